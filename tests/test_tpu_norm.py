"""A mixer's output norm in the TPU kernels: inside the forward kernel, and its cotangents; faults in them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import portable_gdn as pg
from portable_gdn import dispatch, door
from portable_gdn.harness import properties
from portable_gdn.harness.cases import Case, build
from portable_gdn.harness.verify import verify
from portable_gdn.spec.norm import gated_norm, gated_norm_vjp
from portable_gdn.spec.problem import NormKind
from portable_gdn.tpu.chips import CHIPS
from portable_gdn.tpu.kernels.epilogue.plan import Epilogue
from portable_gdn.tpu.kernels.pipelined.plan import pipeline

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

from portable_gdn.tpu.calls import KEPT  # noqa: E402
from portable_gdn.tpu.kernels.common import norm  # noqa: E402
from portable_gdn.tpu.kernels.common.gradients import NormOperands  # noqa: E402
from portable_gdn.tpu.kernels.epilogue import gradients  # noqa: E402
from portable_gdn.tpu.kernels.pipelined import backward_memory, memory  # noqa: E402

NAME = "pallas-interpret"
LONG = Case(
    "rows", T=270, H=1, HV=2, K=128, V=128, conv=4, gate="softplus", l2norm=True, norm="silu", dtype="bfloat16", seed=3
)
SHORT = replace(LONG, name="short", T=20)

pytestmark = pytest.mark.usefixtures("tpu_backends")
slow = lambda *args: pytest.param(*args, marks=pytest.mark.slow)  # noqa: E731


def verdict(case):
    """Rows of the report of a case that are not within their budgets."""
    report = verify([NAME], full=True, cases=[case], in_process=True)
    assert report.rows
    return [row for row in report.rows if not row.ok]


def signature(case):
    return door.normalise(build(case).operands, build(case).options, "numpy")[0].signature


@pytest.mark.parametrize(
    ("case", "inside"),
    [
        slow(LONG, True),
        slow(replace(LONG, name="KDA", variant="KDA", norm="sigmoid"), True),
        slow(replace(LONG, name="without a gate, float32", dtype="float32", norm="alone"), True),
        slow(replace(LONG, name="heads of two tiles", V=256, HV=1), True),
        slow(replace(LONG, name="packed, plain kernel", layout="packed with empties"), False),
        slow(replace(LONG, name="masked", layout="holes"), False),
        slow(replace(SHORT, name="narrow heads", K=64, V=64), False),
        slow(SHORT, False),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_a_mixer_with_a_norm_is_the_oracle_s(case, inside):
    plan = pipeline(signature(case), CHIPS["v6e"])
    assert (plan is not None and plan.norm is not None) == inside
    assert not verdict(case)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["GDN", "KDA"])
def test_packed_sequences_are_normed_inside_too(variant):
    """Chunks that share a block of 128 tokens each write their own rows of it, normed and as they were before."""
    inputs = build(replace(LONG, T=300, variant=variant, state=False))
    operands = {**inputs.operands, "cu_seqlens": np.array([0, 130, 131, 131, 300], np.int32)}
    inputs = inputs._replace(operands=operands, cotangents={"o": inputs.cotangents["o"]})
    backend = dispatch.get(NAME)
    plan = pipeline(properties._problem(backend, inputs).signature, CHIPS["v6e"])
    assert plan is not None
    assert plan.packed
    assert plan.norm is not None
    properties._close(backend, inputs, properties._with_gradients(backend, inputs), "packed")


@pytest.mark.slow
@pytest.mark.parametrize("T", [1, 2, 3, 129])
def test_short_rows_and_one_token_more_than_a_chunk(T):
    assert not verdict(replace(LONG, name=f"T = {T}", T=T))


@pytest.mark.slow
def test_a_long_row():
    report = verify([NAME], full=True, cases=[replace(LONG, name="long", T=8191)], in_process=True)
    assert report.rows
    assert report.ok


@pytest.mark.slow
@pytest.mark.parametrize("gate", ["softplus", None])
@pytest.mark.parametrize("name", [NAME, "xla"])
def test_keys_without_a_norm_gates_at_their_ends_and_sequences_shorter_than_the_convolution(name, gate):
    inputs = build(replace(LONG, T=200, state=False, gate=gate))
    operands = {key: a.copy() for key, a in inputs.operands.items()}
    operands["qkv"][:, 20:60] = 0  # so that convolved q and k are 0, and v
    ends = [1e4, -1e4, -1e30, 1e4, 0, -1e4] if gate else [0, -1e4, -np.inf, -1e-30, -np.inf, -90]
    operands["g"][:, 70:76] = np.array(ends, operands["g"].dtype)[:, None]
    operands["z"][:, 80:83] = np.array([1e4, -1e4, 0], operands["z"].dtype).reshape(3, *[1] * (operands["z"].ndim - 2))
    operands["cu_seqlens"] = np.array([0, 1, 3, 3, 6, 150, 200], np.int32)
    inputs = inputs._replace(operands=operands, cotangents={"o": inputs.cotangents["o"]})
    backend = dispatch.get(name)
    found = properties._with_gradients(backend, inputs)
    for key, a in found.items():
        assert np.isfinite(np.asarray(a, np.float64)).all(), key
    properties._close(backend, inputs, found, "ends")


def layers_of_mixers(again):
    """A scan over two layers of a mixer with its norm, its gradient by each layer's gains, and those gains."""
    inputs = build(replace(LONG, state=False))
    x = {name: jnp.asarray(a) for name, a in inputs.operands.items()}

    def layer(qkv, gains, backend):
        o, _ = pg.gated_delta_mixer(
            qkv, x["g"], conv=pg.ShortConv(x["conv_weight"]), num_heads=1, key_dim=128, beta=x["beta"],
            gate=pg.SoftplusGate(x["A_log"], x["dt_bias"]), z=gains[0] * x["z"],
            output_norm=pg.GatedRMSNorm(gains[1] * x["norm_weight"]), precision="fast", backend=backend,
        )  # fmt: skip
        return qkv + jnp.tile(o.reshape(*qkv.shape[:2], -1), 2), None

    def loss(gains, backend):
        one = again(lambda qkv, gains: layer(qkv, gains, backend))
        return jnp.sum(jax.lax.scan(one, x["qkv"], gains)[0].astype(jnp.float32) ** 2)

    return jax.grad(loss), jnp.asarray([[0.5, 1], [-1, 2]], jnp.bfloat16)


