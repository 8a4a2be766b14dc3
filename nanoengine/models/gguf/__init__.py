"""GGUF files, as llama.cpp has them: the container, its block formats, and its names for what Hugging Face names otherwise."""
