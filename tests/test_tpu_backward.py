"""The backward kernels: gradients against the oracle, what is exact, and jax's transformations."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from conftest import assert_all_close, assert_close, cotangents, make, oracle

import portable_gdn as pg
from portable_gdn import door
from portable_gdn.harness.cases import Case
from portable_gdn.harness.verify import verify
from portable_gdn.spec.problem import Options
from portable_gdn.tpu.backend import INTERPRETER, PALLAS_INTERPRET

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

from portable_gdn.tpu import backend  # noqa: E402
from portable_gdn.tpu.calls import KEPT  # noqa: E402
from portable_gdn.tpu.chips import CHIPS  # noqa: E402
from portable_gdn.tpu.kernels.common import decay_factors as decays  # noqa: E402

NAME = "pallas-interpret"
NAMES = ("q", "k", "v", "g", "beta", "initial_state")
SMALL = {"chunk_size": 16}


pytestmark = pytest.mark.usefixtures("tpu_backends")


def arrays(x):
    return {name: jnp.asarray(a) for name, a in x.items()}


def on_host(x):
    return {name: np.asarray(a) for name, a in x.items()}


def gradients(x, d, **options):
    """Result and cotangents by the backend's own door."""
    options = {**SMALL, **options}
    problem, _ = door.normalise(arrays(x), Options(output_final_state=True, **options), NAME)
    result, found = PALLAS_INTERPRET.gradients(problem, arrays(d))
    return np.asarray(result.o), on_host(found)


def loss(x, backend=NAME):
    o, state = pg.gated_delta_rule(**x, output_final_state=True, backend=backend, **SMALL)
    return (o * o).sum() + (state * state).sum()


def loss_gradients(x):
    e = oracle(x)
    return oracle(x, {"o": 2 * e.o, "state": 2 * e.state})


# values


SLOW = ("DeltaNet", "GDN-2", "GLA", "GLA (scalar)", "tile-grouped")


