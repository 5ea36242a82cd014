"""The Pallas kernel: stages, table of chunks, what it rounds and refuses, faults in it, the choice under jit.

That it holds every case of the proof is ``test_verify``'s to show, which runs each backend.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import array_api_compat.numpy as xp
import ml_dtypes
import numpy as np
import pytest
from conftest import assert_all_close, assert_close, make, oracle

import portable_gdn as pg
from portable_gdn import dispatch, door
from portable_gdn.harness.cases import Case, build, designed, recorded
from portable_gdn.harness.quick_proof import LISTED
from portable_gdn.harness.verify import verify
from portable_gdn.spec import chunkwise
from portable_gdn.spec.errors import GdnError
from portable_gdn.spec.evaluate import matmul
from portable_gdn.spec.problem import Options
from portable_gdn.spec.stages import STAGES, Algebra
from portable_gdn.tpu.backend import INTERPRETER, PALLAS_INTERPRET, Interpreted
from portable_gdn.tpu.chips import COMMON, VMEM_LIMIT
from portable_gdn.tpu.kernels.plain.plan import plan

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

from portable_gdn.tpu.kernels.common.products import KernelProduct  # noqa: E402
from portable_gdn.tpu.kernels.common.registers import square_indices  # noqa: E402
from portable_gdn.tpu.kernels.plain import stages as kernel_stages  # noqa: E402
from portable_gdn.tpu.table import BEGIN, BLOCK, END, FIRST, FLAGS, FRESH, LAST, SLOT, WORDS, chunk_table  # noqa: E402

NAME = "pallas-interpret"
NAMES = ("q", "k", "v", "g", "beta", "initial_state")


pytestmark = pytest.mark.usefixtures("tpu_backends")


def slow(*values):
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def arrays(x):
    return {name: jnp.asarray(a) for name, a in x.items()}


def rule(x, backend=NAME, **options):
    o, state = pg.gated_delta_rule(**x, output_final_state=True, backend=backend, **options)
    return np.asarray(o), np.asarray(state)


def problem(x, backend=NAME, **options):
    return door.normalise(dict(x), Options(output_final_state=True, **options), backend)[0]


def case(name):
    return next(c for c in [*designed(), *recorded()] if c.name == name)


# the kernel by the proof


def test_names_of_the_quick_proof_exist_and_none_is_refused():
    for name in LISTED["pallas-interpret"]:
        inputs = build(case(name))
        door.normalise(PALLAS_INTERPRET.from_numpy(inputs.operands), inputs.options, NAME)


@pytest.mark.parametrize(("variant", "dtype"), [("GDN", "float32"), ("GDN", "bfloat16"), ("GDN-2", "float32")])
def test_holds_in_the_interpreter_that_models_memories(variant, dtype, monkeypatch):
    """Races, reads out of bounds and memory that nobody has written raise or show as NaN there."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    monkeypatch.setenv(INTERPRETER, "tpu")
    x = make(variant, B=1, T=44, dtype=dtype, state=True, N=4)
    x["cu_seqlens"] = np.asarray([0, 9, 9, 44, 44], np.int32)
    o, state = rule(arrays(x), chunk_size=16)
    want = oracle(x)
    assert_close(o, want.o, want.sizes["o"], eps=16 if dtype == "float32" else 2**15)
    assert_close(state, want.state, want.sizes["state"], eps=16 if dtype == "float32" else 2**15)
    assert interpret_pallas_call.races is not None
    assert not interpret_pallas_call.races.races_found


def test_an_unknown_interpreter_is_refused(monkeypatch):
    monkeypatch.setenv(INTERPRETER, "gpu")
    with pytest.raises(GdnError, match=f"{INTERPRETER} is 'gpu'; it must be 'generic' or 'tpu'"):
        rule(arrays(make(T=16)))


