"""The pipelined kernel: which calls it takes, that it holds the budget, and what it leaves untouched bit for bit."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
import pytest

import portable_gdn as pg
from portable_gdn import door
from portable_gdn.harness import cases
from portable_gdn.harness.cases import Case, build
from portable_gdn.harness.stages import Side, StageTruth, first_parting
from portable_gdn.harness.verify import verify
from portable_gdn.spec.problem import Meta, Options
from portable_gdn.spec.rules import make_signature
from portable_gdn.tpu import tiling
from portable_gdn.tpu.backend import INTERPRETER, PALLAS, PALLAS_INTERPRET
from portable_gdn.tpu.chips import COMMON
from portable_gdn.tpu.kernels.common.tiles import CHUNK
from portable_gdn.tpu.kernels.pipelined.backward_plan import reverse_plan
from portable_gdn.tpu.kernels.pipelined.plan import UNITS, pipeline

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

from portable_gdn.tpu.kernels.pipelined import gates  # noqa: E402

LONG = {"K": CHUNK, "V": CHUNK, "T": UNITS * CHUNK + 88, "H": 1, "HV": 2, "dtype": "bfloat16"}
NAME = "pallas-interpret"


@pytest.fixture(autouse=True, scope="module")
def compiled_fast():
    """Interpreted, the kernel is a large program that runs once: not worth what XLA would take to optimise it."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


pytestmark = pytest.mark.usefixtures("tpu_backends")


def bits(a):
    return np.ascontiguousarray(np.asarray(a)).view(np.uint8)


def signature(T=2048, H=16, HV=16, K=128, V=128, dtype="bfloat16", N=0, **options):
    x = {
        "q": Meta((1, T, H, K), dtype, "cpu"), "k": Meta((1, T, H, K), dtype, "cpu"),
        "v": Meta((1, T, HV, V), dtype, "cpu"), "g": Meta((1, T, HV), "float32", "cpu"),
        "beta": Meta((1, T, HV), "float32", "cpu"),
    }  # fmt: skip
    if N:
        x["cu_seqlens"] = Meta((N + 1,), "int32", "cpu")
    return make_signature("jax", "cpu", x, Options(**options))


def test_which_calls_it_takes():
    core = COMMON
    p = pipeline(signature(), core)
    assert (p.heads, p.groups, p.steps, p.entries, p.masked, p.summands) == (8, 2, 4, 8, False, 2)
    assert pipeline(signature(H=16, HV=32), core).P == 4
    assert pipeline(signature(H=2, HV=6), core).heads == 6  # all there are
    assert pipeline(signature(precision="fast"), core).summands == 1
    assert pipeline(signature(T=2049), core).masked
    assert pipeline(signature(), COMMON._replace(cores=2)).parts == 2
    p = pipeline(signature(H=8, HV=8), COMMON._replace(cores=2))
    assert (p.heads, p.parts) == (4, 2)  # rather than that a core is idle
    assert pipeline(signature(H=1, HV=1), COMMON._replace(cores=2)).parts == 1  # one group cannot be shared
    assert pipeline(signature(precision="highest"), core).summands == 1
    p = pipeline(signature(N=3), core)
    assert (p.packed, p.chunks, p.steps) == (True, 20, 5)  # 18 chunks at most
    for K, V, keys, values in ((64, 128, 128, 128), (96, 192, 256, 256), (256, 512, 256, 512)):
        p = pipeline(signature(K=K, V=V, precision="fast"), core)
        assert p is None or (p.key_lanes, p.value_lanes) == (keys, values)
    for other in (
        signature(T=2 * CHUNK), signature(K=60), signature(V=257), signature(chunk_size=64), signature(H=3, HV=30),
    ):  # fmt: skip
        assert pipeline(other, core) is None
    assert pipeline(signature(precision="highest", H=16, HV=16, V=256), COMMON._replace(vmem_bytes=40 << 20)).heads < 8
    assert pipeline(signature(), COMMON._replace(vmem_bytes=16 << 20)) is None


