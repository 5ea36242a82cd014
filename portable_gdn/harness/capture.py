"""Record the inputs and outputs of the gated delta rule inside layers of transformers.

Each model is tiny and has random weights of realistic size. It reads real text as bytes, and its last layer is
recorded, so that the operands come out of an embedding, norms, attention, a feed-forward block, another linear layer, a
short convolution and the gates, as they do in a trained model. The result is a file that
``portable_gdn.harness.recordings`` reads; the docstring of that module lists names and shapes.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..spec.errors import GdnError
from ..spec.undisturbed import undisturbed
from .recordings import FORMAT, VERSION, load
from .tensor_file import TensorWriter

__all__ = ["MODELS", "TEXT", "capture"]

TEXT = (
    "Four score and seven years ago our fathers brought forth, upon this continent, a new nation, conceived "
    "in Liberty, and dedicated to the proposition that all men are created equal. Now we are engaged in a "
    "great civil war, testing whether that nation, or any nation so conceived, and so dedicated, can long "
    "endure."
)
"""The opening of Abraham Lincoln's Gettysburg Address (1863; public domain), one token per byte."""

TOKENS = 150
"""Two chunks of 64 tokens and a ragged third."""
PREFIX = 90
"""The number of tokens in the cache before the second, continued call; not a multiple of 64 either."""
SEED = 20240917


_GATES = tuple(
    f"{name}.weight" for name in ("in_proj_ba", "in_proj_a", "in_proj_b", "a_proj", "b_proj", "f_b_proj")
)  # projections whose outputs become g or beta


@dataclass(frozen=True)
class _Model:
    """The place where a model calls the rule, and a configuration of three layers, of which the last is linear."""

    module: str  # the modelling module under transformers.models
    rule: str  # the function in it that computes the rule over many tokens
    attention: str  # the name of the linear-attention module in a decoder layer
    variant: str
    key_heads: int
    config: Mapping[str, Any]


_COMMON = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}


