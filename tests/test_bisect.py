"""Where two computations part: a fault planted in each of the seven stages is found there, sound ones part nowhere."""

from __future__ import annotations

import json
from types import SimpleNamespace

import array_api_compat.numpy as xp
import numpy as np
import pytest
from typer.testing import CliRunner

import portable_gdn as pg
from portable_gdn import dispatch, door
from portable_gdn.backends.numpy_oracle import Numpy
from portable_gdn.cli.main import app
from portable_gdn.harness.bisect import bisect
from portable_gdn.harness.cases import Case, build, cases_named, designed
from portable_gdn.harness.compare import compare
from portable_gdn.harness.compute import Settings, backend_for, with_settings
from portable_gdn.harness.record import record
from portable_gdn.harness.run_file import RunFile
from portable_gdn.harness.stages import Side, StageTruth, first_parting
from portable_gdn.spec import stages
from portable_gdn.spec.chunkwise import stage_chunk
from portable_gdn.spec.errors import GdnError
from portable_gdn.spec.evaluate import FLOAT64, chunk_by_chunk, matmul
from portable_gdn.spec.precision import DEFAULT, FAST, Rounding
from portable_gdn.spec.probe import probe


class ByStages(Numpy):
    """The seven stages in float64, or others; its probe is made of the very same functions."""

    name = "under test"
    auto = False

    def __init__(self, **replaced):
        self.stages = SimpleNamespace(**{**{name: getattr(stages, name) for name in stages.STAGES}, **replaced})
        self.rule = chunk_by_chunk(64, fused=False, stages=self.stages)

    def probe(self, problem):
        s, x = problem
        chunk = lambda *rows: stage_chunk(xp, matmul, *rows[:7], s.scale, rows[7], stages=self.stages)  # noqa: E731
        return probe(FLOAT64, matmul, s, x, s.chunk_size or 64, chunk)


@pytest.fixture
def under_test():
    yield pg.register_backend
    dispatch.unregister_backend("under test")


def spoiled(name, part, where):
    """A stage that computes one part of its result wrongly, in all chunks."""

    def stage(*arguments, **more):
        found = getattr(stages, name)(*arguments, **more)
        parts = list(found) if isinstance(found, tuple) else [found]
        parts[part] = where(parts[part])
        return tuple(parts) if isinstance(found, tuple) else parts[0]

    return {name: stage}


def at(index, factor=1.01):
    def change(a):
        a = a.copy()
        if a.shape[-2] >= 64 or a.shape[-2:] == (16, 24):  # not in a short last chunk
            a[index] *= factor
        return a

    return change


#: (stage, what is wrong, (part, chunk, head, token)) of a call with 130 tokens and chunks of 64.
PLANTED = {
    "decay": (spoiled("decay", 0, at(np.s_[..., 1, 40:, :])), ("G", 0, 1)),
    "scores": (spoiled("scores", 1, at(np.s_[..., 33, 7])), ("Aqk", 0, None)),
    "inverse": (spoiled("inverse", 0, at(np.s_[..., 20, 3], 2.0)), ("T", 0, None)),
    "wy": (spoiled("wy", 1, at(np.s_[..., 9, 5], 1.5)), ("W", 0, None)),
    "state": (spoiled("state", 0, at(np.s_[..., 2, 4])), ("S", 1, None)),
    "delta": (spoiled("delta", 0, at(np.s_[..., 50, 11])), ("Vn", 0, None)),
    "output": (spoiled("output", 0, at(np.s_[..., 12, 6])), ("o", 0, None)),
}
TOKENS = {
    "decay": range(40, 64),
    "scores": [33],
    "inverse": [20],
    "wy": [9],
    "state": [64],
    "delta": [50],
    "output": [12],
}


@pytest.mark.parametrize("stage", PLANTED)
def test_a_fault_is_found_at_its_stage(under_test, stage):
    replaced, (part, chunk, head) = PLANTED[stage]
    under_test(ByStages(**replaced))
    found = bisect(dispatch.get("numpy"), dispatch.get("under test"), [Case("GDN", HV=4)], Settings())
    assert not found.agree
    parting = found.cases[0].parting
    assert (parting.stage, parting.part, parting.chunk) == (stage, part, chunk)
    assert head is None or parting.head % 2 == head
    assert parting.token in TOKENS[stage]
    assert f"first at stage {stage}" in next(iter(found.lines()))
    first, second, exact = parting.values
    assert abs(first - exact) < abs(second - exact)


