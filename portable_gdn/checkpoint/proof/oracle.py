"""The original implementation, at work on the original files: transformers' own modules on a CPU in float32.

``whole_model`` loads a model as transformers does and records what enters and leaves each linear-attention layer, its
states, and the logits. ``layers_alone`` runs the layers of models that transformers has no code for on a CPU
(flash-linear-attention's need a GPU): their input is the text's embeddings, their code
the module of transformers that computes the same layer, or for GDN-2 FLA's reference recurrence. FLA must not be
importable here, since transformers would bind its GPU kernels.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...spec.errors import GdnError
from ..families import Mixer
from ..source import Read
from .lazy import lazy_model
from .limits import LIMIT
from .text import DECODED, PREFILLED, TEXT

__all__ = ["Layer", "Original", "hide_fla", "layer_by_layer", "layers_alone", "whole_model"]

Tensor = Any


@dataclass
class Layer:
    """What one layer was given and gave, float32: x and y [1, T, E], then one token at a time, states after the first
    T.

    recurrent: [1, HV, K, V]; conv: [1, W - 1, channels].
    """

    x: np.ndarray
    y: np.ndarray
    recurrent: np.ndarray
    conv: np.ndarray
    later_x: list[np.ndarray] = field(default_factory=list)
    later_y: list[np.ndarray] = field(default_factory=list)
    code: str = ""


@dataclass
class Original:
    """The layers by number; logits [1, T + D, vocabulary] of a whole model, and a function that runs it again with
    other layers in place of its own: ``logits_with({number: forward})``, each forward from x [1, T, E] to y.

    ids: the tokens [1, T + D]. disturbed: logits [2, T + D, vocabulary] of runs in which what each module with weights
    of its own gives is off by noise of relative size LIMIT.
    """

    layers: dict[int, Layer]
    logits: np.ndarray | None = None
    logits_with: Callable[[dict[int, Callable[[np.ndarray], np.ndarray]]], np.ndarray] | None = None
    ids: np.ndarray | None = None
    disturbed: np.ndarray | None = None


def hide_fla() -> None:
    """Make fla and causal_conv1d look absent in this process.

    Raises:
        GdnError: one of them is imported already.
    """
    for name in ("fla", "causal_conv1d"):
        if sys.modules.get(name) is not None:
            raise GdnError(f"{name} is imported already; the original implementation must run in a process of its own.")
        sys.modules[name] = None  # type: ignore[assignment]


def tokens(folder: Path, vocabulary: int, count: int) -> np.ndarray:
    """The first tokens of the text [1, count], by the checkpoint's tokenizer if it has one, else its bytes."""
    ids: list[int] = []
    if (folder / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT).ids
    if not ids:
        ids = [byte % vocabulary for byte in TEXT.encode()]
    while len(ids) < count:
        ids = ids + ids
    return np.array([ids[:count]])


def _numpy(x: Tensor) -> np.ndarray:
    return np.array(x.detach().float().cpu().numpy())


