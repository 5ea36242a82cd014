"""FLA's operations under FLA's names, for torch tensors, JAX arrays and numpy arrays: change the import to port a call.

Names, parameter order, defaults and return values are those of flash-linear-attention 0.6.0 (a test compares the
signatures). In the shapes below, B is the batch size, T the number of tokens, N the number of states (B, or the number
of packed sequences), H the number of key heads and HV the number of value heads, a multiple of H:

- q and k are [B, T, H, K] and v is [B, T, HV, V], all of one dtype;
- g is [B, T, HV], or [B, T, HV, K] for KDA and GDN-2, in natural log;
- beta is [B, T, HV], b is [B, T, HV, K] and w is [B, T, HV, V];
- A_log is [HV], and dt_bias is [HV], or [HV * K] for KDA and GDN-2;
- states are [N, HV, K, V], or [N, HV, V, K] with ``state_v_first``.

Every operation accepts any number of tokens, including one, and returns o [B, T, HV, V] in v's dtype and the final
states in float32, or None. Here ``fused_recurrent_*`` does the same computation as ``chunk_*`` and has gradients. In
FLA, the recurrent operation of DeltaNet has gradients, that of Gated DeltaNet raises an error, and those of KDA and
GDN-2 return detached outputs.

- The gate of KDA and GDN-2 is bounded if ``lower_bound`` is given with ``use_gate_in_kernel``. Without
  ``use_gate_in_kernel``, ``lower_bound`` is ignored, as in FLA. ``safe_gate`` has no effect on the mathematics.
- Accepted and ignored, since they change no numbers, are ``safe_gate``, ``disable_recompute``, ``max_num_seqs``, and
  the copies of ``cu_seqlens``: ``cu_seqlens_cpu`` and ``chunk_indices``.
- Not supported, and refused unless left at None or False, are ``gv``, ``use_graph`` and
  ``return_intermediate_states``.
- Refused, although FLA accepts them silently, are unknown keywords, gates with H instead of HV heads, an operand that
  is None, and ``A_log`` or ``dt_bias`` without ``use_gate_in_kernel``. Calls that ``gated_delta_rule`` refuses are
  refused here too.
- ``transpose_state_layout``, the old name of ``state_v_first``, is accepted with a DeprecationWarning, as in FLA.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from inspect import signature
from typing import Any

import numpy as np

from .api import BoundedGate, Gate, SoftplusGate, gated_delta_rule
from .door import library_of
from .spec.errors import GdnError, bad, check_keywords
from .spec.gates import sigmoid
from .spec.operands import WRITE_GATES

__all__ = [
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_gdn2",
    "chunk_kda",
    "fused_recurrent_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "fused_recurrent_gdn2",
    "fused_recurrent_kda",
]

Array = Any
Pair = tuple[Array, Array | None]

# Keywords that FLA accepts through **kwargs, where a misspelt name would go unnoticed.
_LAYOUT = ("transpose_state_layout", "head_first")
_KEYWORDS = {
    "chunk_gated_delta_rule": ("use_gate_in_kernel", "A_log", "dt_bias", "chunk_size", *_LAYOUT),
    "fused_recurrent_gated_delta_rule": _LAYOUT,
    "chunk_kda": ("A_log", "dt_bias", "chunk_size", *_LAYOUT),
    "fused_recurrent_kda": _LAYOUT,
    "chunk_gdn2": ("A_log", "dt_bias", "chunk_size", *_LAYOUT),
    "fused_recurrent_gdn2": _LAYOUT,
    "chunk_delta_rule": ("chunk_size", "head_first"),
}

# Names of gated_delta_rule's arguments in error messages, and FLA's names for them.
_WORDS = (
    (r"\bgate\.", ""),
    (r"\berase\b", "b"),
    (r"\bwrite\b", "w"),
    (r"\bqk_l2norm\b", "use_qk_l2norm_in_kernel"),
    (r"\bstate_layout='vk'", "state_v_first=True"),
    (r"\bstate_layout='kv'", "state_v_first=False"),
)


def _parameters(op: str) -> list[str]:
    return [name for name, p in signature(globals()[op]).parameters.items() if p.kind is not p.VAR_KEYWORD]


def _keywords(op: str, given: Mapping[str, Any], state_v_first: bool = False) -> Mapping[str, Any]:
    """Check the keywords that an operation received beyond its named parameters, and return them."""
    for name in given:
        if name not in _KEYWORDS[op]:
            check_keywords(op, given, (*_parameters(op), *_KEYWORDS[op]))
    if given.get("head_first"):
        raise bad("head_first", "True", "be False: tokens stand before heads, [B, T, H, K]")
    if "transpose_state_layout" in given:
        old = given["transpose_state_layout"]
        if state_v_first and not old:
            raise bad("transpose_state_layout", repr(old), "agree with state_v_first, whose old name it is")
        warnings.warn(
            "transpose_state_layout is the old name of state_v_first.", DeprecationWarning, stacklevel=3
        )  # the warning points at the caller of the operation
    return given


def _not_offered(**given: Any) -> None:
    for name, value in given.items():
        if value is not None and value is not False:
            was = repr(value) if isinstance(value, (bool, int, str)) else "given"
            raise bad(name, was, "be left out: portable-gdn does not offer it")


def _copies(cu_seqlens: Array | None, **copies: Any) -> None:
    """Check that copies of the boundaries are given only together with ``cu_seqlens``; they are ignored then."""
    for name, value in copies.items():
        if cu_seqlens is None and value is not None:
            raise bad(name, "given without cu_seqlens", "come with cu_seqlens, of which it is a copy")


def _float32(x: Array) -> Array:
    return x.float() if library_of(x) == "torch" else x.astype(np.float32)


def _operand(name: str, x: Array | None, like: Array, channel: str = "", hint: str = "") -> Array:
    """Check a required operand and return it: one value per head, or one per channel with as many as ``like`` has."""
    form = f"[B, T, HV, {channel}]" if channel else "[B, T, HV]"
    if x is None:
        raise bad(name, "None", f"be an array {form}")
    if library_of(x) is None or library_of(like) is None:
        return x  # gated_delta_rule reports what it is instead
    shape = tuple(x.shape)
    if len(shape) != (4 if channel else 3) or (channel and shape[-1:] != tuple(like.shape[-1:])):
        raise bad(name, f"of shape [{', '.join(map(str, shape))}]", f"have shape {form}{hint}")
    return x


def _beta(beta: Array | None, v: Array, activate: bool, negative: bool, optional: bool = False) -> Array:
    """Return beta as the rule takes it: activated in float32 on request, and ones instead of an optional None."""
    if negative and not activate:
        raise bad("allow_neg_eigval", "True without use_beta_sigmoid_in_kernel", "come with it: beta is 2 sigmoid(b)")
    if beta is None and optional:
        if activate:
            raise bad("beta", "None", "be given with use_beta_sigmoid_in_kernel")
        library = library_of(v)
        if library is None:
            return None  # gated_delta_rule refuses v
        return v.new_ones(v.shape[:-1]) if library == "torch" else np.ones(v.shape[:-1], np.float32)
    beta = _operand("beta", beta, v)
    if not activate or library_of(beta) is None:
        return beta
    raw = _float32(beta)
    match library_of(beta):
        case "torch":
            activated = raw.sigmoid()
        case "jax":
            import jax

            activated = jax.nn.sigmoid(raw)
        case _:
            activated = sigmoid(np, raw)
    return 2 * activated if negative else activated


def _flat(x: Array) -> Array:
    """Flatten a parameter of a gate: FLA's kernels accept any shape, and checkpoints contain [1, 1, HV, 1]."""
    return x if library_of(x) is None or len(x.shape) == 1 else x.reshape(-1)