@pytest.mark.parametrize("stage", PLANTED)
def test_a_recording_with_stages_tells_too(under_test, tmp_path, stage):
    """Recorded on a sound machine, compared on a faulty one: the verdict names the stage."""
    case = Case("KDA", variant="KDA", T=130, HV=4)
    path = tmp_path / "stages.safetensors"
    settings = Settings(stages=True)
    record(path, backend_for("numpy", settings), "standard", [case], settings)
    under_test(ByStages(**PLANTED[stage][0]))
    found = compare(RunFile(path), dispatch.get("under test"), Settings())
    assert not found.equal
    assert f"They part first at stage {stage}" in found.sentence()


@pytest.mark.parametrize(
    ("name", "case"),
    [
        *(("torch", c) for c in ("a chunk and a token", "KDA", "DeltaNet", "GLA")),
        ("xla", "a chunk and a token"),
        *(pytest.param("xla", c, marks=pytest.mark.slow) for c in ("five tokens", "segments")),
    ],
)
def test_sound_backends_part_nowhere(name, case):
    backend = dispatch.get(name)
    if backend.unavailable():
        pytest.skip(backend.unavailable())
    probe_agrees(backend, cases_named([case]))


@pytest.mark.slow
def test_torch_parts_nowhere_in_any_case():
    pytest.importorskip("torch")
    cases = [c for c in designed() if c.T and c.layout != "step" and "packed" not in c.layout]
    assert len(cases) > 40
    probe_agrees(dispatch.get("torch"), cases)


def probe_agrees(backend, cases):
    """Every stage lies within its budget, on its own and against the specification's."""
    for case in cases:
        inputs = with_settings(build(case), Settings(chunk_size=64))
        problem, _ = door.normalise(backend.from_numpy(inputs.operands), inputs.options, backend.name)
        found = {
            n: tuple(None if a is None else backend.to_numpy(a) for a in x) for n, x in backend.probe(problem).items()
        }
        truth = StageTruth(inputs, found["output"][0].shape[-2])
        parting = first_parting(truth, Side(backend.name, found, backend.rounding(problem.signature)))
        assert parting is None, (case.name, parting.sentence(backend.name, "exact"))


@pytest.mark.parametrize("declared", [DEFAULT, FAST])
def test_declared_roundings_are_expected_at_every_stage(declared):
    """Stages with other random roundings of the same kind lie within the budget; a stage that rounds more does not."""
    inputs = with_settings(build(Case("GDN", T=130, HV=4)), Settings(chunk_size=64))
    truth = StageTruth(inputs, 64)
    rounding = Rounding(declared)
    run = lambda kind: truth._run(kind, np.random.Generator(np.random.Philox(99)))  # noqa: E731
    other = run(rounding)
    other["state"] = (other["state"][0][:, :-1], other["state"][0][:, 1:])
    assert first_parting(truth, Side("other", other, rounding)) is None
    parting = first_parting(truth, Side("other", other, Rounding()))
    assert parting is not None
    assert parting.stage == "scores"  # the first stage with a product


def test_a_state_stored_in_16_bits_is_expected_to_be_rounded():
    import ml_dtypes

    inputs = with_settings(build(Case("GDN", T=130, HV=4)), Settings(chunk_size=64))
    truth = StageTruth(inputs, 64)
    found = Numpy().probe(door.normalise(dict(inputs.operands), inputs.options, "numpy")[0])
    rounded = {**found, "state": tuple(S.astype(ml_dtypes.bfloat16) for S in found["state"])}
    assert first_parting(truth, Side("stored", rounded, Rounding())) is None
    hidden = {**found, "state": tuple(S.astype(np.float32) for S in rounded["state"])}
    assert first_parting(truth, Side("hidden", hidden, Rounding())).stage == "state"


def test_other_chunk_sizes_compare_states_at_common_boundaries(under_test, tmp_path):
    case = Case("GDN", T=130, HV=4)
    path = tmp_path / "small.safetensors"
    settings = Settings(stages=True, chunk_size=16)
    record(path, backend_for("numpy", settings), "standard", [case], settings)
    for stage, expected in (("state", "state"), ("wy", "output")):
        under_test(ByStages(**PLANTED[stage][0]))
        found = compare(RunFile(path), dispatch.get("under test"), Settings(chunk_size=64))
        assert not found.equal
        assert found.cases[0].parting.stage == expected
        assert any("chunks of 16 tokens" in said and "common boundaries" in said for said in found.cases[0].remarks)


