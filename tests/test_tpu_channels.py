"""The pipelined kernel with decays by channel or group: which calls it takes, the budget, and what is exact."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import make

import portable_gdn as pg
from portable_gdn.harness.cases import Case
from portable_gdn.harness.verify import verify
from portable_gdn.spec.problem import Meta, Options
from portable_gdn.spec.rules import make_signature
from portable_gdn.tpu.backend import INTERPRETER, PALLAS_INTERPRET
from portable_gdn.tpu.chips import COMMON
from portable_gdn.tpu.kernels.common.tiles import CHUNK
from portable_gdn.tpu.kernels.pipelined.geometry import Inside
from portable_gdn.tpu.kernels.pipelined.plan import UNITS, pipeline

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

from portable_gdn.spec.gates import activate_gate  # noqa: E402
from portable_gdn.tpu.kernels.common import decay_factors as decays  # noqa: E402
from portable_gdn.tpu.kernels.pipelined.prologue import channel_decay  # noqa: E402

LONG = {"K": CHUNK, "V": CHUNK, "T": UNITS * CHUNK + 88, "H": 1, "HV": 2, "dtype": "bfloat16"}
NAME = "pallas-interpret"
pytestmark = pytest.mark.usefixtures("tpu_backends")


def signature(g=(128,), erase=None, write=None, T=2048, H=16, HV=16, K=128, V=128, dtype="bfloat16", N=0, **options):
    x = {
        "q": Meta((1, T, H, K), dtype, "cpu"), "k": Meta((1, T, H, K), dtype, "cpu"),
        "v": Meta((1, T, HV, V), dtype, "cpu"), "g": Meta((1, T, HV, *g), "float32", "cpu"),
    }  # fmt: skip
    if erase is None:
        x["beta"] = Meta((1, T, HV), "float32", "cpu")
    else:
        x |= {"erase": Meta((1, T, HV, *erase), "float32", "cpu"), "write": Meta((1, T, HV, *write), "float32", "cpu")}
    if N:
        x["cu_seqlens"] = Meta((N + 1,), "int32", "cpu")
    return make_signature("jax", "cpu", x, Options(**options))


def test_which_calls_it_takes():
    core = COMMON
    p = pipeline(signature(), core)
    assert (p.heads, p.groups, p.steps, p.masked, p.summands) == (8, 2, 4, False, 2)
    assert pipeline(signature(erase=(128,), write=(128,)), core).keeps_values
    assert pipeline(signature(g=(16,)), core) is not None  # many groups are channels
    assert pipeline(signature(H=16, HV=32), core).P == 4
    assert pipeline(signature(precision="fast"), core).summands == 1
    assert pipeline(signature(N=3), core).packed
    assert pipeline(signature(K=256, g=(2,)), core).decays == 2  # groups that are tiles
    for other in (
        signature(g=(2,)), signature(T=2 * CHUNK), signature(K=192, g=(2,)), signature(K=64, g=(64,)), signature(V=256),
        signature(precision="highest"), signature(chunk_size=64), signature(dtype="float32"), signature(H=3, HV=30),
        signature(erase=(), write=(128,)),
    ):  # fmt: skip
        assert pipeline(other, core) is None
    assert pipeline(signature(), COMMON._replace(vmem_bytes=40 << 20)).P < 8
    assert pipeline(signature(), COMMON._replace(vmem_bytes=16 << 20)) is None


def operands(variant="KDA", T=LONG["T"], HV=1, seed=0):
    rng = np.random.default_rng(seed)
    x = {name: rng.standard_normal((1, T, heads, 128)) for name, heads in (("q", 1), ("k", 1), ("v", HV))}
    x["k"] /= np.linalg.norm(x["k"], axis=-1, keepdims=True)
    x["g"] = -rng.exponential(0.3, (1, T, HV, 128))
    if variant == "KDA":
        x["beta"] = rng.random((1, T, HV))
    if variant == "GDN-2":
        x |= {name: rng.random((1, T, HV, 128)) for name in ("erase", "write")}
    return {n: jnp.asarray(a, jnp.bfloat16 if n in "qkv" else jnp.float32) for n, a in x.items()}


def rule(x, **options):
    o, state = pg.gated_delta_rule(**x, output_final_state=True, backend=NAME, **options)
    return np.asarray(o.astype(jnp.float32)), np.asarray(state)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("variant", "precision", "o_within", "state_within"),
    [
        ("KDA", "fast", 4.5e-3, 4e-3), slow("KDA", "default", 3e-3, 3e-3), slow("GDN-2", "fast", 4.5e-3, 4e-3),
        slow("GDN-2", "default", 3e-3, 3e-3), slow("GLA", "fast", 4e-3, 3e-3), slow("GLA", "default", 3e-3, 3e-3),
    ],
)  # fmt: skip
def test_it_agrees_with_the_oracle(variant, precision, o_within, state_within):
    x = operands(variant)
    x["g"] = x["g"].at[:, 200].set(-jnp.inf).at[:, 40:60].set(-30.0)
    o, state = rule(x, precision=precision)
    exact = {n: np.asarray(a.astype(jnp.float32)) for n, a in x.items()}
    want, want_state = pg.gated_delta_rule(**exact, output_final_state=True, backend="numpy")
    assert np.linalg.norm(o - want) < o_within * np.linalg.norm(want)
    assert np.linalg.norm(state - want_state) < state_within * np.linalg.norm(want_state)


def test_what_is_exact_is_exact():
    x = operands()
    o, _ = rule(x, precision="fast")
    for P in (1, 127, 128, 300, 303):
        later, _ = rule({n: a.at[:, P:].multiply(0.5) for n, a in x.items()}, precision="fast")
        assert np.array_equal(o[:, :P], later[:, :P])
        assert not np.array_equal(o[:, P:], later[:, P:])
    # What comes before a reset of every channel does not reach behind it by a bit.
    reset = {**x, "g": x["g"].at[:, 450].set(-jnp.inf)}
    first, state = rule(reset, precision="fast")
    other, other_state = rule({**reset, "v": reset["v"].at[:, :300].multiply(2)}, precision="fast")
    assert np.array_equal(first[:, 512:], other[:, 512:])
    assert np.array_equal(state, other_state)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "T", "dim", "heads"), [("KDA", 203, 32, 8), ("tile-grouped", 203, 32, 8), ("KDA", 300, 128, 2)]
)
def test_no_output_depends_on_a_later_token(variant, T, dim, heads):
    """Bit for bit: each head, several a row, has tokens of its own from its P on, and P goes from 1 to 200. Long rows
    are the pipeline's, where every fourth P suffices; the others are the plain kernel's."""
    shape = {"B": 25, "T": T, "H": heads, "HV": heads, "K": dim, "V": dim, "dtype": "bfloat16"}
    x, other = make(variant, **shape), make(variant, seed=1, **shape)
    P = np.arange(1, 201, 8 // heads).reshape(25, 1, heads, 1)
    token = np.arange(T)[:, None, None]
    later = {n: np.where(token >= P if a.ndim == 4 else (token >= P)[..., 0], other[n], a) for n, a in x.items()}
    first, second = (rule({n: jnp.asarray(a) for n, a in y.items()})[0] for y in (x, later))
    assert np.array_equal(np.where(token < P, first, 0), np.where(token < P, second, 0))
    assert np.where(token == P, first != second, False).any((1, 3)).all()  # and the change is seen at once


@pytest.mark.slow
def test_the_interpreter_of_a_tpu_finds_nothing(monkeypatch):
    """Races, reads out of bounds, memory that nobody wrote."""
    x = operands("GDN-2", T=UNITS * CHUNK + 10)
    expected = rule(x, precision="fast")
    monkeypatch.setenv(INTERPRETER, "tpu")
    found = rule(x, precision="fast")
    for a, b, eps in zip(expected, found, (2**-8, 1e-5), strict=True):  # o is bfloat16
        np.testing.assert_allclose(a, b, atol=eps * np.abs(a).max())


CASES = [
    *(
        Case(f"KDA, gates {kind}", variant="KDA", gates=kind, **LONG)
        for kind in (
            "mild", "zero", "half zero", "-3 each", "-20 each", "one -100", "one -1e6", "one -inf", "many resets",
            "strong",
        )
    ),
    *(
        Case(f"KDA, keys {keys}, beta {beta}", variant="KDA", keys=keys, beta=beta, gates=gates, **LONG)
        for keys, beta, gates in (
            ("repeated", "1", "zero"), ("repeated", "1.998", "mild"), ("correlated 0.9", "1", "half zero"),
            ("repeated", "0", "mild"),
        )
    ),
    Case("KDA, softplus gate, norm", variant="KDA", gate="softplus", l2norm=True, **LONG),
    Case("KDA, bounded gate", variant="KDA", gate="bounded", **LONG),
    Case("KDA, mixer", variant="KDA", conv=4, l2norm=True, gate="softplus", **LONG),
    Case("KDA, left padding, two groups", variant="KDA", layout="left padding", **{**LONG, "H": 2, "HV": 16}),
    Case("GDN-2, many resets", variant="GDN-2", gates="many resets", **{**LONG, "B": 2}),
    Case("GDN-2, mixer", variant="GDN-2", conv=4, l2norm=True, gate="softplus", **LONG),
    Case("tile-grouped", variant="tile-grouped", gates="many resets", **{**LONG, "K": 2 * CHUNK}),
    Case("tile-grouped, mixer", variant="tile-grouped", conv=4, l2norm=True, gate="softplus", **{**LONG, "K": 256}),
    Case("GLA, state [V, K]", variant="GLA", state_layout="vk", **LONG),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda x: x.name)
def test_cases_hold(case, monkeypatch):
    """The outputs; gradients are judged by the harness's own cases."""
    signatures = []
    real = PALLAS_INTERPRET.run

    def run(problem):
        signatures.append(problem.signature)
        return real(problem)

    monkeypatch.setattr(PALLAS_INTERPRET, "run", run)
    monkeypatch.setattr(PALLAS_INTERPRET, "gradients", lambda problem, d: (run(problem), {}))
    report = verify([NAME], full=True, cases=[case], in_process=True)
    assert all(pipeline(s, COMMON).widths.decay == max(s.groups, 1) for s in signatures)
    assert signatures
    assert [row for row in report.rows if row.tensor in ("o", "state") and (row.judged or "1.998" in case.name)]
    assert not [row for row in report.rows if not row.ok and not row.tensor.startswith("grad")]


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["KDA", "GDN-2"])
def test_packed_sequences(variant):
    x = operands(variant, T=600)
    x["cu_seqlens"] = np.asarray([0, 37, 37, 300, 556, 600], np.int32)
    x["initial_state"] = jnp.asarray(np.random.default_rng(1).standard_normal((5, 1, 128, 128)), jnp.float32)
    o, state = rule(x, precision="fast")
    exact = {n: np.asarray(a) if n == "cu_seqlens" else np.asarray(a.astype(jnp.float32)) for n, a in x.items()}
    want, want_state = pg.gated_delta_rule(**exact, output_final_state=True, backend="numpy")
    assert np.linalg.norm(o - want) < 6e-3 * np.linalg.norm(want)
    assert np.linalg.norm(state - want_state) < 6e-3 * np.linalg.norm(want_state)
    assert np.array_equal(state[1], np.asarray(x["initial_state"][1]))


