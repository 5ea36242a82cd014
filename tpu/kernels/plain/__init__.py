"""The kernels of every variant: a grid step is one chunk of several heads."""
