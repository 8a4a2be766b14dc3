"""Capabilities beyond the core, one folder each. Each can be deleted."""

EMBEDDING = "embedding"
"""In `Sequence.state`: the vector of an embedding request, [dimensions] float32, when it is computed."""
