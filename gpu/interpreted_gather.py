"""Two small kernels for the interpreter.

Import this module only after the interpreter is chosen, since Triton decides when it decorates a kernel.
"""

import triton
import triton.language as tl

__all__ = ["gather", "probe"]


@triton.jit
def gather(src, index, axis: tl.constexpr):
    """Call ``tl.gather`` by a name that the interpreter looks up at run time."""
    return tl.gather(src, index, axis)


@triton.jit
def probe(a_ptr, b_ptr, out_ptr):
    """Compute the sum over i in 0, 1, 2 of (a b + i) in float32, for a and b in bfloat16, [16, 16]."""
    row = tl.arange(0, 16)
    place = row[:, None] * 16 + row[None, :]
    a, b = tl.load(a_ptr + place), tl.load(b_ptr + place)
    total = tl.zeros((16, 16), dtype=tl.float32)
    for i in range(3):
        total += tl.dot(a, b) + i.to(tl.float32)
    tl.store(out_ptr + place, total)
