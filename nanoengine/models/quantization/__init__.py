"""Quantized weights: quantization at load, and quantized checkpoints, before kernels pack them."""
