"""Shares among clients: the prompts of one cannot keep the others waiting."""
