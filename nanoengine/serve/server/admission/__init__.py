"""Admission: how much clients may use: memory, queue positions, threads and the server's time."""
