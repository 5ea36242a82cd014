"""The doctor finds each thing that hurts, and nothing in what is sound; states handed over between backends."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from conftest import make
from typer.testing import CliRunner

import portable_gdn as pg
from portable_gdn import dispatch
from portable_gdn.backends.numpy_oracle import Numpy
from portable_gdn.cli.main import app
from portable_gdn.harness import recordings
from portable_gdn.harness.cases import Case, build, designed
from portable_gdn.harness.compute import Settings, backend_for
from portable_gdn.harness.doctor import diagnose
from portable_gdn.harness.record import record
from portable_gdn.harness.tensor_file import TensorFile, TensorWriter
from portable_gdn.spec.errors import GdnError


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def written(path, x, prefix="", **metadata):
    with TensorWriter(path) as file:
        file.metadata = metadata
        for name, a in x.items():
            file.add(prefix + name, a)
    return path


def sound():
    x = make("GDN", T=80, state=True)
    x["q"] = x["q"] / np.linalg.norm(x["q"], axis=-1, keepdims=True)
    return x


def spoiled(name, where, value):
    x = sound()
    x[name] = np.array(x[name])
    x[name][where] = value
    return x


SICK = {
    "NaN": (spoiled("v", (1, 7, 2, 3), np.nan), "error", "v holds 1 values that are not finite, first at row 1"),
    "positive gates": (spoiled("g", (0, 5, 1), 0.5), "error", "g is positive 1 times, up to 0.5, first at row 0"),
    "decays for gates": ({**sound(), "g": np.exp(sound()["g"])}, "error", "g is positive"),
    "long keys": ({**sound(), "k": 9 * sound()["k"]}, "warning", "rows of k are 9 to 9 long"),
    "divergence": ({**sound(), "k": 2 * sound()["k"]}, "error", "beta |k|^2 is up to"),
    "dead state": (spoiled("g", np.s_[:, :, 3], -30.0), "warning", "heads 3 forget by more than e^-10 a token"),
    "long falls": (spoiled("g", np.s_[:, :, 3], -30.0), "warning", "within 64 tokens"),
    "resets": (spoiled("g", (0, 5, 1), -np.inf), "note", "1 gates are below -104, hard resets"),
    "raw beta": (spoiled("beta", (0, 5, 1), -3.0), "warning", "beta is negative 1 times"),
    "beta above 2": (spoiled("beta", (0, 5, 1), 3.0), "warning", "beta reaches 3"),
    "bf16 A_log": ({**sound(), "A_log": np.zeros(4, ml_dtypes.bfloat16)}, "warning", "A_log is bfloat16"),
    "huge A_log": ({**sound(), "A_log": np.full(4, 12, np.float32)}, "warning", "A_log reaches 12.0"),
    "loud queries": ({**sound(), "q": 500 * sound()["q"]}, "note", "rows of q are up to 5e+02 long"),
    "float16": (
        {n: a.astype(np.float16) if n in "qkv" else 3e4 * a if n == "initial_state" else a for n, a in sound().items()},
        "error", "float16 operands beside values",
    ),
}  # fmt: skip


def test_what_is_sound_is_left_alone(tmp_path):
    path = written(tmp_path / "sound.safetensors", sound())
    assert diagnose(path) == (["sound"], [])
    found = run("doctor", path)
    assert found.exit_code == 0
    assert "1 call examined: nothing will hurt" in found.stdout


@pytest.mark.parametrize("variant", ["DeltaNet", "GLA", "GDN-2"])
def test_gates_that_a_variant_has_not_are_not_missed(tmp_path, variant):
    x = make(variant, T=80)
    x["q"] = x["q"] / np.linalg.norm(x["q"], axis=-1, keepdims=True)
    assert diagnose(written(tmp_path / "sound.safetensors", x)) == (["sound"], [])
    x["k"] = np.full_like(x["k"], np.nan)
    (finding,) = diagnose(written(tmp_path / "sick.safetensors", x))[1]
    assert finding.what.startswith(f"k holds {x['k'].size} values that are not finite")


@pytest.mark.parametrize("name", SICK)
def test_what_hurts_is_told(tmp_path, name):
    x, severity, words = SICK[name]
    path = written(tmp_path / "sick.safetensors", x, prefix="layer.3.")
    found = run("doctor", path, "--json")
    report = json.loads(found.stdout)
    told = [f for f in report["findings"] if words in f["what"]]
    assert told, report["findings"]
    assert told[0]["severity"] == severity
    assert told[0]["call"] == "layer.3"
    assert found.exit_code == (1 if any(f["severity"] == "error" for f in report["findings"]) else 0)


def test_short_rows_under_a_norm(tmp_path):
    x = spoiled("k", (0, 3, 1), 1e-5)
    path = written(tmp_path / "short.safetensors", x, qk_l2norm="true")
    (finding,) = diagnose(path)[1]
    assert "1 rows of k are shorter than 0.01" in finding.what


def test_recordings_of_runs_and_of_layers(tmp_path):
    path = tmp_path / "run.safetensors"
    cases = [
        c for c in designed() if c.name in ("one key, beta 1.998", "step", "left padding", "mixer", "gates one -inf")
    ]
    record(path, backend_for("numpy", Settings()), "standard", cases, Settings())
    names, found = diagnose(path)
    assert set(names) == {c.name for c in cases} - {"mixer"}  # whose operands lie behind a convolution
    assert {(f.call, f.severity) for f in found} == {("one key, beta 1.998", "note"), ("gates one -inf", "note")}
    for layer in recordings.bundled():
        assert not [f for f in diagnose(layer)[1] if f.severity != "note"]


def test_what_the_doctor_cannot_read(tmp_path):
    good = make("GDN")
    for name, x, words in (
        ("none", {"a": good["q"]}, "holds no q, k and v"),
        ("shapes", {**good, "v": good["v"][:, :3]}, "q, k and v have shapes"),
    ):
        path = written(tmp_path / f"{name}.safetensors", x)
        with pytest.raises(GdnError, match=words):
            CliRunner().invoke(app, ["doctor", str(path)], catch_exceptions=False)


def swapped(x, *names):
    return {n: np.ascontiguousarray(np.swapaxes(a, 1, 2)) if n in names else a for n, a in x.items()}


def gdn2():
    x = make("GDN-2", T=80)
    x["q"] = x["q"] / np.linalg.norm(x["q"], axis=-1, keepdims=True)
    return x


#: What does not fit: (operands, words of what is found, words of the guess).
UNFIT = {
    "beta by key heads": ({**sound(), "beta": sound()["beta"][:, :, :2]}, "beta is of shape [2, 80, 2]", "key head"),
    "g of 3 heads": ({**sound(), "g": sound()["g"][:, :, :3]}, "g is of shape [2, 80, 3]", ""),
    "g of other tokens": ({**sound(), "g": sound()["g"][:, :7]}, "g is of shape [2, 7, 4]", ""),
    "g of one row": ({**sound(), "g": sound()["g"][0]}, "g is of shape [80, 4]", ""),
    "g of 5 groups": ({**sound(), "g": np.zeros((2, 80, 4, 5), np.float32)}, "g is of 5 decays a head", ""),
    "beta with heads first": (swapped(sound(), "beta"), "beta is of shape [2, 4, 80]", "[B, HV, T]"),
    "integers": ({**sound(), "beta": np.ones((2, 80, 4), np.int32)}, "beta is of dtype int32", ""),
    "k of another dtype": ({**sound(), "k": sound()["k"].astype(np.float16)}, "k is of dtype float16", ""),
    "a state": ({**sound(), "initial_state": sound()["initial_state"][:, :, :3]}, "initial_state is of shape", ""),
    "A_log": ({**sound(), "A_log": np.zeros(3, np.float32)}, "A_log is of shape [3]", ""),
    "dt_bias": ({**sound(), "dt_bias": np.zeros(3, np.float32)}, "dt_bias is of shape [3]", ""),
    "erase": ({**gdn2(), "erase": gdn2()["erase"][..., :5]}, "erase is of shape [2, 80, 4, 5]", ""),
    "write": ({**gdn2(), "write": gdn2()["write"][:, :, :2]}, "write is of shape [2, 80, 2, 24]", "each key head"),
    "beta beside erase": ({**gdn2(), "beta": sound()["beta"]}, "beta and erase are both given", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", UNFIT)
def test_what_does_not_fit_is_told_and_the_rest_examined(tmp_path, name):
    x, words, guess = UNFIT[name]
    x = {**x, "v": np.array(x["v"])}
    x["v"][0, 3, 1, 2] = np.nan
    report = run("doctor", written(tmp_path / "unfit.safetensors", x), "--json")
    assert report.exit_code == 1, report.output
    first, *others = json.loads(report.stdout)["findings"]
    assert words in first["what"]
    assert first["why"].startswith("the call will be refused")
    assert guess in first["why"]
    assert any(found["what"].startswith("v holds 1 values") for found in others)


def test_each_operand_that_does_not_fit_is_told(tmp_path):
    x = {**sound(), "beta": sound()["beta"][:, :, :2], "g": sound()["g"][:, :, :3]}
    x["initial_state"] = x["initial_state"][..., :7]
    found = diagnose(written(tmp_path / "unfit.safetensors", x))[1]
    assert {f.what.split()[0] for f in found if f.severity == "error"} == {"beta", "g", "initial_state"}


def test_heads_before_tokens_are_guessed(tmp_path):
    x = sound()
    for names, words in (
        (("q", "k", "v", "g", "beta"), "q, k and v have shapes"),
        (("q", "k", "v"), "q, k and v have"),
    ):
        with pytest.raises(GdnError, match=rf"{words} .* look like \[B, H, T, K\], heads before tokens"):
            diagnose(written(tmp_path / "swapped.safetensors", swapped(x, *names)))
    same = make("GDN", T=80, H=4, HV=4)  # where q, k and v alone fit in either order
    (finding, *_) = diagnose(written(tmp_path / "swapped.safetensors", swapped(same, "q", "k", "v")))[1]
    assert "heads before tokens" in finding.why
    many = make("GDN", T=512, H=4, HV=4)
    found = diagnose(written(tmp_path / "all.safetensors", swapped(many, "q", "k", "v", "g", "beta")))[1]
    assert any(f.what == "there are 512 heads and 4 tokens" and f.severity == "note" for f in found)


def test_one_call_that_does_not_fit_hides_no_other(tmp_path):
    good, bad, sick = sound(), {**sound(), "v": sound()["v"][:, :3]}, spoiled("g", (0, 5, 1), 0.5)
    x = {f"{i}.{n}": a for i, call in enumerate((good, bad, sick)) for n, a in call.items()}
    names, found = diagnose(written(tmp_path / "three.safetensors", x))
    assert names == ["0", "2"]
    assert [(f.call, f.severity) for f in found] == [("1", "error"), ("2", "error")]
    assert found[0].what.startswith("q, k and v have shapes")


@pytest.mark.parametrize("layout", ["right padding", "left padding", "holes"])
def test_what_padding_holds_does_not_matter(tmp_path, layout):
    path = tmp_path / "run.safetensors"
    case = Case("padded", "GDN-2", T=65, B=2, layout=layout)
    assert all(np.isnan(build(case).operands[name]).any() for name in ("q", "g", "erase", "write"))
    record(path, backend_for("numpy", Settings()), "quick", [case], Settings())
    assert diagnose(path) == (["padded"], [])


@pytest.mark.parametrize("stored", [False, True])
def test_a_recording_that_was_changed_is_told(tmp_path, stored):
    path = tmp_path / "run.safetensors"
    cases = [c for c in designed() if c.name in ("one token", "a chunk", "KDA")]
    record(path, backend_for("numpy", Settings()), "quick", cases, Settings(), store_inputs=stored)
    data = bytearray(path.read_bytes())
    data[-3] ^= 1  # of the last tensor
    path.write_bytes(data)
    found = run("doctor", path, "--json")
    assert found.exit_code == 1
    report = json.loads(found.stdout)
    (finding,) = [f for f in report["findings"] if "hash that was recorded" in f["what"]]
    assert finding["call"] == "KDA"
    assert report["calls"] == ["one token", "a chunk"]


# handing states over


class Transposing(Numpy):
    """Takes every state for one in the other layout: what K = V would hide."""

    name = "under test"
    auto = False

    def run(self, problem):
        s, x = problem
        if s.has("initial_state"):
            swapped = np.swapaxes(x["initial_state"], -1, -2).reshape(x["initial_state"].shape)
            problem = problem._replace(operands={**x, "initial_state": swapped})
        return super().run(problem)


class ForgetsTheConvolution(Numpy):
    name = "under test"
    auto = False

    def run(self, problem):
        x = dict(problem.operands)
        if "conv_state" in x:
            x["conv_state"] = np.zeros_like(x["conv_state"])
        return super().run(problem._replace(operands=x))


@pytest.fixture
def under_test():
    yield pg.register_backend
    dispatch.unregister_backend("under test")


def test_states_pass_from_one_backend_to_another_in_the_other_layout():
    other = "torch" if not dispatch.get("torch").unavailable() else "xla"
    found = run("handover", "-b", "numpy", "-b", other, "--json")
    assert found.exit_code == 0, found.output
    report = json.loads(found.stdout)
    assert report["ok"]
    assert not report["refused"]
    assert {row["tensor"] for row in report["results"]} == {"o", "state", "conv_state"}
    assert {row["layouts"] for row in report["results"] if row["tensor"] == "state"} == {"kv to vk", "vk to kv"}


def test_states_pass_by_a_file(tmp_path):
    path = tmp_path / "states.safetensors"
    found = run("handover", "-b", "numpy", "-o", path)
    assert found.exit_code == 0, found.output
    assert "states of 5 sequences, cut at token 90" in " ".join(found.stdout.split())
    found = run("handover", path, "-b", "numpy")
    assert found.exit_code == 0, found.output
    assert "holds: 5 sequences from numpy to numpy" in found.stdout

    source = TensorFile(path)
    other_inputs, no_recipe = json.loads(source.metadata["cases"]), json.loads(source.metadata["cases"])
    other_inputs[1]["inputs"] = "0" * 64
    del no_recipe[1]["recipe"]["name"]
    for change, cases, words in (
        (1, None, "'KDA' do not have the hash"),
        (0, other_inputs, r"builds other inputs for case 'DeltaNet, states \[V, K\]'; begin again"),
        (0, no_recipe, "the metadata are not valid"),
    ):
        damaged = tmp_path / "damaged.safetensors"
        with TensorWriter(damaged) as out:
            out.metadata = source.metadata | ({} if cases is None else {"cases": json.dumps(cases)})
            for name in source.shapes:
                out.add(name, source.read(name) + np.float32(change * (name == "2/state")))
        with pytest.raises(GdnError, match=words):
            CliRunner().invoke(app, ["handover", str(damaged), "-b", "numpy"], catch_exceptions=False)
    with pytest.raises(GdnError, match="metadata format is 'portable-gdn-activations'"):
        CliRunner().invoke(app, ["handover", str(recordings.bundled()[0]), "-b", "numpy"], catch_exceptions=False)


class Refuses(Numpy):
    name = "under test"
    auto = False

    def run(self, problem):
        raise GdnError("v is too much; it must be less.")


@pytest.mark.parametrize("names", [("under test", "numpy"), ("numpy", "under test")])
def test_what_either_side_refuses_is_said_and_no_pass(under_test, names):
    under_test(Refuses())
    found = run("handover", "-b", names[0], "-b", names[1], "--case", "KDA", "--json")
    assert found.exit_code == 1
    assert json.loads(found.stdout) == {
        "ok": False, "results": [], "refused": {"KDA": "v is too much; it must be less."}, "failed": {},
    }  # fmt: skip


class ForgetsDrafts(Numpy):
    """Commits none of the tokens that waited."""

    name = "under test"
    auto = False

    def update(self, problem):
        name = "batch.num_accepted_tokens"
        return super().update(problem._replace(operands={**problem.operands, name: 0 * problem.operands[name]}))


@pytest.mark.parametrize(
    ("fault", "case"), [(Transposing, "KDA"), (ForgetsTheConvolution, "mixer"), (ForgetsDrafts, "live")]
)
def test_a_state_taken_wrongly_is_found(under_test, fault, case):
    under_test(fault())
    found = run("handover", "-b", "numpy", "-b", "under test", "--case", case)
    assert found.exit_code == 1
    assert "FAILS" in found.stdout


def test_handover_refuses(tmp_path):
    for arguments, words in (
        (("-b", "numpy"), "--backend is given once; it must be given twice here"),
        (("-b", "numpy", "-b", "numpy", "--case", "nonesuch"), "--case is 'nonesuch'"),
        (("-b", "numpy", "-o", str(tmp_path / "no" / "x")), "--output is in"),
    ):
        with pytest.raises(GdnError, match=words):
            CliRunner().invoke(app, ["handover", *arguments], catch_exceptions=False)
