"""Properties drawn over the operand space: sound backends hold them, each has a fault that it finds."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import portable_gdn as pg
from portable_gdn import dispatch
from portable_gdn.backends.numpy_oracle import Numpy
from portable_gdn.cli.main import app
from portable_gdn.harness import check, fuzz, properties
from portable_gdn.harness.cases import Case
from portable_gdn.harness.properties import PROPERTIES, Violation, hold
from portable_gdn.spec.errors import GdnError
from portable_gdn.spec.evaluate import chunk_by_chunk, evaluate
from portable_gdn.spec.problem import Problem

pytest.importorskip("hypothesis")


class Changed(Numpy):
    """The stages in float64, with a change to what comes out."""

    name = "under test"
    auto = False
    rule = staticmethod(chunk_by_chunk(64))

    def __init__(self, change=lambda s, x, result, grads: (result, grads)):
        self.change = change

    def run(self, problem):
        return self.change(*problem, super().run(problem), {})[0]

    def gradients(self, problem, cotangents):
        return self.change(*problem, *super().gradients(problem, cotangents))


def later_tokens(s, x, result, grads):
    """Each output sees a trace of the last token's value."""
    o = np.array(result.o)
    if s.conv is None and not s.step and s.T > 1:
        o[:, 0] += np.asarray(np.nan_to_num(x["v"][:, -1].astype(np.float32)) * 1e-2, o.dtype)
    return result._replace(o=o), grads


def mean_of_batch(s, x, result, grads):
    """What one packed sequence computes leans on all."""
    if s.packed and s.T:
        o = np.nan_to_num(result.o.astype(np.float32))
        return result._replace(
            o=(result.o.astype(np.float32) + 1e-2 * o.mean(1, keepdims=True)).astype(result.o.dtype)
        ), grads
    return result, grads


def empty_zeroed(s, x, result, grads):
    if s.packed:
        state = np.array(result.state)
        state[np.diff(x["cu_seqlens"]) == 0] = 0
        return result._replace(state=state), grads
    return result, grads


def state_ignored(s, x, result, grads):
    """Calls on a whole sequence forget the state they were given."""
    if not s.has("initial_state") or s.T < 2 or s.packed:
        return result, grads
    e = evaluate(Problem(s, {**x, "initial_state": np.zeros_like(x["initial_state"])}))
    return result._replace(o=e.o.astype(result.o.dtype), state=e.state.astype(np.float32)), grads


def step_scaled(s, x, result, grads):
    return (result._replace(o=result.o * result.o.dtype.type(1.5)) if s.step else result), grads


def first_head_wrong(s, x, result, grads):
    o = np.array(result.o)
    if o.size and s.B > 1:
        o[0] = o[0] * o.dtype.type(1.5)
    return result._replace(o=o), grads


def offset(s, x, result, grads):
    return result._replace(o=result.o + result.o.dtype.type(1e-2)), grads


def wide_is_worse(s, x, result, grads):
    return (result._replace(o=result.o * np.float32(1.1)) if s.dtype == "float32" else result), grads


def gradient_of_g_lost(s, x, result, grads):
    return result, {n: np.zeros_like(a) if n == "v" else a for n, a in grads.items()}


def leaks_over_resets(s, x, result, grads):
    o = np.array(result.o)
    if not s.step and s.T > 1 and s.conv is None:
        o[:, -1] += np.asarray(np.nan_to_num(x["v"][:, 0].astype(np.float32)) * 1e-3, o.dtype)
    return result._replace(o=o), grads


def breaks_on_one_token(s, x, result, grads):
    if s.T == 1 and not s.step:
        raise RuntimeError("one token")
    return result, grads


FAULTS = {
    "oracle": offset,
    "causality": later_tokens,
    "neighbours": mean_of_batch,
    "packed_as_alone": empty_zeroed,
    "splits": state_ignored,
    "steps": step_scaled,
    "permutations": first_head_wrong,
    "scaling": offset,
    "dtypes": wide_is_worse,
    "finite_differences": gradient_of_g_lost,
    "resets": leaks_over_resets,
    "tiny": breaks_on_one_token,
}


@pytest.fixture
def under_test():
    yield pg.register_backend
    dispatch.unregister_backend("under test")


