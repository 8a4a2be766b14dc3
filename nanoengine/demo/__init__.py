"""The bundled demo model: an 4.7 M parameter Qwen3 trained on the Python standard library."""
