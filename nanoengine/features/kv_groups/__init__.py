"""Layers that see different tokens: windows, and how layers are put into KV groups. Common first blocks of decodes."""
