"""Draws of tokens: filters and noise."""
