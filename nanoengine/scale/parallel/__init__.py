"""Tensor parallelism: several processes share a model, and compute what one would, to the bit."""