def test_every_property_has_a_fault():
    assert set(FAULTS) == set(PROPERTIES)


LONG = {"oracle", "finite_differences"}  # drawn cases are shrunk: tens of seconds


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in PROPERTIES]
)
def test_a_fault_violates_its_property(under_test, name):
    with pytest.raises(Violation, match=name):
        check(Changed(FAULTS[name]), examples=30, properties=[name])


def test_a_sound_backend_holds_everything(under_test):
    held = check(Changed(), examples=6)
    assert set(held) == set(PROPERTIES)
    assert held.total() >= 6 * len(PROPERTIES) - 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torch", "numpy", "xla", "pallas-interpret"])
def test_backends_hold_everything(name):
    backend = dispatch.get(name)
    if backend.unavailable():
        pytest.skip(backend.unavailable())
    cases = 30 if name in ("numpy", "torch") else 10  # others compile each shape
    found = fuzz.fuzz(name, cases=cases, seconds=600, seed=1, batch=10)
    assert not found.failures, found.failures
    assert found.held.total() + found.refused.total() == cases


def test_a_failure_shrinks_and_its_file_shows_it_again(tmp_path):
    """One file, one command, on a backend that every process has."""
    arguments = ["check", "-b", "numpy", "--cases", "20", "--property", "causality", "--json"]
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 0, found.output
    pg.register_backend(Changed(later_tokens))
    try:
        arguments = ["check", "-b", "under test", "--cases", "30", "--property", "causality"]
        found = CliRunner().invoke(app, [*arguments, "--reproducers", str(tmp_path), "--json"])
    finally:
        dispatch.unregister_backend("under test")
    assert found.exit_code == 1
    report = json.loads(found.stdout)
    (failure,) = report["failures"]
    case = eval(failure["case"], {"Case": Case})
    assert (case.T, case.H, case.HV, case.K, case.B) == (2, 1, 1, 4, 1)  # nothing smaller can fail
    (path,) = report["reproducers"]
    done = subprocess.run([sys.executable, path], capture_output=True, text=True)
    assert done.returncode == 1  # the backend is of this process; the file is whole and runs
    assert "backend is 'under test'; it must be one of" in done.stderr
    text = Path(path).read_text().replace("'under test'", "'numpy'")
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert done.stdout == "it holds\n", done.stderr


def test_the_same_seed_draws_the_same_cases(monkeypatch):
    def drawn(seed):
        seen = []
        monkeypatch.setitem(PROPERTIES, "tiny", lambda backend, case: seen.append(case))
        fuzz.fuzz("numpy", cases=15, seed=seed, properties=["tiny"])
        return seen

    assert drawn(3) == drawn(3) != drawn(4)


def test_the_time_limit_ends_it():
    assert fuzz.fuzz("numpy", cases=10**6, seconds=0.5, batch=5).tried < 10**4


@pytest.mark.parametrize("cases", [5, 12, 60, 130, 700])
def test_every_property_gets_its_share(monkeypatch, cases):
    for name in PROPERTIES:
        monkeypatch.setitem(PROPERTIES, name, lambda backend, case: None)
    found = fuzz.fuzz("numpy", cases=cases)
    drawn = [found.held[name] for name in PROPERTIES]
    assert sum(drawn) == cases
    assert max(drawn) - min(drawn) <= 1
    assert found.not_drawn == [name for name, n in zip(PROPERTIES, drawn, strict=True) if not n]
    assert ("not drawn, and so not checked: " in found.sentence()) == (cases < len(PROPERTIES))


def test_what_was_not_drawn_is_said(under_test):
    """By the sentence, the table and the JSON; whether cases, time or somebody ended it."""
    under_test(Changed())
    found = run("-b", "under test", "--cases", "2", "--json")
    report = json.loads(found.stdout)
    assert report["not_drawn"] == list(PROPERTIES)[2:]
    assert "not drawn, and so not checked: neighbours, packed_as_alone," in report["sentence"]
    table = " ".join(run("-b", "under test", "--cases", "2").stdout.split())
    assert "neighbours 0 not drawn" in table
    assert "not checked: neighbours, packed_as_alone" in table
    assert "tiny" in fuzz.fuzz("under test", cases=10**6, seconds=1e-9).not_drawn


