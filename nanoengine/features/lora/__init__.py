"""Low-rank adapters (LoRA: Hu et al., 2021), one for each request."""
