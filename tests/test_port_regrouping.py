"""OLMo-Hybrid as transformers' ``save_pretrained`` (5.24) writes it: convolutions in equal thirds, a norm renamed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoints import facts, load, read_file, realistic, save, write_file
from typer.testing import CliRunner

from portable_gdn.checkpoint import back, load_layer, port, run
from portable_gdn.cli.main import app
from portable_gdn.spec.errors import GdnError

pytest.importorskip("safetensors")

WIDTHS = {"q": 32, "k": 32, "v": 64}  # 2 heads of 16 and 32
THIRDS = {"q": 43, "k": 43, "v": 42}
CONFIG = {
    **facts("olmo_hybrid")["config"], "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}  # fmt: skip
ENDS = {
    **{f"{n}_proj.weight": [rows, 64] for n, rows in {"g": 64, "a": 2, "b": 2}.items()},
    **{f"linear_attn.{n}_proj.weight": [rows, 64] for n, rows in WIDTHS.items()},
    **{f"{n}_conv1d.weight": [rows, 1, 4] for n, rows in WIDTHS.items()},
    "linear_attn.o_proj.weight": [64, 64], "A_log": [2], "dt_bias": [2], "o_norm.weight": [32],
}  # fmt: skip
LINEAR = (0, 1, 2)


def conv(layer: int, part: str) -> str:
    return f"model.layers.{layer}.linear_attn.{part}_conv1d.weight"


def released() -> dict[str, np.ndarray]:
    """A checkpoint as the family is published."""
    return realistic("olmo_hybrid", ends=ENDS)


def cut(x: dict[str, np.ndarray], lengths: dict[str, int]) -> dict[str, np.ndarray]:
    """The same with each layer's convolutions, one after the other, cut in these lengths, and the norm renamed."""
    x = dict(x)
    for layer in LINEAR:
        every = np.concatenate([x[conv(layer, part)] for part in "qkv"])
        parts = np.split(every, np.cumsum(list(lengths.values())))
        x.update({conv(layer, name): part for name, part in zip(lengths, parts, strict=False)})
    x["model.layers.3.feedforward_layer_norm.weight"] = x.pop("model.layers.3.post_attention_layernorm.weight")
    return dict(sorted(x.items()))


@pytest.fixture
def source(tmp_path) -> Path:
    return save(tmp_path / "src", cut(released(), THIRDS), CONFIG, files=2)


def same(one: Path, other: Path) -> None:
    assert {p.name: p.read_bytes() for p in one.iterdir()} == {p.name: p.read_bytes() for p in other.iterdir()}


@pytest.mark.parametrize("slab", [run.SLAB, 500])
@pytest.mark.parametrize("to", ["jax", "fla", "hf"])
def test_thirds_are_cut_at_the_heads_and_come_back_as_they_were(tmp_path, source, to, slab, monkeypatch):
    """The port is that of the release to the byte; ``hf`` joins the three again."""
    monkeypatch.setattr(run, "SLAB", slab)
    if to == "hf":  # Qwen3-Next's beta is at most 1
        (source / "config.json").write_text(json.dumps({**CONFIG, "linear_allow_neg_eigval": False}))
    settings = json.loads((source / "config.json").read_text())
    port(save(tmp_path / "release", released(), settings), tmp_path / "wanted", to)
    outcome = port(source, tmp_path / "out", to)
    assert any("equal thirds" in note for note in outcome.notes)
    wanted, found = load(tmp_path / "wanted"), load(tmp_path / "out")
    aside = "model.layers.3.post_attention_layernorm.weight"  # under its own name in a side file
    if aside in wanted:
        wanted["model.layers.3.feedforward_layer_norm.weight"] = wanted.pop(aside)
    assert wanted.keys() == found.keys()
    assert all(np.array_equal(wanted[name], found[name]) for name in wanted)
    assert any(
        "equal thirds" in note for note in json.loads((tmp_path / "out" / "portable_gdn.json").read_text())["notes"]
    )
    assert not back(tmp_path / "out", tmp_path / "back").changed
    same(source, tmp_path / "back")