SAVED = jax.checkpoint_policies.save_only_these_names(KEPT)
#: How a layer keeps less, and how often the forward kernel then runs.
WAYS = {
    "all but the rule": (lambda layer: jax.checkpoint(layer, policy=SAVED), 1),
    "the layer": (jax.checkpoint, 2),
}


def kernels(jaxpr):
    """Names of the Pallas kernels in a jaxpr."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation.params["name"]
            continue
        for part in jax.tree.leaves(list(equation.params.values())):
            if hasattr(part, "jaxpr") or hasattr(part, "eqns"):
                yield from kernels(getattr(part, "jaxpr", part))


@pytest.mark.parametrize("again", WAYS)
def test_what_is_kept_has_a_name(again):
    """The norm reads an output that is kept under the rule's name: no policy that saves it runs the rule twice."""
    way, forwards = WAYS[again]
    gradient, gains = layers_of_mixers(way)
    found = list(kernels(jax.make_jaxpr(lambda gains: gradient(gains, "pallas"))(gains).jaxpr))
    assert found.count("gated_delta_rule_pipeline") == forwards
    assert found.count("gated_delta_rule_reverse") == 1
    assert "gated_delta_mixer_norm_gradients" not in found


@pytest.mark.slow
@pytest.mark.parametrize("again", WAYS)
def test_gradients_are_the_same_whatever_is_computed_again(again):
    want, found = (
        jax.jit(gradient, static_argnums=1)(gains, NAME)
        for gradient, gains in map(layers_of_mixers, (lambda layer: layer, WAYS[again][0]))
    )
    assert np.abs(want).min() > 0
    np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(want, np.float32), rtol=1e-2)


def arrays(T, HV, V, z=True, seed=0):
    rng = np.random.default_rng(seed)
    made = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    return made(1, T, HV * V), made(V), 2 * made(1, T, HV * V) if z else None, made(1, T, HV * V)


