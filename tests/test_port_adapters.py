"""Adapters in all the forms that PEFT saves: ported by the rows of their projections, and back to the byte."""

from __future__ import annotations

import json
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import facts, read_file, save, tensors
from typer.testing import CliRunner

from portable_gdn.checkpoint import back, port
from portable_gdn.checkpoint.porting import digests_back
from portable_gdn.cli.main import app
from portable_gdn.spec.errors import GdnError

pytest.importorskip("safetensors")

PRE = "base_model.model."


def shape_of(family: str, module: str) -> list[int]:
    return facts(family)["tensors"][module + ".weight"]


def pair(family: str, module: str, rank: int = 4, slot: str = "", seed: int = 0) -> dict[str, np.ndarray]:
    """Factors of a module."""
    out, inside = shape_of(family, module)
    return factors(module, out, inside, rank, slot, seed)


def factors(module: str, out: int, inside: int, rank: int, slot: str = "", seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([seed, *module.encode()])
    dot = "." + slot if slot else ""
    return {
        f"{PRE}{module}.lora_A{dot}.weight": rng.standard_normal((rank, inside)).astype(np.float32),
        f"{PRE}{module}.lora_B{dot}.weight": rng.standard_normal((out, rank)).astype(np.float32),
    }


def write(tmp_path: Path, family: str, x: dict[str, np.ndarray], **config: Any) -> tuple[Path, Path]:
    """The adapter's folder, and its model's config.json."""
    source = save(tmp_path / "src", x, None)
    (source / "model.safetensors").rename(source / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, **config}
    (source / "adapter_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps(facts(family)["config"]))
    return source, tmp_path / "config.json"


def there_and_back(tmp_path: Path, source: Path, base: Path, to: str = "nnx") -> dict[str, np.ndarray]:
    port(source, tmp_path / "out", to, base=base)
    back(tmp_path / "out", tmp_path / "back")
    assert sorted(p.name for p in source.iterdir()) == sorted(p.name for p in (tmp_path / "back").iterdir())
    for path in source.iterdir():
        assert path.read_bytes() == (tmp_path / "back" / path.name).read_bytes(), path.name
    return {n: a for p in sorted((tmp_path / "out").glob("*.safetensors")) for n, a in read_file(p).items()}


def product(x: dict[str, np.ndarray], module: str, slot: str = "") -> np.ndarray:
    dot = "." + slot if slot else ""
    a, b = (x[f"{PRE}{module}.lora_{f}{dot}.weight"].astype(np.float64) for f in "AB")
    return b @ a


def interleaved(family: str, parts: dict[str, np.ndarray]) -> np.ndarray:
    """Rows of q, k, v, z as Qwen3-Next has them in one projection: by key head."""
    c = facts(family)["config"]
    heads = c["linear_num_key_heads"]
    return np.concatenate([parts[p].reshape(heads, -1, parts[p].shape[-1]) for p in "qkvz"], 1).reshape(-1, 64)


# --- halves and contradictions ---------------------------------------------------------------------------------------

Z = "model.layers.0.linear_attn.in_proj_z"
A, B = f"{PRE}{Z}.lora_A.weight", f"{PRE}{Z}.lora_B.weight"


def without(name: str):
    return lambda x: {n: a for n, a in x.items() if n != name}


@pytest.mark.parametrize(
    ("change", "config", "sentence"),
    [
        (without(B), {}, "in_proj_z.lora_A.weight is there and .*in_proj_z.lora_B.weight is not"),
        (without(A), {}, "in_proj_z.lora_B.weight is there and .*in_proj_z.lora_A.weight is not"),
        (lambda x: {**x, B: np.ones((96, 8), np.float32)}, {}, "rank 4 and rank 8"),
        (lambda x: {**x, B: np.ones(96, np.float32)}, {}, "one rank"),
        (lambda x: x, {"r": 8}, r"has rank 4 and adapter_config.json says 8 \(r\)"),
        (lambda x: x, {"rank_pattern": {"in_proj_z": 16}}, r"says 16 \(rank_pattern\)"),
        (lambda x: x, {"rank_pattern": {r"layers\.0\..*_z": 2}}, r"says 2 \(rank_pattern\)"),
        (lambda x: x, {"r": "four"}, "r of .*in_proj_z is 'four'"),
        (lambda x: x, {"rank_pattern": {"(": 4, "in_proj_z": 4}}, "must be regular"),
        (lambda x: x, {"use_dora": True}, "lora_magnitude_vector of .*in_proj_z is not there"),
        (lambda x: {f"{PRE}{Z}.lora_magnitude_vector": np.ones(96, np.float32)}, {}, "the factors lora_A and"),
        (
            lambda x: {**x, f"{PRE}{Z}.lora_magnitude_vector": np.ones(96, np.float32)},
            {"use_dora": False},
            "use_dora is false",
        ),
        (
            lambda x: {**x, f"{PRE}model.embed_tokens.lora_embedding_A": np.ones((4, 256), np.float32)},
            {},
            "lora_embedding_A is there and .*lora_embedding_B is not",
        ),
        (
            lambda x: {**x, f"{PRE}model.layers.1.linear_attn.in_proj_z.lora_A.other.weight": x[A]},
            {},
            "lora_A.other.weight is there and .*lora_B.other.weight is not",
        ),
    ],
)  # fmt: skip
def test_half_adapters_are_refused_by_name(tmp_path, change, config, sentence):
    x = pair("qwen3_5_text", Z)
    source, base = write(tmp_path, "qwen3_5_text", change(x), **config)
    with pytest.raises(GdnError, match=sentence):
        port(source, tmp_path / "out", "nnx", base=base)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("names", "said", "kind"),
    [
        ((f"{PRE}{Z}.lokr_w1", f"{PRE}{Z}.lokr_w2"), "LOKR", "LoKr"),
        ((f"{PRE}{Z}.hada_w1_a", f"{PRE}{Z}.hada_w1_b"), "LOHA", "LoHa"),
        ((f"{PRE}{Z}.lora_A", f"{PRE}{Z}.lora_B", f"{PRE}{Z}.lora_E"), "ADALORA", "AdaLoRA"),
        ((f"{PRE}{Z}.ia3_l",), "IA3", "IA3"),
        ((f"{PRE}{Z}.vera_lambda_b",), "VERA", "VeRA"),
        ((A, B), "MISS", "MISS"),
    ],
)
def test_other_kinds_of_adapters_are_named(tmp_path, names, said, kind):
    x = {name: np.ones((4, 4), np.float32) for name in names}
    source, base = write(tmp_path, "qwen3_5_text", x, peft_type=said)
    for arguments in ({}, {"base": base}):
        with pytest.raises(GdnError, match=f"an adapter of kind {kind}"):
            port(source, tmp_path / "out", "nnx", **arguments)


# --- forms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slots", "leaves"),
    [
        (("default",), ["lora.lora_a", "lora.lora_b"]),
        (("",), ["lora.lora_a", "lora.lora_b"]),
        (("fast", "slow"), ["lora.fast.lora_a", "lora.fast.lora_b", "lora.slow.lora_a", "lora.slow.lora_b"]),
        (("", "b"), ["lora.b.lora_a", "lora.b.lora_b", "lora.lora_a", "lora.lora_b"]),
    ],
)
def test_slots(tmp_path, slots, leaves):
    x: dict[str, np.ndarray] = {}
    for n, slot in enumerate(slots):
        x |= pair("qwen3_next", "model.layers.0.linear_attn.in_proj_qkvz", 4 + n * (len(slots) > 1), slot, n)
    source, base = write(tmp_path, "qwen3_next", x)
    have = there_and_back(tmp_path, source, base)
    assert sorted(n.removeprefix("layers.0.mixer.q_proj.") for n in have if "q_proj" in n) == leaves
    for slot in slots:
        under = "lora." + (slot + "." if slot and len(slots) > 1 else "")
        parts = {
            p: (have[f"layers.0.mixer.{m}_proj.{under}lora_a"] @ have[f"layers.0.mixer.{m}_proj.{under}lora_b"]).T
            for p, m in zip("qkvz", "qkvg", strict=True)
        }
        want = product(x, "model.layers.0.linear_attn.in_proj_qkvz", slot)
        assert np.allclose(interleaved("qwen3_next", parts), want, atol=1e-5)
    port(source, tmp_path / "fla", "fla", base=base)
    got = read_file(tmp_path / "fla" / "model-00001-of-00001.safetensors")
    marks = [s for s in slots if s] if len(slots) > 1 else [""]
    assert {f"{PRE}model.layers.0.attn.q_proj.lora_A{'.' + m if m else ''}.weight" for m in marks} <= got.keys()


