"""Paged attention: one protocol, and the backends behind it."""
