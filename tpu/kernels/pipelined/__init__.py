"""The kernels for long rows: a grid step has several chunks, at different phases side by side."""