def whole_model(source: Read) -> Original:
    """Load the model and run it over the text.

    Raises:
        GdnError: transformers is missing or has no such model, or finds other tensors in the files than it needs.
    """
    folder = source.checkpoint.folder
    try:
        import torch
        import transformers
    except ImportError as error:
        raise GdnError(f"the original implementation needs torch and transformers; {error.name} is missing.") from error
    transformers.logging.set_verbosity_error()
    network, what = _load(folder, torch, transformers)
    wrong = {
        name: sorted(found)[:3] for name, found in what.items() if found and name in ("missing_keys", "mismatched_keys")
    }
    if wrong:
        raise GdnError(f"transformers does not find the model in {folder}: {wrong}; its files must be whole.")
    network.eval()
    mixers = _mixers(network, source)
    cache_name = "cache" if "cache" in inspect.signature(network.forward).parameters else "past_key_values"
    ids = torch.tensor(tokens(folder, source.sizes["V"], PREFILLED + DECODED))
    layers: dict[int, Layer] = {}
    with torch.no_grad(), _recording(mixers) as calls:
        cache = transformers.DynamicCache(config=network.config.get_text_config())
        network(input_ids=ids[:, :PREFILLED], use_cache=True, **{cache_name: cache})
        for number, module in mixers.items():
            x, y = calls[number][-1]
            conv = _numpy(cache.layers[module.layer_idx].conv_states[0]).transpose(0, 2, 1)
            state = _numpy(cache.layers[module.layer_idx].recurrent_states[0])
            layers[number] = Layer(x, y, state, conv, code=type(module).__name__)
        for t in range(PREFILLED, PREFILLED + DECODED):
            network(input_ids=ids[:, t : t + 1], use_cache=True, **{cache_name: cache})
            for number in mixers:
                x, y = calls[number][-1]
                layers[number].later_x.append(x[:, 0])
                layers[number].later_y.append(y[:, 0])

    def logits_with(forwards: dict[int, Callable[[np.ndarray], np.ndarray]]) -> np.ndarray:
        with torch.no_grad(), _replaced(mixers, forwards):
            return _result(network(input_ids=ids, use_cache=False))

    return Original(layers, logits_with({}), logits_with, ids.numpy(), _disturbed(network, ids))


def _load(folder: Path, torch: Any, transformers: Any) -> tuple[Any, Any]:
    options = {"dtype": torch.float32, "attn_implementation": "eager", "output_loading_info": True}
    problems = []
    for kind in ("AutoModelForCausalLM", "AutoModel"):
        try:
            return getattr(transformers, kind).from_pretrained(folder, local_files_only=True, **options)
        except (ValueError, KeyError) as error:
            problems.append(str(error).split("\n")[0])
    raise GdnError(f"transformers {transformers.__version__} cannot load {folder}: {problems[0]}")


def _result(output: Any) -> np.ndarray:
    """Logits, or the last hidden state of a model without a head."""
    return _numpy(output.logits if hasattr(output, "logits") else output.last_hidden_state)


