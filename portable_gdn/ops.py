"""FLA's operations under FLA's names, on our call: for torch tensors and JAX arrays, changing the import is the port.

Names, order, defaults and returns are those of flash-linear-attention 0.6.0 (a test compares the signatures). Shapes,
with B rows, T tokens, N states (B, or the number of packed sequences), H key heads and HV value heads, a multiple of H:

q, k [B, T, H, K] and v [B, T, HV, V], of one dtype; g [B, T, HV], or [B, T, HV, K] for KDA and GDN-2, natural log;
beta [B, T, HV]; b [B, T, HV, K]; w [B, T, HV, V]; A_log [HV]; dt_bias [HV], or [HV * K] for KDA and GDN-2; states
[N, HV, K, V], or [N, HV, V, K] with ``state_v_first``.

Every operation returns (o [B, T, HV, V] in v's dtype, final states in float32 or None) and takes any number of tokens,
one too. ``fused_recurrent_*`` is the same computation as ``chunk_*`` here, and has gradients: of FLA's, that of
DeltaNet has them, that of Gated DeltaNet raises, and those of KDA and GDN-2 return detached outputs.

- The gate of KDA and GDN-2 is bounded where ``lower_bound`` comes with ``use_gate_in_kernel``. Without that
  ``lower_bound`` is ignored, as by FLA. ``safe_gate`` has no part in the mathematics.
- Taken and ignored, since they change no numbers: ``safe_gate``, ``disable_recompute``, ``max_num_seqs``, and beside
  ``cu_seqlens`` its copies ``cu_seqlens_cpu`` and ``chunk_indices``.
- Not offered, and refused unless left at None or False: ``gv``, ``use_graph``,
  ``return_intermediate_states``.
- Refused where FLA says nothing: unknown keywords, gates of H instead of HV heads, an operand that is None,
  ``A_log`` or ``dt_bias`` without ``use_gate_in_kernel``. Whatever ``gated_delta_rule`` refuses is refused here.
- ``transpose_state_layout``, the old name of ``state_v_first``, is taken with a DeprecationWarning, as by FLA.
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

# What FLA takes through **kwargs, where a misspelt name would go unseen.
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

# Our words in a refusal, and FLA's for them.
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
    """The keywords beside the parameters, none of them unknown."""
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
        )  # of whoever called the operation
    return given


def _not_offered(**given: Any) -> None:
    for name, value in given.items():
        if value is not None and value is not False:
            was = repr(value) if isinstance(value, (bool, int, str)) else "given"
            raise bad(name, was, "be left out: portable-gdn does not offer it")


def _copies(cu_seqlens: Array | None, **copies: Any) -> None:
    """What only repeats the boundaries is ignored, but not in their place."""
    for name, value in copies.items():
        if cu_seqlens is None and value is not None:
            raise bad(name, "given without cu_seqlens", "come with cu_seqlens, of which it is a copy")


def _float32(x: Array) -> Array:
    return x.float() if library_of(x) == "torch" else x.astype(np.float32)


def _operand(name: str, x: Array | None, like: Array, channel: str = "", hint: str = "") -> Array:
    """An operand that FLA's operation cannot do without, of its granularity: by head, or by channels as ``like``."""
    form = f"[B, T, HV, {channel}]" if channel else "[B, T, HV]"
    if x is None:
        raise bad(name, "None", f"be an array {form}")
    if library_of(x) is None or library_of(like) is None:
        return x  # what it is instead is said at the door
    shape = tuple(x.shape)
    if len(shape) != (4 if channel else 3) or (channel and shape[-1:] != tuple(like.shape[-1:])):
        raise bad(name, f"of shape [{', '.join(map(str, shape))}]", f"have shape {form}{hint}")
    return x


