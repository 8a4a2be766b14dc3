"""KV cache groups: layers with different visible ranges, states in place of attention, and the common prefix of decodes."""
