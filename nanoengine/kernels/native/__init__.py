"""Kernels for a CPU, in C++: compiled once for each machine, and called by ctypes."""