def _linear(key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> dict[str, int]:
    return {
        "linear_num_key_heads": key_heads, "linear_num_value_heads": value_heads,
        "linear_key_head_dim": key_dim, "linear_value_head_dim": value_dim, "linear_conv_kernel_dim": 4,
    }  # fmt: skip


# Head counts 1:2, 1:3 and 1:1, value heads wider and narrower than key heads, an odd number of heads.
_MODELS = {
    "qwen3_next": _Model(
        "qwen3_next.modeling_qwen3_next", "torch_chunk_gated_delta_rule", "linear_attn", "gdn", 2,
        {**_COMMON, **_EXPERTS, **_linear(2, 4, 16, 24), "head_dim": 32, "rope_parameters": _ROPE,
         "num_experts": 8, "shared_expert_intermediate_size": 32},
    ),
    "qwen3_5_text": _Model(
        "qwen3_5.modeling_qwen3_5", "torch_chunk_gated_delta_rule", "linear_attn", "gdn", 2,
        {**_COMMON, **_linear(2, 6, 16, 12), "head_dim": 64,
         "rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2], "mrope_interleaved": True}},
    ),
    "kimi_linear": _Model(
        "kimi_linear.modeling_kimi_linear", "chunk_kimi_delta_attention", "self_attn", "kda", 3,
        {**_COMMON, **_EXPERTS, "linear_num_heads": 3, "linear_head_dim": 16, "linear_conv_kernel_dim": 4,
         "kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
         "v_head_dim": 16, "num_local_experts": 8, "num_shared_experts": 1, "first_k_dense_replace": 1,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "olmo_hybrid": _Model(
        "olmo_hybrid.modeling_olmo_hybrid", "torch_chunk_gated_delta_rule", "linear_attn", "gdn", 3,
        {**_COMMON, **_linear(3, 3, 16, 24), "linear_allow_neg_eigval": True, "rope_parameters": None,
         "pad_token_id": 0, "eos_token_id": 2},
    ),
}  # fmt: skip

MODELS = tuple(_MODELS)
"""The transformers model types that ``capture`` knows."""


def capture(model: str, out_dir: Path) -> Path:
    """Run a tiny ``model`` on the CPU and write ``<out_dir>/<model>.safetensors``.

    The file is written completely or not at all. With equal versions of torch and transformers on the same kind of CPU,
    its bytes are always identical.

    Args:
        model: one of ``MODELS``.
        out_dir: the folder for the file; it is created if it does not exist.

    Returns:
        The path of the file.

    Raises:
        GdnError: the model is unknown, torch or transformers is missing or unsuitable, or fla is already imported.
    """
    if model not in _MODELS:
        raise GdnError(f"model is {model!r}; it must be one of {', '.join(MODELS)}.")
    with _without_fla():
        try:
            import torch
            import transformers
        except ImportError as error:
            raise GdnError(f"recording needs torch and transformers; {error.name} is missing.") from error
        try:
            modelling = importlib.import_module("transformers.models." + _MODELS[model].module)
        except ImportError as error:
            raise GdnError(f"transformers {transformers.__version__} has no model {model}.") from error

        threads = torch.get_num_threads()
        with undisturbed(products=True), torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.set_num_threads(1)  # the order of additions, and so the bytes, may depend on the number of threads
            try:
                first, step, layer = _run(model, modelling)
            finally:
                torch.set_num_threads(threads)

    if first.initial_state is not None:
        raise GdnError(f"{layer} handed a state to the rule in its first call; it must start from none.")
    if step.initial_state is None:
        raise GdnError(
            f"transformers {transformers.__version__} hands no state to the rule when {model} continues from "
            f"a cache with more than one token; a newer version must be used."
        )
    arrays = {
        **first.arrays,
        **{"step_" + name: array for name, array in step.arrays.items()},
        "step_initial_state": step.initial_state,
    }
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "model": model,
        "layer": layer,
        "variant": _MODELS[model].variant,
        "qk_l2norm": str(first.qk_l2norm).lower(),
        "qk_heads": "deduplicated" if first.repeated else "as passed",
        "scale": repr(first.arrays["q"].shape[-1] ** -0.5),
        "transformers": transformers.__version__,
        "torch": str(torch.__version__),
        "text_sha256": hashlib.sha256(TEXT.encode()[:TOKENS]).hexdigest(),
        "seed": str(SEED),
        "tokens": str(TOKENS),
        "step_first_token": str(PREFIX),
    }
    return _write(Path(out_dir) / f"{model}.safetensors", arrays, metadata)


@contextmanager
def _without_fla() -> Iterator[None]:
    """Hide fla and causal_conv1d while a modelling file is imported.

    transformers uses their GPU kernels in a layer if the packages can be imported, even if there is only a CPU, and
    every forward pass on the CPU then fails.
    """
    names = ("fla", "causal_conv1d")
    for name in names:
        if sys.modules.get(name) is not None:
            raise GdnError(
                f"{name} is already imported, and transformers may have taken its GPU kernels; recording "
                f"must run in a fresh process."
            )
    before = {name: sys.modules[name] for name in names if name in sys.modules}
    blocked: dict[str, Any] = dict.fromkeys(names)
    sys.modules.update(blocked)  # None makes an import fail as if the package were absent
    try:
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(before)


@dataclass(frozen=True)
class _Call:
    """One call of the rule: its arrays (shapes as in ``recordings``) and its options."""

    arrays: dict[str, np.ndarray]
    initial_state: np.ndarray | None
    qk_l2norm: bool
    repeated: bool  # whether q and k were already repeated to the value heads


def _run(model: str, modelling: Any) -> tuple[_Call, _Call, str]:
    """Build the model and give it the text, once as a whole and once in two parts.

    Returns:
        The last layer's call for the whole text, its call for the second part, and its module path.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

    spec = _MODELS[model]
    torch.manual_seed(SEED)
    config = AutoConfig.for_model(model, **spec.config)
    build: Callable[..., Any] = AutoModelForCausalLM.from_config
    network = build(config, dtype=torch.float32, attn_implementation="eager")
    network.eval()
    _set_weights(network)
    last = network.model.layers[-1].get_submodule(spec.attention)
    layer = next(name for name, module in network.named_modules() if module is last)

    tokens = torch.tensor([list(TEXT.encode()[:TOKENS])])
    with _recorded_calls(modelling, spec) as calls:
        network(input_ids=tokens, use_cache=True)
        first = calls[-1]
        # transformers is renaming this argument. The cache object is the same under both names, and updated in place.
        name = "cache" if "cache" in inspect.signature(network.forward).parameters else "past_key_values"
        cache = {name: DynamicCache(config=config)}
        network(input_ids=tokens[:, :PREFIX], use_cache=True, **cache)
        network(input_ids=tokens[:, PREFIX:], use_cache=True, **cache)
        step = calls[-1]
    return first, step, layer


def _set_weights(network: Any) -> None:
    """Draw weights that give activations of the size that they have in a trained model.

    The initial weights of transformers leave q, k and v near zero, all gates near the middle of their range, and the
    norms at a value at which a forgotten ``1 +`` makes no difference.
    """
    import torch

    for name, weight in network.named_parameters():
        noise = torch.randn_like(weight)
        if name.endswith("A_log"):
            weight.copy_(torch.empty_like(weight).uniform_(1.0, 16.0).log())
        elif name.endswith("dt_bias"):
            # Below zero, as after training, so that most tokens decay little and some a lot.
            weight.copy_(noise - 3.0)
        elif "norm" in name:
            weight.add_(0.1 * noise)
        else:
            # Unit variance in gives unit variance out; the gates' inputs are wider, to spread the gates.
            gain = 1.5 if name.endswith(_GATES) else 1.0
            weight.copy_(noise * gain * weight.shape[-1] ** -0.5)


@contextmanager
def _recorded_calls(modelling: Any, spec: _Model) -> Iterator[list[_Call]]:
    """Replace the rule in the modelling file with one that also records its calls, in order."""
    calls: list[_Call] = []
    rule: Callable[..., Any] = getattr(modelling, spec.rule)

    def recording_rule(
        query: Any, key: Any, value: Any, g: Any, beta: Any, initial_state: Any = None, **kwargs: Any
    ) -> tuple[Any, Any]:
        # Copied before the call, because the layer's cache overwrites the state in place.
        before = None if initial_state is None else _numpy(initial_state)
        o, state = rule(query, key, value, g=g, beta=beta, initial_state=initial_state, **kwargs)
        q, repeated = _key_heads(_numpy(query), spec.key_heads)
        k, _ = _key_heads(_numpy(key), spec.key_heads)
        operands = {"v": value, "g": g, "beta": beta, "o": o, "state": state}
        arrays = {"q": q, "k": k, **{name: _numpy(tensor) for name, tensor in operands.items()}}
        calls.append(_Call(arrays, before, bool(kwargs.get("use_qk_l2norm_in_kernel", False)), repeated))
        return o, state

    setattr(modelling, spec.rule, recording_rule)
    try:
        yield calls
    finally:
        setattr(modelling, spec.rule, rule)


def _numpy(tensor: Any) -> np.ndarray:
    """Copy a float32 tensor. Any other dtype is an error, because a cast would hide what was passed."""
    if str(tensor.dtype) != "torch.float32":
        raise GdnError(f"an operand of the rule has dtype {tensor.dtype}; it must be torch.float32.")
    return np.array(tensor.detach().cpu().numpy())


def _key_heads(x: np.ndarray, heads: int) -> tuple[np.ndarray, bool]:
    """Undo a repetition of q or k [1, T, HV, K] to the value heads.

    Returns:
        The array [1, T, heads, K], and whether it was repeated: some versions of transformers repeat it in the layer,
        others inside the rule.
    """
    if x.shape[2] == heads:
        return x, False
    kept = x[:, :, :: x.shape[2] // heads]
    if x.shape[2] % heads or not np.array_equal(np.repeat(kept, x.shape[2] // heads, axis=2), x):
        raise GdnError(f"q or k has {x.shape[2]} heads that do not repeat {heads} key heads each in turn.")
    return kept, True


def _write(path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> Path:
    """Write a recording in one step, with its bytes always in the same order, and read it back."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with TensorWriter(path) as file:
        file.metadata = dict(sorted(metadata.items()))
        for name, array in sorted(arrays.items()):
            file.add(name, np.asarray(array, "<f4"))
    load(path)
    return path