def test_a_backend_that_cannot_have_such_chunks_is_asked_for_its_own(under_test, tmp_path):
    class Rigid(ByStages):
        def refuses(self, signature):
            return "its chunks have 64 tokens" if signature.chunk_size == 16 else None

    path = tmp_path / "small.safetensors"
    settings = Settings(stages=True, chunk_size=16)
    record(path, backend_for("numpy", settings), "standard", [Case("GDN", T=130)], settings)
    under_test(Rigid())
    found = compare(RunFile(path), dispatch.get("under test"), Settings())
    assert found.equal
    assert any("chunks of 16 tokens" in said and "common boundaries" in said for said in found.cases[0].remarks)
    under_test(ByStages())  # which can, and is asked for those that were recorded
    assert compare(RunFile(path), dispatch.get("under test"), Settings()).cases[0].remarks == []


def test_a_side_without_stages_leaves_the_other_to_the_exact_ones(under_test, tmp_path):
    class Silent(ByStages):
        def probe(self, problem):
            raise GdnError("this call has no probe build; it must be shorter.")

    path = tmp_path / "stages.safetensors"
    settings = Settings(stages=True)
    for stage, parts in ((None, False), ("wy", True)):
        faulty = ByStages(**({} if stage is None else PLANTED[stage][0]))
        under_test(faulty)
        record(path, faulty, "standard", [Case("GDN", T=130)], settings)
        under_test(Silent())
        found = compare(RunFile(path), dispatch.get("under test"), Settings())
        (said,) = [said for said in found.cases[0].remarks if "exact stages" in said]
        assert said == (
            "under test (recorded) is held against the exact stages; under test (here) has none of this case: "
            "this call has no probe build; it must be shorter"
        )
        assert found.equal is not parts
        if parts:
            assert found.cases[0].parting.stage == stage
            assert found.cases[0].apart == ("under test (recorded)", "the specification")


def test_sides_with_other_values_are_each_held_against_their_own_stages(under_test, tmp_path):
    path = tmp_path / "stages.safetensors"
    settings = Settings(stages=True)
    under_test(ByStages())
    record(path, ByStages(), "standard", [Case("GDN", T=130)], settings)
    found = compare(RunFile(path), dispatch.get("under test"), Settings(dtype="bfloat16"))
    assert found.equal
    assert any("given different values" in said for said in found.cases[0].remarks)
    assert len(found.cases[0].errors) == 2


def test_what_lies_outside_the_stages_is_said(under_test):
    class Outside(ByStages):
        def gradients(self, problem, cotangents):
            result, grads = super().gradients(problem, cotangents)
            return result._replace(o=result.o * np.float32(1.5)), grads

    under_test(Outside())
    found = bisect(dispatch.get("numpy"), dispatch.get("under test"), [Case("GDN", HV=4)], Settings())
    assert not found.agree
    assert found.cases[0].parting is None
    assert any("not those of its own stages" in line for line in found.lines())


# the command


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_the_command_prints_the_place(under_test):
    under_test(ByStages(**PLANTED["delta"][0]))
    found = run("bisect", "-b", "numpy", "-b", "under test", "--case", "a chunk and a token")
    assert found.exit_code == 1
    text = " ".join(found.stdout.split())
    assert "first at stage delta: Vn of row 0, chunk 0" in text
    assert "numpy and under test part in 1 of 1 cases, first at delta." in text
    under_test(ByStages())
    found = run("bisect", "-b", "numpy", "-b", "under test", "--json")
    assert found.exit_code == 0, found.output
    report = json.loads(found.stdout)
    assert report["agree"]
    assert (
        sum(bool(case["errors"]) for case in report["cases"]) == 8
    )  # packed sequences have theirs in rows of their own


def test_the_command_reads_a_recording_and_says_what_the_other_side_refuses(under_test, tmp_path):
    class Picky(ByStages):
        def refuses(self, signature):
            return "it takes no single token" if signature.T == 1 else None

    path = tmp_path / "stages.safetensors"
    settings = Settings(stages=True, chunk_size=16)
    record(path, backend_for("numpy", settings), "quick", cases_named(["one token", "five tokens"]), settings)
    under_test(Picky(**spoiled("output", 0, lambda a: 1.01 * a)))
    found = run("bisect", path, "-b", "under test", "--json")
    assert found.exit_code == 1
    report = json.loads(found.stdout)
    (case,) = report["cases"]
    assert case["case"] == "five tokens"
    assert list(report["skipped"]) == ["one token"]
    assert "it takes no single token" in report["skipped"]["one token"]
    said = " ".join(run("bisect", path, "-b", "under test").stdout.split())
    assert "numpy (recorded)" in said
    assert "not compared: one token: under test: " in said


