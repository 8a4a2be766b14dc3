"""The engine in a separate thread, for callers on event loops."""