@pytest.mark.parametrize("precision", ["highest", "default", "fast"])
def test_precisions_hold_on_float32_inputs(precision):
    inputs = build(Case("precision", HV=4, T=130, keys="correlated 0.9", beta="1"))
    x, options = arrays(inputs.operands), inputs.options._replace(precision=precision)
    p, _ = door.normalise(dict(x), options, NAME)
    o = np.asarray(PALLAS_INTERPRET.run(p).o, np.float64)
    want = oracle(inputs.operands).o
    error = np.linalg.norm(o - want) / np.linalg.norm(want)
    low, high = {"highest": (0, 2e-6), "default": (3e-4, 5e-3), "fast": (1e-3, 5e-2)}[precision]
    assert low <= error <= high, error


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [16, 64, 256])
def test_chunk_sizes(chunk_size):
    x = make(T=300, state=True)
    o, state = rule(arrays(x), chunk_size=chunk_size)
    want = oracle(x)
    assert_close(o, want.o, want.sizes["o"], eps=16)
    assert_close(state, want.state, want.sizes["state"], eps=16)


# faults in it


def with_stage(**replaced):
    """A module like the kernel's stages, some of them replaced; a class, since it must be hashable."""
    return type("Faulty", (), {name: staticmethod(f) for name, f in {**vars_of_stages(), **replaced}.items()})


def vars_of_stages():
    return {name: getattr(kernel_stages, name) for name in kernel_stages.__all__}


def decay_twice(g):
    G, count = kernel_stages.decay(g)
    return 2 * G, count


def scores_masked_after_exp(mm, q, k, b, decays, scale):
    row, column = square_indices(k.shape[-2])
    D = jnp.exp(decays.sum - kernel_stages.across_lanes(decays.sum)) * (row >= column)
    strict = (row > column).astype(jnp.float32)
    return (
        b * mm.right_transposed(k, k, "k", "k") * D * strict,
        scale * mm.right_transposed(q, k, "q", "k") * D,
    )


def resets_not_counted(g):
    G, count = kernel_stages.decay(jnp.maximum(g, -100.0))
    return G, 0 * count


def state_transposed(mm, k, Vn, decays, S):
    return jnp.swapaxes(kernel_stages.state(mm, k, Vn, decays, S), -1, -2)


def powers_in_the_inverse(mm, Akk):
    row, column = square_indices(Akk.shape[-1])
    X, P, n = jnp.where(row == column, 1.0, -Akk), -Akk, 1
    while n < Akk.shape[-1] // 2:
        P = mm(P, P, "A", "A")
        X, n = X + mm(X, P, "T", "A"), 2 * n
    return X


SQUARE = Case("square", T=130, K=16, V=16)


@pytest.mark.parametrize(
    ("replaced", "found_by"),
    [
        ({}, None),
        ({"decay": decay_twice}, SQUARE),
        ({"decay": resets_not_counted}, replace(SQUARE, gates="many resets")),
        ({"scores": scores_masked_after_exp}, replace(SQUARE, gates="-20 each")),
        ({"state": state_transposed}, SQUARE),
        ({"inverse": powers_in_the_inverse}, replace(SQUARE, keys="repeated", beta="1.998", gates="zero")),
    ],
)
def test_faults_are_caught(replaced, found_by):
    faulty = Interpreted(with_stage(**replaced))
    faulty.name = "under test"
    dispatch.register_backend(faulty)
    report = verify(["under test"], full=True, cases=[found_by or SQUARE])
    assert report.ok is (found_by is None), report.rows
    if found_by is not None:
        assert {row.tensor for row in report.rows if not row.ok} & {"o", "state"}


# stages


