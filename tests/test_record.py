"""Recordings: record here, replay there; what a file must be, and what becomes of one that is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from typer.testing import CliRunner

import portable_gdn as pg
from portable_gdn import dispatch
from portable_gdn.backends.numpy_oracle import Numpy
from portable_gdn.cli.main import app
from portable_gdn.harness import compute, environment, randoms
from portable_gdn.harness.cases import Case, build, cases_named, designed
from portable_gdn.harness.compare import compare
from portable_gdn.harness.compute import Settings, backend_for
from portable_gdn.harness.record import record
from portable_gdn.harness.report.page import page
from portable_gdn.harness.run_file import RunFile, inputs_digest
from portable_gdn.harness.statistics import statistics
from portable_gdn.harness.suites import SUITES, suite
from portable_gdn.harness.tensor_file import TensorFile, TensorWriter
from portable_gdn.harness.truth import Truth
from portable_gdn.spec.errors import GdnError
from portable_gdn.spec.evaluate import chunk_by_chunk
from portable_gdn.spec.precision import Rounding

COMMITTED = Path(__file__).parent / "recordings" / "run-1.safetensors"


class Sound(Numpy):
    """The stages in float64, under another name."""

    name = "under test"
    auto = False
    rule = staticmethod(chunk_by_chunk(64))


class Changed(Sound):
    """The sound one, with a change to its results."""

    def __init__(self, change):
        self.change = change

    def gradients(self, problem, cotangents):
        result, grads = super().gradients(problem, cotangents)
        return self.change(result, grads, problem.signature)


@pytest.fixture
def under_test():
    yield pg.register_backend
    dispatch.unregister_backend("under test")


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """Four cases by the oracle."""
    path = tmp_path_factory.mktemp("recordings") / "numpy.safetensors"
    names = ("one token", "five tokens", "packed with empties", "mixer", "left padding")
    record(path, backend_for("numpy", Settings()), "standard", cases_named(names), Settings())
    return path


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def refused(*arguments):
    """The sentence with which a command ends."""
    with pytest.raises(GdnError) as caught:
        CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    return str(caught.value)


# record and compare


def test_a_run_recorded_here_is_equal_there(recording, under_test):
    under_test(Sound())
    found = run("compare", recording, "-b", "under test", "--json")
    assert found.exit_code == 0, found.output
    report = json.loads(found.stdout)
    assert report["equal"]
    assert len(report["cases"]) == 5
    tensors = {t["tensor"] for case in report["cases"] for t in case["tensors"]}
    assert tensors >= {"o", "state", "conv_state", "grad_q", "grad_k", "grad_v", "grad_g", "grad_beta", "grad_qkv"}
    assert all("computed: declared roundings float32, chunks of 64" in b for c in report["cases"] for b in c["budgets"])


@pytest.mark.slow
@pytest.mark.skipif(
    any(dispatch.get(b).unavailable() for b in ("fla-interpret", "pallas-interpret")), reason="needs fla and jax"
)
def test_fla_recorded_is_equal_to_pallas(tmp_path):
    """The kernels of a GPU and of a TPU, both interpreted: what two machines would do."""
    path = tmp_path / "gpu.safetensors"
    found = run("record", "-b", "fla-interpret", "--suite", "quick", "--case", "DeltaNet", "-o", path, "--json")
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["done"] == 1
    found = run("compare", path, "-b", "pallas-interpret")
    assert found.exit_code == 0, found.output
    assert "Equal: fla-interpret (recorded) and pallas-interpret (here) agree" in " ".join(found.stdout.split())
    file = RunFile(path)
    facts = file.environment  # of the process that computed, not of this one
    assert facts["switches"]["TRITON_INTERPRET"] == "1"
    assert "fla hands over to" in facts
    served = file.outcome(file.cases[0]).served
    assert any(line.startswith("fla: ") and "(B" in line and "num_warps=" in line for line in served), served


FAULTS = {
    "one head of o": lambda r, g, s: (r._replace(o=np.concatenate([r.o[:, :, :1] * 1.01, r.o[:, :, 1:]], 2)), g),
    "the state transposed": lambda r, g, s: (
        r._replace(state=np.swapaxes(r.state, -1, -2).reshape(r.state.shape)),
        g,
    ),
    "a gradient missing": lambda r, g, s: (r, {n: a for n, a in g.items() if n != "k"}),
    "dg negative": lambda r, g, s: (r, {n: -a if n == "g" else a for n, a in g.items()}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_side_that_differs_is_found(recording, under_test, fault):
    under_test(Changed(FAULTS[fault]))
    found = run("compare", recording, "-b", "under test", "--case", "five tokens", "--json")
    report = json.loads(found.stdout)
    assert found.exit_code == 1
    assert "Not equal: numpy (recorded) and under test (here): 1 of 1 case differ" in report["sentence"]
    wrong = [t for t in report["cases"][0]["tensors"] if not (t["ok"] and t["a"]["ok"] and t["b"]["ok"])]
    assert len(wrong) == 1
    assert wrong[0]["a"]["ok"]  # the recorded side holds
    assert not wrong[0]["b"]["ok"]


def test_the_table_says_where(recording, under_test):
    under_test(Changed(FAULTS["one head of o"]))
    found = run("compare", recording, "-b", "under test", "--case", "five tokens")
    assert found.exit_code == 1
    text = " ".join(found.stdout.split())
    assert "DIFFERS: five tokens: o" in text
    assert "record with --stages" in text


def test_a_backend_that_breaks_is_no_pass(recording, under_test):
    def broken(*_):
        raise RuntimeError("out of memory")

    under_test(Changed(broken))
    found = run("compare", recording, "-b", "under test", "--case", "one token", "--json")
    assert found.exit_code == 1
    assert "RuntimeError: out of memory" in json.loads(found.stdout)["failed"]["one token"]


def test_dtypes_of_the_sides_may_differ(tmp_path, under_test):
    """float32 here, bfloat16 there: what the cast moves in the exact result is allowed, and no more."""
    cases = [Case("GDN", T=65, HV=4)]
    path = tmp_path / "wide.safetensors"
    record(path, backend_for("numpy", Settings()), "quick", cases, Settings())
    under_test(Sound())
    found = compare(RunFile(path), dispatch.get("under test"), Settings(dtype="bfloat16"))
    assert found.equal, found.sentence()
    row = next(t for t in found.cases[0].tensors if t.tensor == "o")
    assert row.b.expected > 1e-3 > row.a.expected
    under_test(Changed(FAULTS["dg negative"]))
    assert not compare(RunFile(path), dispatch.get("under test"), Settings(dtype="bfloat16")).equal


def test_ill_conditioned_cases_are_shown_and_not_judged(tmp_path, under_test):
    class Coarse(Sound):
        def rounding(self, signature):
            return Rounding(dict.fromkeys(("q", "k", "T", "R"), "bfloat16"))

    case = next(c for c in designed() if c.name == "one key, beta 1.998")
    path = tmp_path / "ill.safetensors"
    under_test(Coarse())
    record(path, Coarse(), "standard", [case], Settings())
    found = compare(RunFile(path), Coarse(), Settings())
    assert any(not t.judged for t in found.cases[0].tensors)


def test_where_all_is_ill_conditioned_nothing_passes(tmp_path, under_test):
    class Coarsest(Sound):
        def rounding(self, signature):
            return Rounding(dict.fromkeys(("q", "k", "T", "R", "S", "W", "Aqk"), "bfloat16"))

    path = tmp_path / "ill.safetensors"
    under_test(Coarsest())
    case = next(c for c in designed() if c.name == "one key, beta 1.998")
    record(path, Coarsest(), "standard", [case], Settings())
    found = compare(RunFile(path), Coarsest(), Settings())
    assert not found.equal
    assert found.sentence().startswith("Nothing could be judged of under test (recorded) and under test (here)")


def test_calls_without_tokens_compare_and_have_a_page(tmp_path, under_test):
    path = tmp_path / "none.safetensors"
    under_test(Sound())
    cases = [*cases_named(["no tokens"]), Case("no rows", B=0)]
    record(path, Sound(), "standard", cases, Settings(stages=True))
    found = compare(RunFile(path), Sound(), Settings())
    assert found.equal
    assert [len(case.tensors) for case in found.cases] == [8, 8]
    assert "no rows" in page(found)


# a process of the backend's own


def test_a_backend_with_a_process_of_its_own_records_and_compares_the_same(tmp_path, monkeypatch):
    """Arrays, stages, stored inputs and the environment pass between the two processes as they are."""
    numpy = dispatch.get("numpy")
    settings, cases = Settings(stages=True), cases_named(("one token", "five tokens"))
    here, there = tmp_path / "here.safetensors", tmp_path / "there.safetensors"
    record(here, numpy, "standard", cases, settings)
    monkeypatch.setattr(type(numpy), "own_process", True, raising=False)
    done = record(there, numpy, "standard", cases, settings, store_inputs=True)
    assert done.done == 2
    a, b = RunFile(here), RunFile(there)
    for case in cases:
        x, y = a.outcome(case), b.outcome(case)
        assert {n: t.tobytes() for n, t in x.tensors.items()} == {n: t.tobytes() for n, t in y.tensors.items()}
        for stage, parts in x.stages.items():
            assert all(np.array_equal(p, q) for p, q in zip(parts, y.stages[stage], strict=True))
    assert a.environment == b.environment
    found = compare(b, numpy, Settings())  # the child reads the inputs from the file
    assert found.equal, found.sentence()
    assert found.cases[0].errors


def test_a_process_that_ends_fails_its_cases(tmp_path, under_test):
    class Apart(Sound):
        own_process = True  # whose child does not know it, since it is registered here alone

    under_test(Apart())
    path = tmp_path / "x.safetensors"
    found = run("record", "-b", "under test", "--suite", "quick", "--case", "one token", "-o", path, "--json")
    assert found.exit_code == 1
    assert "its process ended with exit code 1: " in json.loads(found.stdout)["failed"]["one token"]
    found = run("compare", path, "-b", "numpy", "--json")
    assert found.exit_code == 1
    assert json.loads(found.stdout)["failed"]


# the file


def test_a_file_committed_long_ago_is_still_read(under_test):
    """Format version 1. The file never changes; what reads it must."""
    file = RunFile(COMMITTED)
    file.check()
    assert [case.name for case in file.cases] == ["one token", "five tokens"]
    assert file.settings.stages
    outcome = file.outcome(file.cases[1])
    assert set(outcome.stages) == {"decay", "scores", "inverse", "wy", "state", "delta", "output"}
    assert outcome.tensors["o"].dtype == ml_dtypes.bfloat16
    under_test(Sound())
    found = compare(file, Sound(), Settings())
    assert found.equal, found.sentence()


def test_inputs_are_the_same_to_the_bit_on_every_machine():
    """No hash ever changes: recordings hold them."""
    cases = {case.name: inputs_digest(build(case)) for case in cases_named(HASHES)}
    assert cases == HASHES


HASHES = {
    "a chunk and a token": "dddd398e5f66ceec5f829efc42541375d95058d86c025110205fb061116bb21b",
    "KDA": "2e5b896d58ad8a98ae295b6b4334f97b553d255256aa100bf8eb33b0f8e2b48f",
    "bfloat16, 64 x 96": "fd9d8494ad3c1627782d7eed6e4a5f8586806d7572c7b09b4c889ac3002d70a3",
    "gates many resets": "16b516acac0674c1a810d0266444e442c38231c9ce033236ec2a6a3add7c27e7",
    "one key, beta 1.998": "1da79933ce545fa39014dd14abb86bb9980a6d99aab3a6adc654e5eab69b888e",
    "softplus gate, KDA": "7c9cc557503f92a0ed82e93903e898d5e0bbb7a578fe2e78e10b0b34deb5e2c3",
    "mixer": "f89ab05f7d215a7c642b673f8ad50559c0563b14f134c338e089b4fcac6fb8be",
}


def test_logarithm_and_cosine_are_right():
    u = np.concatenate([randoms.uniform(0, "u", (10000,)), [2.0**-53, 0.5, 1 - 2.0**-53, 0.25, 0.75, 0.125, 0.375]])
    assert np.abs(randoms.log(u) - np.log(u)).max() <= 4e-16 * np.abs(np.log(u)).max()
    assert np.abs(randoms._cosine_of_turns(u) - np.cos(2 * np.pi * u)).max() <= 1e-15


def test_stored_inputs_need_no_recipe(tmp_path, under_test):
    under_test(Sound())
    path = tmp_path / "stored.safetensors"
    cases = cases_named(("mixer", "softplus gate"))
    record(path, backend_for("numpy", Settings()), "standard", cases, Settings(), store_inputs=True)
    file = RunFile(path)
    for case in cases:
        built, read = build(case), file.inputs(case)
        assert read.options == built.options
        assert {n: a.tobytes() for n, a in read.operands.items()} == {n: a.tobytes() for n, a in built.operands.items()}
    with pytest.raises(GdnError, match="suite 'standard'"):
        RunFile(edited(path, tmp_path, suite=json.dumps({"name": "standard", "version": "0"})))
    assert compare(file, Sound(), Settings()).equal


def edited(path, folder, tensors=None, **metadata):
    """A copy of a recording with other metadata, or other tensors."""
    source, target = TensorFile(path), folder / "edited.safetensors"
    with TensorWriter(target) as out:
        out.metadata = {**source.metadata, **metadata}
        for name in source.shapes:
            out.add(name, (tensors or {}).get(name, lambda a: a)(source.read(name)))
    return target


def spoil(value):
    def change(a):
        a.ravel()[0] = value
        return a

    return change


def test_what_is_no_recording_is_refused_in_a_sentence(recording, tmp_path, under_test):
    under_test(Sound())
    whole = recording.read_bytes()
    file = RunFile(recording)
    cases = json.loads(TensorFile(recording).metadata["cases"])
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(whole[:-100])
    head = tmp_path / "head.safetensors"
    head.write_bytes(whole[:50])

    def check(path, *words):
        said = refused("compare", path, "-b", "under test")
        for word in words:
            assert word in said
        assert str(path) in said

    check(tmp_path / "missing.safetensors", "cannot be read")
    check(cut, "cut short")
    check(head, "cut short in its header")
    check(edited(recording, tmp_path, format="something"), "metadata format is 'something'")
    check(edited(recording, tmp_path, version="2"), "format version '2'", "this portable-gdn reads '1'")
    check(
        edited(recording, tmp_path, suite='{"name": "huge", "version": "1"}'), "suite 'huge'", "knows quick, standard"
    )
    check(edited(recording, tmp_path, cases="[{]"), "metadata are not valid")
    cases[0]["recipe"]["colour"] = "red"
    check(edited(recording, tmp_path, cases=json.dumps(cases)), "not as this portable-gdn knows them", "colour")
    del cases[0]["recipe"]["colour"]
    check(edited(recording, tmp_path, {"1/o": spoil(3)}), "'five tokens' do not have the hash")
    other = json.loads(json.dumps(cases))
    other[1]["inputs"] = "0" * 64
    check(edited(recording, tmp_path, cases=json.dumps(other)), "builds other inputs for case 'five tokens'")
    other = json.loads(json.dumps(cases))
    other[1]["tensors"].append("grad_z")
    check(edited(recording, tmp_path, cases=json.dumps(other)), "tensor grad_z of case 'five tokens' is missing")
    assert file.cases


def test_a_recording_with_nan_is_refused(tmp_path, under_test):
    def broken(result, grads, s):
        return result._replace(o=result.o * np.asarray(np.nan, result.o.dtype)), grads

    under_test(Changed(broken))
    path = tmp_path / "nan.safetensors"
    found = run("record", "-b", "under test", "--suite", "quick", "--case", "one token", "-o", path)
    assert found.exit_code == 1
    assert "values that are not finite" in " ".join(found.stdout.split())
    assert "o of case 'one token' holds values that are not finite" in refused("compare", path, "-b", "numpy")


def test_a_variant_that_the_other_lacks(tmp_path, under_test):
    class Lacks(Sound):
        def refuses(self, s):
            return "it has no KDA, and this is KDA" if s.variant.name == "KDA" else None

    under_test(Lacks())
    path = tmp_path / "kda.safetensors"
    run("record", "-b", "numpy", "--suite", "quick", "--case", "KDA", "-o", path)
    said = refused("compare", path, "-b", "under test")
    assert "'under test' computes none of the 1 cases" in said
    assert "no KDA" in said
    both = tmp_path / "both.safetensors"
    record(both, backend_for("numpy", Settings()), "quick", cases_named(("one token", "KDA")), Settings())
    found = run("compare", both, "-b", "under test")  # what both have is compared, the rest is named
    assert found.exit_code == 0
    assert "1 case was not compared" in " ".join(found.stdout.split())


def test_two_recordings(recording, tmp_path, under_test):
    """Both machines recorded, a third compares."""
    under_test(Sound())
    path = tmp_path / "other.safetensors"
    run("record", "-b", "under test", "--case", "token", "-o", path)
    found = run("compare", recording, path, "--json")
    assert found.exit_code == 0, found.output
    report = json.loads(found.stdout)
    assert {case["case"] for case in report["cases"]} == {"one token", "five tokens"}
    assert "it holds no such case" in report["not_compared"]["mixer"]
    assert run("compare", path, path, "--case", "one").exit_code == 0
    assert "give either --backend or a second recording" in refused("compare", path)
    assert "give either --backend or a second recording" in refused("compare", path, path, "-b", "numpy")
    assert "as they were recorded" in refused("compare", path, path, "--precision", "fast")
    other = tmp_path / "third.safetensors"
    run("record", "-b", "under test", "--suite", "quick", "--case", "KDA", "-o", other)
    assert "computes none of the" in refused("compare", recording, other)


def test_what_a_library_is_known_to_get_wrong_travels_with_the_recording(tmp_path, under_test, monkeypatch):
    """The machine that compares need not have that library, nor that version of it."""
    known = {("under test", "five tokens"): "library 1.0 rounds twice there: error 0.2"}
    monkeypatch.setattr(compute, "library_fault", lambda backend, case: known.get((backend, case), ""))
    under_test(Changed(FAULTS["dg negative"]))
    path = tmp_path / "known.safetensors"
    run("record", "-b", "under test", "--case", "tokens", "-o", path)
    dispatch.unregister_backend("under test")
    found = run("compare", path, "-b", "numpy", "--case", "five tokens", "--json")
    assert found.exit_code == 0, found.output
    (case,) = json.loads(found.stdout)["cases"]
    row = next(t for t in case["tensors"] if t["tensor"] == "grad_g")
    assert not row["judged"]
    assert "library 1.0 rounds twice" in row["note"]


def test_what_served_a_case_travels_with_the_recording(tmp_path, under_test):
    """Into the file, the comparison and the page; what was recorded before there was such a thing tells nothing."""

    class Tells(Sound):
        @contextmanager
        def serving(self):
            found = []
            yield found
            found.append("a library: a_kernel (BT=64 num_warps=4)")

    under_test(Tells())
    path = tmp_path / "run.safetensors"
    record(path, backend_for("under test", Settings()), "quick", cases_named(["one token", "step"]), Settings())
    found = compare(RunFile(path), backend_for("numpy", Settings()), Settings())
    assert [case.served for case in found.cases] == 2 * [(("a library: a_kernel (BT=64 num_warps=4)",), ())]
    assert '<code>a library: a_kernel (BT=64 num_warps=4)</code> <span class="soft">in 2 cases' in page(found)
    old = RunFile(COMMITTED)
    assert {old.outcome(case).served for case in old.cases} == {()}
    assert "What served the calls" not in page(compare(old, backend_for("numpy", Settings()), Settings()))


def test_a_comparison_of_nothing_is_no_pass(tmp_path):
    class Refuses(Sound):
        def refuses(self, s):
            return "it is Sunday"

    path = tmp_path / "nothing.safetensors"
    pg.register_backend(Refuses())
    try:
        found = run("record", "-b", "under test", "--suite", "quick", "--case", "one token", "-o", path)
    finally:
        dispatch.unregister_backend("under test")
    assert found.exit_code == 1
    found = run("compare", path, "-b", "numpy")
    assert found.exit_code == 1
    assert "Nothing could be compared" in " ".join(found.stdout.split())
    path = edited(path, tmp_path, cases="[]")
    assert "the recording holds no cases" in refused("compare", path, "-b", "numpy")


def test_bad_arguments(tmp_path, recording, under_test):
    class Away(Sound):
        def unavailable(self):
            return "it needs a device of cheese."

    under_test(Away())
    out = tmp_path / "out.safetensors"
    for words, arguments in {
        "--suite is 'huge'; it must be one of quick, standard, full": (
            "record",
            "-b",
            "numpy",
            "--suite",
            "huge",
            "-o",
            out,
        ),
        "backend 'under test' cannot run here: it needs a device of cheese.": ("record", "-b", "under test", "-o", out),
        "backend is 'nonesuch'": ("record", "-b", "nonesuch", "-o", out),
        "--case is 'nonesuch'": ("record", "-b", "numpy", "--case", "nonesuch", "-o", out),
        "--output is in": ("record", "-b", "numpy", "-o", tmp_path / "nowhere" / "x"),
        "precision is 'exact'": ("record", "-b", "numpy", "--precision", "exact", "-o", out),
        "dtype is 'int8'": ("compare", recording, "-b", "numpy", "--dtype", "int8"),
        "--emulate is given for 'numpy'": ("compare", recording, "-b", "numpy", "--emulate", "fast"),
    }.items():
        assert words in refused(*arguments)
    assert not out.exists()
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_recording_leaves_nothing(tmp_path):
    """Ctrl-C once the first case is in the file, however long everything before it takes."""
    code = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # which tests in the background inherit as ignored
from portable_gdn.harness.run_file import RunWriter
add = RunWriter.add
RunWriter.add = lambda *a: (add(*a), os.kill(os.getpid(), signal.SIGINT))
sys.argv = ["portable-gdn", "record", "-b", "numpy", "-o", "x.safetensors", "--suite", "quick"]
from portable_gdn.cli.main import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 130, done.stderr
    assert "interrupted" in done.stderr
    assert os.listdir(tmp_path) == []


def test_a_suite_is_recorded_case_by_case(tmp_path, monkeypatch, under_test):
    """No more than one case's arrays are alive: what is larger than memory passes through."""
    seen = []
    original = TensorWriter.add
    monkeypatch.setattr(TensorWriter, "add", lambda self, name, a: (seen.append(name), original(self, name, a)))
    backend = Sound()
    monkeypatch.setattr(backend, "from_numpy", lambda x: (seen.append("from_numpy"), dict(x))[1], raising=False)
    under_test(backend)
    record(tmp_path / "x.safetensors", backend, "quick", cases_named(("one token", "five tokens")), Settings())
    second = seen.index("1/o")
    assert seen.index("0/o") < max(i for i, what in enumerate(seen[:second]) if what == "from_numpy")


