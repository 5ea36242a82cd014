"""The public calls: the rule, its single step, the mixer around it, and the choice of backend explained.

In shapes, B is the number of rows (the batch size), T the number of tokens, N the number of states (B, or the number of
packed sequences), H the number of key heads, HV the number of value heads (a multiple of H; value head h reads key head
h // (HV // H)), K the number of key channels per head and V the number of value channels per head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from . import dispatch
from .door import check_host_boundaries, describe
from .gathering import add, gate_kind, mixer_operands
from .parallel.calls import compute
from .parallel.placement import signature_of_a_shard
from .parallel.sharding import Sharding
from .serving.batch import Batch
from .serving.calls import gated_delta_mixer_update, gated_delta_rule_update, update_operands
from .serving.pool import StatePool, state_pool
from .spec.conv import ShortConv
from .spec.errors import suggests_keywords
from .spec.gates import BoundedGate, SoftplusGate
from .spec.norm import GatedRMSNorm
from .spec.problem import Options, UpdateOptions

__all__ = [
    "Batch",
    "BoundedGate",
    "GatedRMSNorm",
    "MixerState",
    "RuleStates",
    "ShortConv",
    "SoftplusGate",
    "StatePool",
    "explain",
    "gated_delta_mixer",
    "gated_delta_mixer_step",
    "gated_delta_mixer_update",
    "gated_delta_rule",
    "gated_delta_rule_step",
    "gated_delta_rule_update",
    "state_pool",
]

dispatch.backends()  # find them now, since torch.compile cannot trace the search

Array = Any
Gate = SoftplusGate | BoundedGate


class MixerState(NamedTuple):
    """The state of a mixer between calls: the recurrent state and the last W - 1 inputs of its convolution.

    Attributes:
        recurrent: [N, HV, K, V] float32, or [N, HV, V, K] with state_layout "vk"; None means zeros.
        conv: [N, W - 1, channels], where W is the width of the convolution; None means zeros.
    """

    recurrent: Array | None = None
    conv: Array | None = None


class RuleStates(NamedTuple):
    """The states that a call with ``output_states_every`` returns, in the layout that ``state_layout`` names.

    Attributes:
        final: The final states [N, HV, K, V], or None unless requested.
        every: The states after every ``output_states_every`` tokens, [B, T // output_states_every, HV, K, V]. With
            packed sequences (B = 1) the sequences follow each other: a sequence of L tokens has
            L // output_states_every entries, after those of the sequences before it. Unused entries at the end are
            zeros.
    """

    final: Array | None
    every: Array


@suggests_keywords
def gated_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    g: Array | None = None,
    *,
    beta: Array | None = None,
    erase: Array | None = None,
    write: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: Array | None = None,
    segment_ids: Array | None = None,
    mask: Array | None = None,
    qk_l2norm: bool = False,
    gate: Gate | None = None,
    chunk_size: int | None = None,
    precision: str | None = None,
    state_layout: str = "kv",
    deterministic: bool = False,
    check_values: bool = False,
    output_states_every: int | None = None,
    backend: str | None = None,
    sharding: Sharding | None = None,
) -> tuple[Array, Array | RuleStates | None]:
    """Compute the gated delta rule over whole sequences, on the best backend for the given arrays.

    For each token and value head, with the state S [K, V] in float32:

        S~ = diag(exp g) S;    S = S~ + k (write * v - S~^T (erase * k))^T;    o = scale S^T q

    Args:
        q, k: [B, T, H, K] in float32, bfloat16 or float16, the dtype of v.
        v: [B, T, HV, V].
        g: The log decay (natural log, <= 0) in any float dtype: [B, T, HV], [B, T, HV, n] for n groups of adjacent
            channels, or [B, T, HV, K]. None means no decay (DeltaNet). A value below -104 is a reset: its exp is 0.
        beta: [B, T, HV], the erase gate and write gate in one. GDN-2 has two gates instead, ``erase`` [B, T, HV, K] and
            ``write`` [B, T, HV, V], which may also be [B, T, HV]. Without any of the three, nothing is erased and
            everything is written: this is gated linear attention (GLA), not the delta rule. The operations of FLA and
            of ``portable_gdn.ops`` treat a beta of None as ones instead.
        erase: [B, T, HV, K] or [B, T, HV], the erase gate; not with ``beta``.
        write: [B, T, HV, V] or [B, T, HV], the write gate; not with ``beta``.
        scale: The factor on the output; K ** -0.5 if None.
        initial_state: [N, HV, K, V] float32; zeros if None. With ``segment_ids`` it is for each row's first segment.
        output_final_state: Whether to return the final states.
        cu_seqlens: [N + 1] integers, the boundaries of packed sequences; B must be 1. Equal neighbours are empty
            sequences.
        segment_ids: [B, T] integers; the state is reset wherever the id changes.
        mask: [B, T] booleans; a token with False does not change the state, whatever it contains, and its o is 0.
        qk_l2norm: Whether to normalise q and k, as x / sqrt(sum x^2 + 1e-6).
        gate: A ``SoftplusGate`` or ``BoundedGate`` that turns g, a raw projection, into the log decay, in float32.
        chunk_size: Tokens per chunk, a power of two from 16 to 256; None leaves it to the backend.
        precision: What matrix products may round. "highest" rounds nothing beyond float32; "default" may round q, k, v
            and the state to bfloat16; "fast" may round every operand. None means "default" for 16-bit inputs and
            "highest" otherwise.
        state_layout: "kv", or "vk" for states [N, HV, V, K].
        deterministic: Whether to forbid everything that can change bits from run to run.
        check_values: Whether to check contents too: finite values, g <= 0, gates in [0, 2], and boundaries on a device.
            Under ``jax.jit`` this needs ``jax.experimental.checkify``.
        output_states_every: Also return the states after every this many tokens of each row or packed sequence, for
            example for a prefix cache; see ``RuleStates``. Not with ``segment_ids``. The TPU kernel returns the states
            of rows at multiples of 128 without extra work; on a TPU, packed sequences are computed by ``xla``.
        backend: The name of the backend to use, which never falls back to another; None takes the first that can run
            the call (see ``explain``). Under ``jax.jit``, None lets the compiler choose between "pallas" and "xla"
            for the platform that it compiles for. If "pallas" is named, compiling for anything but a TPU fails in jax
            ("Only interpret mode is supported on CPU backend").
        sharding: A ``Sharding``, for JAX arrays: the mesh axes that split rows, heads and tokens. None reads it from
            the arrays, which works outside a trace and on a mesh with explicit axes. It does not work in a trace with
            automatic axes: there, a call for several TPUs without ``sharding`` is computed by ``xla``, with a warning.

    Returns:
        o [B, T, HV, V] in v's dtype, and the final states in float32, or None unless requested. With
        ``output_states_every`` the second result is a ``RuleStates``.

    Raises:
        GdnError: An argument is wrong, or the named backend cannot compute the call.

    Examples:
        >>> import numpy as np, portable_gdn as pg
        >>> q = k = np.ones((1, 8, 2, 4), np.float32)  # [B, T, H, K]
        >>> v = np.ones((1, 8, 2, 3), np.float32)  # [B, T, HV, V]
        >>> g, beta = np.full((2, 1, 8, 2), [[[[-0.1]]], [[[0.5]]]], np.float32)  # [B, T, HV]
        >>> o, state = pg.gated_delta_rule(q, k, v, g, beta=beta, qk_l2norm=True, output_final_state=True)
        >>> o.shape, state.shape
        ((1, 8, 2, 3), (1, 2, 4, 3))
    """
    operands = {"q": q, "k": k, "v": v}
    add(
        operands,
        g=g,
        beta=beta,
        erase=erase,
        write=write,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        segment_ids=segment_ids,
        mask=mask,
    )
    options = Options(
        scale=scale,
        output_final_state=output_final_state,
        qk_l2norm=qk_l2norm,
        gate=gate_kind(operands, gate),
        chunk_size=chunk_size,
        precision=precision,
        state_layout=state_layout,
        deterministic=deterministic,
    )
    result, every = compute(operands, options, backend, check_values, sharding, output_states_every)
    return result.o, result.state if every is None else RuleStates(result.state, every)


@suggests_keywords
def gated_delta_rule_step(
    q: Array,
    k: Array,
    v: Array,
    g: Array | None = None,
    *,
    beta: Array | None = None,
    erase: Array | None = None,
    write: Array | None = None,
    state: Array | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
    gate: Gate | None = None,
    precision: str | None = None,
    state_layout: str = "kv",
    deterministic: bool = False,
    check_values: bool = False,
    backend: str | None = None,
    sharding: Sharding | None = None,
) -> tuple[Array, Array]:
    """Compute one token of the rule, for decoding.

    The arguments that are not listed here are those of ``gated_delta_rule``.

    Args:
        q, k: [B, H, K].
        v: [B, HV, V].
        g: [B, HV], [B, HV, n] or [B, HV, K].
        beta: [B, HV].
        erase: [B, HV, K].
        write: [B, HV, V].
        state: [B, HV, K, V] float32; zeros if None.

    Returns:
        o [B, HV, V] in v's dtype, and the new state in float32.

    Raises:
        GdnError: As in ``gated_delta_rule``.

    Examples:
        >>> import numpy as np, portable_gdn as pg
        >>> q = k = np.ones((1, 2, 4), np.float32)  # one token per row: [B, H, K]
        >>> v = np.ones((1, 2, 3), np.float32)
        >>> beta = np.full((1, 2), 0.5, np.float32)
        >>> state = None
        >>> for token in range(3):
        ...     o, state = pg.gated_delta_rule_step(q, k, v, beta=beta, state=state, qk_l2norm=True)
        >>> state.shape
        (1, 2, 4, 3)
    """
    operands = {"q": q, "k": k, "v": v}
    add(operands, g=g, beta=beta, erase=erase, write=write, initial_state=state)
    options = Options(
        scale=scale,
        output_final_state=True,
        qk_l2norm=qk_l2norm,
        gate=gate_kind(operands, gate),
        precision=precision,
        state_layout=state_layout,
        deterministic=deterministic,
        step=True,
    )
    result, _ = compute(operands, options, backend, check_values, sharding)
    return result.o, result.state


@suggests_keywords
def gated_delta_mixer(
    qkv: Array | tuple[Array, Array, Array],
    g: Array | None = None,
    *,
    conv: ShortConv,
    num_heads: int,
    key_dim: int | None = None,
    beta: Array | None = None,
    erase: Array | None = None,
    write: Array | None = None,
    output_norm: GatedRMSNorm | None = None,
    z: Array | None = None,
    scale: float | None = None,
    state: MixerState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Array | None = None,
    segment_ids: Array | None = None,
    mask: Array | None = None,
    qk_l2norm: bool = True,
    gate: Gate | None = None,
    chunk_size: int | None = None,
    precision: str | None = None,
    state_layout: str = "kv",
    deterministic: bool = False,
    check_values: bool = False,
    backend: str | None = None,
    sharding: Sharding | None = None,
) -> tuple[Array, MixerState | None]:
    """Compute short convolution, l2 norm, gates, rule and output norm in one call: a layer between its projections.

    Nothing is rounded to 16 bits between the convolution and the output, except the input of the output norm on
    backends that declare this rounding. The arguments that are not listed here are those of ``gated_delta_rule``.

    Args:
        qkv: One array [B, T, channels] with q, k and v side by side, or three: [B, T, H * K] twice and [B, T, HV * V].
        conv: The convolution over the channels of q, k and v, in this order.
        num_heads: The number of key heads, H; the number of value heads is taken from g or beta.
        key_dim: K, the size of a key head; required if qkv is one array.
        output_norm: The norm of each value head's output, with its weight and the activation of its gate; None means
            no norm.
        z: The gate of output_norm before its activation, [B, T, HV * V] or [B, T, HV, V] in any float dtype.
        state: The ``MixerState`` that an earlier call returned; None starts from zeros.
        output_final_state: Whether to return the ``MixerState`` for a later call.
        qk_l2norm: Whether to normalise q and k after the convolution; True by default here, since models do so.

    Returns:
        o [B, T, HV, V] in qkv's dtype, and the ``MixerState`` for a later call, or None unless requested. Reshaping o
        to [B, T, HV * V] for an output projection is free, since kernels write it in this layout.

    Raises:
        GdnError: As in ``gated_delta_rule``.

    Examples:
        >>> import numpy as np, portable_gdn as pg
        >>> q, k, v = np.ones((3, 1, 8, 16), np.float32)  # [B, T, channels], as projections return them: 2 heads of 8
        >>> g, beta = np.full((2, 1, 8, 2), 0.5, np.float32)  # g is raw: the gate makes a log decay of it
        >>> gate = pg.SoftplusGate(A_log=np.zeros(2, np.float32), dt_bias=np.zeros(2, np.float32))
        >>> conv = pg.ShortConv(np.ones((48, 4), np.float32))  # weights [channels of q, k and v, taps]
        >>> o, _ = pg.gated_delta_mixer((q, k, v), g, beta=beta, conv=conv, gate=gate, num_heads=2)
        >>> o.shape
        (1, 8, 2, 8)
    """
    mixed = {"g": g, "beta": beta, "erase": erase, "write": write, "z": z}
    mixed |= {"cu_seqlens": cu_seqlens, "segment_ids": segment_ids, "mask": mask}
    operands, kinds = mixer_operands(qkv, conv, output_norm, gate, state, mixed)
    options = Options(
        scale=scale,
        output_final_state=output_final_state,
        qk_l2norm=qk_l2norm,
        chunk_size=chunk_size,
        precision=precision,
        state_layout=state_layout,
        deterministic=deterministic,
        num_heads=num_heads,
        key_dim=key_dim,
        **kinds,
    )
    result, _ = compute(operands, options, backend, check_values, sharding)
    return result.o, MixerState(result.state, result.conv_state) if output_final_state else None


@suggests_keywords
def gated_delta_mixer_step(
    qkv: Array | tuple[Array, Array, Array],
    g: Array | None = None,
    *,
    conv: ShortConv,
    num_heads: int,
    key_dim: int | None = None,
    beta: Array | None = None,
    erase: Array | None = None,
    write: Array | None = None,
    output_norm: GatedRMSNorm | None = None,
    z: Array | None = None,
    state: MixerState | None = None,
    scale: float | None = None,
    qk_l2norm: bool = True,
    gate: Gate | None = None,
    precision: str | None = None,
    state_layout: str = "kv",
    deterministic: bool = False,
    check_values: bool = False,
    backend: str | None = None,
    sharding: Sharding | None = None,
) -> tuple[Array, MixerState]:
    """Compute one token of the mixer, for decoding.

    The arguments that are not listed here are those of ``gated_delta_mixer``.

    Args:
        qkv: [B, channels], or three arrays: [B, H * K] twice and [B, HV * V].
        g: [B, HV], [B, HV, n] or [B, HV, K].
        beta: [B, HV].
        erase: [B, HV, K].
        write: [B, HV, V].
        z: [B, HV * V] or [B, HV, V].
        state: The state that ``gated_delta_mixer`` or an earlier step returned, [B, HV, K, V] and [B, W - 1, channels];
            None starts from zeros.

    Returns:
        o [B, HV, V] in qkv's dtype, and the new ``MixerState``, both parts in float32.

    Raises:
        GdnError: As in ``gated_delta_rule``.
    """
    mixed = {"g": g, "beta": beta, "erase": erase, "write": write, "z": z}
    operands, kinds = mixer_operands(qkv, conv, output_norm, gate, state, mixed)
    options = Options(
        scale=scale,
        output_final_state=True,
        qk_l2norm=qk_l2norm,
        precision=precision,
        state_layout=state_layout,
        deterministic=deterministic,
        step=True,
        num_heads=num_heads,
        key_dim=key_dim,
        **kinds,
    )
    result, _ = compute(operands, options, backend, check_values, sharding)
    return result.o, MixerState(result.state, result.conv_state)


@suggests_keywords
def explain(
    q: Array,
    k: Array,
    v: Array,
    g: Array | None = None,
    *,
    beta: Array | None = None,
    erase: Array | None = None,
    write: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: Array | None = None,
    segment_ids: Array | None = None,
    mask: Array | None = None,
    qk_l2norm: bool = False,
    gate: Gate | None = None,
    chunk_size: int | None = None,
    precision: str | None = None,
    state_layout: str = "kv",
    deterministic: bool = False,
    check_values: bool = False,
    output_states_every: int | None = None,
    backend: str | None = None,
    sharding: Sharding | None = None,
    pool: StatePool | None = None,
    batch: Batch | None = None,
    window: int | None = None,
    checkpoint_every: int | None = None,
) -> dispatch.Explanation:
    """Explain which backend ``gated_delta_rule`` would use for this call, and why it passes over each of the others.

    The arguments are those of ``gated_delta_rule``, or with a pool and a batch those of ``gated_delta_rule_update``.
    Nothing is computed.

    Returns:
        An ``Explanation``, which prints as readable text.

    Raises:
        GdnError: The call itself is wrong.

    Examples:
        >>> import numpy as np, portable_gdn as pg
        >>> q = k = v = np.ones((1, 8, 2, 4), np.float32)
        >>> pg.explain(q, k, v, beta=np.ones((1, 8, 2), np.float32)).backend
        'numpy'
    """
    operands = {"q": q, "k": k, "v": v}
    add(
        operands,
        g=g,
        beta=beta,
        erase=erase,
        write=write,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        segment_ids=segment_ids,
        mask=mask,
    )
    options = Options(
        scale=scale,
        output_final_state=output_final_state,
        qk_l2norm=qk_l2norm,
        gate=gate_kind(operands, gate),
        chunk_size=chunk_size,
        precision=precision,
        state_layout=state_layout,
        deterministic=deterministic,
    )
    if pool is not None or batch is not None:
        operands |= update_operands(pool, batch)
        options = options._replace(update=UpdateOptions(window, checkpoint_every))
        return dispatch.explain(describe(operands, options), backend)
    signature = describe(operands, options)
    if cu_seqlens is not None:
        check_host_boundaries(operands["cu_seqlens"], signature.T)
    return dispatch.explain(signature_of_a_shard(signature, operands, sharding), backend)
