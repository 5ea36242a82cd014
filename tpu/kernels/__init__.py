"""Pallas kernels, one a file, and the functions on values that they are made of."""
