"""Lower tiers of the KV cache: blocks evicted from the pool are cached in host memory and in files, under their prefixes."""
