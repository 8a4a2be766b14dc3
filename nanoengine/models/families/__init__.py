"""Families of decoders: readers of their config.json, and their differences from Llama."""
