"""The kernels of what lies before the rule in a backward pass: gradients against the oracle, and faults in them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import portable_gdn as pg
from portable_gdn.harness.cases import Case
from portable_gdn.harness.verify import verify
from portable_gdn.tpu.chips import CHIPS
from portable_gdn.tpu.kernels.prologue.plan import prologue_plans

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

from portable_gdn import door  # noqa: E402
from portable_gdn.harness.cases import build  # noqa: E402
from portable_gdn.spec.gates import activate_gate, gate_vjp  # noqa: E402
from portable_gdn.tpu import prologue as around  # noqa: E402
from portable_gdn.tpu.kernels.prologue import backward as gradients  # noqa: E402
from portable_gdn.tpu.kernels.prologue import channel_gates  # noqa: E402
from portable_gdn.tpu.kernels.prologue import forward as values  # noqa: E402

NAME = "pallas-interpret"
MIXER = Case("mixer", T=20, H=2, HV=2, K=64, V=64, conv=4, gate="softplus", l2norm=True)
ROWS = replace(MIXER, name="two rows", T=35, B=2, HV=4, dtype="bfloat16")
PACKED = replace(MIXER, name="packed", layout="packed with empties")

pytestmark = pytest.mark.usefixtures("tpu_backends")
slow = lambda *args: pytest.param(*args, marks=pytest.mark.slow)  # noqa: E731


def verdict(case):
    """Rows of the report of a case that are not within their budgets."""
    report = verify([NAME], full=True, cases=[case], in_process=True)
    assert report.rows
    return [row for row in report.rows if not row.ok]


@pytest.mark.parametrize(
    "case",
    [
        MIXER,
        slow(replace(MIXER, name="one token", T=1)),
        slow(replace(MIXER, name="two tokens", T=2, state=False)),
        slow(replace(MIXER, name="three tokens", T=3)),
        slow(replace(MIXER, name="129 tokens, a whole tile", T=129, H=1, HV=2, K=128, V=128)),
        slow(replace(MIXER, name="heads of two tiles", T=18, H=1, HV=2, K=256, V=128)),
        slow(ROWS),
        slow(PACKED),
        slow(replace(PACKED, name="packed, no states", state=False, dtype="bfloat16")),
        slow(replace(MIXER, name="KDA", variant="KDA", gate="bounded")),
        slow(replace(MIXER, name="GDN-2", variant="GDN-2", dtype="bfloat16", conv=8)),
        slow(replace(MIXER, name="grouped", variant="tile-grouped", conv=2)),
        slow(replace(MIXER, name="without norm", variant="GLA", l2norm=False)),
    ],
    ids=lambda case: case.name,
)
def test_gradients_of_a_mixer_are_the_oracle_s(case):
    problem, _ = door.normalise(build(case).operands, build(case).options, "numpy")
    assert prologue_plans(problem.signature, CHIPS["v6e"]) is not None
    assert not verdict(case)


def a_tap_shifted(real, p, window, slot, r, n, age):
    found = real(p, window, slot, r, n, age)
    return [*found[1:], found[-1]]


def no_projection(real, p, y, d):
    scale = [jax.lax.rsqrt(a + 1e-6) for a in values.head_sums(p, [y[0] * y[0]])]
    return [scale[0] * d[0], *(real(p, y, d)[1:])]


def whatever_lies_behind(real, p, code, block):
    return lambda rows: jnp.ones((rows.stop - rows.start, 128), bool)


def endless_sequences(real, code):
    age, behind, there = real(code)
    return age, behind + 7.0, there


@pytest.mark.parametrize(
    ("module", "name", "fault", "case"),
    [
        slow(gradients, "seen", a_tap_shifted, replace(MIXER, T=21)),
        slow(gradients, "_through_norm", no_projection, replace(MIXER, T=22)),
        slow(gradients, "validity", whatever_lies_behind, replace(MIXER, T=23)),
        slow(values, "head_sums", lambda real, p, tiles: [2.0 * a for a in real(p, tiles)], replace(MIXER, T=24)),
    ],
)
def test_faults_are_caught(module, name, fault, case, monkeypatch):
    real = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args: fault(real, *args))
    jax.clear_caches()
    try:
        assert verdict(replace(case, name="with a fault"))
    finally:
        jax.clear_caches()


def without_states(backend):
    """Gradients of short packed sequences whose final states nobody asks for; the last one ends before T."""
    inputs = build(replace(MIXER, T=19, state=False))
    x = {name: jnp.asarray(a) for name, a in inputs.operands.items()}
    bounds = jnp.asarray([0, 1, 1, 3, 9, 11, 17])

    def loss(x):
        o, _ = pg.gated_delta_mixer(
            x["qkv"], x["g"], conv=pg.ShortConv(x["conv_weight"], x["conv_bias"]), num_heads=2, key_dim=64,
            beta=x["beta"], gate=pg.SoftplusGate(x["A_log"], x["dt_bias"]), cu_seqlens=bounds, backend=backend,
        )  # fmt: skip
        return (o[:, :17] * inputs.cotangents["o"][:, :17]).sum()

    return jax.jit(jax.grad(loss))(x)


@pytest.mark.slow
def test_sequences_shorter_than_the_convolution_hand_nothing_over(monkeypatch):
    """Behind a sequence's last token there is nothing, also where its final state is not asked for."""
    want, found = without_states("xla"), without_states(NAME)
    for name, a in want.items():
        np.testing.assert_allclose(found[name], a, rtol=1e-4, atol=1e-5 * np.abs(a).max(), err_msg=name)
    real = gradients.decoded
    monkeypatch.setattr(gradients, "decoded", lambda code: endless_sequences(real, code))
    jax.clear_caches()
    faulty = without_states(NAME)["qkv"]
    jax.clear_caches()
    assert np.abs(faulty - want["qkv"]).max() > 1e-2