def test_a_short_time_is_shared_too(monkeypatch):
    for name in PROPERTIES:
        monkeypatch.setitem(PROPERTIES, name, lambda backend, case: time.sleep(0.001))
    assert not fuzz.fuzz("numpy", cases=10**6, seconds=2).not_drawn


def test_a_backend_that_refuses_all_of_a_property_is_not_said_to_hold_it(under_test):
    class NoSteps(Changed):
        def refuses(self, signature):
            return "it has no steps" if signature.step else None

    under_test(NoSteps())
    arguments = ("-b", "under test", "--cases", "6", "--property", "steps", "--property", "tiny")
    report = json.loads(run(*arguments, "--json").stdout)
    assert report["not_computed"] == ["steps"]
    said = " ".join(run(*arguments).stdout.split())
    assert "steps 0 3 nothing computed" in said
    assert "0 failures, 3 refused, and of steps all that was drawn" in said


@pytest.mark.parametrize("name", ["dtypes", "resets", "steps", "scaling", "causality", "finite_differences"])
def test_cases_of_which_a_property_says_nothing_do_not_count(monkeypatch, name):
    """The simplest case, which is always drawn first, has one token, float32 and no state."""
    computed = []

    def counted(run):
        def counting(backend, inputs):
            computed.append(1)
            return run(backend, inputs)

        return counting

    for function in ("_run", "_with_gradients"):
        monkeypatch.setattr(properties, function, counted(getattr(properties, function)))
    found = fuzz.fuzz("numpy", cases=4, properties=[name])
    assert found.held == {name: 4}
    assert len(computed) >= 4


def test_one_failure_is_one(under_test):
    under_test(Changed(breaks_on_one_token))
    found = fuzz.fuzz("under test", cases=3, properties=["tiny"])
    assert " 1 failure, 0 refused" in found.sentence()


def run(*arguments):
    return CliRunner().invoke(app, ["check", *map(str, arguments)])


def test_what_was_found_before_an_interruption_is_kept(monkeypatch):
    seen = []

    def tiny(backend, case):
        seen.append(case)
        if len(seen) > 2:
            raise KeyboardInterrupt

    monkeypatch.setitem(PROPERTIES, "tiny", tiny)
    found = fuzz.fuzz("numpy", cases=15, properties=["tiny"])
    assert found.interrupted
    assert found.held == {"tiny": 2}


def test_hypothesis_is_asked_for_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(GdnError, match=r"pip install 'portable-gdn\[check\]'"):
        check("numpy", examples=1)


def test_what_cannot_run_here_is_not_checked(under_test):
    class Away(Changed):
        def unavailable(self):
            return "it needs a device of cheese."

    with pytest.raises(GdnError, match="'under test' cannot run here: it needs a device of cheese"):
        check(Away())


def test_what_is_refused_is_no_violation(under_test):
    class Refuses(Changed):
        def refuses(self, signature):
            return "it is Sunday"

    with pytest.raises(GdnError, match="computes none of the calls"):
        check(Refuses(), examples=2, properties=["tiny"])
    assert not hold("under test", "tiny", Case("x"))

    class RefusesContents(Changed):
        def run(self, problem):
            raise GdnError("v is too much; it must be less.")

        def gradients(self, problem, cotangents):
            raise GdnError("v is too much; it must be less.")

    under_test(RefusesContents())
    assert not [name for name in PROPERTIES if hold("under test", name, Case("x", dtype="bfloat16", layout="packed"))]


def test_bad_arguments(tmp_path):
    (file := tmp_path / "file").write_text("")
    for arguments, words in (
        (("-b", "nonesuch"), "backend is 'nonesuch'"),
        (("-b", "numpy", "--property", "beauty"), "property is 'beauty'; it must be one of oracle"),
        (("-b", "numpy", "--cases", "0"), "--cases is 0"),
        (("-b", "numpy", "--minutes", "0"), "--minutes is 0"),
        (("-b", "numpy", "--reproducers", str(file)), "which is no folder; it must be a folder"),
    ):
        with pytest.raises(GdnError, match=words.replace("(", r"\(")):
            CliRunner().invoke(app, ["check", *arguments], catch_exceptions=False)
