"""The bundled demo model: an 8.4 M parameter Qwen3 trained on the Python standard library."""
