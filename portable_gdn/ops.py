"""FLA's operations by FLA's names, on our call: for torch tensors and JAX arrays, changing the import is the port.

Parameters, their order, defaults and returns are those of flash-linear-attention 0.6.0 (a test compares them). Shapes:
q, k [B, T, H, K]; v [B, T, HV, V]; g [B, T, HV] or, for KDA and GDN-2, [B, T, HV, K], natural log; beta [B, T, HV];
b [B, T, HV, K]; w [B, T, HV, V]; states [N, HV, K, V] float32, or [N, HV, V, K] with ``state_v_first``. Each returns
(o [B, T, HV, V] in v's dtype, final states or None).

What differs: ``fused_recurrent_*`` are the same computation as ``chunk_*`` here, with gradients, where FLA's raise or
detach. ``lower_bound`` together with ``use_gate_in_kernel`` chooses the bounded gate, as in FLA; without that it is
ignored, as in FLA. ``safe_gate``, ``disable_recompute``, ``cu_seqlens_cpu``, ``chunk_indices`` and ``max_num_seqs``
change no numbers and are accepted. What FLA takes and this package does not offer (``gv``, ``cp_context``,
``use_graph``, ``return_intermediate_states``) is refused unless it is None or False, and so is every unknown keyword,
which FLA accepts without a word, and ``A_log`` or ``dt_bias`` without ``use_gate_in_kernel``, which FLA ignores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .api import BoundedGate, SoftplusGate, gated_delta_rule
from .door import library_of
from .spec.errors import GdnError, bad

__all__ = [
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gdn2",
    "chunk_kda",
    "fused_recurrent_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn2",
    "fused_recurrent_kda",
]

Array = Any
Pair = tuple[Array, Array | None]

#: Documented keywords that FLA takes through ``**kwargs``.
_GATE = ("use_gate_in_kernel", "A_log", "dt_bias")
_LAYOUT = ("transpose_state_layout", "head_first")


def _offered(**given: Any) -> None:
    """Refuse what is not offered unless it is left at None or False."""
    for name, value in given.items():
        if value is not None and value is not False:
            raise bad(
                name, f"{value if isinstance(value, (bool, int, str)) else 'given'}", "be left out: it is not offered"
            )


def _keywords(op: str, given: Mapping[str, Any], allowed: tuple[str, ...]) -> dict[str, Any]:
    for name in given:
        if name not in allowed:
            known = ", ".join(allowed) if allowed else "none"
            raise GdnError(f"{name} is not a keyword of {op}; beside its parameters it takes {known}.")
    if given.get("head_first"):
        raise bad("head_first", "True", "be False: tokens stand before heads, [B, T, H, K]")
    return dict(given)


def _beta(beta: Array | None, v: Array, sigmoid: bool, negative: bool) -> Array:
    """The gate that the rule takes: ones if None, activated in float32 if asked for."""
    if negative and not sigmoid:
        raise bad(
            "allow_neg_eigval", "True without use_beta_sigmoid_in_kernel", "come with it: beta is 2 sigmoid(beta)"
        )
    library = library_of(v)
    if beta is None:
        shape = v.shape[:-1]
        if library == "torch":
            return v.new_ones(shape)
        if library == "jax":
            import jax.numpy as jnp

            return jnp.ones(shape, jnp.float32)
        return np.ones(shape, np.float32)
    if not sigmoid:
        return beta
    if library == "torch":
        activated = beta.float().sigmoid()
    elif library == "jax":
        import jax

        activated = jax.nn.sigmoid(beta.astype(np.float32))
    else:
        activated = 1 / (1 + np.exp(-beta.astype(np.float32)))
    return 2 * activated if negative else activated


def _gate(use: bool, A_log: Array | None, dt_bias: Array | None, lower_bound: float | None) -> Any:
    if not use:
        for name, value in (("A_log", A_log), ("dt_bias", dt_bias)):
            if value is not None:
                raise bad(name, "given without use_gate_in_kernel", "come with use_gate_in_kernel=True, or be left out")
        return None
    if lower_bound is None:
        if A_log is None:
            raise bad("A_log", "None", "be given with use_gate_in_kernel, unless there is a lower_bound")
        return SoftplusGate(A_log, dt_bias)
    return BoundedGate(A_log, dt_bias, lower_bound)


def _layout(state_v_first: bool, more: Mapping[str, Any]) -> str:
    old = more.get("transpose_state_layout")
    if old is not None and state_v_first and not old:
        raise bad("transpose_state_layout", repr(old), "agree with state_v_first, whose old name it is")
    return "vk" if state_v_first or old else "kv"


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
    """Gated DeltaNet. Keywords beside: use_gate_in_kernel, A_log [HV], dt_bias [HV], chunk_size."""
    more = _keywords("chunk_gated_delta_rule", kwargs, (*_GATE, "chunk_size", *_LAYOUT))
    _offered(cp_context=cp_context)
    return gated_delta_rule(
        q, k, v, g, beta=_beta(beta, v, use_beta_sigmoid_in_kernel, allow_neg_eigval), scale=scale,
        initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens,
        qk_l2norm=use_qk_l2norm_in_kernel, state_layout=_layout(state_v_first, more), chunk_size=more.get("chunk_size"),
        gate=_gate(more.get("use_gate_in_kernel", False), more.get("A_log"), more.get("dt_bias"), None),
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
    """Gated DeltaNet. The fifth parameter is ``gk`` [B, T, HV, K], a decay by channel on top of g; beta None is 1."""
    more = _keywords("fused_recurrent_gated_delta_rule", kwargs, _LAYOUT)
    _offered(gv=gv)
    if gk is not None and use_gate_in_kernel:
        raise bad("gk", "given with use_gate_in_kernel", "be left out, or g activated before the call and added to it")
    if gk is not None:
        g = gk if g is None else g[..., None] + gk
    return gated_delta_rule(
        q, k, v, g, beta=_beta(beta, v, use_beta_sigmoid_in_kernel, allow_neg_eigval), scale=scale,
        initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens,
        qk_l2norm=use_qk_l2norm_in_kernel, state_layout=_layout(state_v_first, more),
        gate=_gate(use_gate_in_kernel, A_log, dt_bias, None),
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
    """Kimi Delta Attention. Keywords beside: A_log [HV], dt_bias [HV * K], chunk_size."""
    more = _keywords("chunk_kda", kwargs, ("A_log", "dt_bias", "chunk_size", *_LAYOUT))
    _offered(cp_context=cp_context, use_graph=use_graph, return_intermediate_states=return_intermediate_states)
    return gated_delta_rule(
        q, k, v, g, beta=_beta(beta, v, use_beta_sigmoid_in_kernel, allow_neg_eigval), scale=scale,
        initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens,
        qk_l2norm=use_qk_l2norm_in_kernel, state_layout=_layout(state_v_first, more), chunk_size=more.get("chunk_size"),
        gate=_gate(use_gate_in_kernel, more.get("A_log"), more.get("dt_bias"), lower_bound),
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
    """Kimi Delta Attention; A_log [HV], dt_bias [HV * K]."""
    more = _keywords("fused_recurrent_kda", kwargs, _LAYOUT)
    return gated_delta_rule(
        q, k, v, g, beta=_beta(beta, v, use_beta_sigmoid_in_kernel, allow_neg_eigval), scale=scale,
        initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens,
        qk_l2norm=use_qk_l2norm_in_kernel, state_layout=_layout(state_v_first, more),
        gate=_gate(use_gate_in_kernel, A_log, dt_bias, lower_bound),
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
    """GDN-2, with grouped value heads too. Keywords beside: A_log [HV], dt_bias [HV * K], chunk_size."""
    more = _keywords("chunk_gdn2", kwargs, ("A_log", "dt_bias", "chunk_size", *_LAYOUT))
    _offered(cp_context=cp_context, return_intermediate_states=return_intermediate_states)
    return gated_delta_rule(
        q, k, v, g, erase=b, write=w, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        cu_seqlens=cu_seqlens, qk_l2norm=use_qk_l2norm_in_kernel, state_layout=_layout(state_v_first, more),
        chunk_size=more.get("chunk_size"),
        gate=_gate(use_gate_in_kernel, more.get("A_log"), more.get("dt_bias"), lower_bound),
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
    """GDN-2; A_log [HV], dt_bias [HV * K]."""
    more = _keywords("fused_recurrent_gdn2", kwargs, _LAYOUT)
    return gated_delta_rule(
        q, k, v, g, erase=b, write=w, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        cu_seqlens=cu_seqlens, qk_l2norm=use_qk_l2norm_in_kernel, state_layout=_layout(state_v_first, more),
        gate=_gate(use_gate_in_kernel, A_log, dt_bias, lower_bound),
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
    """DeltaNet, float32 too. Keyword beside: chunk_size."""
    more = _keywords("chunk_delta_rule", kwargs, ("chunk_size", "head_first"))
    return gated_delta_rule(
        q, k, v, beta=beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        cu_seqlens=cu_seqlens, qk_l2norm=use_qk_l2norm_in_kernel, chunk_size=more.get("chunk_size"),
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
    """DeltaNet; beta None is 1."""
    return gated_delta_rule(
        q, k, v, beta=_beta(beta, v, False, False), scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, cu_seqlens=cu_seqlens, qk_l2norm=use_qk_l2norm_in_kernel,
    )  # fmt: skip
