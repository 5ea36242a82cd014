"""Models of transformers on our call.

transformers chooses, when a modelling file is imported, between FLA's kernels and its own torch code, by what is
installed; with FLA and Triton installed, and no GPU, every forward pass of these models fails in Triton. Here the
functions that the layers call are replaced, so that each call goes to the best backend for the tensors it brings.

So is the norm of a layer's output with its gate: by FLA's fused kernel where FLA computes, else in float32 as
``gated_delta_mixer`` does it. A layer's short convolution stays transformers' own, except for packed sequences, which
its torch code cannot keep apart: for them it is ``spec.conv``'s.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

from ..spec.errors import GdnError, bad
from .patch import Patch

__all__ = ["MODELS", "Patch", "patch_transformers"]

Tensor = Any

_GDN = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
_KDA = ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention")
_CONVOLUTION = "causal_conv1d_fn"
#: How the class of the output norm ends; what comes before it is the model's.
_NORM = "RMSNormGated"

#: The functions by which each model's layers call the rule.
_RULES = {"qwen3_next": _GDN, "qwen3_5": _GDN, "qwen3_5_moe": _GDN, "kimi_linear": _KDA, "olmo_hybrid": _GDN}
MODELS = tuple(_RULES)


def patch_transformers(
    models: Sequence[str] = MODELS, *, backend: str | None = None, precision: str | None = None
) -> Patch:
    """Make models of transformers use ``gated_delta_rule``, on CPU, GPU and wherever else torch has tensors, and norm
    and gate their outputs as ``gated_delta_mixer`` does.

    Works for models that exist already and for those made later, until undone:

        with patch_transformers():
            model.generate(...)
        patch = patch_transformers(); ...; patch.undo()

    Args:
        models: of ``MODELS``, transformers' names.
        backend, precision: of every call; None as in ``gated_delta_rule``.

    Returns:
        The patch, a context manager with ``undo``.

    Raises:
        GdnError: transformers is not installed or too old for one of these, or a name is none of ``MODELS``.
    """
    if isinstance(models, str):
        models = (models,)
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise GdnError(f"{package} is not installed; `pip install 'portable-gdn[checkpoints]'` brings it.")
    for model in models:
        if model not in _RULES:
            raise bad("models", f"given with {model!r}", f"hold of {', '.join(MODELS)}")
    patch = Patch()
    try:
        for model in models:
            module = _module(model)
            for name in _RULES[model]:
                patch._replace(module, name, lambda _: _rule(backend, precision))
            patch._replace(module, _CONVOLUTION, _convolution)
            patch._replace(_norm_class(module), "forward", lambda _: _norm(backend))
    except BaseException:
        patch.undo()
        raise
    return patch


def _module(model: str) -> Any:
    """A modelling file that has the functions which will be replaced."""
    name = f"transformers.models.{model}.modeling_{model}"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise _too_old(model, f"has no {error.name}") from None
    for function in (*_RULES[model], _CONVOLUTION):
        if not hasattr(module, function):
            raise _too_old(model, f"has no {function} in {name}")
    if _norm_class(module) is None:
        raise _too_old(model, f"has no class whose name ends with {_NORM} in {name}")
    return module


def _norm_class(module: Any) -> Any:
    """The class of the output norm in a modelling file, or None."""
    return next((value for name, value in vars(module).items() if name.endswith(_NORM)), None)


def _norm(backend: str | None) -> Callable[..., Tensor]:
    """The output norm's forward method."""

    def forward(self: Any, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        import array_api_compat.torch as xp
        import torch

        from .. import dispatch
        from ..spec.norm import gated_norm

        fla: Any = dispatch.get("fla")
        activation = None if gate is None else self.activation
        here = hidden_states.device.type in getattr(fla, "devices", ()) and not torch.compiler.is_compiling()
        if here and backend in (None, "fla") and fla.unavailable() is None:
            from ..gpu.norm import fused_norm

            return fused_norm(hidden_states, gate, self.weight, self.variance_epsilon, activation)
        z = None if gate is None else gate.float()
        o, weight = hidden_states.float(), self.weight.float()
        return gated_norm(xp, o, weight, z, self.variance_epsilon, activation).to(hidden_states.dtype)

    return forward


def _too_old(model: str, why: str) -> GdnError:
    import transformers

    return GdnError(f"transformers {transformers.__version__} {why}; {model} can be patched in 5.24.")


def _rule(backend: str | None, precision: str | None) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The rule with the parameters that the layers give it."""
    from ..api import gated_delta_rule

    def rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        seq_idx: Tensor | None = None,
        **others: Any,  # of attention: nothing that this rule has
    ) -> tuple[Tensor, Tensor | None]:
        bounds = cu_seq_lens_q if cu_seqlens is None else cu_seqlens
        return gated_delta_rule(
            query,
            key,
            value,
            g,
            beta=beta,
            initial_state=None if initial_state is None else initial_state.float(),
            output_final_state=output_final_state,
            qk_l2norm=use_qk_l2norm_in_kernel,
            cu_seqlens=bounds,
            segment_ids=seq_idx if bounds is None else None,
            precision=precision,
            backend=backend,
        )

    return rule


def _convolution(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The original, and for packed sequences one that keeps them apart."""

    def convolution(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        cu_seq_lens_q: Tensor | None = None,
        seq_idx: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        if cu_seq_lens_q is None and seq_idx is None:
            return original(hidden_states, weight, bias, activation=activation, **others)
        if activation not in (None, "silu", "swish"):
            raise bad("activation", repr(activation), "be None or 'silu' where sequences are packed")
        import array_api_compat.torch as xp

        from ..spec.conv import convolve
        from ..spec.sequences import layout

        x = hidden_states.transpose(1, 2).float()
        segments = seq_idx if cu_seq_lens_q is None else None
        place = layout(xp, x, cu_seq_lens_q, segments, None)
        taps = weight.float()
        y = convolve(xp, x, taps, None if bias is None else bias.float(), "silu" if activation else None, place, None)
        return y.transpose(1, 2).to(hidden_states.dtype)

    return convolution
