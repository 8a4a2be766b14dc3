"""Speculative decoding: drafts of the next tokens, several of which one step verifies. No token changes (docs/speculation.md)."""
