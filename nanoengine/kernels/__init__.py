"""The operations of a transformer's layers and attention: interfaces, a reference in torch, C++ for CPUs, and Triton for GPUs."""
