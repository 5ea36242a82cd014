"""Small checkpoints for the tests of ports: names, shapes and dtypes of published ones, random contents.

``data/keys`` holds what each family's files hold, as facts: names and shapes, with the configuration that gives them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

KEYS = Path(__file__).parent / "data" / "keys"
FAMILIES = (
    "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5_conditional", "qwen3_5_moe_conditional", "kimi_linear",
    "olmo_hybrid", "fla_gated_deltanet", "fla_gated_deltanet_ungated", "fla_kda", "fla_gdn2_layer", "bailing_hybrid",
    "lara_mini", "glm5_next_text", "qwen4_exp_text",
)  # fmt: skip
FLOAT32 = re.compile(r"(.*\.)?(A_log|dt_bias|norm\.weight|o_norm\.weight|e_score_correction_bias|expert_bias)")


def facts(name: str) -> dict[str, Any]:
    return json.loads((KEYS / f"{name}.json").read_text())


def tensors(shapes: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors: float32 where releases have it (decays, gated norms, router biases), else bfloat16."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal(shape).astype(np.float32 if FLOAT32.fullmatch(name) else ml_dtypes.bfloat16)
        for name, shape in shapes.items()
    }


def extras(name: str) -> dict[str, Any]:
    """Tensors that releases have beside those that transformers loads."""
    if not name.startswith("qwen3"):
        return {}
    return {
        "mtp.fc.weight": [64, 128],
        "mtp.norm.weight": [64],
        "mtp.layers.0.mlp.experts.0.gate_proj.weight": [32, 64],
        "mtp.layers.0.self_attn.q_proj.weight": [256, 64],
    }


def save(folder: Path, arrays: dict[str, np.ndarray], config: dict[str, Any] | None, files: int = 1) -> Path:
    """Write a checkpoint as the safetensors package does, over several files with an index if asked for."""
    from safetensors.numpy import save_file

    folder.mkdir()
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    names = list(arrays)
    if files == 1:
        save_file(arrays, folder / "model.safetensors", {"format": "pt"})
        return folder
    where = {}
    for n in range(files):
        file = f"model-{n + 1:05d}-of-{files:05d}.safetensors"
        save_file({name: arrays[name] for name in names[n::files]}, folder / file, {"format": "pt"})
        where.update(dict.fromkeys(names[n::files], file))
    index = {"metadata": {"total_size": sum(a.nbytes for a in arrays.values())}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def checkpoint(folder: Path, name: str, files: int = 1, seed: int = 0) -> Path:
    """A small checkpoint of a family."""
    found = facts(name)
    return save(folder, tensors({**found["tensors"], **extras(name)}, seed), found["config"], files)


def load(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder's files, read by the safetensors package."""
    from safetensors import safe_open

    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "numpy") as file:
            found.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return found


def save_raw(folder: Path, x: dict[str, np.ndarray], config: dict) -> Path:
    """As ``save``, for the dtypes that the safetensors package does not write from numpy."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_file(folder / "model.safetensors", x)
    return folder


def write_file(path: Path, x: dict[str, np.ndarray]) -> None:
    from portable_gdn.checkpoint.dtypes import NAMES

    names = {dtype: name for name, dtype in NAMES.items()}
    header, data = {}, b""
    for name, a in x.items():
        header[name] = {
            "dtype": names[a.dtype],
            "shape": list(a.shape),
            "data_offsets": [len(data), len(data) + a.nbytes],
        }
        data += a.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def read_file(path: Path) -> dict[str, np.ndarray]:
    from portable_gdn.checkpoint.reader import Checkpoint

    found = Checkpoint(path)
    return {name: found.array(name) for name in found.where}


def realistic(name: str, seed: int = 0, ends: dict[str, Any] | None = None) -> dict[str, np.ndarray]:
    """As ``tensors``, of the sizes that trained weights have; no norm where a forgotten 1 + would not show. ``ends``
    are other shapes of tensors whose names end so."""
    rng = np.random.default_rng(seed)
    centred = name.startswith(("qwen3", "qwen4"))
    found = {}
    for key, shape in {**facts(name)["tensors"], **extras(name)}.items():
        shape = next((other for end, other in (ends or {}).items() if key.endswith(end)), shape)
        a = rng.standard_normal(shape)
        if key.endswith("A_log"):
            a = np.log(rng.uniform(1, 16, shape))
        elif key.endswith("dt_bias"):
            a = a - 3  # most tokens decay little, some a lot
        elif "norm" in key:
            a = 0.1 * a + (0 if "layernorm" in key and centred else 1)
        else:
            a = a * (0.5 if "conv1d" in key else shape[-1] ** -0.5)
        found[key] = a.astype(np.float32 if FLOAT32.fullmatch(key) else ml_dtypes.bfloat16)
    return found
