"""Kernels for NVIDIA GPUs in Triton (Tillet et al., 2019): a file for each, with its launch beside it."""
