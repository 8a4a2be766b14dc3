"""The engine in a thread of its own, for callers on event loops."""
