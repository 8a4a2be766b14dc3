"""Blocks that the KV pool has no room for: host memory and files keep them, under their prefixes."""