def by_kernel(T, HV, V, kind, end, x):
    plan = Epilogue(1, T, V, HV * V, 16, HV * V, kind, True, 8 << 20)
    o, weight, z, dy = (None if a is None else jnp.asarray(a) for a in x)
    x = NormOperands(o, z, weight)
    return gradients.epilogue_gradients(plan, x, dy, jnp.full(1, end, jnp.int32), dtype=jnp.float32, interpret=True)


def first_head(a):
    return None if a is None else jnp.asarray(a[:, 0], jnp.float32)


@pytest.mark.parametrize("activation", ["silu", "sigmoid", None])
def test_cotangents_are_the_formula_s(activation):
    """Behind the last sequence's end nothing counts, whatever it holds."""
    T, HV, V, end, kind = 40, 2, 128, 37, NormKind(1e-5, activation)
    x = arrays(T, HV, V, activation is not None)
    x[0][:, 5] = 0
    x[0][:, end:] = x[3][:, end:] = np.nan
    dO, dz, d_weight = by_kernel(T, HV, V, kind, end, x)
    by_head = lambda a: None if a is None else np.asarray(a).reshape(T, -1, V)[:end].astype(np.float64)  # noqa: E731
    o, z, dy = (by_head(x[n]) for n in (0, 2, 3))
    weight = x[1].astype(np.float64)
    want = gated_norm_vjp(np, o, weight, z, *kind, dy)
    y = norm.normed_output(kind, *(first_head(a) for a in (o, x[1][None, None], z)))
    found = [by_head(dO), np.asarray(d_weight), by_head(dz), np.asarray(y)]
    exact = [want[0], want[1].sum((0, 1)), want[2], gated_norm(np, o, weight, z, *kind)[:, 0]]
    for got, must in zip(found, exact, strict=True):
        if must is not None:
            np.testing.assert_allclose(got, must, rtol=2e-5, atol=2e-5 * np.abs(must).max())


def projection_left_out(real, kind, o, weight, z, dy):
    found = real(kind, o, weight, z, dy)
    r = jax.lax.rsqrt(jnp.mean(o * o, -1, keepdims=True) + kind.eps)
    return found._replace(o=r * found.weight * weight / jnp.where(o == 0, 1.0, o * r))


def slope_of_the_value(real, kind, o, weight, z, dy):
    found = real(kind, o, weight, z, dy)
    return found._replace(z=found.z * 1.01)


def weight_of_other_rows(real, kind, o, weight, z, dy):
    found = real(kind, o, weight, z, dy)
    return found._replace(weight=jnp.where(jnp.arange(len(o))[:, None] == 3, 0.0, found.weight))


@pytest.mark.slow
@pytest.mark.parametrize("fault", [projection_left_out, slope_of_the_value, weight_of_other_rows])
def test_faults_are_caught(fault, monkeypatch):
    real = norm.norm_gradients
    for module in (gradients, backward_memory):
        monkeypatch.setattr(module, "norm_gradients", lambda *args: fault(real, *args))
    jax.clear_caches()
    try:
        assert verdict(replace(SHORT, name="with a fault", dtype="float32"))
    finally:
        jax.clear_caches()


def test_tokens_behind_the_last_sequence_that_count_are_seen(monkeypatch):
    monkeypatch.setattr(gradients, "iota", lambda shape, _: jnp.zeros(shape, jnp.int32))
    with pytest.raises(AssertionError):
        test_cotangents_are_the_formula_s("silu")


@pytest.mark.slow
def test_tokens_beyond_a_row_that_count_are_caught(monkeypatch):
    """The backward kernel for long rows reads whole chunks of the norm's operands."""
    monkeypatch.setattr(
        backward_memory.BackwardMemory,
        "_wide",
        lambda self, ref, i: ref[0, self._here, i * 128 : (i + 1) * 128].astype(jnp.float32),
    )
    jax.clear_caches()
    try:
        assert verdict(replace(LONG, name="with a fault"))
    finally:
        jax.clear_caches()


@pytest.mark.slow
def test_a_fault_of_the_forward_kernel_is_caught(monkeypatch):
    real = memory.normed_output
    monkeypatch.setattr(memory, "normed_output", lambda kind, *args: real(kind._replace(eps=1e-2), *args))
    jax.clear_caches()
    try:
        assert verdict(replace(LONG, name="with a fault"))
    finally:
        jax.clear_caches()
