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
from portable_gdn.harness import judge
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
from portable_gdn.spec.stages import Algebra


@pytest.fixture(autouse=True)
def _fewer_runs(request, monkeypatch):
    """Where a fault lies does not depend on how wide its budget becomes: a second look takes 32 runs, not 256."""
    if "slow" not in request.keywords:
        monkeypatch.setattr(judge, "MANY_SEEDS", 32)


class ByStages(Numpy):
    """The seven stages in float64, or others; its probe is made of the very same functions."""

    name = "under test"
    auto = False

    def __init__(self, **replaced):
        self.stages = SimpleNamespace(**{**{name: getattr(stages, name) for name in stages.STAGES}, **replaced})
        self.rule = chunk_by_chunk(64, fused=False, stages=self.stages)

    def probe(self, problem):
        s, x = problem
        chunk = lambda part: stage_chunk(Algebra(xp, matmul), part, s.scale, stages=self.stages)  # noqa: E731
        return probe(Algebra(FLOAT64, matmul), s, x, s.chunk_size or 64, chunk)


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
        if hasattr(found, "_make"):
            return found._make(parts)
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
    assert parting.token == TOKENS[stage][0]  # the first, not the worst
    assert parting.wrong == (False, True)
    assert "; under test is wrong; " in parting.sentence("numpy", "under test")
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
    def refused(*arguments):
        with pytest.raises(GdnError) as caught:
            CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
        return str(caught.value)

    path = tmp_path / "x.safetensors"
    record(path, backend_for("numpy", Settings()), "quick", cases_named(["one token"]), Settings())
    assert "--backend is given once; it must be given twice, or once beside" in refused("bisect", "-b", "numpy")
    assert "--backend is given not at all" in refused("bisect")
    assert "--backend is given 3 times" in refused("bisect", *("-b", "numpy") * 3)
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
    from portable_gdn.tpu.kernels.plain import stages as own

    class Faulty(Interpreted):
        name = "under test"
        priority = 99

    def state(mm, k, Vn, decays, S):
        return own.state(mm, k, Vn, decays, S) * 1.001

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


# backends without a probe


class Blind(ByStages):
    """A backend that shows no stages, and whose whole call alone has a fault."""

    probe = property()  # an attribute that is not there

    def __init__(self, change=lambda s, o, state: (o, state)):
        super().__init__()
        self.change = change

    def _changed(self, problem, result):
        o, state = self.change(problem.signature, np.array(result.o), np.array(result.state))
        return result._replace(o=o, state=state)

    def run(self, problem):
        return self._changed(problem, super().run(problem))

    def gradients(self, problem, cotangents):
        result, grads = super().gradients(problem, cotangents)
        return self._changed(problem, result), grads


def state_lost_at_128(s, o, state):
    """What the third chunk of 64 is handed is 1 % too large in one head."""
    if s.T >= 128:
        state[:, 1] *= np.float32(1.01)
    if s.T > 128:
        o[:, 128:, 1] *= np.float32(1.01)
    return o, state


def output_wrong_from_77(s, o, state):
    o[:, 77:, 3] *= np.float32(1.01)
    return o, state


def state_kept_in_16_bits(s, o, state):
    import ml_dtypes

    return o, state.astype(ml_dtypes.bfloat16).astype(np.float32) if s.T == 64 else state


