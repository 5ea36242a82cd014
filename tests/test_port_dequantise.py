"""Weights in few bits turned into bfloat16 on the way, against the product written out in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import checkpoint, facts, read_file, save_raw, tensors
from typer.testing import CliRunner

from portable_gdn.checkpoint import back, dequantise, port
from portable_gdn.cli.main import app
from portable_gdn.spec.errors import GdnError

pytest.importorskip("safetensors")

E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
Made = tuple[dict[str, np.ndarray], np.ndarray]


def nibbles(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Packed codes [out, in / 2] and their values [out, in] in float64: the lower four bits are the even columns."""
    packed = rng.integers(0, 256, (shape[0], shape[1] // 2)).astype(np.uint8)
    values = np.zeros(shape)
    for column, code in ((0, packed % 16), (1, packed // 16)):
        values[:, column::2] = np.where(code >= 8, -1.0, 1.0) * np.array(E2M1)[code % 8]
    return packed, values


def eight(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any = E4M3) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32).astype(dtype)


def fp8_channel(n: str, shape: tuple[int, ...], rng: np.random.Generator) -> Made:
    w, s = eight(rng, shape), rng.uniform(0.5, 2, (shape[0], 1)).astype(np.float32)
    x = {n: w, n + "_scale": s, n.removesuffix("weight") + "input_scale": np.ones(1, np.float32)}
    return x, w.astype(np.float64) * s.astype(np.float64)


def fp8_channel_flat(n: str, shape: tuple[int, ...], rng: np.random.Generator) -> Made:
    w, s = eight(rng, shape), rng.uniform(0.5, 2, shape[0]).astype(BF16)
    return {n: w, n + "_scale": s}, w.astype(np.float64) * s.astype(np.float64)[:, None]


def fp8_tensor(n: str, shape: tuple[int, ...], rng: np.random.Generator) -> Made:
    w, s = eight(rng, shape), np.float32(rng.uniform(0.5, 2))
    x = {n: w, n + "_scale": np.array([s]), n.removesuffix("weight") + "input_scale": np.ones(1, np.float32)}
    return x, w.astype(np.float64) * float(s)


def fp8_inverse(n: str, shape: tuple[int, ...], rng: np.random.Generator) -> Made:
    w, s = eight(rng, shape), np.float32(rng.uniform(0.5, 2))
    x = {n: w, n + "_scale_inv": np.array(s), n.removesuffix("weight") + "activation_scale": np.array(np.float32(1))}
    return x, w.astype(np.float64) * float(s)


def fp8_groups(n: str, shape: tuple[int, ...], rng: np.random.Generator) -> Made:
    w, s = eight(rng, shape, ml_dtypes.float8_e5m2), rng.uniform(0.5, 2, (shape[0], shape[1] // 16)).astype(np.float16)
    return {n: w, n + "_scale": s}, w.astype(np.float64) * np.repeat(s.astype(np.float64), 16, 1)


def fp8_blocks(n: str, shape: tuple[int, ...], rng: np.random.Generator) -> Made:
    w = eight(rng, shape)
    s = rng.uniform(0.5, 2, (-(-shape[0] // 24), -(-shape[1] // 40))).astype(np.float32)
    full = np.kron(s.astype(np.float64), np.ones((24, 40)))[: shape[0], : shape[1]]
    return {n: w, n + "_scale": s}, w.astype(np.float64) * full


def int8_channel(n: str, shape: tuple[int, ...], rng: np.random.Generator) -> Made:
    w, s = rng.integers(-128, 128, shape).astype(np.int8), rng.uniform(0.001, 0.01, (shape[0], 1)).astype(BF16)
    return {n: w, n + "_scale": s}, w.astype(np.float64) * s.astype(np.float64)


def nvfp4(n: str, shape: tuple[int, ...], rng: np.random.Generator) -> Made:
    packed, values = nibbles(rng, shape)
    s = rng.uniform(1, 448, (shape[0], shape[1] // 16)).astype(np.float32).astype(E4M3)
    whole = np.array([rng.uniform(500, 4000)], np.float32)
    module = n.removesuffix("weight")
    x = {n + "_packed": packed, n + "_scale": s, n + "_global_scale": whole, module + "input_global_scale": whole}
    return x, values * np.repeat(s.astype(np.float64), 16, 1) / whole.astype(np.float64)


def nvfp4_modelopt(n: str, shape: tuple[int, ...], rng: np.random.Generator) -> Made:
    packed, values = nibbles(rng, shape)
    s = rng.uniform(1, 448, (shape[0], shape[1] // 16)).astype(np.float32).astype(E4M3)
    whole = np.array(rng.uniform(1e-4, 1e-3), np.float32)
    x = {n: packed, n + "_scale": s, n + "_scale_2": whole, n.removesuffix("weight") + "input_scale": whole}
    return x, values * np.repeat(s.astype(np.float64), 16, 1) * float(whole)


def mxfp4(n: str, shape: tuple[int, ...], rng: np.random.Generator) -> Made:
    packed, values = nibbles(rng, shape)
    s = rng.integers(118, 130, (shape[0], shape[1] // 32)).astype(np.uint8)
    return {n + "_packed": packed, n + "_scale": s}, values * np.repeat(2.0 ** (s.astype(np.float64) - 127), 32, 1)


BLOCKS = {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"block_structure": [24, 40]}}}}
SCHEMES = {
    "fp8, channel": (fp8_channel, {"quant_method": "compressed-tensors", "format": "float-quantized"}),
    "fp8, channel, flat": (fp8_channel_flat, {"quant_method": "fbgemm_fp8"}),
    "fp8, tensor": (fp8_tensor, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "fp8, inverse": (fp8_inverse, {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"}),
    "fp8, groups": (fp8_groups, {"quant_method": "compressed-tensors", "format": "float-quantized"}),
    "fp8, blocks": (fp8_blocks, BLOCKS),
    "fp8, unsaid": (fp8_tensor, None),
    "int8, channel": (int8_channel, {"quant_method": "compressed-tensors", "format": "int-quantized"}),
    "nvfp4": (nvfp4, {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}),
    "nvfp4, modelopt": (nvfp4_modelopt, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "mxfp4": (mxfp4, {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}),
}


def quantised(tmp_path: Path, family: str, how: str, ignored: str = "in_proj_z") -> tuple[Path, Path]:
    """A checkpoint whose projections are in few bits, and the same in bfloat16, made in float64."""
    make, said = SCHEMES[how]
    rng = np.random.default_rng(7)
    x, y = {}, {}
    for name, a in tensors(facts(family)["tensors"]).items():
        if "_proj" in name and a.ndim == 2 and a.shape[0] > 16 and a.shape[1] % 32 == 0 and ignored not in name:
            stored, values = make(name, a.shape, rng)
            x |= stored
            y[name] = values.astype(np.float32).astype(BF16)
        else:
            x[name] = y[name] = a
    for layer in (0, 3):
        x[f"model.layers.{layer}.self_attn.k_scale"] = np.ones(1, np.float32)
    config = facts(family)["config"]
    more = {} if said is None else {"quantization_config": said}
    return save_raw(tmp_path / "src", x, {**config, **more}), save_raw(tmp_path / "plain", y, config)


def leaves(folder: Path) -> dict[str, np.ndarray]:
    return {n: a for p in sorted(folder.glob("*.safetensors")) for n, a in read_file(p).items()}


def agree(have: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    """The same leaves, and the same numbers but for one rounding to float32 before that to bfloat16."""
    assert have.keys() == want.keys()
    for name, a in have.items():
        assert (a.dtype, a.shape) == (want[name].dtype, want[name].shape), name
        got, b = a.astype(np.float64), want[name].astype(np.float64)
        assert np.all(np.abs(got - b) <= 2.0**-8 * np.abs(b)), name
        assert np.mean(got == b) > 0.999, name


@pytest.mark.parametrize("how", SCHEMES)
def test_it_is_the_product_in_float64(tmp_path, how):
    family = "qwen3_5_moe_text" if how in ("nvfp4", "mxfp4") else "qwen3_5_text"
    source, plain = quantised(tmp_path, family, how)
    port(plain, tmp_path / "want", "jax")
    with pytest.raises(GdnError, match="--dequantise"):
        port(source, tmp_path / "out", "jax")
    outcome = port(source, tmp_path / "out", "jax", dequantise=True)
    want = leaves(tmp_path / "want")
    agree(leaves(tmp_path / "out"), want)
    assert any("are dequantised" in note for note in outcome.notes)
    assert any("left out" in note and "k_scale" in note for note in outcome.notes)
    stored = json.loads((tmp_path / "out" / "portable_gdn.json").read_text())
    name = "model.layers.0.linear_attn.out_proj.weight"
    made = stored["quantised"][name]
    assert made["scheme"].lower().startswith(how.split(",")[0])
    assert {made["stored"], *made["scales"]} <= stored["source"]["tensors"].keys()  # with their hashes
    assert "model.layers.0.self_attn.k_scale" in stored["left_out"]
    with pytest.raises(GdnError, match=r"ported with --dequantise: .* cannot be had back"):
        back(tmp_path / "out", tmp_path / "never", lossy=True)


@pytest.mark.parametrize("how", ["fp8, channel", "nvfp4", "mxfp4"])
def test_other_targets_and_dtypes(tmp_path, how):
    """Joined with plain tensors in one projection; in float32, with more digits; wrapped names; the command."""
    source, plain = quantised(tmp_path, "qwen3_5_text", how)
    for to in ("hf", "orbax"):
        port(plain, tmp_path / f"want {to}", to)
        port(source, tmp_path / to, to, dequantise=True)
    agree(leaves(tmp_path / "hf"), leaves(tmp_path / "want hf"))
    port(source, tmp_path / "wide", "jax", dequantise=True, dtype="float32")
    wide = leaves(tmp_path / "wide")
    x, values = {}, None
    make, _ = SCHEMES[how]
    rng = np.random.default_rng(7)
    for name, a in tensors(facts("qwen3_5_text")["tensors"]).items():
        if "_proj" in name and a.ndim == 2 and a.shape[0] > 16 and a.shape[1] % 32 == 0 and "in_proj_z" not in name:
            x, values = make(name, a.shape, rng)
            if name == "model.layers.0.linear_attn.out_proj.weight":
                break
    assert np.allclose(wide["layers.0.mixer.o_proj.kernel"].T, values, rtol=1e-6, atol=0)
    arguments = ["port", str(source), str(tmp_path / "cli"), "--to", "jax", "--dequantise"]
    assert CliRunner().invoke(app, [*arguments, "--dry-run"], env={"COLUMNS": "250"}).exit_code == 0
    assert CliRunner().invoke(app, arguments).exit_code == 0
    result = CliRunner().invoke(app, ["inspect", str(source), "--dequantise"], env={"COLUMNS": "300"})
    said = " ".join(result.output.split())
    assert "applied to its weight" in said
    assert "left out: the key-value cache's scales" in said
    assert {p.name for p in (tmp_path / "cli").iterdir()} >= {"portable_gdn.json", "config.json"}
    assert x


def test_wrapped_names_and_side_files(tmp_path):
    """What has no place in the target, and what a rule carries, is dequantised too."""
    family = "qwen3_5_text"
    rng = np.random.default_rng(1)
    x = {}
    for name, a in tensors({**facts(family)["tensors"], "mtp.fc.weight": [64, 128]}).items():
        if name in ("mtp.fc.weight", "model.layers.0.mlp.up_proj.weight", "model.layers.0.linear_attn.out_proj.weight"):
            stored, values = fp8_channel(name, a.shape, rng)
            x |= {"_orig_mod." + n: b for n, b in stored.items()}
            x["want " + name] = values.astype(np.float32).astype(BF16)
        else:
            x["_orig_mod." + name] = a
    want = {n.removeprefix("want "): x.pop(n) for n in list(x) if n.startswith("want ")}
    source = save_raw(tmp_path / "src", x, facts(family)["config"])
    port(source, tmp_path / "out", "fla", dequantise=True)
    have = leaves(tmp_path / "out")
    for name in ("mtp.fc.weight", "model.layers.0.mlp.up_proj.weight"):
        agree({name: have["_orig_mod." + name]}, {name: want[name]})
    agree({"o": have["model.layers.0.attn.o_proj.weight"]}, {"o": want["model.layers.0.linear_attn.out_proj.weight"]})


def test_block_scales_that_could_be_carried_are_applied(tmp_path):
    family = "qwen3_next"
    x, y = {}, {}
    rng = np.random.default_rng(0)
    for name, a in tensors(facts(family)["tensors"]).items():
        if "_proj" in name and a.ndim == 2 and "in_proj_ba" not in name:
            w, s = eight(rng, a.shape), rng.uniform(0.5, 2, [-(-n // 8) for n in a.shape]).astype(np.float32)
            x |= {name: w, name + "_scale_inv": s}
            full = np.kron(s.astype(np.float64), np.ones((8, 8)))[: a.shape[0], : a.shape[1]]
            y[name] = (w.astype(np.float64) * full).astype(np.float32).astype(BF16)
        else:
            x[name] = y[name] = a
    config = facts(family)["config"]
    said = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 8]}}
    source = save_raw(tmp_path / "src", x, {**config, **said})
    port(source, tmp_path / "out", "jax", dequantise=True)
    port(save_raw(tmp_path / "plain", y, config), tmp_path / "want", "jax")
    agree(leaves(tmp_path / "out"), leaves(tmp_path / "want"))


@pytest.mark.parametrize(
    ("scale", "block"),
    [((8, 64, 1), None), ((8,), None), ((8, 1, 1), None), ((8, 2, 2), [32, 32]), ((), None), ((8, 64, 4), None)],
)
def test_stacked_experts(tmp_path, scale, block):
    """Experts in one tensor [X, out, in], with scales for each expert, each of its rows, or its blocks."""
    found = facts("qwen3_5_moe_text")
    rng = np.random.default_rng(2)
    config = {**found["config"], "quantization_config": {"quant_method": "fp8", "weight_block_size": block}}
    experts = {"gate_up_proj": (8, 64, 64), "down_proj": (8, 64, 32)}
    x, y = {}, {}
    for name, a in tensors({n: s for n, s in found["tensors"].items() if ".experts." not in n}).items():
        x[name] = y[name] = a
    for layer in range(found["config"]["num_hidden_layers"]):
        for part, shape in experts.items():
            name = f"model.layers.{layer}.mlp.experts.{part}"
            columns = shape[2] // 32 if block else scale[2] if len(scale) == 3 else 1
            w = eight(rng, shape)
            s = rng.uniform(0.5, 2, scale if not block else (8, 2, columns)).astype(np.float32)
            full = s.reshape(8 if s.ndim else 1, *(s.shape[1:] or (1, 1))).astype(np.float64)
            full = np.repeat(np.repeat(full, 64 // full.shape[1], 1), shape[2] // full.shape[2], 2)
            x |= {name: w, name + ("_scale_inv" if block else "_scale"): s}
            y[name] = (w.astype(np.float64) * full).astype(np.float32).astype(BF16)
    port(save_raw(tmp_path / "plain", y, found["config"]), tmp_path / "want", "jax")
    port(save_raw(tmp_path / "src", x, config), tmp_path / "out", "jax", dequantise=True)
    agree(leaves(tmp_path / "out"), leaves(tmp_path / "want"))


def test_the_option_belongs_to_a_port(tmp_path):
    for others in (["--back"], ["--check"]):
        result = CliRunner().invoke(app, ["port", str(tmp_path), str(tmp_path / "x"), "--dequantise", *others])
        assert result.exit_code
        assert "--dequantise is given together with" in str(result.exception)


NAME = "model.layers.0.linear_attn.out_proj.weight"


def at(value: float):
    def change(s: np.ndarray) -> np.ndarray:
        s = s.copy()
        s.reshape(-1)[-1] = value
        return s

    return change


@pytest.mark.parametrize(
    ("how", "part", "change", "sentence"),
    [
        ("fp8, channel", "_scale", at(np.nan), "out_proj.weight_scale has 1 bad scales .* nan"),
        ("fp8, channel", "_scale", at(0), "out_proj.weight_scale has 1 bad scales .* 0.0"),
        ("fp8, channel", "_scale", at(-1), "out_proj.weight_scale has 1 bad scales .* -1.0"),
        ("fp8, tensor", "_scale", at(np.inf), "out_proj.weight_scale has 1 bad scales .* inf"),
        ("nvfp4", "_scale", at(0), "out_proj.weight_scale has 1 bad scales"),
        ("nvfp4", "_scale", at(-2), "out_proj.weight_scale has 1 bad scales"),
        ("nvfp4", "_global_scale", at(0), "out_proj.weight_global_scale has 1 bad scales"),
        ("nvfp4", "_global_scale", at(np.nan), "out_proj.weight_global_scale has 1 bad scales"),
        ("nvfp4, modelopt", "_scale_2", at(-1), "out_proj.weight_scale_2 has 1 bad scales"),
        ("mxfp4", "_scale", at(255), "out_proj.weight_scale has 1 bad scales"),
        ("fp8, channel", "_scale", lambda s: s[:-1], "weight_scale has shape .* it must be one number"),
        ("fp8, blocks", "_scale", lambda s: s[:, :-1], r"blocks of 24 x 40"),
        ("nvfp4", "_scale", lambda s: s[:, :-1], "one scale for 16 columns"),
        ("nvfp4", "_scale", lambda s: s.astype(np.float32), "scales of NVFP4 must be F8_E4M3"),
        ("nvfp4", "_global_scale", lambda s: None, "weight_global_scale is not there"),
        ("nvfp4", "_global_scale", lambda s: np.ones(2, np.float32), "one number for each matrix"),
        ("nvfp4", "_scale", lambda s: None, "weight_scale is not there"),
        ("mxfp4", "_scale", lambda s: s[:-1], "one scale for 32 columns"),
    ],
)  # fmt: skip
def test_bad_scales_are_named_and_refused(tmp_path, how, part, change, sentence):
    source, _ = quantised(tmp_path, "qwen3_5_text", how)
    x = {n: np.array(a) for n, a in read_file(source / "model.safetensors").items()}
    config = json.loads((source / "config.json").read_text())
    made = change(x[NAME + part])
    x = {n: made if n == NAME + part else a for n, a in x.items() if made is not None or n != NAME + part}
    bad = save_raw(tmp_path / "bad", x, config)
    with pytest.raises(GdnError, match=sentence):
        port(bad, tmp_path / "out", "jax", dequantise=True)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith("out")]


@pytest.mark.parametrize("how", ["fp8, channel", "nvfp4", "nvfp4, modelopt"])
def test_a_scale_of_zero_for_zeros_is_no_fault(tmp_path, how):
    source, _ = quantised(tmp_path, "qwen3_5_text", how)
    x = {n: np.array(a) for n, a in read_file(source / "model.safetensors").items()}
    x[NAME + "_scale"][0] = 0
    x[NAME + "_packed" if NAME + "_packed" in x else NAME][0] = 0
    bad = save_raw(tmp_path / "zero", x, json.loads((source / "config.json").read_text()))
    port(bad, tmp_path / "out", "jax", dequantise=True)
    assert not leaves(tmp_path / "out")["layers.0.mixer.o_proj.kernel"][:, 0].any()


def test_what_cannot_be_dequantised(tmp_path):
    plain = checkpoint(tmp_path / "unquantised", "qwen3_5_text")
    with pytest.raises(GdnError, match="--dequantise is given; it must be given for weights in few bits"):
        port(plain, tmp_path / "out", "jax", dequantise=True)
    source, _ = quantised(tmp_path, "qwen3_5_text", "int8, channel")
    x = dict(read_file(source / "model.safetensors"))
    config = json.loads((source / "config.json").read_text())
    zero = {**x, NAME + "_zero_point": np.zeros((64, 1), np.int8)}
    with pytest.raises(GdnError, match="zero point"):
        port(save_raw(tmp_path / "zero", zero, config), tmp_path / "out", "jax", dequantise=True)
    lacking = {n: a for n, a in x.items() if n != NAME + "_scale"}
    with pytest.raises(GdnError, match=r"out_proj\.weight is I8 and .*out_proj\.weight_scale is not there"):
        port(save_raw(tmp_path / "lacking", lacking, config), tmp_path / "out", "jax", dequantise=True)
    (tmp_path / "four").mkdir()
    four, _ = quantised(tmp_path / "four", "qwen3_5_text", "nvfp4")
    twice = {**read_file(four / "model.safetensors"), NAME: np.zeros((64, 64), np.float32)}
    with pytest.raises(GdnError, match="one weight twice"):
        port(save_raw(tmp_path / "twice", twice, config), tmp_path / "out", "jax", dequantise=True)


def test_memory_is_bounded(tmp_path, monkeypatch):
    """Rows are computed a few at a time, and large tensors lie in a file; the numbers are the same."""
    source, _ = quantised(tmp_path, "qwen3_5_text", "nvfp4")
    port(source, tmp_path / "want", "jax", dequantise=True)
    monkeypatch.setattr(dequantise, "_ROWS", 2000)
    monkeypatch.setattr(dequantise, "_LARGE", 100)
    port(source, tmp_path / "out", "jax", dequantise=True)
    want, have = leaves(tmp_path / "want"), leaves(tmp_path / "out")
    assert all(np.array_equal(have[n].view(np.uint8), want[n].view(np.uint8)) for n in want)