@pytest.mark.parametrize("variant", ["GDN", "KDA", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_gradients_are_the_oracle_s(variant):
    x = make(variant, state=True, B=1)
    d = cotangents(x)
    o, found = gradients(x, d)
    want = oracle(x, d)
    assert_close(o, want.o, want.sizes["o"])
    assert_all_close(found, want, eps=16)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["default", "fast"])
@pytest.mark.parametrize(
    "case",
    [
        Case("square", K=16, V=16, HV=4),
        Case("square, resets", K=16, V=16, HV=4, gates="many resets"),
        Case("square, strong", K=16, V=16, HV=4, gates="strong"),
        Case("square, repeated", K=16, V=16, HV=4, keys="repeated", beta="1", gates="zero"),
    ],
    ids=lambda c: c.name,
)
def test_precisions_hold_on_float32_inputs(case, precision, monkeypatch):
    from portable_gdn.harness import verify as module

    real = module.build
    monkeypatch.setattr(
        module, "build", lambda c: (lambda i: i._replace(options=i.options._replace(precision=precision)))(real(c))
    )
    report = verify([NAME], full=True, cases=[case], in_process=True)
    assert report.ok, [row for row in report.rows if not row.ok]


def test_a_chip_without_gathers_exchanges_rows_by_turns(monkeypatch):
    """What a v4 computes: in its small memory, and without a gather of sublanes."""
    rows = np.random.default_rng(0).standard_normal((32, 24), np.float32)
    for size in (1, 2, 4):
        for gathers in (False, True):
            found = jax.jit(partial(decays.exchanged, size=size, gathers=gathers))(decays.tiles(jnp.asarray(rows)))
            np.testing.assert_array_equal(np.reshape(found, rows.shape), rows[np.arange(32) ^ size])
    chips = []
    monkeypatch.setattr(backend, "target", lambda: chips.append(CHIPS["v4"]) or chips[-1])
    x = make("KDA", state=True, B=1, T=29)  # compiled by no other test
    d = cotangents(x)
    assert_all_close(gradients(x, d)[1], oracle(x, d), eps=16)
    assert [chip.name for chip in chips[:1]] == ["v4"]


@pytest.mark.parametrize("variant", ["GDN", pytest.param("KDA", marks=pytest.mark.slow)])
def test_gates_have_no_gradient_where_nothing_is_left(variant):
    """At a reset, and at the first token of a sequence that starts from nothing; what lies before a reset has none."""
    x = make(variant, T=40)
    x["g"][:, 21] = -np.inf
    x["g"][:, 22] = -105.0
    d = {"o": cotangents(x)["o"]}
    d["o"][:, :22] = 0
    _, found = gradients(x, d)
    assert not np.any(found["g"][:, :23])
    for name in ("q", "k", "v", "beta"):
        assert not np.any(found[name][:, :21])
        assert np.any(found[name][:, 22:])
    assert np.any(found["g"][:, 23:])
    first = make(variant, T=40)
    _, found = gradients(first, cotangents(first))
    assert not np.any(found["g"][:, 0])
    assert np.all(found["g"][:, 1] != 0)


# sequences


@pytest.fixture(scope="module", params=["GDN", pytest.param("KDA", marks=pytest.mark.slow)])
def packed(request):
    x = make(request.param, B=1, T=60, dtype="bfloat16", state=True, N=5)
    return {**x, "cu_seqlens": np.asarray([0, 21, 21, 44, 44, 60], np.int32)}


def test_no_gradient_crosses_a_boundary(packed):
    d = cotangents(packed)
    _, found = gradients(packed, d)
    want = oracle(packed, d)
    for name, value in found.items():
        exact = want.gradients[name]
        assert np.linalg.norm(value.astype(np.float64) - exact) <= 0.02 * np.linalg.norm(exact), name
    for junk in (3.0, np.nan):
        x, c = ({name: a.copy() for name, a in part.items()} for part in (packed, d))
        for part in (x, c):
            for name, a in part.items():
                if name in ("q", "k", "v", "g", "beta", "o"):
                    a[:, 21:44] = junk
                elif name in ("initial_state", "state"):
                    a[2] = junk
        _, other = gradients(x, c)
        for name, value in found.items():
            keep = np.r_[:2, 3:5] if name == "initial_state" else np.r_[:21, 44:60]
            axis = 0 if name == "initial_state" else 1
            a, b = (np.ascontiguousarray(np.take(v, keep, axis)).view(np.uint8) for v in (value, other[name]))
            np.testing.assert_array_equal(a, b, err_msg=name)
    for n in (1, 3):  # empty: the state's cotangent goes through as it came
        np.testing.assert_array_equal(found["initial_state"][n], d["state"][n])


def test_tokens_behind_the_last_sequence_have_no_gradient():
    x = arrays(make(B=1, T=60))
    bounds = jnp.asarray([0, 5, 20], jnp.int32)
    rule = lambda x, cu: pg.gated_delta_rule(**x, cu_seqlens=cu, backend=NAME, **SMALL)[0]  # noqa: E731
    found = on_host(jax.jit(jax.grad(lambda x, cu: rule(x, cu).sum()))(x, bounds))
    part = {name: a[:, :20] for name, a in on_host(x).items()}
    want = oracle({**part, "cu_seqlens": np.asarray(bounds)}, {"o": np.ones((1, 20, 4, 24))})
    for name, value in found.items():
        assert_close(value[:, :20], want.gradients[name], want.sizes[name], eps=16)
        assert not np.any(value[:, 20:])


def test_it_holds_in_the_interpreter_that_models_memories(packed, monkeypatch):
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    d = cotangents(packed)
    _, want = gradients(packed, d)
    monkeypatch.setenv(INTERPRETER, "tpu")
    _, found = gradients(packed, d)
    for name, value in found.items():
        a, b = value.astype(np.float64), want[name].astype(np.float64)
        assert np.linalg.norm(a - b) <= 1e-3 * np.linalg.norm(b), name
    assert interpret_pallas_call.races is not None
    assert not interpret_pallas_call.races.races_found


# transformations


@pytest.mark.slow
def test_vmap_of_gradients():
    x = make(state=True, B=1)
    many = {name: jnp.stack([a, 0.5 * a]) for name, a in arrays(x).items()}
    found = jax.jit(jax.vmap(jax.grad(loss)))(many)
    for i in range(2):
        alone = {name: np.asarray(a[i]) for name, a in many.items()}
        assert_all_close({name: np.asarray(a[i]) for name, a in found.items()}, loss_gradients(alone), eps=16)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "forwards"), [(None, 2), (KEPT, 1)])
