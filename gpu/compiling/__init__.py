"""Triton kernels compiled for GPUs that are not here, and what the compilers say about them."""