def test_the_table_of_schedules_decides_how_many_heads_share_a_step(monkeypatch):
    made = [
        tiling.Entry("v6e", "fast", True, 128, 128, 8, 380),
        tiling.Entry("v6e", "fast", True, 128, 128, 16, 360),
        tiling.Entry("v6e", "default", True, 64, 64, 4, 300),
        tiling.Entry("v5e", "fast", True, 128, 128, 8, 500),
    ]
    monkeypatch.setattr(tiling, "entries", lambda: made)
    tiling._nearest.cache_clear()
    try:
        core = COMMON._replace(vmem_bytes=128 << 20)
        assert pipeline(signature(precision="fast", qk_l2norm=True), core).heads == 16
        assert pipeline(signature(H=2, HV=2, precision="fast"), core).heads == 2
        assert pipeline(signature(K=64, V=64), core).heads == 4
        assert pipeline(signature(), core._replace(name="v5e")).heads == 8
        assert pipeline(signature(), core._replace(name="v99")).heads == 16  # the nearest of any
        assert pipeline(signature(precision="fast"), COMMON._replace(vmem_bytes=32 << 20)).heads < 16  # as VMEM allows
        with tiling.trying(2):
            assert pipeline(signature(), core).heads == 2
    finally:
        tiling._nearest.cache_clear()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {},
            "pipelined kernel, .* value heads and 4 chunks of 128 tokens a .*; gradients: kernel for long rows",
        ),
        (
            {"chunk_size": 64},
            "plain kernel, .* 64 tokens .*chunk_size is 64.* gradients: plain backward kernel, .* of 64",
        ),
        ({"T": 100}, "plain kernel, .*T is 100"),
        ({"K": 60}, "no number of heads with 60 and 128 channels fills tiles of 128 lanes"),
        ({"V": 512, "K": 512, "H": 2, "HV": 64}, "not even one key head's step fits into 128 MiB.*gradients: xla"),
    ],
)
def test_it_is_said_which_kernel_runs_and_why(options, words):
    assert re.search(words, PALLAS.serves(signature(**options)))


CASES = [
    Case("long", **LONG),
    Case("long, one head a group", **{**LONG, "H": 2, "HV": 2, "B": 2}),
    Case("long, DeltaNet, no state", variant="DeltaNet", state=False, **LONG),
    Case("long, two groups", **{**LONG, "H": 4, "HV": 16, "T": UNITS * CHUNK + 1}),
    Case("long, whole steps", **{**LONG, "T": 2 * UNITS * CHUNK}),
    *(
        Case(f"long, gates {kind}", gates=kind, **LONG)
        for kind in (
            "zero", "half zero", "-3 each", "-20 each", "one -100", "one -1e6", "one -inf", "many resets", "strong",
        )
    ),
    *(
        Case(f"long, keys {keys}, beta {beta}", keys=keys, beta=beta, gates=gates, **LONG)
        for keys, beta, gates in (
            ("repeated", "1", "zero"), ("repeated", "1.998", "mild"), ("repeated", "0.5", "zero"),
            ("correlated 0.9", "1", "half zero"), ("random", "1.998", "mild"), ("repeated", "0", "mild"),
        )
    ),
    Case("long, left padding", layout="left padding", **{**LONG, "B": 2}),
    Case("long, holes", layout="holes", **{**LONG, "B": 2}),
    Case("long, mixer", conv=4, l2norm=True, gate="softplus", **LONG),
    Case("long, state [V, K]", state_layout="vk", l2norm=True, **LONG),
    Case("long, float32", **{**LONG, "dtype": "float32"}),
    Case("long, 64 x 96", gates="strong", **{**LONG, "K": 64, "V": 96, "H": 4, "HV": 4}),
    Case("long, 96 x 192, mixer", conv=4, l2norm=True, gate="softplus", **{**LONG, "K": 96, "V": 192, "H": 4, "HV": 4}),
    Case("long, 256 x 256", **{**LONG, "K": 256, "V": 256}),
    Case("long, packed", layout="long packed", gates="many resets", **LONG),
    Case("long, packed, mixer", layout="long packed", conv=4, l2norm=True, gate="softplus", **LONG),
    Case("long, packed, 64 x 96", layout="long packed", **{**LONG, "K": 64, "V": 96, "H": 4, "HV": 4}),
]  # fmt: skip


