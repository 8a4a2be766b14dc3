"""Observability: counters, times, events of the KV cache, and a live view of an engine, which it does not change."""
