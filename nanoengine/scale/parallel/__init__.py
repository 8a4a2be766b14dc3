"""Tensor parallelism: several processes compute one model, with the bits of a single process."""
