"""What compiled kernels will do on a TPU, read from the compiler's own schedule on a CPU.

``build`` traces here and compiles in a child; ``dump``, ``listing``, ``hlo`` read what the compiler wrote; ``machine``
counts how often each bundle runs; ``analyse`` and ``report`` say what that means.
"""
