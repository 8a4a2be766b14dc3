"""Speculative decoding: one step verifies several drafts of the next tokens. No token changes (docs/speculation.md)."""