def _beta(beta: Array | None, v: Array, activate: bool, negative: bool, optional: bool = False) -> Array:
    """beta as the rule takes it: activated in float32 if asked for, ones in place of an optional None."""
    if negative and not activate:
        raise bad("allow_neg_eigval", "True without use_beta_sigmoid_in_kernel", "come with it: beta is 2 sigmoid(b)")
    if beta is None and optional:
        if activate:
            raise bad("beta", "None", "be given with use_beta_sigmoid_in_kernel")
        library = library_of(v)
        if library is None:
            return None  # v is refused at the door
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
    """FLA's kernels take a gate's parameters in any shape of as many elements; checkpoints have [1, 1, HV, 1]."""
    return x if library_of(x) is None or len(x.shape) == 1 else x.reshape(-1)


def _gate(
    use: bool, A_log: Array | None, dt_bias: Array | None, lower_bound: float | None = None, safe_gate: bool = False
) -> Gate | None:
    """The activation that FLA's parameters mean."""
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
    """The call itself; refusals come back in FLA's words."""
    if cp_context is not None and cp_context is not False:
        _check_context(cp_context, v, initial_state, options["output_final_state"])
        if cp_context.group is not None:
            return _piece(q, k, v, g, cp_context, more, options), None
    if library_of(initial_state) is not None and str(initial_state.dtype).endswith("float16"):
        initial_state = _float32(initial_state)  # bfloat16 too; exact, and what FLA's kernels do
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

    gates = {name: options.pop(name) for name in ("beta", "erase", "write") if options.get(name) is not None}
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
    """Gated DeltaNet. FLA has it as ``chunk_gdn`` too.

    Args:
        q, k: [B, T, H, K], float32, bfloat16 or float16, as v.
        v: [B, T, HV, V].
        g: [B, T, HV], log decay, or with ``use_gate_in_kernel`` the raw projection.
        beta: [B, T, HV].
        scale: of the output; K ** -0.5 if None.
        initial_state: [N, HV, K, V]; float32, or 16 bits, which are widened as FLA does.
        output_final_state: whether to return the final states.
        use_qk_l2norm_in_kernel: whether to normalise q and k: x / sqrt(sum x^2 + 1e-6).
        use_beta_sigmoid_in_kernel: whether beta is raw and enters as sigmoid(beta), computed in float32.
        allow_neg_eigval: whether it enters as 2 sigmoid(beta); only with ``use_beta_sigmoid_in_kernel``.
        state_v_first: whether states, given and returned, are [N, HV, V, K].
        cu_seqlens: [N + 1] integers, boundaries of packed sequences (then B = 1).
        cu_seqlens_cpu, chunk_indices: ignored.
        cp_context: of ``fla.ops.cp.build_cp_context``, contiguous: q to beta are this process's piece of the tokens of
            one packed row, whose boundaries the context has; all processes of its group make the call. Not with states.
        **kwargs: ``use_gate_in_kernel`` (False): g enters as -exp(A_log) softplus(g + dt_bias), in float32;
            ``A_log`` and ``dt_bias`` [HV]; ``chunk_size``, a power of two from 16 to 256.

    Returns:
        o [B, T, HV, V] in v's dtype, and the final states in float32, or None unless asked for.

    Raises:
        GdnError: an argument is wrong or not offered, or a keyword unknown.
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
    """Gated DeltaNet, with gradients, where FLA's raises. FLA has it as ``fused_recurrent_gdn`` too.

    Args:
        q, k: [B, T, H, K]; v: [B, T, HV, V].
        g: [B, T, HV], log decay by head; None keeps everything.
        gk: [B, T, HV, K], log decay by channel, on top of g; not with ``use_gate_in_kernel``. It is the fifth
            parameter: beta is given by name.
        gv: not offered.
        beta: [B, T, HV]; None is 1.
        A_log, dt_bias: [HV].
        The rest as in ``chunk_gated_delta_rule``.

    Returns:
        o [B, T, HV, V] in v's dtype, and the final states in float32, or None unless asked for.

    Raises:
        GdnError: as ``chunk_gated_delta_rule``.
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
    """Kimi Delta Attention.

    Args:
        q, k: [B, T, H, K]; v: [B, T, HV, V].
        g: [B, T, HV, K], log decay by channel, or with ``use_gate_in_kernel`` the raw projection.
        beta: [B, T, HV].
        use_gate_in_kernel: g enters as -exp(A_log) softplus(g + dt_bias), or if there is a ``lower_bound`` as
            lower_bound sigmoid(exp(A_log) (g + dt_bias)), in float32.
        safe_gate: changes nothing; as in FLA it demands a ``lower_bound`` where ``use_gate_in_kernel`` is set.
        lower_bound: in [-5, 0); ignored without ``use_gate_in_kernel``.
        disable_recompute, cu_seqlens_cpu, max_num_seqs: ignored.
        return_intermediate_states, use_graph: not offered. cp_context: as in ``chunk_gated_delta_rule``.
        **kwargs: ``A_log`` [HV], None is 0 where there is a ``lower_bound``; ``dt_bias`` [HV * K]; ``chunk_size``.
        The rest as in ``chunk_gated_delta_rule``.

    Returns:
        o [B, T, HV, V] in v's dtype, and the final states in float32, or None unless asked for.

    Raises:
        GdnError: as ``chunk_gated_delta_rule``.
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
    """Kimi Delta Attention, with gradients, where FLA detaches its outputs.

    Args:
        q, k: [B, T, H, K]; v: [B, T, HV, V]; g: [B, T, HV, K]; beta: [B, T, HV].
        A_log: [HV]. dt_bias: [HV * K].
        The rest as in ``chunk_kda``.

    Returns:
        o [B, T, HV, V] in v's dtype, and the final states in float32, or None unless asked for.

    Raises:
        GdnError: as ``chunk_gated_delta_rule``.
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
    """Gated DeltaNet 2; with HV > H too, which FLA has in its recurrent operation only.

    Args:
        q, k: [B, T, H, K]; v: [B, T, HV, V]; g: [B, T, HV, K].
        b: [B, T, HV, K], what is erased. w: [B, T, HV, V], what is written.
        disable_recompute, cu_seqlens_cpu: ignored.
        return_intermediate_states: not offered. cp_context: as in ``chunk_gated_delta_rule``.
        **kwargs: ``A_log`` [HV], None is 0 where there is a ``lower_bound``; ``dt_bias`` [HV * K]; ``chunk_size``.
        The rest as in ``chunk_kda``.

    Returns:
        o [B, T, HV, V] in v's dtype, and the final states in float32, or None unless asked for.

    Raises:
        GdnError: as ``chunk_gated_delta_rule``.
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
    """Gated DeltaNet 2, with gradients, where FLA detaches its outputs.

    Args:
        q, k: [B, T, H, K]; v: [B, T, HV, V]; g: [B, T, HV, K]; b: [B, T, HV, K]; w: [B, T, HV, V].
        A_log: [HV]. dt_bias: [HV * K].
        The rest as in ``chunk_gdn2``.

    Returns:
        o [B, T, HV, V] in v's dtype, and the final states in float32, or None unless asked for.

    Raises:
        GdnError: as ``chunk_gated_delta_rule``.
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
    """DeltaNet; in float32 and with HV > H too, neither of which FLA takes.

    Args:
        q, k: [B, T, H, K]; v: [B, T, HV, V]; beta: [B, T, HV].
        cu_seqlens_cpu: ignored.
        **kwargs: ``chunk_size``.
        The rest as in ``chunk_gated_delta_rule``.

    Returns:
        o [B, T, HV, V] in v's dtype, and the final states in float32, or None unless asked for.

    Raises:
        GdnError: as ``chunk_gated_delta_rule``.
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
    """DeltaNet.

    Args:
        q, k: [B, T, H, K]; v: [B, T, HV, V].
        beta: [B, T, HV]; None is 1. FLA's beta by channel [B, T, H, V] erases by value channel, and is refused.
        The rest as in ``chunk_delta_rule``.

    Returns:
        o [B, T, HV, V] in v's dtype, and the final states in float32, or None unless asked for.

    Raises:
        GdnError: as ``chunk_gated_delta_rule``.
    """
    return _rule(
        q, k, v, None, beta=_beta(beta, v, False, False, optional=True), scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, qk_l2norm=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens, more={},
    )  # fmt: skip


chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule
