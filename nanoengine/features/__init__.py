"""Abilities beyond the core, one folder each. Each can be deleted."""
