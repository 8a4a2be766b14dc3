"""Measurements of the CUDA path: gpu.sh beside this folder runs them all."""