def _gate(
    use: bool, A_log: Array | None, dt_bias: Array | None, lower_bound: float | None = None, safe_gate: bool = False
) -> Gate | None:
    """Return the gate that FLA's parameters describe, or None without ``use_gate_in_kernel``."""
    if not use:
        for name, value in (("A_log", A_log), ("dt_bias", dt_bias)):
            if value is not None:
                raise bad(name, "given without use_gate_in_kernel", "come with use_gate_in_kernel=True, or be left out")
        return None
    if lower_bound is not None:
        return BoundedGate(_flat(A_log), _flat(dt_bias), lower_bound)
    if safe_gate:
        raise bad("lower_bound", "None", "be given with safe_gate=True and use_gate_in_kernel=True")
    if A_log is None:
        raise bad("A_log", "None", "be an array [HV] with use_gate_in_kernel=True, unless there is a lower_bound")
    return SoftplusGate(_flat(A_log), _flat(dt_bias))


def _rule(
    q: Array,
    k: Array,
    v: Array,
    g: Array | None,
    *,
    initial_state: Array,
    state_v_first: bool = False,
    more: Mapping[str, Any],
    cp_context: Any = None,
    **options: Any,
) -> Pair:
    """Call ``gated_delta_rule``; errors name the arguments as FLA does."""
    if cp_context is not None and cp_context is not False:
        _check_context(cp_context, v, initial_state, options["output_final_state"])
        if cp_context.group is not None:
            return _piece(q, k, v, g, cp_context, more, options), None
    if library_of(initial_state) is not None and str(initial_state.dtype).endswith("float16"):
        initial_state = _float32(initial_state)  # bfloat16 too; the widening is exact, and FLA's kernels do it as well
    try:
        return gated_delta_rule(
            q,
            k,
            v,
            g,
            initial_state=initial_state,
            state_layout="vk" if state_v_first or more.get("transpose_state_layout") else "kv",
            chunk_size=more.get("chunk_size"),
            **options,
        )
    except GdnError as error:
        sentence = str(error)
        for ours, theirs in _WORDS:
            sentence = re.sub(ours, theirs, sentence)
        raise GdnError(sentence) from error