IN_FAST = ("long", "long, gates strong", "long, gates many resets", "long, keys repeated, beta 1", "long, mixer")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "precision"),
    [(c, None) for c in CASES] + [(c, "fast") for c in CASES if c.name in IN_FAST],
    ids=lambda x: getattr(x, "name", x),
)
def test_cases_hold(case, precision, monkeypatch):
    """Results and gradients; those of other head dims, float32 and packed sequences are the plain kernel's."""
    from portable_gdn.harness import verify as module
    from portable_gdn.harness.cases import Inputs

    def inputs(c):
        made = build(c)
        return Inputs(made.operands, made.options._replace(precision=precision), *made[2:])

    monkeypatch.setattr(module, "build", inputs)
    monkeypatch.setitem(cases.PACKED, "long packed", (0, 130, 300, 0, 1, 2, 100))
    signatures = []
    real = PALLAS_INTERPRET.gradients
    monkeypatch.setattr(PALLAS_INTERPRET, "gradients", lambda p, d: signatures.append(p.signature) or real(p, d))
    report = verify([NAME], full=True, cases=[case], in_process=True)
    expected = precision or ("highest" if case.dtype == "float32" else "default")
    assert [pipeline(s, COMMON).precision for s in signatures] == [expected]
    own = (case.K, case.V, case.dtype) == (CHUNK, CHUNK, "bfloat16") and "packed" not in case.layout
    assert [reverse_plan(s, COMMON) is not None for s in signatures] == [own]
    assert not [row for row in report.rows if not row.ok]
    judged = [row for row in report.rows if row.judged and row.tensor in ("o", "state")]
    assert judged or "1.998" in case.name


def operands(T=UNITS * CHUNK + 88, B=1, HV=2, seed=0):
    rng = np.random.default_rng(seed)
    x = {
        "q": rng.standard_normal((B, T, 1, 128)), "k": rng.standard_normal((B, T, 1, 128)),
        "v": rng.standard_normal((B, T, HV, 128)), "g": -rng.random((B, T, HV)), "beta": rng.random((B, T, HV)),
    }  # fmt: skip
    x["k"] /= np.linalg.norm(x["k"], axis=-1, keepdims=True)
    return {n: jnp.asarray(a, jnp.bfloat16 if n in "qkv" else jnp.float32) for n, a in x.items()}


def rule(x, **options):
    o, state = pg.gated_delta_rule(**x, output_final_state=True, backend=NAME, **options)
    return np.asarray(o.astype(jnp.float32)), np.asarray(state)


@pytest.mark.parametrize(("precision", "o_within", "state_within"), [("default", 2.5e-3, 1e-3), ("fast", 4e-3, 4e-3)])
def test_it_agrees_with_the_oracle(precision, o_within, state_within):
    x = operands()
    x["g"] = x["g"].at[:, 200].set(-jnp.inf).at[:, 40:60].set(-30.0)
    o, state = rule(x, precision=precision)
    exact = {n: np.asarray(a.astype(jnp.float32)) for n, a in x.items()}
    want, want_state = pg.gated_delta_rule(**exact, output_final_state=True, backend="numpy")
    assert np.linalg.norm(o - want) < o_within * np.linalg.norm(want)
    assert np.linalg.norm(state - want_state) < state_within * np.linalg.norm(want_state)