def test_trained_convolutions_are_cut_in_thirds_again(tmp_path, source):
    port(source, tmp_path / "out", "jax", dtype="float32")
    path = tmp_path / "out" / "model-00001-of-00001.safetensors"
    x = {name: np.array(a) for name, a in read_file(path).items()}
    x["layers.1.mixer.k_conv1d.kernel"] += 1
    x["layers.3.mixer_post_norm.scale"] = 2 * x["layers.3.mixer_post_norm.scale"]
    write_file(path, x)
    outcome = back(tmp_path / "out", tmp_path / "back")
    trained = released()
    trained[conv(1, "k")] = (trained[conv(1, "k")].astype(np.float32) + 1).astype(trained[conv(1, "k")].dtype)
    trained["model.layers.3.post_attention_layernorm.weight"] *= 2
    wanted, found = cut(trained, THIRDS), load(tmp_path / "back")
    assert all(np.array_equal(wanted[name], found[name]) for name in wanted)
    assert set(outcome.changed) == {conv(1, "k"), conv(1, "q"), "model.layers.3.feedforward_layer_norm.weight"}


def test_lengths_that_are_neither_are_refused(tmp_path):
    wrong = {"q": 42, "k": 43, "v": 43}  # they sum up, and torch.chunk never gives them
    with pytest.raises(GdnError, match=r"conv1d.weight has"):
        port(save(tmp_path / "wrong", cut(released(), wrong), CONFIG), tmp_path / "out", "jax")
    few = cut(released(), {"q": 43, "k": 43, "v": 41})
    with pytest.raises(GdnError, match="equal thirds"):
        port(save(tmp_path / "few", few, CONFIG), tmp_path / "out", "jax")
    mixed = cut(released(), THIRDS)
    mixed[conv(1, "k")] = mixed[conv(1, "k")].astype(np.float32)
    with pytest.raises(GdnError, match="of one dtype"):
        port(save(tmp_path / "mixed", mixed, CONFIG), tmp_path / "out", "jax")
    assert not (tmp_path / "out").exists()


def test_inspect_says_so(source):
    result = CliRunner().invoke(app, ["inspect", str(source), "--json"], catch_exceptions=False)
    shown = json.loads(result.stdout)
    assert any("equal thirds" in note for note in shown["notes"])
    assert all(row["becomes"] for row in shown["tensors"])


@pytest.mark.slow
def test_what_transformers_saves_is_proven_and_loads_again(tmp_path):
    """By transformers itself: saved, ported, checked, run, trained, and loaded by transformers."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("flax")
    import whole

    from portable_gdn.checkpoint.proof import check
    from portable_gdn.models import load_model

    release = save(tmp_path / "release", released(), CONFIG)
    patched = whole.plain_transformers()
    next(patched)
    try:
        whole.original(release).save_pretrained(tmp_path / "src")
        stored = load(tmp_path / "src")
        assert {part: len(stored[conv(0, part)]) for part in "qkv"} == THIRDS
        out = tmp_path / "out"
        port(tmp_path / "src", out, "nnx")
        report = check(out)
        assert report.ok, report
        assert not back(out, tmp_path / "back").changed
        same(tmp_path / "src", tmp_path / "back")
        assert load_layer(out, 1).q_conv1d.kernel.shape == (4, 1, 32)

        path = out / "model-00001-of-00001.safetensors"
        x = {name: np.array(a) for name, a in read_file(path).items()}
        for layer in LINEAR:
            x[f"layers.{layer}.mixer.v_conv1d.kernel"] *= 1.5
        write_file(path, x)
        back(out, tmp_path / "trained")
        ids = np.arange(40)[None] * 5 % 256
        ours = np.asarray(load_model(out, dtype="float32", precision="highest")(ids)[0])
        with torch.no_grad():
            theirs = whole.original(tmp_path / "trained")(torch.from_numpy(ids), use_cache=False).logits.numpy()
            before = whole.original(tmp_path / "src")(torch.from_numpy(ids), use_cache=False).logits.numpy()
        size = np.linalg.norm(theirs)
        assert np.linalg.norm(ours - theirs) < 2e-5 * size
        assert np.linalg.norm(before - theirs) > 1e-2 * size
    finally:
        patched.close()