def _check_context(context: Any, v: Array, initial_state: Array, output_final_state: bool) -> None:
    """Refuse what is no context of FLA's, and what cannot go with one."""
    if not all(hasattr(context, name) for name in ("group", "cu_seqlens", "is_first_rank", "is_last_rank")):
        raise bad("cp_context", f"a {type(context).__name__}", "be None or what fla.ops.cp.build_cp_context returns")
    if getattr(context, "layout", "contiguous") != "contiguous":
        raise bad(
            "cp_context.layout", repr(context.layout), "be 'contiguous': each process has one piece of the tokens"
        )
    if library_of(v) != "torch":
        raise bad("cp_context", "given with arrays that are no torch tensors", "be left out: JAX arrays of "
                  "gated_delta_rule take sharding=portable_gdn.Sharding(sequence=...)")  # fmt: skip
    for name, given in (("initial_state", initial_state is not None), ("output_final_state", output_final_state)):
        if given and context.group is not None:
            raise bad(name, "given with cp_context", "be left out: sequences begin from zeros there, and end unseen")


def _piece(
    q: Array, k: Array, v: Array, g: Array | None, context: Any, more: Mapping[str, Any], options: dict[str, Any]
) -> Array:
    """The outputs of this process's tokens, one piece of those of a group."""
    from .parallel.ranks import run_ranks

    gates = {name: options.pop(name) for name in WRITE_GATES if options.get(name) is not None}
    x = {name: a for name, a in {"q": q, "k": k, "v": v, "g": g, **gates}.items() if a is not None}
    options = {name: a for name, a in options.items() if name != "cu_seqlens"} | {"output_final_state": True}

    def call(x: Mapping[str, Array], state: Array, bounds: Array | None) -> tuple[Array, Array]:
        o, after = _rule(**{"g": None, **x}, **options, initial_state=state, more=more, cu_seqlens=bounds)
        assert after is not None
        return o, after

    places = context.cu_seqlens_cpu if getattr(context, "cu_seqlens_cpu", None) is not None else context.cu_seqlens
    bounds = context.cu_seqlens.to(v.device)
    enters, leaves = not context.is_first_rank, not context.is_last_rank
    return run_ranks(call, x, bounds, places.tolist(), enters, leaves, context.group)


