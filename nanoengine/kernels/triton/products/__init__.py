"""Products with weights, dense and quantized, and what is fused to them."""
