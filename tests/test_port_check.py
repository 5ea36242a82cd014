"""``port --check``: every family against the original code, and planted faults that must be found."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoints import FAMILIES, facts, read_file, realistic, save, write_file
from typer.testing import CliRunner
from whole import ported

from portable_gdn.checkpoint import port
from portable_gdn.checkpoint.proof import check, prove
from portable_gdn.checkpoint.proof.prove import LIMIT, LOGITS_LIMIT, Report, _check_bytes, compare_ports
from portable_gdn.checkpoint.reader import Checkpoint
from portable_gdn.checkpoint.source import read
from portable_gdn.cli.main import app

pytest.importorskip("safetensors")


@pytest.fixture
def quick_compiler(monkeypatch):
    """Programs here run once or twice: less time for the compiler."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")


def made(folder: Path, name: str) -> Path:
    """A checkpoint ``src`` and its port ``out``."""
    folder.mkdir(exist_ok=True)
    source = save(folder / "src", realistic(name), facts(name)["config"])
    port(source, folder / "out", "nnx")
    return folder / "out"


def wide(folder: Path) -> Path:
    """Qwen3-Next with three value heads for a key head, wider than it; ``src`` and its port ``out``."""
    folder.mkdir()
    H, HV, K, V = 2, 6, 16, 24
    ends = {
        "in_proj_qkvz.weight": [2 * H * K + 2 * HV * V, 64], "in_proj_ba.weight": [2 * HV, 64],
        "conv1d.weight": [2 * H * K + HV * V, 1, 4], "out_proj.weight": [64, HV * V], "A_log": [HV], "dt_bias": [HV],
        "linear_attn.norm.weight": [V],
    }  # fmt: skip
    config = {**facts("qwen3_next")["config"], "linear_num_value_heads": HV, "linear_value_head_dim": V}
    port(save(folder / "src", realistic("qwen3_next", ends=ends), config), folder / "out", "nnx")
    return folder / "out"


def naive_split(x):
    """The rows of q, k, v, z taken one after the other, as if they were not interleaved by key head."""
    names = [f"{n}_proj.kernel" for n in "qkvg"]
    Hk, R, Dk, Dv = 2, 2, 16, 16
    q, k, v, z = (x[n].T.reshape(Hk, -1, 64) for n in names)
    rows = np.concatenate([q, k, v, z], axis=1).reshape(-1, 64)
    K, V = Hk * Dk, Hk * R * Dv
    for n, part in zip(names, np.split(rows, [K, 2 * K, 2 * K + V]), strict=True):
        x[n] = part.T.copy()


def tiled_heads(x):
    """Value heads as if head h read key head h % H."""
    for n, width in (("v_proj.kernel", 16), ("g_proj.kernel", 16), ("a_proj.kernel", 1), ("b_proj.kernel", 1)):
        x[n] = x[n].reshape(64, 2, 2, width).swapaxes(1, 2).reshape(64, -1).copy()


def one_more(x):
    x["o_norm.scale"] = x["o_norm.scale"] + 1


def taps_reversed(x):
    for n in "qkv":
        x[f"{n}_conv1d.kernel"] = x[f"{n}_conv1d.kernel"][::-1].copy()


def decay_cast(x):
    import ml_dtypes

    x["A_log"] = x["A_log"].astype(ml_dtypes.bfloat16).astype(np.float32)


FAULTS = {f.__name__: f for f in (naive_split, tiled_heads, one_more, taps_reversed, decay_cast)}


def halves(x):
    """Attention's query and gate as halves of the projection, not of each head's rows."""
    kernel = x["layers.3.attention.q_proj.kernel"]
    x["layers.3.attention.q_proj.kernel"] = kernel.reshape(64, 4, 2, 32).swapaxes(1, 2).reshape(64, -1).copy()


def norm_twice(x):
    x["layers.0.input_norm.scale"] = x["layers.0.input_norm.scale"] + 1


def narrow(x):
    """A_log in bfloat16, of values that do not show it."""
    import ml_dtypes

    x["layers.1.mixer.A_log"] = np.ones(4, ml_dtypes.bfloat16)


def up_for_gate(x):
    """Gate and up exchanged in dense layers and experts, as a table with two rows exchanged would do it."""
    for name in [name for name in x if "gate_proj" in name]:
        other = name.replace("gate_proj", "up_proj")
        x[name], x[other] = x[other].copy(), x[name].copy()


DECODED = ("qwen3_next", "qwen3_5", "kimi_linear", "olmo_hybrid")
"""Families of which transformers' whole model and ours are compared, by their names."""


def plant(out: Path, faulty: Path, change) -> Path:
    """A copy of a port with a fault in it."""
    import shutil

    shutil.copytree(out, faulty)
    path = faulty / "model-00001-of-00001.safetensors"
    x = {name: np.array(a) for name, a in read_file(path).items()}
    if change in FAULTS.values():
        start = "layers.1.mixer."
        layer = {name.removeprefix(start): a for name, a in x.items() if name.startswith(start)}
        change(layer)
        x.update({start + name: a for name, a in layer.items()})
    else:
        change(x)
    write_file(path, x)
    return faulty


def test_every_fault_shows_in_the_bytes(tmp_path):
    """Without the original code: what the way back would give differs from the source."""
    out = made(tmp_path, "qwen3_next")
    good = check(out, tmp_path / "elsewhere")  # no source: hashes are those that were written down
    assert good.wrong == []
    assert "no longer" in good.unrun
    assert not good.ok  # nothing was run
    for n, change in enumerate((*FAULTS.values(), halves, norm_twice, narrow)):
        report = check(plant(out, tmp_path / f"faulty{n}", change), tmp_path / "elsewhere")
        assert report.wrong, change.__name__
    assert any("A_log" in sentence for sentence in report.wrong)  # narrow