def chunk_gated_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Array | None = None,
    cu_seqlens_cpu: Array | None = None,
    chunk_indices: Array | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> Pair:
    """Compute Gated DeltaNet over whole sequences; as in FLA, ``chunk_gdn`` is another name for it.

    Args:
        q, k: [B, T, H, K] in float32, bfloat16 or float16, the dtype of v.
        v: [B, T, HV, V].
        g: [B, T, HV], the log decay, or the raw projection with ``use_gate_in_kernel``.
        beta: [B, T, HV].
        scale: The factor on the output; K ** -0.5 if None.
        initial_state: [N, HV, K, V] in float32, or in a 16-bit dtype, which is widened as in FLA.
        output_final_state: Whether to return the final states.
        use_qk_l2norm_in_kernel: Whether to normalise q and k, as x / sqrt(sum x^2 + 1e-6).
        use_beta_sigmoid_in_kernel: Whether beta is raw and is replaced by sigmoid(beta), computed in float32.
        allow_neg_eigval: Whether beta is replaced by 2 sigmoid(beta); needs ``use_beta_sigmoid_in_kernel``.
        state_v_first: Whether states, both given and returned, are [N, HV, V, K].
        cu_seqlens: [N + 1] integers, the boundaries of packed sequences; B must be 1.
        cu_seqlens_cpu, chunk_indices: Ignored.
        cp_context: From ``fla.ops.cp.build_cp_context``, contiguous: q to beta are this process's piece of the tokens
            of one packed row, whose boundaries the context holds. All processes of its group make the call. It cannot
            be combined with states.
        **kwargs: ``use_gate_in_kernel`` (False by default) replaces g by -exp(A_log) softplus(g + dt_bias), computed
            in float32; ``A_log`` and ``dt_bias`` are [HV]; ``chunk_size`` is a power of two from 16 to 256.

    Returns:
        o [B, T, HV, V] in v's dtype, and the final states in float32, or None unless requested.

    Raises:
        GdnError: An argument is wrong or not supported, or a keyword is unknown.
    """
    more = _keywords("chunk_gated_delta_rule", kwargs, state_v_first)
    _copies(cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu, chunk_indices=chunk_indices)
    return _rule(
        q, k, v, _operand("g", g, v), beta=_beta(beta, v, use_beta_sigmoid_in_kernel, allow_neg_eigval),
        gate=_gate(more.get("use_gate_in_kernel", False), more.get("A_log"), more.get("dt_bias")),
        scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        qk_l2norm=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens, state_v_first=state_v_first, more=more,
        cp_context=cp_context,
    )  # fmt: skip


def fused_recurrent_gated_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    g: Array | None = None,
    gk: Array | None = None,
    gv: Array | None = None,
    beta: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Array | None = None,
    **kwargs: Any,
) -> Pair:
    """Compute Gated DeltaNet, with gradients, which FLA's operation lacks.

    As in FLA, ``fused_recurrent_gdn`` is another name for it. The arguments that are not listed here are those of
    ``chunk_gated_delta_rule``.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, HV, V].
        g: [B, T, HV], the log decay per head; None means no decay.
        gk: [B, T, HV, K], a log decay per channel that is added to g; not allowed with ``use_gate_in_kernel``. It is
            the fifth parameter, so beta must be passed by name.
        gv: Not supported.
        beta: [B, T, HV]; None means 1.
        A_log, dt_bias: [HV].

    Returns:
        o [B, T, HV, V] in v's dtype, and the final states in float32, or None unless requested.

    Raises:
        GdnError: As in ``chunk_gated_delta_rule``.
    """
    more = _keywords("fused_recurrent_gated_delta_rule", kwargs, state_v_first)
    _not_offered(gv=gv)
    if g is not None:
        g = _operand("g", g, v)
    if gk is not None:
        gk = _operand("gk", gk, q, "K", "; beta is not the fifth parameter, and is given by name")
        if use_gate_in_kernel:
            raise bad("gk", "given with use_gate_in_kernel", "be left out, or added to a g that is activated before")
        both = library_of(g) is not None and library_of(gk) is not None
        g = gk if g is None else _float32(g)[..., None] + _float32(gk) if both else g
    return _rule(
        q, k, v, g, beta=_beta(beta, v, use_beta_sigmoid_in_kernel, allow_neg_eigval, optional=True),
        gate=_gate(use_gate_in_kernel, A_log, dt_bias), scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, qk_l2norm=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens,
        state_v_first=state_v_first, more=more,
    )  # fmt: skip