def test_rematerialised_layers_in_a_scan(policy, forwards):
    """What is kept for the backward pass has a name: a policy that keeps it spares the second forward pass."""
    x = arrays(make(B=1, T=40))
    gains = jnp.asarray([0.5, -1.0], jnp.float32)
    layer = lambda v, gain: (v + pg.gated_delta_rule(**{**x, "v": gain * v}, backend=NAME, **SMALL)[0], None)  # noqa: E731
    keep = None if policy is None else jax.checkpoint_policies.save_only_these_names(policy)
    run = lambda layer: jax.value_and_grad(lambda g: (jax.lax.scan(layer, x["v"], g)[0] ** 2).sum())  # noqa: E731
    remat = run(jax.checkpoint(layer, policy=keep))
    for a, b in zip(jax.jit(remat)(gains), jax.jit(run(layer))(gains), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    text = str(jax.make_jaxpr(remat)(gains))
    assert text.count("name=gated_delta_rule_forward") == forwards
    assert text.count("name=gated_delta_rule_backward") == 1


SHARDED = """
import numpy as np, jax, jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P
from conftest import make
import portable_gdn as pg
x = {name: jnp.asarray(a) for name, a in make(state=True, T=20).items()}
def loss(x):
    o, state = pg.gated_delta_rule(**x, output_final_state=True, backend="pallas-interpret", chunk_size=16)
    return (o * o).sum() + (state * state).sum()
mesh = Mesh(np.asarray(jax.devices()), ("i",))
want = jax.jit(jax.grad(loss))(x)
heads = {name: P(None, "i") if name == "initial_state" else P(None, None, "i") for name in x}
for spec in ({name: P("i") for name in x}, heads):
    sharded = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(spec,), out_specs=spec, check_vma=False)
    for name, value in jax.jit(sharded)(x).items():
        np.testing.assert_allclose(value, want[name], atol=1e-5 * np.abs(want[name]).max(), err_msg=name)
"""


@pytest.mark.slow
def test_sharded_over_rows_and_over_heads():
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", SHARDED], cwd=Path(__file__).parent, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_second_derivatives_are_those_of_xla():
    x = arrays(make(B=1, T=20, H=1, HV=1, K=8, V=8, state=True))
    slope = lambda backend: lambda x: sum((g * g).sum() for g in jax.grad(loss)(x, backend).values())  # noqa: E731
    found, want = (jax.jit(jax.grad(slope(backend)))(x) for backend in (NAME, "xla"))
    for name in NAMES:
        assert_close(np.asarray(found[name]), np.asarray(want[name]), eps=256)


def test_forward_mode_is_refused():
    x = arrays(make(B=1, T=20))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: pg.gated_delta_rule(**{**x, "q": q}, backend=NAME)[0], (x["q"],), (x["q"],))


# the kernel for long rows


def long_rows(T=300, seed=0):
    rng = np.random.default_rng(seed)
    x = {
        "q": rng.standard_normal((1, T, 1, 128)), "k": rng.standard_normal((1, T, 1, 128)),
        "v": rng.standard_normal((1, T, 2, 128)), "g": -rng.exponential(0.2, (1, T, 2)), "beta": rng.random((1, T, 2)),
    }  # fmt: skip
    x["k"] *= 0.98 / np.linalg.norm(x["k"], axis=-1, keepdims=True)
    return {n: jnp.asarray(a, jnp.bfloat16 if n in "qkv" else jnp.float32) for n, a in x.items()}


