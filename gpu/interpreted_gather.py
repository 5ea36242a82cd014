"""Two small kernels for the interpreter: import only after it is chosen, since Triton decides at decoration."""

import triton
import triton.language as tl

__all__ = ["gather", "probe"]


@triton.jit
def gather(src, index, axis: tl.constexpr):
    """``tl.gather`` by a name that the interpreter looks up when it runs."""
    return tl.gather(src, index, axis)


@triton.jit
def probe(a_ptr, b_ptr, out_ptr):
    """out = sum over i in 0, 1, 2 of (a b + i), a and b bfloat16 [16, 16], in float32."""
    row = tl.arange(0, 16)
    place = row[:, None] * 16 + row[None, :]
    a, b = tl.load(a_ptr + place), tl.load(b_ptr + place)
    total = tl.zeros((16, 16), dtype=tl.float32)
    for i in range(3):
        total += tl.dot(a, b) + i.to(tl.float32)
    tl.store(out_ptr + place, total)