@pytest.mark.parametrize("variant", ["GDN", "DeltaNet", "KDA", *slow("tile-grouped", "GDN-2", "GLA")])
def test_probed_stages_are_the_specification_s(variant):
    x = make(variant, B=2, T=150, state=True)
    if "g" in x:
        x["g"][:, 40] = -np.inf
        x["g"][:, 41] = -8
    p = problem(arrays(x))
    s = p.signature
    found = PALLAS_INTERPRET.probe(p)
    assert tuple(found) == STAGES
    size = PALLAS_INTERPRET.rounding(s).chunk_size
    for row in range(s.B):
        alone = {name: a[row : row + 1].astype(np.float64) for name, a in x.items()}
        S = alone["initial_state"].reshape(s.H, -1, s.K, s.V)
        for chunk in range(-(-s.T // size)):
            part = {
                n: a if n == "initial_state" else filled(a[:, chunk * size :][:, :size], size) for n, a in alone.items()
            }
            core = prepare_in_float64(s, part)
            want = chunkwise.stage_chunk(Algebra(xp, matmul), chunkwise.ChunkOperands(*core, S), s.scale)
            for stage, values in want.items():
                for got, exact in zip(found[stage], values, strict=True):
                    assert (got is None) == (exact is None), stage
                    if exact is None:
                        continue
                    exact = np.broadcast_to(exact, (s.H, s.HV // s.H, *exact.shape[2:]))
                    exact = exact.reshape(s.HV, *exact.shape[2:])
                    got = np.asarray(got[row, chunk], np.float64)
                    assert got.shape == exact.shape, stage
                    error = np.linalg.norm(got - exact)
                    assert error <= 3e-6 * np.linalg.norm(exact) + 1e-7, (stage, chunk, error)
            S = want["state"][1]


def filled(a, size):
    return np.pad(a, [(0, size - n if axis == 1 else 0) for axis, n in enumerate(a.shape)])


def test_packed_sequences_cannot_be_probed():
    x = make(B=1, T=40, N=2)
    x["cu_seqlens"] = np.asarray([0, 11, 40], np.int32)
    with pytest.raises(GdnError, match="cu_seqlens is given; it must be None where stages are probed"):
        PALLAS_INTERPRET.probe(problem(arrays(x)))


def prepare_in_float64(s, x):
    """Operands of the rule of one row and chunk, heads first; no gate or norm in these calls."""
    lead = lambda a: np.moveaxis(a[0], 0, 1).reshape(s.H, -1, a.shape[1], a.shape[-1])  # noqa: E731
    column = lambda a: a if a.ndim == 4 else a[..., None]  # noqa: E731
    g = column(x["g"]) if "g" in x else np.zeros((*x["beta"].shape, 1))
    b, w = (lead(column(x[n])) if n in x else None for n in (("beta", "beta") if "beta" in x else ("erase", "write")))
    return lead(x["q"]), lead(x["k"]), lead(x["v"]), lead(g), b, w


def test_decay_in_the_kernel_is_the_specification_s_to_the_bit():
    from portable_gdn.spec import stages

    rng = np.random.default_rng(0)
    g = -rng.exponential(0.3, (64, 3)).astype(np.float32)
    g[rng.uniform(size=g.shape) < 0.1] = -np.inf
    for got, want in zip(jax.jit(kernel_stages.decay)(g), stages.decay(xp, g), strict=True):
        np.testing.assert_array_equal(np.asarray(got), want)


# products


def test_products_round_what_they_say():
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((2, 64, 64)).astype(np.float32) for _ in range(2))
    exact = a.astype(np.float64) @ b
    half = lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float64)  # noqa: E731
    error = lambda x, want: np.linalg.norm(np.asarray(x) - want) / np.linalg.norm(want)  # noqa: E731

    def product(precision, *names):
        return jax.jit(lambda a, b: KernelProduct(precision)(a, b, *names))(a, b)

    assert error(product("highest", "q", "k"), exact) < 3e-7
    assert error(product("default", "q", "k"), half(a) @ half(b)) < 3e-7
    assert error(product("default", "T", "R"), exact) < 2e-5
    assert error(product("default", "T", "R"), exact) > 1e-7  # three passes, not float32
    assert error(product("default", "k", "Vn"), half(a) @ b) < 2e-5
    assert error(product("fast", "T", "R"), half(a) @ half(b)) < 3e-7
    mm = KernelProduct("default")
    assert error(mm.right_transposed(a, b, "T", "R"), np.swapaxes(b @ np.swapaxes(a, 1, 2), 1, 2)) < 2e-5
    assert error(mm.left_transposed(a, b, "T", "R"), np.swapaxes(a, 1, 2) @ b) < 2e-5


# the table of chunks


def signature(**changes):
    x = make(T=16)
    return replace(problem(arrays(x)).signature, **changes)


@pytest.mark.parametrize("seed", range(20))
def test_the_table_covers_every_token_once_in_order(seed):
    rng = np.random.default_rng(seed)
    T, N = int(rng.integers(1, 300)), int(rng.integers(1, 9))
    cuts = np.sort(rng.integers(0, T + 1, N - 1))
    bounds = np.concatenate([[0], cuts, [T]]).astype(np.int32)
    p = plan(
        signature(B=1, T=T, N=N, operands=(*NAMES[:5], "cu_seqlens"), chunk_size=int(rng.choice([16, 64]))), COMMON
    )
    t = np.asarray(chunk_table(p, bounds)).reshape(-1, WORDS)
    assert len(t) == p.chunks
    covered, owner = [], np.repeat(np.arange(N), np.diff(bounds))
    for e in t:
        tokens = e[BLOCK] * p.C + np.arange(e[BEGIN], e[END])
        assert 0 <= e[BLOCK] < p.blocks
        assert np.all(owner[tokens] == e[SLOT])
        covered += tokens.tolist()
    assert covered == list(range(T))
    assert np.all(
        np.diff(t[:, BLOCK]) >= 0
    )  # visits of a block follow each other: its output is complete when it leaves
    fresh = t[:, FLAGS] & FRESH != 0
    np.testing.assert_array_equal(fresh, np.diff(t[:, BLOCK], prepend=-1) != 0)
    for flag in (FIRST, LAST):  # every state, those of empty sequences too, is read once and written once
        assert sorted(t[t[:, FLAGS] & flag != 0, SLOT]) == list(range(N))


@pytest.mark.parametrize(
    "bounds", [[0, 70, 40, 90], [5, -3, 1000, 90], [0, 0, 0, 0], [0, 20, 40, 60], [90, 90, 90, 90]]
)
def test_boundaries_that_nobody_could_check_stay_in_bounds(bounds):
    p = plan(signature(B=1, T=90, N=3, operands=(*NAMES[:5], "cu_seqlens"), chunk_size=16), COMMON)
    t = np.asarray(jax.jit(lambda b: chunk_table(p, b))(jnp.asarray(bounds, jnp.int32))).reshape(-1, WORDS)
    assert np.all((t[:, BLOCK] >= 0) & (t[:, BLOCK] < p.blocks))
    assert np.all((t[:, BEGIN] >= 0) & (t[:, END] <= p.C))
    assert np.all((t[:, SLOT] >= 0) & (t[:, SLOT] < p.N))


def test_tokens_behind_the_last_sequence_give_zeros():
    x = arrays(make(B=1, T=70))
    x.pop("initial_state", None)
    f = jax.jit(lambda x, cu: pg.gated_delta_rule(**x, cu_seqlens=cu, backend=NAME, chunk_size=16)[0])
    o = np.asarray(f(x, jnp.asarray([0, 5, 20], jnp.int32)))
    want = oracle({**{n: a[:, :20] for n, a in map_numpy(x).items()}, "cu_seqlens": np.asarray([0, 5, 20])})
    assert_close(o[:, :20], want.o, want.sizes["o"])
    assert not np.any(o[:, 20:])


def map_numpy(x):
    return {name: np.asarray(a) for name, a in x.items()}


# bits


@pytest.fixture(scope="module")
def packed():
    x = make(B=1, T=150, dtype="bfloat16", state=True, N=5)
    return {**x, "cu_seqlens": np.asarray([0, 30, 30, 101, 101, 150], np.int32)}


def test_sequences_do_not_touch_each_other(packed):
    o, state = rule(arrays(packed))
    for junk in (3.0, np.nan, np.inf):
        x = {name: a.copy() for name, a in packed.items()}
        for name in ("q", "k", "v", "g", "beta"):
            x[name][:, 30:101] = junk
        x["initial_state"][2] = junk
        other, other_state = rule(arrays(x))
        for part in (slice(0, 30), slice(101, 150)):
            np.testing.assert_array_equal(bits(other[:, part]), bits(o[:, part]))
        for n in (0, 1, 3, 4):
            np.testing.assert_array_equal(bits(other_state[n]), bits(state[n]))


def test_an_empty_sequence_keeps_its_state_to_the_bit(packed):
    x = {name: a.copy() for name, a in packed.items()}
    x["initial_state"][1, 0, 0, :4] = [-0.0, 1e-42, np.inf, np.nan]
    _, state = rule(arrays(x))
    for n in (1, 3):
        np.testing.assert_array_equal(bits(state[n]), bits(x["initial_state"][n]))


@pytest.mark.parametrize("variant", ["GDN", "KDA", *slow("tile-grouped", "GDN-2", "GLA")])
def test_later_tokens_do_not_change_earlier_ones(variant):
    """From every token on, in one program."""
    x = arrays(make(variant, B=1, T=200, H=1, HV=1, dtype="bfloat16", state=True))
    halved = [name for name in x if name != "initial_state"]

    @jax.jit
    def outputs(x, P):
        later = lambda a: jnp.arange(200).reshape(1, -1, *(1,) * (a.ndim - 2)) >= P  # noqa: E731
        y = {**x, **{name: jnp.where(later(x[name]), 0.5 * x[name], x[name]) for name in halved}}
        return pg.gated_delta_rule(**y, backend=NAME)[0]

    whole = np.asarray(outputs(x, 200))
    for P in range(1, 200):
        o = np.asarray(outputs(x, P))
        np.testing.assert_array_equal(bits(o[:, :P]), bits(whole[:, :P]), str(P))
        assert np.any(bits(o[:, P:]) != bits(whole[:, P:]))


def bits(a):
    return np.ascontiguousarray(a).view(np.uint8)


# what it refuses


REFUSED = [
    ("GDN", {"dtype": "float16"}, "cannot load float16"),
    ("GDN", {"H": 1, "HV": 16, "K": 1024, "V": 1024}, "MiB of VMEM for 16 value heads of 1024 x 1024"),
]


@pytest.mark.parametrize(("variant", "sizes", "sentence"), REFUSED)
def test_refusals_are_sentences(variant, sizes, sentence):
    x = arrays(make(variant, B=1, T=8, **sizes))
    with pytest.raises(GdnError, match=f"backend '{NAME}' cannot run this call: .*{sentence}"):
        rule(x)
    assert pg.explain(**x).backend == "xla"


def test_steps_and_long_tables_are_refused():
    x = make(B=1, T=8)
    step = {name: jnp.asarray(a[:, 0]) for name, a in x.items()}
    with pytest.raises(GdnError, match="'xla' runs a step"):
        pg.gated_delta_rule_step(**step, backend=NAME)
    why = PALLAS_INTERPRET.refuses(signature(B=1, T=1 << 24))
    assert "scalar memory" in why


def test_arrays_that_are_not_on_a_tpu_are_refused():
    x = arrays(make(T=8))
    with pytest.raises(GdnError, match="these arrays are on cpu, and it is for TPUs; 'pallas-interpret' runs the same"):
        rule(x, "pallas")
    assert pg.explain(**x).backend == "xla"
    assert dict(pg.explain(**x).passed_over)["pallas"].startswith("these arrays are on cpu")


def test_no_tokens_are_answered_before_the_kernel():
    x = make(T=0, state=True)
    o, state = rule(arrays(x))
    assert o.shape == x["v"].shape
    np.testing.assert_array_equal(state, x["initial_state"])


def test_chunks_shrink_before_a_call_is_refused():
    wide = plan(signature(H=1, HV=16, K=256, V=256, T=4096), COMMON)
    assert wide.C < 128
    assert wide.vmem <= VMEM_LIMIT


def test_the_backend_imports_no_jax():
    code = "import sys, portable_gdn.tpu.backend as b; assert b.PALLAS.name; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# transformations and the compiler's choice


def loss(o, state):
    return (o * o).sum() + (state * state).sum()


def test_the_interpreted_kernel_under_vmap():
    """Over all operands, and over boundaries alone, which the kernel's table is made of."""
    x = make(B=1, T=40, state=True, N=2)
    bounds = np.asarray([[0, 11, 40], [0, 0, 40]], np.int32)
    many = {name: jnp.stack([a, 0.5 * a]) for name, a in arrays(x).items()}
    f = lambda x, cu: pg.gated_delta_rule(**x, cu_seqlens=cu, output_final_state=True, backend=NAME)  # noqa: E731
    o, state = jax.vmap(f)(many, jnp.asarray(bounds))
    for i in range(2):
        want = oracle({**{name: np.asarray(a[i]) for name, a in many.items()}, "cu_seqlens": bounds[i]})
        assert_close(np.asarray(o[i]), want.o, want.sizes["o"])
        assert_close(np.asarray(state[i]), want.state, want.sizes["state"])


def auto(x):
    return pg.gated_delta_rule(**x, output_final_state=True)


def test_one_jitted_function_holds_the_kernel_on_a_tpu_only():
    x = arrays(make(T=40, state=True))
    for function in (auto, jax.grad(lambda x: loss(*auto(x)))):
        traced = jax.jit(function).trace(x)
        text = {platform: traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("cpu", "tpu")}
        assert "gated_delta_rule_forward" in text["tpu"]
        assert ("gated_delta_rule_backward" in text["tpu"]) is (function is not auto)
        assert "tpu_custom_call" in text["tpu"]
        assert "tpu_custom_call" not in text["cpu"]
    forward = jax.jit(auto).trace(x).lower(lowering_platforms=("tpu",)).as_text()
    assert "stablehlo.while" not in forward  # xla's scan is not there beside it


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_named_under_jit_it_never_falls_back(how, monkeypatch):
    """Nor for gradients."""
    if how == "environment":
        monkeypatch.setenv(dispatch.ENVIRONMENT, "pallas")
    x = arrays(make(T=40, state=True))
    name = "pallas" if how == "argument" else None
    named = lambda x: pg.gated_delta_rule(**x, output_final_state=True, backend=name)  # noqa: E731
    for function in (named, jax.grad(lambda x: loss(*named(x)))):
        traced = jax.jit(function).trace(x)
        assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()
        with pytest.raises(ValueError, match="Only interpret mode is supported on CPU"):
            traced.lower(lowering_platforms=("cpu",))
    if jax.default_backend() == "cpu":
        with pytest.raises(ValueError, match="Only interpret mode is supported on CPU"):
            jax.jit(named)(x)


def test_on_a_cpu_the_jitted_function_is_xla_to_the_bit():
    x = arrays(make(T=40, state=True))
    for a, b in zip(jax.jit(auto)(x), pg.gated_delta_rule(**x, output_final_state=True, backend="xla"), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_grad_vmap_and_checks_of_values_where_the_choice_is_the_compiler_s():
    from jax.experimental import checkify

    x = make(T=40, state=True)
    e = oracle(x)
    want = oracle(x, {"o": 2 * e.o, "state": 2 * e.state})
    gradient = jax.grad(lambda x: loss(*auto(x)))
    assert_all_close(map_numpy(jax.jit(gradient)(arrays(x))), want, eps=16)
    many = {name: jnp.stack([a, a]) for name, a in arrays(x).items()}
    o, _ = jax.jit(jax.vmap(auto))(many)
    assert_close(np.asarray(o[1]), e.o, e.sizes["o"])
    checked = jax.jit(checkify.checkify(lambda x: pg.gated_delta_rule(**x, check_values=True)[0]))
    assert checked(arrays(x))[0].get() is None
    assert "beta" in checked(arrays({**x, "beta": 3 + x["beta"]}))[0].get()


def test_explain_under_a_trace_takes_the_kernel_and_names_xla():
    found = []

    @jax.jit
    def function(x):
        found.extend([pg.explain(**x), pg.explain(**x, backend="pallas")])
        return x["q"]

    function(arrays(make(T=8)))
    free, named = found
    assert free.backend == named.backend == "pallas"
    assert "xla" in dict(free.passed_over)
    assert "runs on  pallas if compiled for a TPU, xla elsewhere\n" in str(free)
    assert "runs on  pallas\n" in str(named)
    assert dict(named.passed_over)["xla"] == "'pallas' was asked for by name"


def test_packed_boundaries_may_be_traced():
    x = make(B=1, T=70, state=True, N=3)
    bounds = np.asarray([0, 33, 33, 70], np.int32)
    f = jax.jit(lambda x, cu: pg.gated_delta_rule(**x, cu_seqlens=cu, output_final_state=True, backend=NAME))
    o, state = f(arrays(x), jnp.asarray(bounds))
    want = oracle({**x, "cu_seqlens": bounds})
    assert_close(np.asarray(o), want.o, want.sizes["o"])
    assert_close(np.asarray(state), want.state, want.sizes["state"])
