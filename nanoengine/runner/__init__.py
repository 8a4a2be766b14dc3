"""Tensors: batches in, sampled tokens out. Nothing in this package decides who runs."""
