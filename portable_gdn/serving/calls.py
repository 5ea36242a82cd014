"""The calls that a serving engine makes per step and layer: the rule and the mixer on ragged tokens, with a pool."""

from __future__ import annotations

from typing import Any

from ..door import normalise, run_update
from ..gathering import add, gate_kind, mixer_operands
from ..spec.conv import ShortConv
from ..spec.errors import bad, suggests_keywords
from ..spec.gates import BoundedGate, SoftplusGate
from ..spec.norm import GatedRMSNorm
from ..spec.problem import Options, UpdateOptions
from .batch import Batch
from .pool import StatePool

__all__ = ["gated_delta_mixer_update", "gated_delta_rule_update", "update_operands"]

Array = Any
Gate = SoftplusGate | BoundedGate


@suggests_keywords
def gated_delta_rule_update(
    q: Array,
    k: Array,
    v: Array,
    g: Array | None = None,
    *,
    pool: StatePool,
    batch: Batch,
    beta: Array | None = None,
    erase: Array | None = None,
    write: Array | None = None,
    window: int | None = None,
    checkpoint_every: int | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
    gate: Gate | None = None,
    chunk_size: int | None = None,
    precision: str | None = None,
    state_layout: str = "kv",
    deterministic: bool = False,
    check_values: bool = False,
    backend: str | None = None,
) -> tuple[Array, StatePool]:
    """Compute the rule on a ragged batch of prefill pieces, single tokens and windows of drafts, with states in a pool.

    The arguments that are not listed here are those of ``gated_delta_rule``. A compiled program depends only on shapes:
    T, N, and those of the pool.

    Args:
        q, k: [T, H, K].
        v: [T, HV, V].
        g, beta, erase, write: As in ``gated_delta_rule``, without the axis of rows.
        pool: The states. With JAX arrays, the update reuses their memory, so use the pool that it returns. Torch
            tensors are updated in place.
        batch: The rows.
        window: The tokens of a row with at most this many wait in their slot until the request's next row says how many
            are accepted; longer rows commit their tokens at once. For n drafts after one token, it is n + 1. None uses
            the pool's room; 0 commits everything at once.
        checkpoint_every: The number of tokens between the checkpoints for ``batch.checkpoint_indices``, counted from
            the request's first token.
        check_values: Whether to check contents too: slots, boundaries, counts, and two rows that write one slot.

    Returns:
        o [T, HV, V] in v's dtype, 0 at padding, and the pool.

    Raises:
        GdnError: An argument is wrong, or the named backend cannot run the call.
    """
    operands = {"q": q, "k": k, "v": v}
    add(operands, g=g, beta=beta, erase=erase, write=write)
    options = Options(
        scale=scale,
        qk_l2norm=qk_l2norm,
        gate=gate_kind(operands, gate),
        chunk_size=chunk_size,
        precision=precision,
        state_layout=state_layout,
        deterministic=deterministic,
        update=UpdateOptions(window, checkpoint_every),
    )
    return _update(operands, options, pool, batch, (backend, check_values))


@suggests_keywords
def gated_delta_mixer_update(
    qkv: Array | tuple[Array, Array, Array],
    g: Array | None = None,
    *,
    conv: ShortConv,
    num_heads: int,
    pool: StatePool,
    batch: Batch,
    key_dim: int | None = None,
    beta: Array | None = None,
    erase: Array | None = None,
    write: Array | None = None,
    z: Array | None = None,
    output_norm: GatedRMSNorm | None = None,
    window: int | None = None,
    checkpoint_every: int | None = None,
    scale: float | None = None,
    qk_l2norm: bool = True,
    gate: Gate | None = None,
    chunk_size: int | None = None,
    precision: str | None = None,
    state_layout: str = "kv",
    deterministic: bool = False,
    check_values: bool = False,
    backend: str | None = None,
) -> tuple[Array, StatePool]:
    """Compute the short convolution, l2 norm, gates and rule on a ragged batch, with both states of a mixer in a pool.

    The arguments that are not listed here are those of ``gated_delta_rule_update`` and ``gated_delta_mixer``.

    Args:
        qkv: One array [T, channels] of q | k | v, or three arrays [T, H * K], [T, H * K] and [T, HV * V].
        conv, num_heads, key_dim, output_norm: As in ``gated_delta_mixer``.
        z: [T, HV, V] or [T, HV * V].

    Returns:
        o [T, HV, V] in qkv's dtype, 0 at padding, and the pool.

    Raises:
        GdnError: An argument is wrong, or the named backend cannot run the call.
    """
    mixed = {"g": g, "beta": beta, "erase": erase, "write": write, "z": z}
    operands, kinds = mixer_operands(qkv, conv, output_norm, gate, None, mixed)
    options = Options(
        scale=scale,
        qk_l2norm=qk_l2norm,
        chunk_size=chunk_size,
        precision=precision,
        state_layout=state_layout,
        deterministic=deterministic,
        **kinds,
        num_heads=num_heads,
        key_dim=key_dim,
        update=UpdateOptions(window, checkpoint_every),
    )
    return _update(operands, options, pool, batch, (backend, check_values))


def update_operands(pool: StatePool | None, batch: Batch | None) -> dict[str, Array]:
    """Return the arrays of a pool and a batch as operands of a call.

    Raises:
        GdnError: ``pool`` is not a ``StatePool``, or ``batch`` is not a ``Batch``.
    """
    if not isinstance(pool, StatePool):
        raise bad("pool", f"a {type(pool).__name__}", "be a StatePool, as state_pool makes one")
    if not isinstance(batch, Batch):
        raise bad("batch", f"a {type(batch).__name__}", "be a Batch")
    if pool.recurrent is None:
        raise bad("pool.recurrent", "None", "be an array [S, HV, K, V]")
    return {**pool.operands(), **batch.operands()}


def _update(
    operands: dict[str, Array], options: Options, pool: StatePool, batch: Batch, how: tuple[str | None, bool]
) -> tuple[Array, StatePool]:
    problem, backend = normalise({**operands, **update_operands(pool, batch)}, options, *how)
    result = run_update(problem, backend)
    return result.o, pool.replaced(result.pool)
