"""The bundled demo model: a 4.7 M parameter Qwen3 trained on the Python standard library."""