def chunk_kda(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Array | None = None,
    cu_seqlens_cpu: Array | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    **kwargs: Any,
) -> Pair:
    """Compute Kimi Delta Attention over whole sequences.

    The arguments that are not listed here are those of ``chunk_gated_delta_rule``.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, HV, V].
        g: [B, T, HV, K], the log decay per channel, or the raw projection with ``use_gate_in_kernel``.
        beta: [B, T, HV].
        use_gate_in_kernel: Whether to replace g, in float32, by -exp(A_log) softplus(g + dt_bias), or with a
            ``lower_bound`` by lower_bound sigmoid(exp(A_log) (g + dt_bias)).
        safe_gate: Has no effect, but as in FLA it requires a ``lower_bound`` if ``use_gate_in_kernel`` is set.
        lower_bound: A value in [-5, 0); ignored without ``use_gate_in_kernel``.
        disable_recompute, cu_seqlens_cpu, max_num_seqs: Ignored.
        return_intermediate_states, use_graph: Not supported.
        **kwargs: ``A_log`` [HV], for which None means 0 if there is a ``lower_bound``; ``dt_bias`` [HV * K];
            ``chunk_size``.

    Returns:
        o [B, T, HV, V] in v's dtype, and the final states in float32, or None unless requested.

    Raises:
        GdnError: As in ``chunk_gated_delta_rule``.
    """
    more = _keywords("chunk_kda", kwargs, state_v_first)
    _not_offered(use_graph=use_graph, return_intermediate_states=return_intermediate_states)
    _copies(cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu)
    return _rule(
        q, k, v, _operand("g", g, q, "K"), beta=_beta(beta, v, use_beta_sigmoid_in_kernel, allow_neg_eigval),
        gate=_gate(use_gate_in_kernel, more.get("A_log"), more.get("dt_bias"), lower_bound, safe_gate),
        scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        qk_l2norm=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens, state_v_first=state_v_first, more=more,
        cp_context=cp_context,
    )  # fmt: skip


def fused_recurrent_kda(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Array | None = None,
    **kwargs: Any,
) -> Pair:
    """Compute Kimi Delta Attention, with gradients; FLA's operation returns detached outputs.

    The arguments that are not listed here are those of ``chunk_kda``.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, HV, V].
        g: [B, T, HV, K].
        beta: [B, T, HV].
        A_log: [HV].
        dt_bias: [HV * K].

    Returns:
        o [B, T, HV, V] in v's dtype, and the final states in float32, or None unless requested.

    Raises:
        GdnError: As in ``chunk_gated_delta_rule``.
    """
    more = _keywords("fused_recurrent_kda", kwargs, state_v_first)
    return _rule(
        q, k, v, _operand("g", g, q, "K"), beta=_beta(beta, v, use_beta_sigmoid_in_kernel, allow_neg_eigval),
        gate=_gate(use_gate_in_kernel, A_log, dt_bias, lower_bound), scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, qk_l2norm=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens,
        state_v_first=state_v_first, more=more,
    )  # fmt: skip


