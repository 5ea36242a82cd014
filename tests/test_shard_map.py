"""Calls inside ``jax.shard_map`` with its default check of the axes that values vary over, on two CPU devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("jax")

PROGRAM = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
import portable_gdn as pg

r = np.random.default_rng(0)
draw = lambda *s: jnp.asarray(r.standard_normal(s), jnp.float32)
mesh, found = Mesh(np.array(jax.devices()), ("d",)), {}
B, T, H, HV, K, V = 2, 40, 2, 4, 16, 16

def rule(x, **options):
    return pg.gated_delta_rule(output_final_state=True, **x, **options)

def mixer(x, **options):
    x = dict(x)
    conv = pg.ShortConv(x.pop("weight"), x.pop("bias"))
    gate = pg.SoftplusGate(x.pop("A_log"), x.pop("dt_bias"))
    o, state = pg.gated_delta_mixer(x.pop("qkv"), x.pop("g"), conv=conv, gate=gate, num_heads=H, key_dim=K,
                                    output_final_state=True, **x, **options)
    return o, state.recurrent

gates = {"g": -jnp.abs(draw(B, T, HV)), "beta": jax.nn.sigmoid(draw(B, T, HV))}
k = draw(B, T, H, K)
plain = {"q": draw(B, T, H, K), "k": k / jnp.linalg.norm(k, axis=-1, keepdims=True), "v": draw(B, T, HV, V), **gates}
channels = {**plain, "g": -jnp.abs(draw(B, T, HV, K)), "initial_state": draw(B, HV, K, V)}
masked = {**plain, "mask": jnp.arange(T)[None] < jnp.array([[T], [T - 3]])}
segments = {**plain, "segment_ids": jnp.arange(T)[None] // jnp.array([[7], [50]])}
whole = {"qkv": draw(B, T, 2 * H * K + HV * V), **gates, "weight": draw(2 * H * K + HV * V, 4),
         "bias": draw(2 * H * K + HV * V), "A_log": draw(HV), "dt_bias": draw(HV)}
packed = {n: jnp.concatenate([a, a], 1)[:1] for n, a in plain.items()}
shared = {"weight", "bias", "A_log", "dt_bias", "cu_seqlens"}
cases = {
    "rows": (rule, plain, 0), "heads": (rule, plain, 2), "channels": (rule, channels, 0), "masked": (rule, masked, 0),
    "segments": (rule, segments, 0), "mixer": (mixer, whole, 0),
    "packed, heads": (rule, {**packed, "cu_seqlens": jnp.array([0, 3, 3, 2 * T])}, 2),
}
float32 = lambda tree: {n: a for n, a in tree.items() if a.dtype == jnp.float32}

def split(name, call, x, axis, **options):
    spec = {n: P() if n in shared else P(*[None] * axis, "d") for n in x}
    if axis == 2:
        spec |= {n: P(None, "d") for n in x if n == "initial_state"}
    state = P(None, "d") if axis == 2 else P("d")
    f = lambda x: call(x, **options)
    return jax.shard_map(f, mesh=mesh, in_specs=(spec,), out_specs=(spec.get("v", P("d")), state))

def loss(f):
    def of(smooth, x):
        o, S = f({**x, **smooth})
        return (jnp.sin(o) * jnp.arange(o.size).reshape(o.shape) / o.size).sum() + (S * S).sum() / S.size
    return jax.grad(of)

if sys.argv[1] == "xla":
    for name, (call, x, axis) in cases.items():
        f = split(name, call, x, axis, backend="xla")
        want, got = call(x, backend="xla"), f(x)
        pairs = list(zip(want, got))
        smooth = float32(x)
        want, got = (jax.jit(loss(g))(smooth, x) for g in (lambda x: call(x, backend="xla"), f))
        pairs += [(want[n], got[n]) for n in want]
        found[name] = max(float(jnp.linalg.norm(a - b) / jnp.linalg.norm(a)) for a, b in pairs)
else:  # no TPU is here: what a program for one would hold
    for name, (call, x, axis) in cases.items():
        for options in ({"backend": "pallas"}, {})[: 2 if name == "rows" else 1]:
            f = split(name, call, x, axis, **options)
            for how, traced in (("forward", jax.jit(f).trace(x)), ("both", jax.jit(loss(f)).trace(float32(x), x))):
                text = traced.lower(lowering_platforms=("tpu",)).as_text()
                found[f"{name}, {options.get('backend', 'auto')}, {how}"] = text.count("tpu_custom_call")
    call, x, axis = cases["rows"]
    try:
        split("rows", call, x, axis, backend="pallas-interpret")(x)
    except pg.GdnError as error:
        found["interpreted"] = str(error)
print(json.dumps(found))
"""


def _run(what: str) -> dict:
    environment = {
        **os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", PROGRAM, what], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_xla_computes_shards_as_it_computes_the_whole():
    found = _run("xla")
    assert len(found) == 7
    assert all(error < 2e-6 for error in found.values()), found


@pytest.mark.slow
def test_kernels_are_in_the_program_of_every_shard():
    found = _run("pallas")
    sentence = found.pop("interpreted")
    assert sentence.startswith("backend 'pallas-interpret' is called inside jax.shard_map with check_vma=True")
    assert len(found) == 16
    assert all(kernels == (1 if case.endswith("forward") else 2) for case, kernels in found.items()), found
