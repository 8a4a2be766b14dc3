"""Recordings of steps: CUDA graphs on a GPU, programs of C calls on a CPU. A replay makes the same calls without their Python."""