def chunk_gdn2(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    b: Array,
    w: Array,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    cu_seqlens: Array | None = None,
    cu_seqlens_cpu: Array | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cp_context: Any = None,
    **kwargs: Any,
) -> Pair:
    """Compute Gated DeltaNet 2 over whole sequences.

    HV > H is supported too, which in FLA only the recurrent operation supports. The arguments that are not listed here
    are those of ``chunk_kda``.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, HV, V].
        g: [B, T, HV, K].
        b: [B, T, HV, K], the erase gate.
        w: [B, T, HV, V], the write gate.
        disable_recompute, cu_seqlens_cpu: Ignored.
        return_intermediate_states: Not supported.
        **kwargs: ``A_log`` [HV], for which None means 0 if there is a ``lower_bound``; ``dt_bias`` [HV * K];
            ``chunk_size``.

    Returns:
        o [B, T, HV, V] in v's dtype, and the final states in float32, or None unless requested.

    Raises:
        GdnError: As in ``chunk_gated_delta_rule``.
    """
    more = _keywords("chunk_gdn2", kwargs, state_v_first)
    _not_offered(return_intermediate_states=return_intermediate_states)
    _copies(cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu)
    return _rule(
        q, k, v, _operand("g", g, q, "K"), erase=_operand("b", b, q, "K"), write=_operand("w", w, v, "V"),
        gate=_gate(use_gate_in_kernel, more.get("A_log"), more.get("dt_bias"), lower_bound, safe_gate),
        scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        qk_l2norm=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens, state_v_first=state_v_first, more=more,
        cp_context=cp_context,
    )  # fmt: skip


def fused_recurrent_gdn2(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    b: Array,
    w: Array,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Array | None = None,
    **kwargs: Any,
) -> Pair:
    """Compute Gated DeltaNet 2, with gradients; FLA's operation returns detached outputs.

    The arguments that are not listed here are those of ``chunk_gdn2``.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, HV, V].
        g: [B, T, HV, K].
        b: [B, T, HV, K], the erase gate.
        w: [B, T, HV, V], the write gate.
        A_log: [HV].
        dt_bias: [HV * K].

    Returns:
        o [B, T, HV, V] in v's dtype, and the final states in float32, or None unless requested.

    Raises:
        GdnError: As in ``chunk_gated_delta_rule``.
    """
    more = _keywords("fused_recurrent_gdn2", kwargs, state_v_first)
    return _rule(
        q, k, v, _operand("g", g, q, "K"), erase=_operand("b", b, q, "K"), write=_operand("w", w, v, "V"),
        gate=_gate(use_gate_in_kernel, A_log, dt_bias, lower_bound), scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, qk_l2norm=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens,
        state_v_first=state_v_first, more=more,
    )  # fmt: skip


def chunk_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    beta: Array,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Array | None = None,
    cu_seqlens_cpu: Array | None = None,
    **kwargs: Any,
) -> Pair:
    """Compute DeltaNet over whole sequences, also in float32 and with HV > H, neither of which FLA supports.

    The arguments that are not listed here are those of ``chunk_gated_delta_rule``.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, HV, V].
        beta: [B, T, HV].
        cu_seqlens_cpu: Ignored.
        **kwargs: ``chunk_size``.

    Returns:
        o [B, T, HV, V] in v's dtype, and the final states in float32, or None unless requested.

    Raises:
        GdnError: As in ``chunk_gated_delta_rule``.
    """
    more = _keywords("chunk_delta_rule", kwargs)
    _copies(cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu)
    return _rule(
        q, k, v, None, beta=_beta(beta, v, False, False), scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, qk_l2norm=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens, more=more,
    )  # fmt: skip


def fused_recurrent_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    beta: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Array | None = None,
) -> Pair:
    """Compute DeltaNet; the computation is that of ``chunk_delta_rule``.

    The arguments that are not listed here are those of ``chunk_delta_rule``.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, HV, V].
        beta: [B, T, HV]; None means 1. FLA's beta per channel [B, T, H, V], which erases per value channel, is refused.

    Returns:
        o [B, T, HV, V] in v's dtype, and the final states in float32, or None unless requested.

    Raises:
        GdnError: As in ``chunk_gated_delta_rule``.
    """
    return _rule(
        q, k, v, None, beta=_beta(beta, v, False, False, optional=True), scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, qk_l2norm=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens, more={},
    )  # fmt: skip


chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule
