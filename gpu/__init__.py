"""The GPU backend: flash-linear-attention's Triton kernels (imported as ``portable_gdn.gpu``)."""