def test_another_source_is_noticed(tmp_path):
    out = made(tmp_path, "kimi_linear")
    x = realistic("kimi_linear")
    x["model.layers.2.self_attn.A_log"] = x["model.layers.2.self_attn.A_log"] + 1
    path = save(tmp_path / "other", x, {**facts("kimi_linear")["config"], "quantization_config": {}})
    report = Report(str(out), str(path))
    _check_bytes(report, out, path, lambda *a: None)
    assert report.wrong == ["model.layers.2.self_attn.A_log does not come back from the port as the source has it"]


def test_logits_alone_prove_no_layer():
    report = Report("port", "source", findings=[prove.Finding("xla", None, "logits", 0.0, "transformers")])
    assert not report.ok
    report.findings.append(prove.Finding("xla", 0, "output", 0.0, "transformers"))
    assert report.ok


@pytest.mark.slow
def test_every_family_agrees_with_the_original_and_faults_do_not(tmp_path, quick_compiler):
    """Layer outputs, states, decoding and logits, at least 130 tokens; r = 1, 2, 3, K and V different."""
    pytest.importorskip("transformers")
    pytest.importorskip("flax")
    jobs, faulty = [], {}
    for name in set(FAMILIES) - {"qwen3_5_moe_text", "qwen3_5_conditional"}:  # their layers are in others
        out = made(tmp_path / name, name)
        ports = [out]
        if name == "qwen3_next":
            faulty = {key: plant(out, tmp_path / key, change) for key, change in FAULTS.items()}
            ports += [*faulty.values(), plant(out, tmp_path / "exchanged", up_for_gate)]
        jobs.append((read(Checkpoint(tmp_path / name / "src")), ports))
    out = wide(tmp_path / "wide")
    jobs.append((read(Checkpoint(tmp_path / "wide" / "src")), [out]))
    (tmp_path / "lively").mkdir()  # weights so large that its states carry roundings on
    lively = ported(tmp_path / "lively", "qwen3_next")
    jobs.append((read(Checkpoint(lively.parent / "src")), [lively]))
    reasons: dict[str, str] = {}
    found = compare_ports(jobs, not_whole=reasons)
    for original, (out, *_) in jobs:
        findings = found[str(out)]
        assert all(f.ok for f in findings), findings
        layers = {f.layer for f in findings} - {None}
        assert layers == set(original.linear_layers)
        whole = [f for f in findings if f.what.startswith("our whole model")]
        assert len(findings) - len(whole) == 4 * len(layers) + (not original.family.name.startswith(("gated", "kda")))
        assert len(whole) == 2 * (original.family.name in DECODED)
        assert (str(out) in reasons) == (not whole)
        assert [f for f in findings if f.what != "logits" and not 10 * f.error < f.limit < 1e-2] == []
    # Bytes, mixers and the original with our mixers in it see nothing of rows that a table has exchanged.
    found_there = {f.what: f.ok for f in found[str(tmp_path / "exchanged")] if f.layer is None}
    assert found_there == {"logits": True, "our whole model": False, "our whole model, 20 steps": False}
    for key, path in faulty.items():
        by_layer = [f for f in found[str(path)] if f.layer == 1 and not f.ok]
        assert any(f.what == "output" and f.error > 10 * LIMIT for f in by_layer), key
        assert all(f.ok for f in found[str(path)] if f.layer in (0, 2))
        if key != "decay_cast":  # a cast decay may hide from logits: that is why bytes are compared
            assert any(f.what == "logits" and f.error > LOGITS_LIMIT for f in found[str(path)]), key


@pytest.mark.slow
def test_models_larger_than_memory_are_run_layer_by_layer(tmp_path, monkeypatch, quick_compiler):
    """One decoder layer at a time has its tensors; logits are compared, and a fault is found there too."""
    pytest.importorskip("transformers")
    pytest.importorskip("flax")
    monkeypatch.setattr(prove, "MEMORY", 0)
    jobs = []
    for name in ("qwen3_next", "kimi_linear", "lara_mini"):
        ports = [made(tmp_path / name, name)]
        if name == "qwen3_next":
            ports.append(plant(ports[0], tmp_path / "faulty", naive_split))
        jobs.append((read(Checkpoint(tmp_path / name / "src")), ports))
    found = compare_ports(jobs)
    for original, (out, *_) in jobs:
        assert all(f.ok for f in found[str(out)]), found[str(out)]
        assert len(found[str(out)]) == 4 * len(original.linear_layers) + 1 + 2 * (original.family.name in DECODED)
    assert {f.layer for f in found[str(tmp_path / "faulty")] if not f.ok} == {1, None}


@pytest.mark.slow
def test_the_command_with_a_kernel(tmp_path):
    """Our Pallas kernel, interpreted, in the place of xla; exit codes and JSON."""
    pytest.importorskip("transformers")
    pytest.importorskip("flax")
    out = made(tmp_path, "qwen3_5_text")
    done = CliRunner().invoke(app, ["port", "--check", str(out), "-b", "xla", "-b", "pallas-interpret", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["ok"]
    assert {f["backend"] for f in report["findings"]} == {"xla", "pallas-interpret"}
    assert set(report["tensors"].values()) == {"bytes", "bytes, and run"}
    assert all("linear_attn" not in n or how == "bytes, and run" for n, how in report["tensors"].items())
    faulty = plant(out, tmp_path / "faulty", norm_twice)
    shown = CliRunner().invoke(app, ["port", "--check", str(faulty), "--source", str(tmp_path / "nowhere")])
    assert shown.exit_code == 1
    assert "FAILS" in shown.stdout