@pytest.mark.parametrize("precision", ["default", "fast"])
def test_what_is_exact_is_exact(precision):
    x = operands()
    o, _ = rule(x, precision=precision)
    changed = {n: a.at[:, 300:].multiply(0.5) for n, a in x.items()}
    later, _ = rule(changed, precision=precision)
    assert np.array_equal(o[:, :300], later[:, :300])
    assert not np.array_equal(o[:, 300:], later[:, 300:])
    # What comes before a reset does not reach behind it by a bit.
    reset = {**x, "g": x["g"].at[:, 450].set(-jnp.inf)}
    first, state = rule(reset, precision=precision)
    other, other_state = rule({**reset, "v": reset["v"].at[:, :300].multiply(2)}, precision=precision)
    assert np.array_equal(first[:, 512:], other[:, 512:])
    assert np.array_equal(state, other_state)


@pytest.mark.slow
def test_rows_and_heads_do_not_touch_each_other():
    x = operands(B=2)
    o, state = rule(x)
    broken = {n: (a.at[1].set(jnp.nan) if n in "qkv" else a) for n, a in x.items()}
    o2, state2 = rule(broken)
    assert np.array_equal(o[0], o2[0])
    assert np.array_equal(state[0], state2[0])
    assert np.isnan(o2[1]).any()
    alone, alone_state = rule({n: a[:1] for n, a in x.items()})  # another program: to within roundings
    np.testing.assert_allclose(o[:1], alone, atol=2**-8 * np.abs(o).max())
    np.testing.assert_allclose(state[:1], alone_state, atol=1e-5 * np.abs(state).max())


# Packed sequences

BOUNDS = (0, 130, 130, 260, 261, 400, 590)  # one empty, one of a single token, some that begin within a block
LONGER = 10  # tokens behind the last one


@pytest.fixture(scope="module")
def packed():
    rng = np.random.default_rng(5)
    x = operands(T=BOUNDS[-1] + LONGER, HV=1)
    x["initial_state"] = jnp.asarray(rng.standard_normal((len(BOUNDS) - 1, 1, 128, 128)), jnp.float32)
    return x


@pytest.fixture(scope="module")
def packed_rule():
    """The call with boundaries that only the device knows, compiled once."""
    run = jax.jit(lambda x, cu: pg.gated_delta_rule(**x, cu_seqlens=cu, output_final_state=True, backend=NAME))

    def rule(x, bounds=BOUNDS):
        o, state = run(x, jnp.asarray(bounds, jnp.int32))
        return np.asarray(o.astype(jnp.float32)), np.asarray(state)

    return rule


def test_packed_sequences_are_what_they_are_alone(packed, packed_rule):
    o, state = packed_rule(packed)
    exact = {n: np.asarray(a.astype(jnp.float32)) for n, a in packed.items()}
    for n, (a, b) in enumerate(pairwise(BOUNDS)):
        alone = {name: v[:, a:b] for name, v in exact.items() if name != "initial_state"}
        want, want_state = pg.gated_delta_rule(
            **alone, initial_state=exact["initial_state"][n : n + 1], output_final_state=True, backend="numpy"
        )
        assert np.linalg.norm(o[:, a:b] - want) <= 2.5e-3 * np.linalg.norm(want)
        assert np.linalg.norm(state[n] - want_state) <= 1e-3 * np.linalg.norm(want_state)
    assert not o[:, BOUNDS[-1] :].any()


def test_packed_sequences_do_not_touch_each_other(packed, packed_rule):
    o, state = packed_rule(packed)
    for junk in (3.0, np.nan):
        other = {n: a.at[:, 260:400].set(junk) if n != "initial_state" else a for n, a in packed.items()}
        other["initial_state"] = packed["initial_state"].at[3:5].set(junk)
        o2, state2 = packed_rule(other)
        keep = np.r_[0:260, 400:600]
        assert np.array_equal(bits(o[:, keep]), bits(o2[:, keep]))
        assert np.array_equal(bits(state[[0, 1, 2, 5]]), bits(state2[[0, 1, 2, 5]]))
        assert not np.array_equal(bits(state[4]), bits(state2[4]))


def test_an_empty_sequence_keeps_its_state_to_the_bit(packed, packed_rule):
    odd = packed["initial_state"].at[1, 0, 0, :4].set(jnp.asarray([-0.0, 1e-42, jnp.inf, jnp.nan]))
    _, state = packed_rule({**packed, "initial_state": odd})
    assert np.array_equal(bits(state[1]), bits(odd[1]))


