"""What an engine calls once a step and layer: the rule and the mixer on ragged tokens, with states in a pool."""

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
    """The rule on a ragged batch of prefill pieces, single tokens and windows of drafts, with states in a pool.

    Args:
        q, k: [T, H, K]; v: [T, HV, V]; g, beta, erase and write: as in ``gated_delta_rule``, without the axis of rows.
        pool: the states. Of JAX arrays an update takes their memory: use the pool that it returns. Of torch tensors it
            is written in place.
        batch: the rows.
        window: rows of at most so many tokens leave them waiting in their slots until the request's next row says how
            many are accepted; longer rows commit theirs at once. For n drafts behind one token that is n + 1. None
            is as many as the pool has room for; 0 commits everything at once.
        checkpoint_every: tokens between the checkpoints that go to ``batch.checkpoint_indices``, counted from the
            request's first token.
        check_values: look at contents, too: slots, boundaries, counts, and two rows that write one slot.
        The rest as in ``gated_delta_rule``. Compiled programs depend on shapes alone: T, N, and the pool's.

    Returns:
        o [T, HV, V] in v's dtype, 0 at padding, and the pool.

    Raises:
        GdnError: an argument is wrong, or the backend named cannot compute the call.
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
    """Short convolution, l2 norm, gates and rule on a ragged batch, with both of a mixer's states in a pool.

    Args:
        qkv: one array [T, channels] of q | k | v side by side, or three: [T, H * K] twice and [T, HV * V].
        conv, num_heads, key_dim, output_norm: as in ``gated_delta_mixer``. z: [T, HV, V] or [T, HV * V].
        The rest as in ``gated_delta_rule_update``, and as in ``gated_delta_mixer``.

    Returns:
        o [T, HV, V] in qkv's dtype, 0 at padding, and the pool.

    Raises:
        GdnError: an argument is wrong, or the backend named cannot compute the call.
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
    """The arrays of a pool and a batch as operands of a call.

    Raises:
        GdnError: one of the two is something else.
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
