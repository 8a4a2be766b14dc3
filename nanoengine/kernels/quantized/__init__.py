"""Quantized matrices before kernels pack them: integers with scales, and blocks of ggml."""
