"""What kernels of both kinds are made of."""
