"""Ollama's interface (https://docs.ollama.com/api)."""