def plain(family: str, names: list[str]) -> dict[str, np.ndarray]:
    return tensors({name: facts(family)["tensors"][name] for name in names}, 3)


FORMS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {  # model's tensors by the names they have, and leaves
    "modules_to_save": ({"lm_head.weight": "lm_head.weight"}, {"lm_head.kernel": (64, 256)}),
    "modules_to_save in a state dict": (
        {"lm_head.weight": "lm_head.modules_to_save.default.weight"},
        {"lm_head.kernel": (64, 256)},
    ),
    "norms saved whole": (
        {"model.layers.0.input_layernorm.weight": "model.layers.0.input_layernorm.weight"},
        {"layers.0.input_norm.scale": (64,)},
    ),
    "the original beside it": (
        {
            "lm_head.weight": "lm_head.modules_to_save.default.weight",
            "model.embed_tokens.weight": "lm_head.original_module.weight",
        },
        {"lm_head.kernel": (64, 256), PRE + "lm_head.original_module.weight": (256, 64)},
    ),
    "bias all": (
        {"model.layers.0.linear_attn.dt_bias": "model.layers.0.linear_attn.dt_bias"},
        {"layers.0.mixer.dt_bias": (4,)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_what_is_saved_beside_factors(tmp_path, form):
    names, leaves = FORMS[form]
    family = "qwen3_5_moe_text"
    values = plain(family, [n for n in names if n in facts(family)["tensors"]])
    x = {PRE + names[n]: a for n, a in values.items()} | pair(family, Z)
    source, base = write(tmp_path, family, x, bias="all" if form == "bias all" else "none")
    have = there_and_back(tmp_path, source, base)
    assert {n: have[n].shape for n in leaves} == leaves
    assert "layers.0.mixer.g_proj.lora.lora_a" in have


@pytest.mark.parametrize("form", ["", ".weight", ".default", ".default.weight"])
def test_dora(tmp_path, form):
    """Each part's rows have their magnitudes: the weights that they make, computed in float64 from both sides."""
    module, family = "model.layers.0.linear_attn.in_proj_qkvz", "qwen3_next"
    out, inside = shape_of(family, module)
    rng = np.random.default_rng(5)
    m = rng.uniform(0.5, 2, out).astype(np.float32)
    x = pair(family, module, slot="default" if "default" in form else "")
    x[f"{PRE}{module}.lora_magnitude_vector{form}"] = m
    source, base = write(tmp_path, family, x, use_dora=True, use_rslora=True)
    have = there_and_back(tmp_path, source, base)
    stored = json.loads((tmp_path / "out" / "portable_gdn.json").read_text())["adapter"]
    scaling = {entry["scaling"] for entry in stored.values()}
    assert scaling == {8 / sqrt(4)}
    whole = rng.standard_normal((out, inside))

    def weights(w: np.ndarray, change: np.ndarray, magnitude: np.ndarray) -> np.ndarray:
        w = w + 8 / sqrt(4) * change
        return magnitude[:, None] * w / np.linalg.norm(w, axis=1, keepdims=True)

    want = weights(whole, product(x, module, "default" if "default" in form else ""), m.astype(np.float64))
    (tmp_path / "model").mkdir()
    made = tensors(facts(family)["tensors"])
    made[module + ".weight"] = whole.astype(np.float64)
    port(save(tmp_path / "model" / "src", made, facts(family)["config"]), tmp_path / "model" / "out", "nnx")
    kernels = read_file(tmp_path / "model" / "out" / "model-00001-of-00001.safetensors")
    parts = {}
    for piece, name in zip("qkvz", "qkvg", strict=True):
        under = f"layers.0.mixer.{name}_proj."
        a, b, magnitude = (
            have[under + "lora." + leaf].astype(np.float64) for leaf in ("lora_a", "lora_b", "magnitude")
        )
        parts[piece] = weights(kernels[under + "kernel"].T, (a @ b).T, magnitude)
    assert np.allclose(interleaved(family, parts), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("slot", ["", ".default"])
def test_embeddings_and_heads(tmp_path, slot):
    family = "qwen3_5_moe_text"
    rng = np.random.default_rng(0)
    x = pair(family, "lm_head") if not slot else {}
    name = f"{PRE}model.embed_tokens.lora_embedding_"
    x[f"{name}A{slot}"] = rng.standard_normal((4, 256)).astype(np.float32)
    x[f"{name}B{slot}"] = rng.standard_normal((64, 4)).astype(np.float32)
    source, base = write(tmp_path, family, x)
    have = there_and_back(tmp_path, source, base)
    change = have["embed.lora.lora_a"] @ have["embed.lora.lora_b"]
    assert np.allclose(change, (x[f"{name}B{slot}"] @ x[f"{name}A{slot}"]).T, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "module", "leaf"),
    [
        ("qwen3_next", "model.layers.0.mlp.shared_expert_gate", "layers.0.mlp.shared_expert_gate"),
        ("qwen3_next", "model.layers.0.mlp.gate", "layers.0.mlp.router"),
        ("kimi_linear", "model.layers.3.self_attn.kv_b_proj", "layers.3.attention.kv_b_proj"),
        ("qwen3_next", "model.layers.3.self_attn.q_proj", "layers.3.attention.q_proj"),
    ],
)
def test_factors_outside_linear_layers(tmp_path, family, module, leaf):
    x = pair(family, module)
    source, base = write(tmp_path, family, x)
    have = there_and_back(tmp_path, source, base)
    change = have[leaf + ".lora.lora_a"].astype(np.float64) @ have[leaf + ".lora.lora_b"].astype(np.float64)
    assert np.allclose(change.T, product(x, module), atol=1e-12)


def test_factors_of_vision_wait_in_the_side_file(tmp_path):
    x = pair("qwen3_5_conditional", "model.language_model.layers.0.linear_attn.in_proj_qkv")
    at = "base_model.model.model.visual.blocks.0.attn.qkv.lora_"
    x |= {at + "A.weight": np.ones((4, 8), np.float32), at + "B.weight": np.ones((8, 4), np.float32)}
    source, base = write(tmp_path, "qwen3_5_conditional", x)
    have = there_and_back(tmp_path, source, base)
    assert {at + "A.weight", at + "B.weight", "layers.0.mixer.k_proj.lora.lora_b"} <= have.keys()


def test_a_bias_of_the_second_factor(tmp_path):
    module = "model.layers.0.linear_attn.in_proj_qkvz"
    x = pair("qwen3_next", module)
    x[f"{PRE}{module}.lora_B.bias"] = np.arange(shape_of("qwen3_next", module)[0], dtype=np.float32)
    source, base = write(tmp_path, "qwen3_next", x, lora_bias=True)
    have = there_and_back(tmp_path, source, base)
    parts = {
        p: have[f"layers.0.mixer.{m}_proj.lora.lora_b_bias"][:, None] * np.ones((1, 64))
        for p, m in zip("qkvz", "qkvg", strict=True)
    }
    assert np.array_equal(interleaved("qwen3_next", parts)[:, 0], x[f"{PRE}{module}.lora_B.bias"])


# --- scalings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "want"),
    [
        ({}, {"q": 2.0, "v": 2.0}),
        ({"use_rslora": True}, {"q": 4.0, "v": 4.0}),
        ({"alpha_pattern": {"q_proj": 2}}, {"q": 0.5, "v": 2.0}),
        ({"rank_pattern": {"v_proj": 16}, "use_rslora": True}, {"q": 4.0, "v": 2.0}),
        ({"rank_pattern": {r"layers\.\d+\.attn\.v_proj": 16}, "alpha_pattern": {"v_proj": 4.0}}, {"q": 2.0, "v": 0.25}),
        ({"lora_alpha": None}, {"q": None, "v": None}),
    ],
)
def test_scalings_are_written_down(tmp_path, config, want):
    family = "fla_gated_deltanet"
    x = pair(family, "model.layers.0.attn.q_proj")
    x |= pair(family, "model.layers.0.attn.v_proj", 16 if "rank_pattern" in config else 4)
    source, base = write(tmp_path, family, x, **config)
    there_and_back(tmp_path, source, base)
    stored = json.loads((tmp_path / "out" / "portable_gdn.json").read_text())["adapter"]
    found = {name.split(".")[3][0]: entry["scaling"] for name, entry in stored.items()}
    assert found == want


def scaling_in(folder: Path, module: str, rank: int) -> float:
    """A module's scaling by adapter_config.json, as PEFT reads it."""
    import re

    config = json.loads((folder / "adapter_config.json").read_text())
    find = lambda patterns, default: next(  # noqa: E731
        (v for p, v in patterns.items() if re.match(rf"(.*\.)?({p})$", module)), default
    )
    assert find(config["rank_pattern"], config["r"]) == rank
    assert module in config["target_modules"]
    alpha = find(config["alpha_pattern"], config["lora_alpha"])
    return alpha / sqrt(rank) if config.get("use_rslora") else alpha / rank


# --- parts that the target has in one --------------------------------------------------------------------------------


@pytest.mark.parametrize("stable", [False, True])
@pytest.mark.parametrize("ranks", [dict.fromkeys("qkvg", 4), {"q": 4, "v": 2, "g": 8}, {"v": 3}, {"k": 4, "g": 4}])
def test_separate_factors_are_joined_exactly(tmp_path, ranks, stable):
    family = "fla_gated_deltanet"
    x: dict[str, np.ndarray] = {}
    root = sqrt if stable else float
    for n, rank in ranks.items():
        x |= pair(family, f"model.layers.0.attn.{n}_proj", rank)
    patterns = {
        "rank_pattern": {f"{n}_proj": rank for n, rank in ranks.items() if rank != 4},
        "alpha_pattern": {f"{n}_proj": 2 * root(rank) for n, rank in ranks.items() if rank != 4},
        "lora_alpha": 2 * root(4),
    }
    source, base = write(tmp_path, family, x, use_rslora=stable, **patterns)
    have = there_and_back(tmp_path, source, base, "hf")
    module = "model.layers.0.linear_attn.in_proj_qkvz"
    assert have[f"{PRE}{module}.lora_A.weight"].shape == (sum(ranks.values()), 64)
    got = product(have, module)
    c = facts(family)["config"]
    heads, rows = c["num_heads"], {n: shape_of(family, f"model.layers.0.attn.{n}_proj")[0] for n in "qkvg"}
    parts = [
        (product(x, f"model.layers.0.attn.{n}_proj") if n in ranks else np.zeros((rows[n], 64))).reshape(heads, -1, 64)
        for n in "qkvg"
    ]
    assert np.allclose(got, np.concatenate(parts, 1).reshape(-1, 64), rtol=1e-12, atol=1e-12)
    assert scaling_in(tmp_path / "out", module, sum(ranks.values())) == pytest.approx(2.0)


def test_joined_factors_go_back_only_as_they_were(tmp_path):
    family = "fla_gated_deltanet"
    x = pair(family, "model.layers.0.attn.q_proj") | pair(family, "model.layers.0.attn.v_proj")
    source, base = write(tmp_path, family, x)
    there_and_back(tmp_path, source, base, "hf")
    path = tmp_path / "out" / "model-00001-of-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(GdnError, match="cannot be taken apart again"):
        back(tmp_path / "out", tmp_path / "never")
    with pytest.raises(GdnError, match="cannot be taken apart again"):
        digests_back(tmp_path / "out")
    (tmp_path / "other").mkdir()
    source, base = write(tmp_path / "other", family, x, alpha_pattern={"v_proj": 3})
    with pytest.raises(GdnError, match="one scaling"):
        port(source, tmp_path / "never", "hf", base=base)
    (tmp_path / "dora").mkdir()
    x[f"{PRE}model.layers.0.attn.q_proj.lora_magnitude_vector"] = np.ones(32, np.float32)
    source, base = write(tmp_path / "dora", family, x)
    with pytest.raises(GdnError, match=r"magnitude \(DoRA\) of a part"):
        port(source, tmp_path / "never", "hf", base=base)


@pytest.mark.parametrize("to", ["nnx", "hf", "fla"])
@pytest.mark.parametrize("name", ["{}_proj", "in_proj_{}"])
def test_parts_of_a_projection_that_the_model_has_in_one(tmp_path, name, to):
    """q, k and v trained apart, on a model that has them in one."""
    under = "model.layers.0.linear_attn."
    c = facts("qwen3_next")["config"]
    K, V = c["linear_num_key_heads"] * 16, c["linear_num_value_heads"] * c["linear_value_head_dim"]
    x: dict[str, np.ndarray] = {}
    for n, rows in zip("qkv", (K, K, V), strict=True):
        x |= factors(under + name.format(n), rows, 64, 4)
    source, base = write(tmp_path, "qwen3_next", x)
    have = there_and_back(tmp_path, source, base, to)
    want = {n: product(x, under + name.format(n)) for n in "qkv"} | {"z": np.zeros((V, 64))}
    if to == "hf":
        assert np.allclose(product(have, under + "in_proj_qkvz"), interleaved("qwen3_next", want), atol=1e-12)
        return
    for n in "qkv":
        if to == "nnx":
            mixer = f"layers.0.mixer.{n}_proj.lora.lora_"
            got = (have[mixer + "a"].astype(np.float64) @ have[mixer + "b"].astype(np.float64)).T
        else:
            got = product(have, f"model.layers.0.attn.{n}_proj")
        assert np.allclose(got, want[n], atol=1e-12)


def test_what_fused_factors_become_where_projections_are_apart(tmp_path):
    """The reverse: every part gets its rows of B and the whole of A, and the configuration names the new modules."""
    module = "model.layers.0.linear_attn.in_proj_qkvz"
    x = pair("qwen3_next", module, 6)
    source, base = write(tmp_path, "qwen3_next", x, r=6, target_modules=["in_proj_qkvz"])
    have = there_and_back(tmp_path, source, base, "fla")
    parts = {p: product(have, f"model.layers.0.attn.{m}_proj") for p, m in zip("qkvz", "qkvg", strict=True)}
    assert np.allclose(interleaved("qwen3_next", parts), product(x, module), atol=1e-12)
    for m in "qkvg":
        assert scaling_in(tmp_path / "out", f"model.layers.0.attn.{m}_proj", 6) == pytest.approx(8 / 6)


@pytest.mark.parametrize("to", ["nnx", "hf"])
def test_wrapped_adapters(tmp_path, to):
    """Names of compiled and distributed models, of which adapters were saved."""
    family = "fla_gated_deltanet"
    x: dict[str, np.ndarray] = {}
    for n in "qkvg":
        x |= pair(family, f"model.layers.0.attn.{n}_proj")
    x = {n.replace("base_model.model.", "module.base_model.model._orig_mod."): a for n, a in x.items()}
    source, base = write(tmp_path, family, x)
    there_and_back(tmp_path, source, base, to)
    result = CliRunner().invoke(app, ["inspect", str(source), "--base", str(base)], env={"COLUMNS": "300"})
    assert result.exit_code == 0
    assert "_orig_mod. (torch.compile)" in result.output
