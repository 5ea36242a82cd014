"""Compile Triton kernels for GPUs that this machine need not have, and report what the compilers say about them."""
