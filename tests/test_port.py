"""Checkpoints there and back: bytes, completeness, what is refused, and what an interruption leaves."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoints import FAMILIES, checkpoint, facts, load, read_file, save, save_raw, tensors, write_file
from typer.testing import CliRunner

from portable_gdn.checkpoint import back, direct, port, run, stream
from portable_gdn.checkpoint.plan import plan_port
from portable_gdn.checkpoint.reader import Checkpoint
from portable_gdn.checkpoint.report import formats
from portable_gdn.checkpoint.source import read
from portable_gdn.cli.main import app
from portable_gdn.spec.errors import GdnError

pytest.importorskip("safetensors")


def same_files(one: Path, other: Path) -> None:
    names = sorted(p.name for p in one.iterdir())
    assert names == sorted(p.name for p in other.iterdir())
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def there_and_back(tmp_path: Path, source: Path, to: str = "jax") -> Path:
    before = {p.name: p.read_bytes() for p in source.iterdir()}
    outcome = port(source, tmp_path / "out", to)
    assert not outcome.changed
    assert not back(tmp_path / "out", tmp_path / "back").changed
    same_files(source, tmp_path / "back")
    assert before == {p.name: p.read_bytes() for p in source.iterdir()}
    return tmp_path / "out"


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_way_back_gives_the_very_files(tmp_path, name, files):
    source = checkpoint(tmp_path / "src", name, files)
    out = there_and_back(tmp_path, source)
    stored = json.loads((out / "portable_gdn.json").read_text())
    assert set(stored["source"]["tensors"]) == set(load(source))  # each has its hash
    have = load(out)
    assert set(stored["tensors"]) == set(have)
    decays = [a for key, a in have.items() if key.endswith(("A_log", "dt_bias"))]
    assert decays
    assert all(a.dtype == np.float32 for a in decays)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_name_of_the_published_files_has_a_row(name):
    """No row of linear-attention layers, norms or projections is missing, and nothing falls to a rule by accident."""
    found = facts(name)
    family = read_of(found)
    carried = {n for rule, names, _ in family.carried for n in names}
    assert all("linear_attn" not in n and not n.endswith("A_log") for n in carried)
    by_row = {place.bound.name for place in family.places.values()}
    assert by_row | carried == set(found["tensors"])
    if name in ("qwen3_next", "qwen3_5_text", "kimi_linear", "olmo_hybrid", "fla_kda", "fla_gdn2_layer", "lara_mini"):
        assert not carried


def read_of(found):
    from portable_gdn.checkpoint.table import Spec

    class Headers(Checkpoint):
        def __init__(self):
            self.folder, self.config, self.index = Path("somewhere"), found["config"], None
            self.where = dict.fromkeys(found["tensors"], ("file", None))

        @property
        def inventory(self):
            return {name: Spec("F32", tuple(shape)) for name, shape in found["tensors"].items()}

    return read(Headers())


def mixer_of(out: Path, layer: int = 0) -> dict[str, np.ndarray]:
    start = f"layers.{layer}.mixer."
    return {name.removeprefix(start): a for name, a in load(out).items() if name.startswith(start)}


@pytest.mark.parametrize(("Hk", "R", "Dk", "Dv"), [(2, 1, 16, 24), (2, 2, 16, 8), (2, 3, 8, 16), (4, 4, 8, 8)])
def test_interleaved_projections_are_split_by_key_head(tmp_path, Hk, R, Dk, Dv):
    """Against the split written out: a naive one has the same shapes."""
    E, K, V = 64, Hk * Dk, Hk * R * Dv
    under = "model.layers.0.linear_attn."
    widths = {
        "in_proj_qkvz.weight": [2 * K + 2 * V, E],
        "in_proj_ba.weight": [2 * Hk * R, E],
        "conv1d.weight": [2 * K + V, 1, 4],
        "A_log": [Hk * R],
        "dt_bias": [Hk * R],
        "norm.weight": [Dv],
        "out_proj.weight": [E, V],
    }
    found = facts("qwen3_next")
    shapes = {name: shape for name, shape in found["tensors"].items() if ".layers." not in name or ".layers.0." in name}
    shapes = {n: widths[n.removeprefix(under)] if n.startswith(under) else shape for n, shape in shapes.items()}
    config = {
        **found["config"], "num_hidden_layers": 1, "linear_num_key_heads": Hk, "linear_num_value_heads": Hk * R,
        "linear_key_head_dim": Dk, "linear_value_head_dim": Dv,
    }  # fmt: skip
    x = tensors(shapes)
    there_and_back(tmp_path, save(tmp_path / "src", x, config))
    y = mixer_of(tmp_path / "out")
    qkvz = x[under + "in_proj_qkvz.weight"].reshape(Hk, 2 * Dk + 2 * R * Dv, E)
    ba = x[under + "in_proj_ba.weight"].reshape(Hk, 2 * R, E)
    cuts = np.split(qkvz, [Dk, 2 * Dk, 2 * Dk + R * Dv], axis=1)
    for name, cut in zip("qkvg", cuts, strict=True):
        assert np.array_equal(y[f"{name}_proj.kernel"], cut.reshape(-1, E).T), name
    assert np.array_equal(y["b_proj.kernel"], ba[:, :R].reshape(-1, E).T)
    assert np.array_equal(y["a_proj.kernel"], ba[:, R:].reshape(-1, E).T)
    conv = x[under + "conv1d.weight"]
    for name, cut in zip("qkv", np.split(conv, [K, 2 * K]), strict=True):
        assert np.array_equal(y[f"{name}_conv1d.kernel"], cut.transpose(2, 1, 0)), name
    assert np.array_equal(y["o_proj.kernel"], x[under + "out_proj.weight"].T)
    assert np.array_equal(y["A_log"], x[under + "A_log"])
    assert np.array_equal(y["o_norm.scale"], x[under + "norm.weight"])


def test_three_dialects_of_experts_give_one_tree(tmp_path):
    """Fused and one by one: the same pieces, so the same tree, and each goes back to its own."""
    found = facts("qwen3_5_moe_conditional")
    x = tensors(found["tensors"])
    y = {name: a for name, a in x.items() if ".experts." not in name}
    for name, a in x.items():
        if ".experts." in name:
            base = name.rsplit(".", 1)[0]
            for e, expert in enumerate(a):
                if name.endswith("gate_up_proj"):
                    y[f"{base}.{e}.gate_proj.weight"], y[f"{base}.{e}.up_proj.weight"] = np.split(expert, 2)
                else:
                    y[f"{base}.{e}.down_proj.weight"] = expert
    assert found["saved_again"].keys() <= y.keys()
    trees = []
    for kind, arrays in (("fused", x), ("single", y)):
        (tmp_path / kind).mkdir()
        trees.append(load(there_and_back(tmp_path / kind, save(tmp_path / kind / "src", arrays, found["config"]))))
    assert trees[0].keys() == trees[1].keys()
    assert all(np.array_equal(trees[0][name], trees[1][name]) for name in trees[0])
    assert trees[0]["layers.0.mlp.experts.gate_proj"].shape == (8, 64, 32)


@pytest.mark.parametrize(
    ("name", "to"),
    [
        ("qwen3_next", "fla"),
        ("qwen3_5_text", "fla"),
        ("qwen3_5_text", "qwen3_next"),
        ("qwen3_next", "qwen3_5"),
        ("olmo_hybrid", "fla"),
        ("kimi_linear", "fla"),
        ("fla_gated_deltanet", "hf"),
        ("fla_gated_deltanet", "qwen3_5"),
        ("glm5_next_text", "fla"),
    ],
)
def test_between_families_and_back(tmp_path, name, to):
    out = there_and_back(tmp_path, checkpoint(tmp_path / "src", name), to)
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] != facts(name)["config"]["model_type"]
    again = read(Checkpoint(out, json.loads((out / "portable_gdn.json").read_text())["files"]))  # reads as that family
    assert again.linear_layers == json.loads((out / "portable_gdn.json").read_text())["linear_layers"]


def test_families_that_compute_something_else_are_refused(tmp_path):
    found = facts("fla_gated_deltanet")
    for change, sentence in (
        ({"allow_neg_eigval": True}, "largest beta"),
        ({"output_gate_activation": "sigmoid"}, "output gate"),
    ):
        source = save(tmp_path / sentence, tensors(found["tensors"]), {**found["config"], **change})
        with pytest.raises(GdnError, match=sentence):
            port(source, tmp_path / "out", "hf")
    with pytest.raises(GdnError, match="rule"):
        port(source, tmp_path / "out", "kimi_linear")
    source = checkpoint(tmp_path / "kda", "fla_kda")  # its output gate has a bias, for which Kimi has no place
    with pytest.raises(GdnError, match=r"g_proj\.1\.bias has no place .* is not zero"):
        port(source, tmp_path / "out", "hf")
    x = {n: a * 0 if n.endswith("g_proj.1.bias") else a for n, a in load(source).items()}
    there_and_back(tmp_path, save(tmp_path / "zero", x, facts("fla_kda")["config"]), "hf")


def test_legacy_names(tmp_path):
    found = facts("fla_kda")
    x = tensors(found["tensors"])
    (tmp_path / "new").mkdir()
    new = load(there_and_back(tmp_path / "new", save(tmp_path / "new" / "src", x, found["config"])))
    under = "model.layers.0.attn."
    x[under + "A"], x[under + "f_proj.1.bias"] = x.pop(under + "A_log"), x.pop(under + "dt_bias")
    (tmp_path / "old").mkdir()
    old = load(there_and_back(tmp_path / "old", save(tmp_path / "old" / "src", x, found["config"])))
    assert all(np.array_equal(new[name], old[name]) for name in new)
    found = facts("fla_gated_deltanet")
    y = tensors({**found["tensors"], under + "D": [4]})
    out = there_and_back(tmp_path, save(tmp_path / "src", y, found["config"]))
    assert json.loads((out / "portable_gdn.json").read_text())["aside"] == {
        "unused by the model (attn.D)": [under + "D"]
    }


def test_the_tensors_decide_what_they_are_not_the_configuration(tmp_path):
    found = facts("qwen3_5_text")
    source = save(tmp_path / "src", tensors(found["tensors"]), {**found["config"], "model_type": "qwen3_next"})
    plan = plan_port(read(Checkpoint(source)), "jax")
    assert plan.read.family.name == "qwen3_5"
    assert "qwen3_next" in plan.read.notes[0]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda x: x.update({"model.layers.0.linear_attn.extra": np.ones(2, np.float32)}), "no tensors like .*extra"),
        (lambda x: x.pop("model.layers.1.mlp.experts.3.up_proj.weight"), "experts.3.up_proj.weight is not there"),
        (lambda x: x.update({n: a.transpose(0, 2, 1).copy() for n, a in x.items() if "conv1d" in n}), "as MLX stores"),
        (lambda x: x.update({"model.layers.0.linear_attn.A_log": np.ones(5, np.float32)}), "A_log has shape .5.;"),
        (lambda x: x.update({"other.layers.0.x": np.ones(5, np.float32)}), "other.layers.0.x"),
    ],
)  # fmt: skip
def test_what_is_not_complete_is_refused_before_anything_is_written(tmp_path, change, sentence):
    found = facts("qwen3_next")
    x = tensors(found["tensors"])
    change(x)
    source = save(tmp_path / "src", x, found["config"])
    with pytest.raises(GdnError, match=sentence):
        port(source, tmp_path / "out", "jax")
    assert [p.name for p in tmp_path.iterdir()] == ["src"]


def test_casts_are_asked_for_and_listed(tmp_path):
    source = checkpoint(tmp_path / "src", "kimi_linear")
    x = load(source)
    outcome = port(source, tmp_path / "wide", "jax", dtype="float32")
    y = mixer_of(tmp_path / "wide")
    assert y["q_proj.kernel"].dtype == np.float32
    assert "layers.0.mixer.q_proj.kernel" in outcome.changed
    assert "layers.0.mixer.A_log" not in outcome.changed
    assert np.array_equal(y["q_proj.kernel"].T, x["model.layers.0.self_attn.q_proj.weight"].astype(np.float32))
    assert not back(tmp_path / "wide", tmp_path / "back").changed  # every bfloat16 is a float32
    same_files(source, tmp_path / "back")

    wide = save(tmp_path / "f32", {n: a.astype(np.float32) for n, a in x.items()}, facts("kimi_linear")["config"])
    port(wide, tmp_path / "narrow", "jax", dtype="bfloat16")
    y = mixer_of(tmp_path / "narrow")
    assert y["q_proj.kernel"].dtype == ml_dtypes.bfloat16
    assert y["A_log"].dtype == y["dt_bias"].dtype == y["o_norm.scale"].dtype == np.float32
    with pytest.raises(GdnError, match="lost what their bytes held"):
        back(tmp_path / "narrow", tmp_path / "lossy")
    assert back(tmp_path / "narrow", tmp_path / "lossy", lossy=True).changed == []  # these came from bfloat16


def eight_bits(x: dict[str, np.ndarray], block: int) -> dict[str, np.ndarray]:
    y = {}
    for name, a in x.items():
        if "_proj" in name and a.ndim == 2 and "in_proj_b" not in name and "in_proj_a" not in name:
            y[name] = a.astype(ml_dtypes.float8_e4m3fn)
            shape = [-(-n // block) for n in a.shape]
            y[name + "_scale_inv"] = np.random.default_rng(1).uniform(0.5, 2, shape).astype(ml_dtypes.bfloat16)
        else:
            y[name] = a
    return y


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text"])
def test_eight_bits_with_block_scales(tmp_path, name):
    """Carried over with their scales, in blocks; or applied, against the product written out."""
    found, block = facts(name), 8
    config = {**found["config"], "quantization_config": {"quant_method": "fp8", "weight_block_size": [block, block]}}
    x = eight_bits(tensors(found["tensors"]), block)
    source = save_raw(tmp_path / "src", x, config)
    out = there_and_back(tmp_path, source)
    y = read_file(out / "model-00001-of-00001.safetensors")
    port(source, tmp_path / "wide", "jax", dtype="float32")
    z = mixer_of(tmp_path / "wide")
    for part in ("q_proj.kernel", "v_proj.kernel", "g_proj.kernel", "o_proj.kernel"):
        weight, scale = y["layers.0.mixer." + part], y[f"layers.0.mixer.{part}_scale_inv"]
        assert weight.dtype == ml_dtypes.float8_e4m3fn
        full = np.kron(scale.astype(np.float32), np.ones((block, block), np.float32))
        assert np.array_equal(weight.astype(np.float32) * full, z[part]), part
    with pytest.raises(GdnError, match="eight bits"):
        back(tmp_path / "wide", tmp_path / "never", lossy=True)
    lacking = {n: a for n, a in x.items() if not n.endswith("layers.1.self_attn.o_proj.weight_scale_inv")}
    lacking.pop("model.layers.1.linear_attn.out_proj.weight_scale_inv")
    with pytest.raises(GdnError, match="must have its block scales"):
        port(save_raw(tmp_path / "lacking", lacking, config), tmp_path / "never", "jax")


def test_scales_that_cannot_be_carried_are_refused(tmp_path):
    found = facts("qwen3_next")  # parts of 16 rows
    config = {**found["config"], "quantization_config": {"weight_block_size": [32, 32]}}
    source = save_raw(tmp_path / "src", eight_bits(tensors(found["tensors"]), 32), config)
    with pytest.raises(GdnError, match="--dtype bfloat16"):
        port(source, tmp_path / "out", "jax")
    port(source, tmp_path / "out", "jax", dtype="bfloat16")


# --- hostile files -------------------------------------------------------------------------------------------------


def header_file(path: Path, header: object, data: bytes = b"\0" * 8, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def one(**changes) -> dict:
    return {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


@pytest.mark.parametrize(
    ("header", "sentence"),
    [
        (b"", "header claims"),
        (b"{", "no JSON"),
        (b"[]", "is a list"),
        (b"[" * 100000, "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b'{"x": 1, "x": 2}', "twice"),
        ({"__metadata__": {"a": 1}}, "text"),
        (one(dtype="F7"), "dtype"),
        (one(dtype=["F32"]), "dtype"),
        (one(shape=[-2]), "shape"),
        (one(shape=[2.0]), "shape"),
        (one(shape=[True, 2]), "shape"),
        (one(shape=[2**62, 2**62]), "has 8 bytes for"),
        (one(shape=[1] * 40), "shape"),
        (one(shape=[3]), "has 8 bytes for"),
        (one(data_offsets=[0, 16]), "lies at"),
        (one(data_offsets=[8, 0]), "lies at"),
        (one(data_offsets=[-8, 0]), "offsets"),
        (one(data_offsets=[0, 2**70]), "offsets"),
        (one(data_offsets=[0]), "offsets"),
        (one(extra=1), "described"),
        ({"x": None}, "described"),
        ({"../x": one()["x"]}, "names"),
        ({"/etc/passwd": one()["x"]}, "names"),
        ({"a..b": one()["x"]}, "names"),
        ({"a\0b": one()["x"]}, "names"),
        ({"x" * 600: one()["x"]}, "names"),
        ({"": one()["x"]}, "names"),
        ({**one(), "y": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, "overlaps"),
        ({"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, "gap"),
        ({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, "end at byte"),
        ({f"t{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(20)}, "at most"),
    ],
)  # fmt: skip
def test_hostile_headers_are_refused(tmp_path, monkeypatch, header, sentence):
    monkeypatch.setattr("portable_gdn.checkpoint.header.MAX_TENSORS", 10)
    path = header_file(tmp_path / "x.safetensors", header, length=10**15 if header == b"" else None)
    with pytest.raises(GdnError, match=sentence) as error:
        Checkpoint(path)
    assert len(str(error.value)) < 600


def test_hostile_folders_are_refused(tmp_path):
    with pytest.raises(GdnError, match="not there"):
        Checkpoint(tmp_path / "missing")
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(GdnError, match="pickle, which is never read"):
        Checkpoint(tmp_path)
    header_file(tmp_path / "a.safetensors", one())
    header_file(tmp_path / "b.safetensors", {"y": one()["x"]})
    for index, sentence in (
        ({"weight_map": {"x": "../a.safetensors"}}, "its own folder"),
        ({"weight_map": {"x": "/tmp/a.safetensors"}}, "its own folder"),
        ({"weight_map": {"x": "sub/a.safetensors"}}, "its own folder"),
        ({"weight_map": {"x": "pytorch_model.bin"}}, "its own folder"),
        ({"weight_map": {"x": "c.safetensors"}}, "not there"),
        ({"weight_map": {"x": "b.safetensors"}}, "must agree"),
        ({"weight_map": {"x": "a.safetensors", "y": "a.safetensors"}}, "must agree"),
        ({"weight_map": {"x": 1}}, "weight_map"),
        ({}, "weight_map"),
        ([], "JSON object"),
    ):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(GdnError, match=sentence):
            Checkpoint(tmp_path)
    header_file(tmp_path / "b.safetensors", one())
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(GdnError, match="must be in one file"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("value", [0, -2, True, 2**40, "4", None])
def test_hostile_configurations_are_refused(tmp_path, value):
    found = facts("qwen3_next")
    source = save(tmp_path / "src", tensors(found["tensors"]), {**found["config"], "linear_num_key_heads": value})
    with pytest.raises(GdnError):
        port(source, tmp_path / "out", "jax")


# --- interruptions -------------------------------------------------------------------------------------------------


def test_a_port_that_was_killed_continues(tmp_path):
    source = checkpoint(tmp_path / "src", "qwen3_next")
    stopped = 5

    def stop(what: str, done: int, of: int) -> None:
        nonlocal stopped
        if what.startswith("model-"):
            stopped -= 1
        if not stopped:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        port(source, tmp_path / "out", "jax", shard_size=50000, progress=stop)
    assert not (tmp_path / "out").exists()
    (partial,) = tmp_path.glob("out.partial")
    finished = sorted(p.name for p in partial.glob("model-*.safetensors"))
    assert 0 < len(finished) <= 4
    (partial / finished[0]).write_bytes(b"\0" * (partial / finished[0]).stat().st_size)  # a finished file that decayed
    outcome = port(source, tmp_path / "out", "jax", shard_size=50000)
    assert outcome.resumed == len(finished) - 1
    back(tmp_path / "out", tmp_path / "back")
    same_files(source, tmp_path / "back")
    assert not list(tmp_path.glob("*.partial"))


def test_another_port_starts_clean(tmp_path):
    source = checkpoint(tmp_path / "src", "kimi_linear")

    def stop(what: str, done: int, of: int) -> None:
        if done > of // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        port(source, tmp_path / "out", "jax", shard_size=50000, progress=stop)
    assert port(source, tmp_path / "out", "jax", shard_size=50000, dtype="float32").resumed == 0
    (tmp_path / "new.partial").mkdir()
    (tmp_path / "new.partial" / "precious").write_text("not ours")
    with pytest.raises(GdnError, match="not of an interrupted port"):
        port(source, tmp_path / "new", "jax")
    assert (tmp_path / "new.partial" / "precious").exists()


@pytest.mark.slow
def test_killed_at_any_moment_the_source_is_whole_and_the_port_can_be_repeated(tmp_path):
    source = checkpoint(tmp_path / "src", "qwen3_5_moe_conditional", files=2)
    before = {p.name: p.read_bytes() for p in source.iterdir()}
    code = (
        "import sys; from pathlib import Path; from portable_gdn.checkpoint import port; import time\n"
        "print('go', flush=True)\n"
        "port(Path(sys.argv[1]), Path(sys.argv[2]), 'jax', shard_size=20000, progress=lambda *a: time.sleep(0.002))"
    )
    out = tmp_path / "out"
    for delay in (0.0, 0.05, 0.1, 0.2, 0.4):
        child = subprocess.Popen([sys.executable, "-c", code, source, out], stdout=subprocess.PIPE, text=True)
        assert child.stdout.readline() == "go\n"
        time.sleep(delay)
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert before == {p.name: p.read_bytes() for p in source.iterdir()}
        if out.exists():
            break
    if not out.exists():
        port(source, out, "jax", shard_size=20000)
    back(out, tmp_path / "back")
    same_files(source, tmp_path / "back")


def test_an_empty_partial_folder_is_of_an_attempt_that_was_killed_at_once(tmp_path):
    source = checkpoint(tmp_path / "src", "kimi_linear")
    (tmp_path / "out.partial").mkdir()
    port(source, tmp_path / "out", "jax")
    assert {p.name for p in tmp_path.iterdir()} == {"src", "out"}
    (tmp_path / "again.partial").mkdir()
    (tmp_path / "again.partial" / "mine").touch()
    with pytest.raises(GdnError, match="not of an interrupted port"):
        port(source, tmp_path / "again", "jax")


def test_a_full_disk_says_so_and_leaves_nothing(tmp_path, monkeypatch):
    source = checkpoint(tmp_path / "src", "kimi_linear")
    calls = []

    def full(handle: int, start: int, size: int) -> None:
        calls.append(size)
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(GdnError, match="became full; what had been written was removed"):
        port(source, tmp_path / "out", "jax", shard_size=50000)
    assert [p.name for p in tmp_path.iterdir()] == ["src"]
    monkeypatch.setattr(run, "_SPARE", 2**60)
    with pytest.raises(GdnError, match="GiB free"):
        port(source, tmp_path / "out", "jax")
    assert [p.name for p in tmp_path.iterdir()] == ["src"]


def test_what_was_not_written_right_is_noticed(tmp_path, monkeypatch):
    source = checkpoint(tmp_path / "src", "olmo_hybrid")

    write = direct.Writer.write

    def flip(file, data) -> None:
        data = bytearray(data)
        if len(data) == 64 * 4:  # one tensor
            data[0] ^= 1
        write(file, data)

    monkeypatch.setattr(direct.Writer, "write", flip)
    with pytest.raises(GdnError, match="not what was written"):
        port(source, tmp_path / "out", "jax")
    assert not (tmp_path / "out").exists()


def test_large_tensors_are_written_in_slabs(tmp_path, monkeypatch):
    whole = checkpoint(tmp_path / "src", "qwen3_5_moe_conditional")
    port(whole, tmp_path / "one", "jax")
    monkeypatch.setattr(run, "SLAB", 1000)
    monkeypatch.setattr(stream, "_WHOLE", 3000)  # of those that cannot be read in slabs, some are mapped
    port(whole, tmp_path / "two", "jax")
    for name in ("model-00001-of-00001.safetensors", "side-00001-of-00001.safetensors"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


@pytest.mark.parametrize("system", ["direct", "none", "opens and refuses"])
def test_files_past_the_cache(tmp_path, monkeypatch, system):
    """Any place and length, on file systems with O_DIRECT, without it, and with one that wants other blocks."""
    if system == "none":
        monkeypatch.setattr(direct, "_FLAG", 0)
    elif system == "opens and refuses":
        if not direct._FLAG:
            pytest.skip("no O_DIRECT here")
        for name in ("write", "preadv"):
            whole = getattr(os, name)

            def refusing(handle, *rest, whole=whole):
                if fcntl.fcntl(handle, fcntl.F_GETFL) & direct._FLAG:
                    raise OSError(errno.EINVAL, "Invalid argument")
                return whole(handle, *rest)

            monkeypatch.setattr(os, name, refusing)
    monkeypatch.setattr(direct, "_BLOCK", 8192)
    data = np.random.default_rng(0).integers(0, 256, 30001, np.uint8).tobytes()
    path = tmp_path / "file"
    with direct.Writer(path, len(data)) as file:
        for begin, end in ((0, 1), (1, 1), (1, 9000), (9000, 30001)):
            file.write(data[begin:end])
    assert path.read_bytes() == data
    buffers = direct.Buffers(20000)
    for begin, end in ((0, 0), (0, 30001), (1, 4097), (4096, 8192), (8191, 30000), (30000, 30001)):
        assert b"".join(map(bytes, direct.pieces(path, begin, end))) == data[begin:end]
        found, memory = direct.read(path, begin, end, buffers)
        assert found.tobytes() == data[begin:end]
        buffers.give(memory)
    assert direct.read(path, 29000, 40000, buffers)[0].tobytes() == data[29000:]  # a file that became shorter
    assert b"".join(map(bytes, direct.pieces(path, 29000, 40000))) == data[29000:]


def test_trained_weights_go_back_and_are_listed(tmp_path):
    source = checkpoint(tmp_path / "src", "qwen3_next")
    port(source, tmp_path / "out", "jax")
    path = tmp_path / "out" / "model-00001-of-00001.safetensors"
    x = {n: np.array(a) for n, a in read_file(path).items()}
    x["layers.1.mixer.A_log"] += 1
    write_file(path, x)
    assert back(tmp_path / "out", tmp_path / "back").changed == ["model.layers.1.linear_attn.A_log"]
    y, z = load(source), load(tmp_path / "back")
    assert np.array_equal(z["model.layers.1.linear_attn.A_log"], y["model.layers.1.linear_attn.A_log"] + 1)
    x.pop("layers.1.mixer.A_log")
    write_file(path, x)
    with pytest.raises(GdnError, match="not in the port"):
        back(tmp_path / "out", tmp_path / "never")


def test_the_page_of_formats_is_what_the_tables_say():
    page = Path(__file__).parent.parent / "docs" / "checkpoint-formats.md"
    assert page.read_text() == formats(), "python -m portable_gdn.checkpoint.report > docs/checkpoint-formats.md"


# --- the command line ----------------------------------------------------------------------------------------------


def cli(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("name", FAMILIES)
def test_the_commands(tmp_path, name):
    source = checkpoint(tmp_path / "src", name)
    shown = json.loads(cli("inspect", source, "--json"))
    assert sum(row["count"] for row in shown["tensors"]) == len(load(source))
    assert all(row["becomes"] for row in shown["tensors"])
    plan = json.loads(cli("port", source, "--to", "jax", "--dry-run", "--json"))
    assert plan["outputs"] == shown["outputs"]
    assert [p.name for p in tmp_path.iterdir()] == ["src"]
    done = json.loads(cli("port", source, tmp_path / "out", "--to", "jax", "--json"))
    assert done["tensors"] == len(load(tmp_path / "out"))
    assert "port to jax" in cli("inspect", tmp_path / "out")
    json.loads(cli("port", tmp_path / "out", tmp_path / "back", "--back", "--json"))
    same_files(source, tmp_path / "back")


def test_commands_in_words(tmp_path):
    source = checkpoint(tmp_path / "src", "qwen3_5_moe_conditional")
    text = cli("inspect", source)
    assert "vision" in text
    assert "multi-token prediction" in text
    assert "would be" in cli("port", cli_port(tmp_path, source), "--back", "--dry-run")
    with pytest.raises(GdnError, match="there already"):
        cli("port", source, tmp_path / "out", "--to", "jax")
    for wrong in (["--to", "tensorflow"], [], ["--to", "jax", "--back"], ["--to", "jax", "--shard-size", "0"]):
        with pytest.raises(GdnError):
            cli("port", source, tmp_path / "new", *wrong)


def test_an_interrupted_command_says_that_it_continues(tmp_path, monkeypatch):
    source = checkpoint(tmp_path / "src", "olmo_hybrid")

    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run, "_put", stop)
        result = CliRunner().invoke(app, ["port", str(source), str(tmp_path / "out"), "--to", "jax"])
    assert result.exit_code == 130
    assert "continues" in result.stderr
    cli("port", source, tmp_path / "out", "--to", "jax")


def cli_port(tmp_path: Path, source: Path) -> Path:
    cli("port", source, tmp_path / "out", "--to", "nnx")
    return tmp_path / "out"
