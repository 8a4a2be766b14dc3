"""What `bench.py` runs: one module per mode, and the parts they share. See `bench.py`."""
