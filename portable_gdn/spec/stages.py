"""The seven stages of the chunkwise rule, each a function of one chunk.

Every function takes the array namespace ``xp`` (the array API, as array-api-compat or ``jax.numpy`` provide it), or an
``Algebra``, which also has the matrix product ``mm(a, b, name_a, name_b)``. The names identify the operands, so that a
product can round them differently (``precision.py``). Leading dimensions (heads, groups, batch) are arbitrary and
broadcast.

Shapes below leave them out. There are C tokens in a chunk (a power of two), K key channels, V value channels and n
decay groups (1: one decay per head, K: one per channel).

A log decay below ``RESET`` is a hard reset: its exp is 0 in float32. It is counted, not summed, since a sum that
contains it has no digits left for its neighbours. Sums begin anew after it, and nothing passes it. Exponents are masked
before exp, never after it, because 0 * inf is NaN. Formulas: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (2024),
and the KDA and GDN-2 reports for the finer gates; the hierarchy of reference rows in ``channel_scores`` keeps every
exponent <= 0 for any gate.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

__all__ = [
    "RESET",
    "STAGES",
    "Algebra",
    "Decays",
    "Product",
    "decay",
    "delta",
    "inverse",
    "lower_blocks",
    "output",
    "pair_decay",
    "scores",
    "state",
    "transpose",
    "wy",
]

Array = Any
Namespace = Any

RESET = -104.0  # exp(-104) rounds to 0 in float32 (the smallest subnormal is exp(-103.28))

STAGES = ("decay", "scores", "inverse", "wy", "state", "delta", "output")


class Product(Protocol):
    """A matrix product over the last two dimensions, which is told the names of its operands."""

    def __call__(self, a: Array, b: Array, name_a: str, name_b: str) -> Array: ...


class Algebra(NamedTuple):
    """The array namespace and the matrix product that a stage uses."""

    xp: Namespace
    mm: Product


class Decays(NamedTuple):
    """The decays of one chunk, as the stage ``decay`` sums them.

    Attributes:
        sum: G [C, n], the sum of the log decays since the chunk's start or the last reset, up to and including each
            token.
        resets: [C, n], the number of resets up to and including each token, as floats.
    """

    sum: Array
    resets: Array


def transpose(xp: Namespace, x: Array) -> Array:
    """Swap the last two dimensions."""
    return xp.matrix_transpose(x)


def lower_triangle(xp: Namespace, like: Array, strict: bool) -> Array:
    """Return a boolean mask [C, C], true where row i may see column j: i >= j, or i > j if ``strict``."""
    index = xp.arange(like.shape[-2], **device_of(like))
    row, column = index[:, None], index[None, :]
    return row > column if strict else row >= column


def device_of(x: Array) -> dict[str, Any]:
    """Return the keyword for the device of a new array next to x, if the library needs one, as torch does."""
    return {"device": x.device} if type(x).__module__.startswith("torch") else {}


# decay -----------------------------------------------------------------------------------------------------------


def decay(xp: Namespace, g: Array, starts: Array | None = None) -> Decays:
    """Sum the log decays since the chunk's start or the last reset in it, and count the resets so far.

    Args:
        xp: the array namespace.
        g: log decay [C, n].
        starts: boolean [C, 1], True at the first token of a new segment, which is a reset, too.

    Returns:
        The sums and the numbers of resets. No sum runs across a reset, so that tokens after it do not depend on those
        before it, not even by a rounding. A gate of exactly 0 leaves the sum unchanged, bit for bit: after strong gates
        the sum is large, and values would otherwise decay by its rounding between a token and the padding (or masked
        tokens) that follows.
    """
    reset = g < RESET
    if starts is not None:
        reset = reset | starts
    count = xp.cumulative_sum(xp.astype(reset, g.dtype), axis=-2)
    G, size = xp.where(reset, xp.zeros_like(g), g), 1
    while size < g.shape[-2]:  # add to each right block the last sum of the left block next to it
        (left, right), (left_count, right_count) = halves(xp, G, size), halves(xp, count, size)
        last = left[..., -1:, :]
        right = right + xp.where(right_count == left_count[..., -1:, :], last, xp.zeros_like(last))
        G = xp.reshape(xp.stack([left, right], axis=-3), g.shape)
        size *= 2
    return Decays(G, count)


def from_start(xp: Namespace, decays: Decays) -> Array:
    """Return exp(G) [C, n] where no reset lies between the chunk's start and the row, else 0."""
    return xp.exp(xp.where(decays.resets == 0, decays.sum, -xp.inf))