@pytest.mark.parametrize(
    "bounds", [(0, 0, 0, 0, 0, 0, 0), (0, 5, 20, 30, 40, 50, 60), (5, -3, 900, 9, 0, 1, 2), (0, *[600] * 6)]
)
def test_boundaries_that_nobody_could_check_do_no_harm(packed, packed_rule, bounds):
    o, _ = packed_rule(packed, bounds)
    if list(bounds) == sorted(bounds):
        assert np.isfinite(o).all()
        assert not o[:, bounds[-1] :].any()


@pytest.mark.slow
@pytest.mark.parametrize("bounds", [None, (0, 130, 130, 200, 522)])
def test_the_interpreter_of_a_tpu_finds_nothing(bounds, monkeypatch):
    """Races, reads out of bounds, memory that nobody wrote."""
    x = operands(T=UNITS * CHUNK + 10)
    options = {}
    if bounds is not None:
        x["initial_state"] = jnp.ones((len(bounds) - 1, 2, 128, 128), jnp.float32)
        options["cu_seqlens"] = jnp.asarray(bounds, jnp.int32)
    expected = rule(x, **options)
    monkeypatch.setenv(INTERPRETER, "tpu")
    found = rule(x, **options)
    for a, b, eps in zip(expected, found, (2**-8, 1e-5), strict=True):  # o is bfloat16
        np.testing.assert_allclose(a, b, atol=eps * np.abs(a).max())


def test_it_lowers_where_nobody_said_which_tpu_it_is_for():
    shapes = {n: jax.ShapeDtypeStruct(a.shape, a.dtype) for n, a in operands(T=1024).items()}
    traced = jax.jit(lambda x: pg.gated_delta_rule(**x, qk_l2norm=True)[0]).trace(shapes)
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()


# stages


def parting(case):
    """Where the stages that are shown leave the truth first, and the results of the call and of its stages."""
    made = build(case)
    problem, _ = door.normalise({name: jnp.asarray(a) for name, a in made.operands.items()}, made.options, NAME)
    found = {
        n: tuple(None if a is None else np.asarray(a) for a in x) for n, x in PALLAS_INTERPRET.probe(problem).items()
    }
    truth = StageTruth(made, CHUNK)
    side = Side("pipeline", found, PALLAS_INTERPRET.rounding(problem.signature))
    return first_parting(truth, side), np.asarray(PALLAS_INTERPRET.run(problem).o), found


@pytest.mark.parametrize(
    "case",
    [
        Case("long", **{**LONG, "T": 300}),
        Case("long, KDA", variant="KDA", **{**LONG, "T": 300}),
        Case("long, vk, holes", layout="holes", state_layout="vk", **LONG),
        Case("long, segments", layout="segments", **LONG),
    ],
    ids=lambda c: c.name,
)
@pytest.mark.slow
def test_its_own_states_and_outputs_are_probed(case):
    where, o, found = parting(case)
    assert where is None
    shown = np.moveaxis(found["output"][0], 2, 3)
    assert np.array_equal(bits(shown.reshape(1, -1, *shown.shape[3:])[:, : case.T]), bits(o))


@pytest.mark.slow
@pytest.mark.parametrize(("of", "stage", "chunk"), [("into", "state", 1), ("before", "delta", 0)])
def test_a_fault_in_the_pipeline_is_found_at_its_stage(of, stage, chunk, monkeypatch):
    real = gates.gates_of_chunks
    wrong = lambda p, g, b: [a._replace(**{of: getattr(a, of) * 1.5}) for a in real(p, g, b)]  # noqa: E731
    monkeypatch.setattr(gates, "gates_of_chunks", wrong)
    jax.clear_caches()
    try:
        where, _, _ = parting(Case("long", **{**LONG, "T": 300}))
    finally:
        jax.clear_caches()
    assert (where.stage, where.chunk) == (stage, chunk)
