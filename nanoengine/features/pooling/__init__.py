"""Embeddings of prompts: the hidden states of the last layer, pooled."""