def to_end(xp: Namespace, decays: Decays) -> Array:
    """Return exp(G_C - G) [C, n] where no reset lies between the row and the chunk's end, else 0."""
    G, count = decays
    last, last_count = G[..., -1:, :], count[..., -1:, :]
    return xp.exp(xp.where(count == last_count, last - G, -xp.inf))


def across(xp: Namespace, decays: Decays) -> Array:
    """Return exp(G_C) [1, n], the fraction of the entering state that is left after the chunk; 0 after a reset."""
    return from_start(xp, Decays(*(a[..., -1:, :] for a in decays)))


def to_channels(xp: Namespace, x: Array, channels: int) -> Array:
    """Repeat a factor [C, n] over the channels of its groups, [C, K]; with n = 1 or n = K it is returned as it is."""
    n = x.shape[-1]
    if n in (1, channels):
        return x
    wide = xp.broadcast_to(x[..., None], (*x.shape, channels // n))
    return xp.reshape(wide, (*x.shape[:-1], channels))


def over_groups(xp: Namespace, x: Array, groups: int) -> Array:
    """Sum x [C, K] over the channels of each group, and return [C, n]."""
    if groups == x.shape[-1]:
        return x
    if groups == 1:
        return xp.sum(x, axis=-1, keepdims=True)
    return xp.sum(xp.reshape(x, (*x.shape[:-1], groups, x.shape[-1] // groups)), axis=-1)


def split_groups(xp: Namespace, x: Array, groups: int) -> Array:
    """Reshape [C, K] to [n, C, K/n]."""
    return xp.moveaxis(xp.reshape(x, (*x.shape[:-1], groups, x.shape[-1] // groups)), -2, -3)


def join_groups(xp: Namespace, x: Array) -> Array:
    """Reshape [n, C, K/n] to [C, K]: the inverse of ``split_groups``."""
    x = xp.moveaxis(x, -3, -2)
    return xp.reshape(x, (*x.shape[:-2], x.shape[-2] * x.shape[-1]))


def pair_decay(xp: Namespace, decays: Decays) -> Array:
    """Return D [n, C, C] with D[i, j] = exp(G_i - G_j) for i >= j with no reset between them, else 0."""
    G, count = (transpose(xp, a) for a in decays)
    keep = (count[..., :, None] == count[..., None, :]) & lower_triangle(xp, G[..., None], strict=False)
    return xp.exp(xp.where(keep, G[..., :, None] - G[..., None, :], -xp.inf))


def by_channel(k: Array, decays: Decays) -> bool:
    """Return whether the decay is given per channel, so that it cannot be moved out of the sum over channels."""
    return 1 < decays.sum.shape[-1] == k.shape[-1]


# scores ----------------------------------------------------------------------------------------------------------


def scores(
    algebra: Algebra, q: Array, k: Array, b: Array | None, decays: Decays, scale: float
) -> tuple[Array | None, Array]:
    """Compute the decayed scores of the keys against themselves and of the queries against the keys.

    Akk[i, j] = sum_d b_i k_i k_j exp(G_i - G_j) for i > j;  Aqk[i, j] = scale sum_d q_i k_j exp(G_i - G_j) for i >= j.

    Args:
        algebra: the array namespace and the matrix product to use.
        q, k: [C, K].
        b: erase gate [C, 1] or [C, K], or None, which erases nothing (Akk is then None).
        decays: the decays of the chunk.
        scale: the factor of the queries.

    Returns:
        Akk [C, C] or None, Aqk [C, C].
    """
    xp, mm = algebra
    if by_channel(k, decays):
        rows = [q] if b is None else [q, b * k]
        pairs = channel_scores(algebra, rows, ["q", "k"], k, decays)
        same = scale * xp.sum(q * k, axis=-1)[..., None]
        index = xp.arange(k.shape[-2], **device_of(k))
        Aqk = xp.where(index[:, None] == index[None, :], same, scale * pairs[0])
        return (None if b is None else pairs[1]), Aqk
    D, groups = pair_decay(xp, decays), decays.sum.shape[-1]
    kT = transpose(xp, k)
    if groups == 1:
        D = D[..., 0, :, :]
        Aqk = scale * mm(q, kT, "q", "k") * D
        if b is None:
            return None, Aqk
        Akk = b * mm(k, kT, "k", "k") if b.shape[-1] == 1 else mm(b * k, kT, "k", "k")
        return xp.where(lower_triangle(xp, k, strict=True), Akk * D, 0.0), Aqk
    kT = transpose(xp, split_groups(xp, k, groups))
    Aqk = scale * xp.sum(D * mm(split_groups(xp, q, groups), kT, "q", "k"), axis=-3)
    if b is None:
        return None, Aqk
    Akk = xp.sum(D * mm(split_groups(xp, b * k, groups), kT, "k", "k"), axis=-3)
    return xp.where(lower_triangle(xp, k, strict=True), Akk, 0.0), Aqk


def halves(xp: Namespace, x: Array, size: int) -> tuple[Array, Array]:
    """Split the rows of x [C, D] into pairs of adjacent blocks of ``size`` rows.

    Returns:
        The left and the right blocks of the pairs, each [C / 2 size, size, D].
    """
    x = xp.reshape(x, (*x.shape[:-2], x.shape[-2] // (2 * size), 2, size, x.shape[-1]))
    return x[..., 0, :, :], x[..., 1, :, :]


def channel_factors(xp: Namespace, decays: Decays, size: int) -> tuple[Array, Array]:
    """Return the decay from each row of a left block to that block's last row, and from there to each right row.

    With this reference row no exponent is positive, whatever the gates are, and none depends on a token later than its
    query.
    """
    left, right = halves(xp, decays.sum, size)
    left_count, right_count = halves(xp, decays.resets, size)
    last, last_count = left[..., -1:, :], left_count[..., -1:, :]
    return (
        xp.exp(xp.where(left_count == last_count, last - left, -xp.inf)),
        xp.exp(xp.where(right_count == last_count, right - last, -xp.inf)),
    )


def channel_scores(algebra: Algebra, rows: list[Array], names: list[str], k: Array, decays: Decays) -> list[Array]:
    """Compute for each x of rows sum_d x_i k_j exp(G_i - G_j) for i > j, [C, C], with a decay per channel.

    This takes pairs of adjacent blocks of 1, 2, 4, ... rows: at every size the rows of the right block are multiplied
    with the keys of the left block.
    """
    xp, mm = algebra
    blocks = [xp.zeros_like(x[..., :, None, :1]) * xp.zeros_like(decays.sum[..., :, None, :1]) for x in rows]
    size = 1
    while size < k.shape[-2]:
        to_last, from_last = channel_factors(xp, decays, size)
        keys = transpose(xp, halves(xp, k, size)[0] * to_last)
        for i, x in enumerate(rows):
            corner = mm(halves(xp, x, size)[1] * from_last, keys, names[i], "k")
            blocks[i] = _grow(xp, blocks[i], corner)
        size *= 2
    return [x[..., 0, :, :] for x in blocks]


def _grow(xp: Namespace, blocks: Array, corner: Array) -> Array:
    """Join diagonal blocks [2m, s, s], and the corners [m, s, s] between the pairs of them, to blocks [m, 2s, 2s]."""
    shape = blocks.shape
    pairs = xp.reshape(blocks, (*shape[:-3], shape[-3] // 2, 2, *shape[-2:]))
    first, second = pairs[..., 0, :, :], pairs[..., 1, :, :]
    top = xp.concat([first, xp.zeros_like(first)], axis=-1)
    return xp.concat([top, xp.concat([corner, second], axis=-1)], axis=-2)


def lower_blocks(xp: Namespace, A: Array) -> list[Array]:
    """Return the corners of A [C, C] between pairs of blocks of 1, 2, ..., C/2 rows, each [C / 2 size, size, size]."""
    found = []
    A = A[..., None, :, :]
    while A.shape[-1] > 1:
        half = A.shape[-1] // 2
        found.append(A[..., half:, :half])
        pairs = xp.stack([A[..., :half, :half], A[..., half:, half:]], axis=-3)
        A = xp.reshape(pairs, (*pairs.shape[:-4], pairs.shape[-4] * 2, half, half))
    return found[::-1]


# inverse, wy, state, delta, output -----------------------------------------------------------------------------------


def inverse(algebra: Algebra, Akk: Array) -> Array:
    """Compute T = (I + Akk)^-1 for a strictly lower triangular Akk [C, C], by blocks of 1, 2, 4, ... rows.

    [[L, 0], [A, R]]^-1 = [[L^-1, 0], [-R^-1 A L^-1, R^-1]]. No powers of Akk are formed: with repeated keys they
    overflow long before they cancel.
    """
    xp, mm = algebra
    blocks = xp.ones_like(Akk[..., :, None, :1])
    for corner in lower_blocks(xp, Akk):
        if corner.shape[-1] == 1:
            joint = corner
        else:
            pairs = xp.reshape(blocks, (*blocks.shape[:-3], blocks.shape[-3] // 2, 2, *blocks.shape[-2:]))
            joint = mm(mm(pairs[..., 1, :, :], corner, "T", "A"), pairs[..., 0, :, :], "T", "T")
        blocks = _grow(xp, blocks, -joint)
    return blocks[..., 0, :, :]


def wy(
    algebra: Algebra, T: Array | None, k: Array, v: Array, b: Array | None, w: Array | None, decays: Decays
) -> tuple[Array, Array | None]:
    """Compute U = T (w * v) [C, V] and W = T (b * k * exp G) [C, K]; without an erase gate U = w * v and W is None."""
    xp, mm = algebra
    written = v if w is None else w * v
    if b is None or T is None:
        return written, None
    erased = b * k * to_channels(xp, from_start(xp, decays), k.shape[-1])
    return mm(T, written, "T", "R"), mm(T, erased, "T", "R")


def delta(algebra: Algebra, U: Array, W: Array | None, S: Array) -> Array:
    """Compute Vn = U - W S [C, V], the values that the chunk really writes, from the state S [K, V] at its start."""
    return U if W is None else U - algebra.mm(W, S, "W", "S")


def delta_direct(
    algebra: Algebra, T: Array | None, k: Array, v: Array, b: Array | None, w: Array | None, decays: Decays, S: Array
) -> Array:
    """Compute Vn = T (w * v - (b * k * exp G) S) [C, V], as ``delta`` does, with one product fewer if S is known."""
    xp, mm = algebra
    written = v if w is None else w * v
    if b is None or T is None:
        return written
    factor = from_start(xp, decays)
    if factor.shape[-1] == 1 and b.shape[-1] == 1:
        held = (b * factor) * mm(k, S, "k", "S")
    else:
        held = mm(b * k * to_channels(xp, factor, k.shape[-1]), S, "k", "S")
    return mm(T, written - held, "T", "R")


def output(algebra: Algebra, q: Array, Aqk: Array, Vn: Array, decays: Decays, S: Array, scale: float) -> Array:
    """Compute o = scale (q * exp G) S + Aqk Vn, [C, V]."""
    xp, mm = algebra
    factor = from_start(xp, decays)
    if factor.shape[-1] == 1:
        return (scale * factor) * mm(q, S, "q", "S") + mm(Aqk, Vn, "Aqk", "Vn")
    return mm(scale * q * to_channels(xp, factor, q.shape[-1]), S, "q", "S") + mm(Aqk, Vn, "Aqk", "Vn")


def state(algebra: Algebra, k: Array, Vn: Array, decays: Decays, S: Array) -> Array:
    """Compute the state after the chunk, diag(exp G_C) S + (k * exp(G_C - G))^T Vn, [K, V]."""
    xp, mm = algebra
    channels = k.shape[-1]
    keys = k * to_channels(xp, to_end(xp, decays), channels)
    kept = transpose(xp, to_channels(xp, across(xp, decays), channels))
    return kept * S + mm(transpose(xp, keys), Vn, "k", "Vn")