def _disturbed(network: Any, ids: Tensor) -> np.ndarray:
    """The logits of two runs in one batch, with noise of relative size LIMIT on what each projection, norm, convolution
    and mixture of experts gives: rounding in another order is ten times smaller and more."""
    import torch

    random = torch.Generator().manual_seed(0)

    def disturb(module: Any, args: Any, x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            return x
        return x * (1 + LIMIT * torch.randn(x.shape, generator=random))

    own = [module for module in network.modules() if any(True for _ in module.parameters(recurse=False))]
    handles = [module.register_forward_hook(disturb) for module in own]
    try:
        with torch.no_grad():
            return _result(network(input_ids=ids.expand(2, -1), use_cache=False))
    finally:
        for handle in handles:
            handle.remove()


def _mixers(network: Any, source: Read) -> dict[int, Any]:
    """The model's linear-attention modules by layer."""
    found = {}
    for name, module in network.named_modules():
        place = re.search(r"(?:^|\.)layers\.(\d+)\.\w+$", name)
        if place and hasattr(module, "conv1d"):
            found[int(place[1])] = module
    if sorted(found) != source.linear_layers:
        raise GdnError(
            f"transformers has linear attention in layers {sorted(found)} of this model, and the files hold it in "
            f"{source.linear_layers}; config.json must say the same as the files."
        )
    return found


@contextmanager
def _recording(mixers: dict[int, Any]) -> Iterator[dict[int, list[tuple[np.ndarray, np.ndarray]]]]:
    calls: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {number: [] for number in mixers}

    def hook(number: int) -> Callable[..., None]:
        def record(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            x = args[0] if args else kwargs["hidden_states"]
            calls[number][:] = [(_numpy(x), _numpy(output[0] if isinstance(output, tuple) else output))]

        return record

    handles = [module.register_forward_hook(hook(number), with_kwargs=True) for number, module in mixers.items()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _replaced(mixers: dict[int, Any], forwards: dict[int, Callable[[np.ndarray], np.ndarray]]) -> Iterator[None]:
    """Put other functions in place of the modules' forward."""
    import torch

    def forward(module: Any, run: Callable[[np.ndarray], np.ndarray]) -> Callable[..., Any]:
        plain = module.forward

        def replaced(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
            return torch.from_numpy(np.array(run(_numpy(hidden_states))))

        replaced.original = plain  # type: ignore[attr-defined]
        return replaced

    for number, run in forwards.items():
        mixers[number].forward = forward(mixers[number], run)
    try:
        yield
    finally:
        for number in forwards:
            del mixers[number].forward


def layer_by_layer(source: Read) -> Original:
    """A model that does not fit into memory: transformers' own, of which one decoder layer at a time has its tensors.

    Each mixer gets the inputs that it has in the model, at once and then token by token; the logits are those of the
    text read at once. Every run of the model reads the files once.

    Raises:
        GdnError: transformers is missing or has no such model, or a module's tensor is not in the files.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise GdnError(f"the original implementation needs torch and transformers; {error.name} is missing.") from error
    transformers.logging.set_verbosity_error()
    network = lazy_model(source)
    mixers = _mixers(network, source)
    config = network.config.get_text_config()
    ids = torch.tensor(tokens(source.checkpoint.folder, source.sizes["V"], PREFILLED + DECODED))
    layers: dict[int, Layer] = {}

    def alone(number: int) -> Callable[[np.ndarray], np.ndarray]:
        """A mixer as it is; what it does with its input in two ways is kept."""
        module = mixers[number]
        plain = type(module).forward
        name = "cache" if "cache" in inspect.signature(plain).parameters else "cache_params"

        def run(x: np.ndarray) -> np.ndarray:
            cache = transformers.DynamicCache(config=config)
            step = lambda part: _numpy(plain(module, torch.from_numpy(np.array(part)), **{name: cache}))  # noqa: E731
            y = step(x[:, :PREFILLED])
            place = cache.layers[module.layer_idx]
            state, conv = _numpy(place.recurrent_states[0]), _numpy(place.conv_states[0]).transpose(0, 2, 1)
            layer = Layer(x[:, :PREFILLED], y, state, conv, code=type(module).__name__)
            for t in range(PREFILLED, PREFILLED + DECODED):
                layer.later_x.append(x[:, t])
                layer.later_y.append(step(x[:, t : t + 1])[:, 0])
            layers[number] = layer
            return _numpy(plain(module, torch.from_numpy(x)))

        return run

    def logits_with(forwards: dict[int, Callable[[np.ndarray], np.ndarray]]) -> np.ndarray:
        with torch.no_grad(), _replaced(mixers, forwards):
            return _result(network(input_ids=ids, use_cache=False))

    logits = logits_with({number: alone(number) for number in mixers})
    return Original(layers, logits, logits_with, ids.numpy(), _disturbed(network, ids))


# --- layers alone --------------------------------------------------------------------------------------------------


def layers_alone(source: Read, layers: list[int] | None = None) -> Original:
    """Run layers by themselves on the text's embeddings, one in memory at a time.

    Raises:
        GdnError: there is no code to run this kind of layer on a CPU.
    """
    if source.mixer is None:
        raise GdnError(f"config.json of {source.checkpoint.folder} does not say what its layers compute; it must.")
    numbers = source.linear_layers if layers is None else layers
    x = _embedded(source)
    return Original({number: _alone(source, number, x) for number in numbers})


def _embedded(source: Read) -> np.ndarray:
    """Embeddings of the text with unit mean square [1, T + D, E]: the size that a layer's norm gives its input."""
    count = PREFILLED + DECODED
    place = next((place for key, place in source.places.items() if key.piece == "embed"), None)
    if place is None:  # a layer alone
        table = np.random.default_rng(0).standard_normal((256, source.sizes["E"])).astype(np.float32)
        x = table[tokens(source.checkpoint.folder, 256, count)[0]]
    else:
        table = source.checkpoint.array(place.bound.name)
        x = np.asarray(table[tokens(source.checkpoint.folder, len(table), count)[0]], np.float32)
    return (x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-12))[None]


def _piece(source: Read, name: str, layer: int) -> np.ndarray | None:
    """A tensor of the layer by the part of its name behind the layer's prefix, float32, or None."""
    for key, place in source.places.items():
        own = source.dialect.normal(place.bound.name)
        if key.layer == layer and own.endswith(name):
            rest = own[: -len(name)]
            if rest in ("", *(f"model.layers.{layer}.{m}." for m in ("attn", "linear_attn", "self_attn"))):
                return np.asarray(source.checkpoint.array(place.bound.name), np.float32)
    return None


def _alone(source: Read, layer: int, x: np.ndarray) -> Layer:
    import torch

    module = _module(source, layer)
    module.eval()
    at_once, later = x[:, :PREFILLED], x[:, PREFILLED:]
    with torch.no_grad():
        y, conv, state = module(torch.from_numpy(at_once), None)
        result = Layer(at_once, _numpy(y), _numpy(state), _numpy(conv), code=module.code)
        for t in range(DECODED):
            token = torch.from_numpy(later[:, t : t + 1])
            y, conv, state = module(token, (conv, state))
            result.later_x.append(later[:, t])
            result.later_y.append(_numpy(y)[:, 0])
    return result


def _module(source: Read, layer: int) -> Any:
    """A module with weights from the source's files: (x, (conv, state) or None) -> y, conv, state."""
    import torch
    from torch import nn

    assert source.mixer is not None
    m: Mixer = source.mixer
    rule, code = _rule(m.kind)

    def weight(name: str) -> Tensor | None:
        found = _piece(source, name, layer)
        return None if found is None else torch.from_numpy(found)

    class Module(nn.Module):
        """The layer as flash-linear-attention's documentation and code define it, around another's rule."""

        def __init__(self) -> None:
            super().__init__()
            self.code = code

        def forward(self, x: Tensor, before: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
            raw = torch.cat([x @ _need(weight(f"{n}_proj.weight")).T for n in "qkv"], -1)
            taps = [weight(f"{n}_conv1d.weight") for n in "qkv"]
            y, conv = _convolve(raw, taps, [weight(f"{n}_conv1d.bias") for n in "qkv"], before)
            K, V = m.num_heads * m.key_dim, m.value_dim
            q, k, v = torch.split(y, [K, K, m.num_value_heads * V], -1)
            q, k = (t.reshape(*t.shape[:2], m.num_heads, m.key_dim) for t in (q, k))
            v = v.reshape(*v.shape[:2], m.num_value_heads, V)
            shared = m.num_value_heads // m.num_heads
            spread = lambda t: t.repeat_interleave(shared, 2)  # noqa: E731
            b = m.beta_scale * torch.sigmoid(x @ _need(weight("b_proj.weight")).T)
            A, dt = _first(weight, "A_log", "A"), _first(weight, "dt_bias", "f_proj.1.bias")
            A = A.reshape(-1).exp()
            extra: dict[str, Tensor] = {}
            if m.kind == "gdn":
                g = -A * nn.functional.softplus(x @ _need(weight("a_proj.weight")).T + dt)
                extra = {"beta": b}
            else:
                heads = m.num_heads if m.kind == "gdn2" else m.num_value_heads
                f = x @ _need(weight("f_proj.0.weight")).T @ _need(weight("f_proj.1.weight")).T + dt
                f, A = f.reshape(*f.shape[:2], heads, m.key_dim), A[:, None]
                g = -A * nn.functional.softplus(f) if m.lower_bound is None else m.lower_bound * torch.sigmoid(A * f)
                if m.kind == "gdn2":
                    g, b = spread(g), spread(b.reshape(*b.shape[:2], heads, m.key_dim))
                    extra = {"b": b, "w": torch.sigmoid(x @ _need(weight("w_proj.weight")).T).reshape(v.shape)}
                else:
                    extra = {"beta": b}
            o, state = rule(spread(q), spread(k), v, g, None if before is None else before[1], extra)
            o = o * torch.rsqrt((o * o).mean(-1, keepdim=True) + m.norm_eps) * _need(weight("o_norm.weight"))
            if m.gate is not None:
                z = self.z(x).reshape(o.shape)
                o = o * (torch.sigmoid(z) if m.gate == "sigmoid" else nn.functional.silu(z))
            return o.reshape(*x.shape[:2], -1) @ _need(weight("o_proj.weight")).T, conv, state

        def z(self, x: Tensor) -> Tensor:
            full = weight("g_proj.weight")
            if full is not None:
                return x @ full.T
            z = x @ _need(weight("g_proj.0.weight")).T @ _need(weight("g_proj.1.weight")).T
            bias = weight("g_proj.1.bias")
            return z if bias is None else z + bias

    return Module()


def _need(x: Tensor | None) -> Tensor:
    if x is None:
        raise GdnError(
            "a tensor of the layer is not where the original implementation looks for it; its files must be whole."
        )
    return x


def _first(weight: Callable[[str], Tensor | None], *names: str) -> Tensor:
    return _need(next((found for found in map(weight, names) if found is not None), None))


def _convolve(
    raw: Tensor, taps: list[Tensor | None], biases: list[Tensor | None], before: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """torch's own grouped convolution, and the last W - 1 inputs [B, W - 1, channels]."""
    import torch
    from torch.nn import functional

    if taps[0] is None:
        return functional.silu(raw), raw[:, :0]
    kernel = torch.cat([_need(t) for t in taps])
    bias = None if biases[0] is None else torch.cat([_need(b) for b in biases])
    past = raw.new_zeros(raw.shape[0], kernel.shape[-1] - 1, raw.shape[-1]) if before is None else before[0]
    seen = torch.cat([past, raw], 1)
    y = functional.conv1d(seen.transpose(1, 2), kernel, bias, groups=kernel.shape[0]).transpose(1, 2)
    return functional.silu(y), seen[:, seen.shape[1] - kernel.shape[-1] + 1 :]


def _rule(kind: str) -> tuple[Callable[..., tuple[Tensor, Tensor]], str]:
    """Somebody else's rule: (q, k, v, g, state, gates) -> o, state, on heads as many as v's; and its name."""
    import torch

    if kind == "gdn2":
        naive = _fla_file("ops/gdn2/naive.py").naive_recurrent_gdn2

        def gdn2(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor | None, gates: Any) -> tuple[Tensor, Tensor]:
            norm = lambda t: t * torch.rsqrt((t * t).sum(-1, keepdim=True) + 1e-6)  # noqa: E731
            return naive(norm(q), norm(k), v, g, **gates, initial_state=state, output_final_state=True)

        return gdn2, "fla.ops.gdn2.naive"
    module, chunk, step = {
        "gdn": (
            "olmo_hybrid.modeling_olmo_hybrid", "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule",
        ),
        "kda": (
            "kimi_linear.modeling_kimi_linear", "chunk_kimi_delta_attention", "recurrent_kimi_delta_attention",
        ),
    }[kind]  # fmt: skip
    home = importlib.import_module("transformers.models." + module)

    def ruled(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor | None, gates: Any) -> tuple[Tensor, Tensor]:
        run = getattr(home, step if state is not None and q.shape[1] == 1 else chunk)
        return run(q, k, v, g=g, **gates, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)

    return ruled, f"transformers.models.{module}"


def _fla_file(path: str) -> Any:
    """One file of flash-linear-attention that needs torch alone, without importing the package."""
    hidden = {name: sys.modules.pop(name) for name in ("fla",) if name in sys.modules and sys.modules[name] is None}
    try:
        found = importlib.util.find_spec("fla")
    finally:
        sys.modules.update(hidden)
    if found is None or not found.submodule_search_locations:
        raise GdnError("GDN-2's reference is part of flash-linear-attention, which is not installed.")
    file = Path(found.submodule_search_locations[0]) / path
    spec = importlib.util.spec_from_file_location("portable_gdn_reference", file)
    if spec is None or spec.loader is None or not file.is_file():
        raise GdnError(f"{file} is not there; another version of flash-linear-attention must be installed.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
