"""The scripts that made the bundled model, and measure it: see nanoengine/demo/README.md."""