@pytest.mark.slow
def test_long_rows_have_a_kernel_of_their_own():
    """Which holds, and where nothing is left of what came before, gives nothing to it."""
    x = long_rows()
    x["g"] = x["g"].at[:, 200].set(-jnp.inf)
    x["beta"] = x["beta"].at[:, 30:40].set(0)  # where the gate's gradient is a sum, and no quotient
    d = jnp.asarray(np.random.default_rng(1).standard_normal(x["v"].shape), jnp.bfloat16)

    @jax.jit
    def pull(x, d):
        run = lambda x: pg.gated_delta_rule(**x, precision="fast", backend=NAME)[0]  # noqa: E731
        return jax.vjp(run, x)[1](d)[0]

    assert "gated_delta_rule_reverse" in str(jax.make_jaxpr(pull)(x, d))
    found, late = (on_host(pull(x, c)) for c in (d, d.at[:, :200].set(0)))
    want = oracle(on_host(x), {"o": np.asarray(d)}).gradients
    for name, value in found.items():
        error = np.linalg.norm(value.astype(np.float64) - want[name])
        assert error <= 6e-3 * np.linalg.norm(want[name]), (name, error / np.linalg.norm(want[name]))
        assert not np.any(late[name][:, :200]), name
    assert not np.any(found["g"][:, 200])
    assert not np.any(found["g"][:, 0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "precision", "bound"), [("KDA", "default", 4e-3), ("GDN-2", "default", 4e-3), ("GDN-2", "fast", 6e-3)]
)
def test_long_rows_keep_what_the_forward_pass_solved(variant, precision, bound):
    """Decays by channel: gradients from the pipeline's scores, inverse and u, rows of others masked."""
    x = make(variant, B=1, T=300, H=1, HV=2, K=128, V=128, dtype="bfloat16", state=True, N=4)
    x["cu_seqlens"] = np.asarray([0, 37, 37, 260, 300], np.int32)
    x["g"][:, 200] = -np.inf
    d = cotangents(x)
    problem, _ = door.normalise(arrays(x), Options(output_final_state=True, precision=precision), NAME)
    plans = PALLAS_INTERPRET._execution(problem.signature).training
    assert plans is not None
    assert plans.forward.keeps == ("S", "M", "u", "Aqk")
    found, want = on_host(PALLAS_INTERPRET.gradients(problem, arrays(d))[1]), oracle(x, d).gradients
    for name, value in found.items():
        error = np.linalg.norm(value.astype(np.float64) - want[name])
        assert error <= bound * np.linalg.norm(want[name]), (name, error / np.linalg.norm(want[name]))
    assert not np.any(found["g"][:, 200])


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["GDN", "GDN-2"])
def test_long_rows_in_the_interpreter_that_models_memories(variant, monkeypatch):
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    of_channels = {"B": 1, "T": 290, "H": 1, "HV": 2, "K": 128, "V": 128, "dtype": "bfloat16"}
    x = long_rows(T=290) if variant == "GDN" else arrays(make(variant, **of_channels))
    pull = lambda x: jax.grad(lambda x: pg.gated_delta_rule(**x, backend=NAME)[0].astype(jnp.float32).sum())(x)  # noqa: E731
    want = on_host(jax.jit(pull)(x))
    monkeypatch.setenv(INTERPRETER, "tpu")
    for name, value in on_host(jax.jit(lambda x: pull(x))(x)).items():
        a, b = value.astype(np.float64), want[name].astype(np.float64)
        assert np.linalg.norm(a - b) <= 1e-3 * np.linalg.norm(b), name
    assert not interpret_pallas_call.races.races_found
