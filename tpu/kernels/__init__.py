"""Pallas kernels for TPUs: ``common`` parts, ``plain`` kernels of every variant, ``pipelined`` ones for long rows."""