def test_the_command_refuses(under_test, tmp_path):
    class Blind(ByStages):
        probe = property()  # an attribute that is not there

    def refused(*arguments):
        with pytest.raises(GdnError) as caught:
            CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
        return str(caught.value)

    path = tmp_path / "x.safetensors"
    record(path, backend_for("numpy", Settings()), "quick", cases_named(["one token"]), Settings())
    under_test(Blind())
    assert "--backend is given 1 times" in refused("bisect", "-b", "numpy")
    assert "has no stages to show" in refused("bisect", "-b", "numpy", "-b", "under test")
    assert "holds no stages; record again with --stages" in refused("bisect", path, "-b", "numpy")
    assert "--case is 'nonesuch'" in refused("bisect", "-b", "numpy", "-b", "numpy", "--case", "nonesuch")


@pytest.mark.parametrize(
    "case",
    [
        Case("packed", layout="packed with empties", HV=4),
        Case("packed mixer", variant="KDA", layout="packed", conv=4, gate="softplus", l2norm=True),
    ],
    ids=lambda case: case.name,
)
def test_packed_sequences_have_stages_in_rows_of_their_own(under_test, case):
    """At what sequence, chunk and token a fault lies; and what the packing alone gets wrong lies outside of them."""
    under_test(ByStages())
    numpy, other = dispatch.get("numpy"), dispatch.get("under test")
    found = bisect(numpy, other, [case], Settings())
    assert found.agree, list(found.lines())
    assert not found.cases[0].remarks
    under_test(ByStages(**PLANTED["delta"][0]))
    parting = bisect(numpy, dispatch.get("under test"), [case], Settings()).cases[0].parting
    assert (parting.stage, parting.part, parting.chunk, parting.token) == ("delta", "Vn", 0, 50)
    sequence = 1 if case.layout == "packed with empties" else 2
    assert parting.row >= sequence
    lines = " ".join(bisect(numpy, dispatch.get("under test"), [case], Settings()).lines())
    assert f"row {parting.row}, chunk 0" in lines


def test_what_the_packing_gets_wrong_lies_outside_the_stages(under_test):
    class Leaks(ByStages):
        def gradients(self, problem, cotangents):
            result, grads = super().gradients(problem, cotangents)
            return (result._replace(o=result.o * np.float32(1.01)) if problem.signature.packed else result), grads

    under_test(Leaks())
    found = bisect(dispatch.get("numpy"), dispatch.get("under test"), [Case("x", layout="packed")], Settings())
    assert not found.agree
    assert "what parts lies outside the stages" in " ".join(found.lines())


def test_stages_of_single_steps_alone_are_no_pass():
    found = run("bisect", "-b", "numpy", "-b", "numpy", "--suite", "standard", "--case", "step, KDA")
    assert found.exit_code == 1
    assert "that is a failure, not a pass" in " ".join(found.stdout.split())


@pytest.mark.slow
@pytest.mark.skipif(bool(dispatch.get("pallas-interpret").unavailable()), reason="needs jax")
def test_a_fault_in_the_tpu_kernel_is_found_at_its_stage(under_test):
    """One of the functions that the Pallas kernel is made of is wrong."""
    from portable_gdn.tpu.backend import Interpreted
    from portable_gdn.tpu.kernels import stages as own

    class Faulty(Interpreted):
        name = "under test"
        priority = 99

    def state(mm, k, Vn, G, count, S):
        return own.state(mm, k, Vn, G, count, S) * 1.001

    names = ("decay", "scores", "inverse", "wy", "delta", "output", "state")
    faulty = SimpleNamespace(**{**{name: getattr(own, name) for name in names}, "state": state})
    backend = Faulty(_Hashable(faulty))
    under_test(backend)
    settings = Settings(chunk_size=64)
    (case,) = cases_named(["a chunk and a token"])
    found = bisect(dispatch.get("numpy"), backend, [case], settings)
    assert found.cases[0].parting.stage == "state"
    assert found.cases[0].parting.chunk == 1


class _Hashable:
    """Stages as the static argument of a compiled function."""

    def __init__(self, functions):
        self.__dict__.update(vars(functions))
