"""The kernels of a training pass before the rule: convolution, l2norm, gates by channel, and their cotangents."""
