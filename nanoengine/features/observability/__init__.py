"""What an engine does and has done: counters, times, events of the KV cache, and a live picture. It changes nothing."""
