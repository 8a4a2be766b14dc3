"""What a quantized matrix is, before kernels lay it out: whole numbers and scales, or blocks of ggml."""
