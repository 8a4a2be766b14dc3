"""The whole minimal engine: it imports nothing else of the package, and all else of the package extends it."""
