"""What a user calls: the rule, its single step, the mixer around it, and the choice explained.

Shapes: B rows, T tokens, N states (B, or the number of packed sequences), H key heads, HV value heads (a multiple of H;
value head h reads key head h // (HV // H)), K key and V value channels.
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

dispatch.backends()  # found now, since torch.compile cannot trace the search

Array = Any
Gate = SoftplusGate | BoundedGate


class MixerState(NamedTuple):
    """What a mixer carries on: the recurrent state and the last W - 1 inputs of its convolution.

    recurrent: [N, HV, K, V] float32 (or [N, HV, V, K], by state_layout). conv: [N, W - 1, channels]. None is zeros.
    """

    recurrent: Array | None = None
    conv: Array | None = None


class RuleStates(NamedTuple):
    """What is returned where ``output_states_every`` is given, by state_layout.

    final: the final states [N, HV, K, V], or None unless asked for. every: the states after each multiple of so many
    tokens, [B, T // output_states_every, HV, K, V]. Of packed sequences (B = 1) they stand one after the other: those
    of sequence n, which has L tokens, are the L // output_states_every entries that follow those of the sequences
    before it; entries that are left over are zeros.
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
    """The gated delta rule over whole sequences, on the best backend for the arrays given.

    Per token and value head, with the state S [K, V] in float32:

        S~ = diag(exp g) S;    S = S~ + k (write * v - S~^T (erase * k))^T;    o = scale S^T q

    Args:
        q, k: [B, T, H, K], float32, bfloat16 or float16, as v.
        v: [B, T, HV, V].
        g: log decay (natural), <= 0: [B, T, HV], [B, T, HV, n] for n groups of adjacent channels, or [B, T, HV, K]; any
            float dtype. None keeps everything (DeltaNet). Below -104 it is a reset: exp of it is 0.
        beta: [B, T, HV], erase and write gate in one. Instead of it ``erase`` [B, T, HV, K] and ``write`` [B, T, HV, V]
            (GDN-2; [B, T, HV] is taken too). Without any of them nothing is erased and all is written: that is gated
            linear attention (GLA) and no delta rule. FLA's operations take a beta of None for ones instead, as those of
            ``portable_gdn.ops`` do.
        scale: of the output; K ** -0.5 if None.
        initial_state: [N, HV, K, V] float32; zeros if None. With ``segment_ids`` that of a row's first segment.
        output_final_state: whether to return the final states.
        cu_seqlens: [N + 1] integers, boundaries of packed sequences (then B = 1); equal neighbours are empty sequences.
        segment_ids: [B, T] integers; the state starts anew where the id changes.
        mask: [B, T] booleans; False tokens change nothing, whatever they hold, and give o = 0.
        qk_l2norm: whether to normalise q and k: x / sqrt(sum x^2 + 1e-6).
        gate: makes g a raw projection that ``SoftplusGate`` or ``BoundedGate`` activates, in float32.
        chunk_size: tokens a chunk, a power of two from 16 to 256; None leaves it to the backend.
        precision: what matrix products may round: "highest" nothing beyond float32; "default" q, k, v and the state to
            bfloat16; "fast" every operand. None is "default" for 16-bit inputs, else "highest".
        state_layout: "kv", or "vk" for states [N, HV, V, K].
        deterministic: forbid whatever can change bits from run to run.
        check_values: look at contents too: finite values, g <= 0, gates in [0, 2], boundaries on a device. Under
            ``jax.jit`` this needs ``jax.experimental.checkify``.
        output_states_every: return the states after every so many tokens of each row or packed sequence, too, for a
            cache of prefixes say: see ``RuleStates``. Not with ``segment_ids``. The TPU kernel returns those of rows at
            multiples of 128 as it goes; packed sequences are computed by ``xla`` there.
        backend: name of the one to use, which never falls back; None takes the first that can (see ``explain``). Under
            ``jax.jit`` None leaves "pallas" or "xla" to the compiler, which knows what it compiles for; with "pallas"
            by name, compiling for anything but a TPU fails in jax ("Only interpret mode is supported on CPU backend").
        sharding: which axes of a mesh split rows, heads and tokens (a ``Sharding``, of JAX arrays). None reads it from
            the arrays: those of a mesh with explicit axes, and arrays outside of a trace. A trace with automatic axes
            does not tell; there a call for several TPUs without it is computed by ``xla``, with a warning.

    Returns:
        o [B, T, HV, V] in v's dtype, and the final states, float32, or None unless asked for; with
        ``output_states_every`` they are a ``RuleStates``.

    Raises:
        GdnError: an argument is wrong, or the backend named cannot compute the call.

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
    """One token of the rule, for decoding.

    Args:
        q, k: [B, H, K]; v: [B, HV, V]; g: [B, HV], [B, HV, n] or [B, HV, K]; beta: [B, HV];
        erase: [B, HV, K]; write: [B, HV, V]; state: [B, HV, K, V] float32, zeros if None. The rest as in
        ``gated_delta_rule``.

    Returns:
        o [B, HV, V] in v's dtype, and the new state.

    Raises:
        GdnError: as ``gated_delta_rule``.

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
    """Short convolution, l2 norm, gates, rule and output norm in one call: a layer between its projections.

    Args:
        qkv: one array [B, T, channels] of q | k | v side by side, or three: [B, T, H * K] twice and [B, T, HV * V].
        conv: the convolution over the channels q | k | v.
        num_heads: key heads H; value heads are those of g or beta.
        key_dim: K; needed where qkv is one array.
        output_norm: the norm of each value head's output, with its weight and the activation of its gate; None is none.
        z: the gate of output_norm before its activation, [B, T, HV * V] or [B, T, HV, V], any float dtype.
        state: what an earlier call returned; None starts from zeros.
        qk_l2norm: whether q and k are normalised after the convolution; here True by default, as models do.
        The rest as in ``gated_delta_rule``. Nothing is rounded to 16 bits between convolution and output, unless the
        backend's declared rounding says so of the norm's input.

    Returns:
        o [B, T, HV, V] in qkv's dtype, and the ``MixerState`` to carry on (None unless asked for). A caller that
        projects reshapes o to [B, T, HV * V], which costs nothing: that is how kernels write it.

    Raises:
        GdnError: as ``gated_delta_rule``.

    Examples:
        >>> import numpy as np, portable_gdn as pg
        >>> q, k, v = np.ones((3, 1, 8, 16), np.float32)  # [B, T, channels], as projections make them: 2 heads of 8
        >>> g, beta = np.full((2, 1, 8, 2), 0.5, np.float32)  # raw log decays, made by the gate; erase and write gate
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
    """One token of the mixer, for decoding.

    Args:
        qkv: [B, channels], or three arrays: [B, H * K] twice and [B, HV * V].
        g: [B, HV], [B, HV, n] or [B, HV, K]; beta: [B, HV]; erase: [B, HV, K]; write: [B, HV, V].
        z: [B, HV * V] or [B, HV, V].
        state: what ``gated_delta_mixer`` or an earlier step returned, [B, HV, K, V] and [B, W - 1, channels]; None is
            the start. The rest as in ``gated_delta_mixer``.

    Returns:
        o [B, HV, V] in qkv's dtype, and the new state, both parts float32.

    Raises:
        GdnError: as ``gated_delta_rule``.
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
    """Which backend ``gated_delta_rule`` would take for this call, and why each other one is passed over.

    Takes the arguments of ``gated_delta_rule``, or with a pool and a batch those of ``gated_delta_rule_update``;
    computes nothing. Print what it returns.

    Raises:
        GdnError: the call itself is wrong.

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