#: (fault, case, (stage, part, row, chunk, head, token))
UNSEEN = {
    "a state": (state_lost_at_128, Case("GDN", T=200, HV=4), ("state", "S", 0, 2, 1, 128)),
    "an output": (
        output_wrong_from_77, Case("KDA", "KDA", T=130, HV=4, state_layout="vk"), ("output", "o", 0, 1, 3, 77),
    ),
    "16 bits": (state_kept_in_16_bits, Case("GDN", T=130, HV=4), ("state", "S", 0, 1, None, 64)),
    "packed": (output_wrong_from_77, Case("packed", layout="packed", HV=4), ("output", "o", 3, 0, 3, 0)),
    "mixer": (
        state_lost_at_128, Case("mixer", T=130, conv=4, gate="softplus", l2norm=True, HV=4),
        ("state", "S", 0, 2, 1, 128),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSEEN)
def test_a_backend_without_a_probe_parts_at_a_border(under_test, name):
    change, case, (stage, part, row, chunk, head, token) = UNSEEN[name]
    under_test(Blind(change))
    found = bisect(dispatch.get("numpy"), dispatch.get("under test"), [case], Settings())
    (compared,) = found.cases
    parting = compared.parting
    assert (parting.stage, parting.part, parting.row, parting.chunk) == (stage, part, row, chunk)
    assert head is None or parting.head == head
    assert parting.token == token
    assert parting.wrong == (False, True)
    assert parting.derived == (False, False)
    assert any("of under test states at chunk borders and outputs are compared" in said for said in compared.remarks)
    assert ("bfloat16 can hold" in parting.hint) == (name == "16 bits")
    other = bisect(dispatch.get("under test"), dispatch.get("numpy"), [case], Settings()).cases[0].parting
    assert (other.stage, other.chunk, other.wrong) == (stage, chunk, (True, False))


@pytest.mark.parametrize("case", cases_named(["one token", "KDA", "packed with empties", "left padding", "segments"]))
def test_a_sound_backend_without_a_probe_parts_nowhere(under_test, case):
    under_test(Blind())
    found = bisect(dispatch.get("numpy"), dispatch.get("under test"), [case], Settings())
    assert found.agree, list(found.lines())
    assert set(found.cases[0].errors["under test"]) == {"state", "output"}


def test_two_without_a_probe_and_a_recording_of_one(under_test, tmp_path):
    path = tmp_path / "blind.safetensors"
    settings = Settings(stages=True)
    under_test(sound := Blind())
    case = Case("long", T=1100, K=4, V=4)
    record(path, sound, "standard", [case], settings)
    assert RunFile(path).stage_chunk == 128  # so that no call has more than 16 borders
    under_test(Blind(lambda s, o, state: (o, state * np.float32(1.01 if s.T >= 640 else 1))))
    found = compare(RunFile(path), dispatch.get("under test"), Settings())
    assert found.cases[0].parting.token == 640
    assert found.cases[0].parting.wrong == (False, True)
    assert "They part first at stage state" in found.sentence()
    assert "under test (here) is wrong" in found.sentence()


def test_only_the_side_that_derives_a_stage_is_said_to_derive_it(under_test):
    class Derives(ByStages):
        derived_stages = ("wy",)

    for ours, names in ((ByStages, {"numpy"}), (Derives, {"numpy", "under test"})):
        under_test(ours(**PLANTED["wy"][0]))
        numpy = SimpleNamespace(**{n: getattr(Numpy(), n) for n in dir(Numpy()) if not n.startswith("__")})
        numpy.derived_stages = ("wy",)
        found = bisect(numpy, dispatch.get("under test"), [Case("GDN", T=64, H=1, HV=1)], Settings())
        said = found.cases[0].parting.sentence(*found.cases[0].apart)
        assert f"(derived by {' and '.join(sorted(names))}: " in said
    under_test(ByStages(**PLANTED["wy"][0]))
    found = bisect(Numpy(), dispatch.get("under test"), [Case("GDN", T=64, H=1, HV=1)], Settings())
    assert "derived" not in found.cases[0].parting.sentence(*found.cases[0].apart)


def test_both_sides_may_be_wrong(under_test):
    """The oracle knows, also where the two agree with each other less than with it."""
    pg.register_backend(other := ByStages(**PLANTED["delta"][0]))
    under_test(ByStages(**spoiled("delta", 0, at(np.s_[..., 50, 11], 0.98))))
    found = bisect(other, dispatch.get("under test"), [Case("GDN", HV=4)], Settings())
    parting = found.cases[0].parting
    assert parting.wrong == (True, True)
    assert "are both wrong" in parting.sentence("a", "b")


def test_errors_stand_beside_differences_in_their_units(under_test):
    """What is said of a token is a norm over that token, and of a chunk over that chunk, with what may be beside it."""
    under_test(ByStages(**PLANTED["output"][0]))
    parting = (
        bisect(dispatch.get("numpy"), dispatch.get("under test"), [Case("GDN", HV=4)], Settings()).cases[0].parting
    )
    first, second, _ = parting.values
    assert parting.token_error == pytest.approx(abs(first - second), rel=1e-4)  # one entry of the row is wrong
    assert parting.error == pytest.approx(parting.token_error, rel=1e-4)
    assert parting.token_budget < parting.budget < parting.error < parting.norm


def test_what_a_probe_does_wrong_is_said_and_the_rest_goes_on(under_test):
    class Breaks(ByStages):
        def probe(self, problem):
            raise RuntimeError("out of memory")

    under_test(Breaks())
    found = bisect(dispatch.get("numpy"), dispatch.get("under test"), cases_named(["one token", "KDA"]), Settings())
    assert found.agree
    assert any("its probe fails: RuntimeError: out of memory" in line for line in found.lines())


# what one side refuses


class NoMasks(Blind):
    """As many backends of others: neither segments nor masks, and no probe."""

    def refuses(self, signature):
        return "it has no masks" if signature.has("mask") else None


def test_what_one_side_refuses_is_listed_and_the_rest_compared(under_test, tmp_path):
    """Packed sequences, whose stages are had in padded rows, and padding itself."""
    cases = cases_named(["one token", "packed with empties", "left padding", "KDA"])
    path, page = tmp_path / "stages.safetensors", tmp_path / "page.html"
    record(path, backend_for("numpy", Settings(stages=True)), "quick", cases, Settings(stages=True))
    under_test(NoMasks())
    found = run("compare", path, "-b", "under test", "--report", page)
    assert found.exit_code == 0, found.output
    said = " ".join(found.stdout.split())
    assert (
        "not compared: left padding: under test (here): backend 'under test' cannot run this call: it has no masks"
        in said
    )
    assert (
        "Equal: numpy (recorded) and under test (here) agree in 24 results of 3 cases. 1 case was not compared." in said
    )
    assert "left padding" in page.read_text()
    found = run("bisect", path, "-b", "under test")
    assert found.exit_code == 0, found.output
    assert "not compared: left padding: under test: " in " ".join(found.stdout.split())
    found = run("record", "-b", "under test", "--suite", "quick", "--stages", "-o", tmp_path / "theirs.safetensors")
    assert found.exit_code == 0, found.output
    assert "not computed: left padding: " in " ".join(found.stdout.split())
    found = run("compare", path, tmp_path / "theirs.safetensors")
    assert found.exit_code == 0, found.output
    assert "not compared: left padding: under test (recorded): " in " ".join(found.stdout.split())


@pytest.mark.parametrize("order", [("under test", "numpy"), ("numpy", "under test")])
def test_a_sequence_at_which_one_side_breaks_is_named_and_the_rest_handed_over(under_test, order):
    class Breaks(ByStages):
        def run(self, problem):
            if problem.signature.variant.name == "KDA":
                raise RuntimeError("out of memory")
            return super().run(problem)

    under_test(Breaks())
    found = run("handover", "-b", order[0], "-b", order[1])
    assert found.exit_code == 1
    said = " ".join(found.stdout.split())
    assert "FAILED: KDA: under test: RuntimeError: out of memory" in said
    assert f"fails: 6 sequences from {order[0]} to {order[1]}" in said