# its parts


def test_factors_are_the_sums_exponentials():
    rng = np.random.default_rng(0)
    g = -rng.exponential(0.3, (128, 128)).astype(np.float32)
    P, Q, size = np.exp(g), np.ones_like(g), 1
    P, Q = jnp.asarray(P), jnp.asarray(Q)
    while size < 128:
        P, Q = decays.doubled(P, Q, size)
        size *= 2
        blocks = g.astype(np.float64).reshape(-1, size, 128)
        upto = np.cumsum(blocks, 1)
        np.testing.assert_allclose(P, np.exp(upto).reshape(128, 128), rtol=4e-6)
        np.testing.assert_allclose(Q, np.exp(upto[:, -1:] - upto).reshape(128, 128), rtol=4e-6)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_the_gate_inside_is_the_specification_s(lower_bound):
    raw = np.asarray([-1e4, -200, -88, -20, -3, -1e-3, 0, 1e-3, 3, 20, 88, 1e4], np.float32)
    what = Inside(0, False, False, False, True, lower_bound)
    for A_log in (-100.0, -3.0, 0.0, 2.0, 20.0, 100.0):
        with np.errstate(over="ignore"):
            got = channel_decay(what, jnp.asarray(raw)[:, None], jnp.exp(jnp.float32(A_log)), jnp.float32(0))
        want = activate_gate(jnp, jnp.asarray(raw)[:, None], jnp.float32(A_log), None, lower_bound)
        assert not np.isnan(got).any()
        np.testing.assert_allclose(np.exp(got), np.exp(want), rtol=1e-5, atol=1e-43)
        mild = np.abs(want) < 50
        np.testing.assert_allclose(np.asarray(got)[mild], np.asarray(want)[mild], rtol=3e-6)
