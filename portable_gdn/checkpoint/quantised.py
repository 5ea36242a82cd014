"""Recognise weights in quantised formats that cannot be read, and refuse them with the name of the program."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ..spec.errors import GdnError
from .configuration import text_config
from .dtypes import FLOAT8
from .table import Spec

__all__ = ["quantisation", "quantiser", "refuse_quantised"]

_TITLES = {
    "gptq": "GPTQ",
    "gptqmodel": "GPTQ",
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "modelopt": "ModelOpt",
    "fp8": "block FP8",
    "fbgemm_fp8": "FBGEMM FP8",
    "mxfp4": "MXFP4",
    "hqq": "HQQ",
    "aqlm": "AQLM",
    "quanto": "Quanto",
    "torchao": "torchao",
    "eetq": "EETQ",
    "vptq": "VPTQ",
    "spqr": "SpQR",
    "higgs": "HIGGS",
    "quark": "Quark",
    "auto-round": "AutoRound",
    "intel/auto-round": "AutoRound",
    "bitnet": "BitNet",
    "sinq": "SINQ",
    "exl2": "ExLlamaV2",
    "exl3": "ExLlamaV3",
}
_BY_NAME: tuple[tuple[str, str], ...] = (
    (r".*\.(quant_state\.bitsandbytes__\w+|absmax|quant_map|nested_absmax|nested_quant_map)", "bitsandbytes (4 bit)"),
    (r".*\.SCB", "bitsandbytes (8 bit)"),
    (r".*\.g_idx", "GPTQ"),
    (r".*\.qweight", "GPTQ or AWQ"),
    (r".*\.weight_scale_2", "ModelOpt (NVFP4)"),
    (r".*\.weight_global_scale", "compressed-tensors (NVFP4)"),
    (r".*\.weight_packed", "compressed-tensors"),
    (r".*_blocks", "MXFP4"),
    (r".*\.(codebooks|codes)", "AQLM"),
    (r".*\.(trellis|suh|svh)", "ExLlamaV3"),
    (r".*\.(q_weight|q_scale|q_groups)", "ExLlamaV2"),
    (r".*\.W_q", "HQQ"),
    (r".*\.weight_scale", "FP8 or int8 with a scale for each channel or tensor"),
    (r".*\.biases", "MLX"),
)


_DEQUANTISES = re.compile(r"nvfp4|mxfp4-pack|float-quantized|\bfp8", re.IGNORECASE)
"""Titles of what ``--dequantise`` reads, though this one may lack something for it."""


def quantisation(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what config.json says about the quantisation of the weights."""
    found = text_config(config).get("quantization_config") or config.get("quantization_config")
    return found if isinstance(found, Mapping) else {}


def quantiser(config: Mapping[str, Any], unread: Collection[str]) -> str | None:
    """Return the program that quantised a checkpoint, or None if it is not quantised.

    The answer comes from config.json, or else from tensors that no table describes.
    """
    found = quantisation(config)
    method = found.get("quant_method") or found.get("quant_algo")
    named = next((title for mark, title in _BY_NAME if any(re.fullmatch(mark, name) for name in unread)), None)
    if not isinstance(method, str):
        return named
    title = _TITLES.get(method.lower(), method)
    more = found.get("format") or found.get("quant_algo") or (f"{found['bits']} bit" if "bits" in found else None)
    more = more or ("4 bit" if found.get("load_in_4bit") else "8 bit" if found.get("load_in_8bit") else None)
    return f"{title} ({more})" if isinstance(more, str) and more != method else title


def refuse_quantised(
    folder: Path, config: Mapping[str, Any], inventory: Mapping[str, Spec], unread: Collection[str], can: bool = False
) -> None:
    """Refuse weights that another program quantised, and name the program.

    Weights in float8 with block scales (``weight_scale_inv``) are supported and not refused.

    Args:
        folder: The folder that holds them.
        config: The contents of config.json.
        inventory: The tensors of the checkpoint.
        unread: The names that no table describes.
        can: Whether ``--dequantise`` can turn them into bfloat16.

    Raises:
        GdnError: The weights are quantised.
    """
    marks = {name for name in unread if any(re.fullmatch(mark, name) for mark, _ in _BY_NAME)}
    packed = [name for name, spec in inventory.items() if spec.dtype in ("I8", "U8", "I32", "U32") or name in marks]
    blocks = quantisation(config).get("weight_block_size") is not None
    eight = [] if blocks else [name for name, spec in inventory.items() if spec.dtype in FLOAT8]
    title = quantiser(config, unread) or ("scales beside its weights" if can else None)
    if title is None or not (packed or eight):
        return
    how = "it must be dequantised first"
    if can or _DEQUANTISES.search(title):
        how += ", or on the way with --dequantise"
    raise GdnError(f"{folder} is quantised with {title}, as {(packed or eight)[0]} shows; {how}.")
