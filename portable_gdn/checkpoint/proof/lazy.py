"""A model of transformers that is larger than memory: a decoder layer has its tensors only while it runs.

The tensors are those of the files, brought into the form of the modules by transformers' own conversion, in float32.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ...spec.errors import GdnError
from ..source import Read

__all__ = ["lazy_model"]

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)$")


def lazy_model(source: Read) -> Any:
    """The network, whose embeddings, last norm and head are loaded, and whose layers load themselves.

    Raises:
        GdnError: transformers has no such model, or a tensor that a module needs is not in the files.
    """
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(source.checkpoint.folder, local_files_only=True)
    problem = None
    for kind in (transformers.AutoModelForCausalLM, transformers.AutoModel):
        try:
            with _without_parameters():
                network = kind.from_config(config, dtype=torch.float32, attn_implementation="eager")
            break
        except (ValueError, KeyError) as error:
            problem = problem or str(error).split("\n")[0]
    else:
        raise GdnError(f"transformers {transformers.__version__} cannot make the model: {problem}")
    network.eval()
    start = "model.layers."
    names: dict[int, list[str]] = {}  # -1: of no layer
    for name in source.checkpoint.where:
        own = source.dialect.normal(name)
        digits = own.removeprefix(start).partition(".")[0] if own.startswith(start) else ""
        names.setdefault(int(digits) if digits.isdigit() else -1, []).append(name)
    layers = {int(at[1]): module for name, module in network.named_modules() if (at := _LAYER.search(name))}
    _load(network, source, names.get(-1, []))
    network.tie_weights()
    inside = {id(weight) for module in layers.values() for weight in module.parameters()}
    _whole((n, w) for n, w in network.named_parameters() if id(w) not in inside)
    for number, module in layers.items():
        _load_when_run(network, module, source, names.get(number, []))
    return network


@contextmanager
def _without_parameters() -> Iterator[None]:
    """Parameters of modules that are made take no memory; buffers, which no file holds, are computed as always."""
    import torch

    register = torch.nn.Module.register_parameter

    def registered(self: Any, name: str, param: Any) -> None:
        empty = None if param is None else torch.nn.Parameter(param.to("meta"), requires_grad=False)
        register(self, name, empty)

    torch.nn.Module.register_parameter = registered  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def _load_when_run(network: Any, layer: Any, source: Read, names: list[str]) -> None:
    import torch

    def before(module: Any, *_: Any) -> None:
        _load(network, source, names)
        _whole(module.named_parameters())

    def after(module: Any, *_: Any) -> None:
        for part in module.modules():
            for name, weight in part.named_parameters(recurse=False):
                setattr(part, name, torch.nn.Parameter(weight.to("meta"), requires_grad=False))
        source.checkpoint.release()

    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after)


def _whole(weights: Any) -> None:
    for name, weight in weights:
        if weight.is_meta:
            raise GdnError(f"transformers' model has a {name} that the files have not; they must be whole.")


def _load(network: Any, source: Read, names: list[str]) -> None:
    """Give modules these tensors of the files."""
    import torch
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    def tensor(name: str) -> Any:
        return torch.from_numpy(np.asarray(source.checkpoint.array(name), np.float32).copy())

    mapping: Any = get_model_conversion_mapping(network)
    options = LoadStateDictConfig(dtype=torch.float32, weight_mapping=mapping)
    with torch.no_grad():
        own = {name: name if source.published else source.dialect.normal(name) for name in names}
        convert_and_load_state_dict_in_model(network, {own[name]: tensor(name) for name in names}, options)