def test_suites_are_known_and_hold_each_other():
    names = {name: {c.name for c in suite(name)} for name in SUITES}
    assert names["quick"] < names["standard"] < names["full"]
    assert len(names["quick"]) == 8


# the environment, statistics


def test_the_environment_is_told():
    pytest.importorskip("torch")
    facts = environment.environment(dispatch.get("torch"))
    assert facts["packages"]["torch"]
    assert facts["torch.float32_matmul_precision"] == "highest"
    assert facts["revision"] is None or len(facts["revision"].rstrip("+")) == 40
    json.dumps(facts)


def test_the_revision_is_that_of_this_package_alone(tmp_path, monkeypatch):
    """Not that of a repository in which it happens to be installed; and without git there is none."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "environment.py"))
    assert environment.environment(Sound())["revision"] is None
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.environment(Sound())["revision"] is None


def test_packages_that_are_not_installed_are_left_out(monkeypatch):
    monkeypatch.setattr(environment, "PACKAGES", ("numpy", "no-such-package-at-all"))
    assert list(environment.environment(Sound())["packages"]) == ["numpy"]


def test_the_environment_of_jax_is_told():
    pytest.importorskip("jax")
    facts = environment.environment(dispatch.get("xla"))
    assert facts["packages"]["jax"]
    assert facts["jax_enable_x64"] is False
    assert "cpu" in facts["device"].lower()


@pytest.fixture(scope="module")
def truth():
    return Truth(build(Case("long", T=256, HV=4)))


def stats(truth, change):
    exact = truth.exact.o
    noise = 1e-4 * np.random.default_rng(0).standard_normal(exact.shape)
    return statistics("o", change(exact.copy(), noise).astype(np.float32), exact, truth.problem.signature, 64)


def test_structure_in_an_error_is_found(truth):
    def scaled(where):
        def change(exact, noise):
            noise[where] *= 100
            return exact + noise

        return change

    even = stats(truth, lambda exact, noise: exact + noise)
    assert even.findings == []
    assert sum(even.ulps.values()) == pytest.approx(1)
    assert "head 2 stands out" in stats(truth, scaled(np.s_[:, :, 2])).findings[0]
    assert "chunk 3 stands out" in stats(truth, scaled(np.s_[:, 192:])).findings[0]
    assert "position in a chunk 0 stands out" in stats(truth, scaled(np.s_[:, ::64])).findings[0]
    growing = stats(truth, lambda exact, noise: exact + noise * np.exp(np.arange(256) / 40)[:, None, None])
    assert any("grows along the sequence" in said for said in growing.findings)
    assert "leans to one side" in stats(truth, lambda exact, noise: exact + np.abs(noise)).findings[0]
    assert "follows the result" in stats(truth, lambda exact, noise: exact * 1.01).findings[0]
    exact = truth.exact.o.astype(np.float32)
    none = statistics("o", exact, exact.astype(np.float64), truth.problem.signature, 64)
    assert none.findings == []
    assert none.ulps["0"] == 1


def test_ulps_are_counted_in_the_results_own_dtype(truth):
    exact = truth.exact.o
    s = truth.problem.signature
    rounded = exact.astype(ml_dtypes.bfloat16)
    found = statistics("o", rounded, exact, s, 64)
    assert found.ulps["0"] == 1
    next_up = (rounded.view(np.int16) + 1).view(ml_dtypes.bfloat16)
    found = statistics("o", next_up, exact, s, 64)
    assert found.ulps["1"] + found.ulps["2"] == pytest.approx(1)  # 2 where the exponent steps
    assert found.ulps["1"] > 0.9