@pytest.mark.slow
def test_a_gate_s_sum_over_one_head_only_is_caught(monkeypatch):
    real = around.Inside.pulled

    def first_head_only(self, d):
        found = real(self, d)
        return {**found, "A_log": found["A_log"].at[1:].set(0.0)}

    monkeypatch.setattr(around.Inside, "pulled", first_head_only)
    assert any("A_log" in str(row) for row in verdict(replace(MIXER, name="with a fault", T=25)))


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_gates_by_channel_at_their_extremes(lower_bound):
    """Resets, saturated and huge raw gates, tokens that are none of a sequence: finite, and as the specification's."""
    p = channel_gates.ChannelGates(2, 21, 128, 32, 128, lower_bound, True, 1 << 24)
    rng = np.random.default_rng(0)
    raw = jnp.asarray(8 * rng.standard_normal((2, 21, 128)), jnp.float32)
    raw = raw.at[0, 0, :5].set(jnp.asarray([0.0, 1e4, -1e4, jnp.inf, -jnp.inf]))
    A, d = (jnp.asarray(2 * rng.standard_normal(shape), jnp.float32) for shape in (128, (2, 21, 128)))
    A = A.at[7].set(100.0)  # overflows
    parameters = jnp.pad(jnp.stack([jnp.exp(A), 0 * A]), ((0, 6), (0, 0)))
    g = channel_gates.channel_gates(p, raw, parameters, interpret=True)
    want = activate_gate(jnp, raw, A, None, lower_bound)
    reset = want == -jnp.inf
    assert (jnp.where(reset, g < -104, jnp.isfinite(g))).all()
    np.testing.assert_allclose(jnp.where(reset, 0, g), jnp.where(reset, 0, want), rtol=2e-6, atol=1e-6)
    end = jnp.asarray([19], jnp.int32)
    found, sums = channel_gates.channel_gate_gradients(p, raw, parameters, end, d, interpret=True)
    wanted = gate_vjp(jnp, raw, A, None, lower_bound, d.at[:, 19:].set(0.0))
    np.testing.assert_allclose(found, wanted[0], rtol=1e-5, atol=1e-4)
    for a, b in zip(sums.reshape(2, 8, -1).sum(1), wanted, strict=True):
        np.testing.assert_allclose(a, b.sum((0, 1)), rtol=1e-4, atol=1e-3)


def test_explain_says_who_computes_the_prologue_s_gradients():
    from portable_gdn.tpu.kernels.pipelined.backward_plan import describe_gradients

    def told(case):
        inputs = build(case)
        problem, _ = door.normalise(inputs.operands, inputs.options, "numpy")
        return describe_gradients(problem.signature, CHIPS["v6e"])

    assert "in a kernel of their own, 32 tokens and 128 channels" in told(MIXER)
    assert "by xla, since a mask or segments" in told(replace(MIXER, layout="segments"))
    assert "by xla, since 32 and 48 channels" in told(replace(MIXER, K=16, V=24))
    assert "by xla, since heads of 24 channels" in told(replace(MIXER, K=24))


@pytest.mark.slow
def test_calls_can_be_mapped():
    inputs = build(replace(MIXER, T=5, state=False, H=1, HV=1, K=128, V=128))
    x = {name: jnp.asarray(a) for name, a in inputs.operands.items()}

    def loss(qkv, weight, backend=NAME):
        o, _ = pg.gated_delta_mixer(
            qkv, x["g"], conv=pg.ShortConv(weight), num_heads=1, key_dim=128, beta=x["beta"],
            gate=pg.SoftplusGate(x["A_log"], x["dt_bias"]), backend=backend,
        )  # fmt: skip
        return (o * o).sum()

    two = jnp.stack([x["qkv"], x["qkv"][:, ::-1]])
    by_row = [jax.grad(loss, (0, 1))(a, x["conv_weight"]) for a in two]
    mapped = jax.vmap(jax.grad(loss, (0, 1)), (0, None))(two, x["conv_weight"])
    for n in range(2):
        for a, b in zip(mapped, by_row[n], strict=True):
            np.testing.assert_allclose(a[n], b, rtol=2e-5, atol=2e-6)
