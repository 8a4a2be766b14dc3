"""Weights of few bits: what they are before kernels lay them out, and how they are made from numbers or read from files."""
