"""Rude clients beside a well-behaved one; run by hand, see `beside.py`."""
