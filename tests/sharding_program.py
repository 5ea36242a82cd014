"""Calls split over rows and heads of 2 x 4 devices, against the same calls on one; run by test_sharding.py."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from mesh_program import collectives

import portable_gdn as pg

r = np.random.default_rng(0)
devices = np.array(jax.devices()).reshape(2, 4)
AUTO, EXPLICIT = Mesh(devices, ("data", "heads")), jax.make_mesh((2, 4), ("data", "heads"))
ASKED = pg.Sharding("data", "heads", mesh=AUTO)
B, T, K, V = 4, 40, 8, 8


def draw(*shape):
    return jnp.asarray(r.standard_normal(shape), jnp.float32)


def operands(H, HV):
    k = draw(B, T, H, K)
    return {
        "q": draw(B, T, H, K), "k": k / jnp.linalg.norm(k, axis=-1, keepdims=True), "v": draw(B, T, HV, V),
        "g": -jnp.abs(draw(B, T, HV)), "beta": jax.nn.sigmoid(draw(B, T, HV)), "initial_state": draw(B, HV, K, V),
    }  # fmt: skip


def rule(x, **options):
    return pg.gated_delta_rule(output_final_state=True, **x, **options)


def step(x, **options):
    x = {n: a[:, 0] if n != "initial_state" else a for n, a in x.items()}
    return pg.gated_delta_rule_step(state=x.pop("initial_state"), **x, **options)


def mixing(H, HV, fused):
    x, C = operands(H, HV), 2 * H * K + HV * V
    x |= {"weight": draw(C, 4), "bias": draw(C), "A_log": draw(HV), "dt_bias": draw(HV), "conv_state": draw(B, 3, C)}
    wide = {n: a.reshape(B, T, -1) for n, a in ((n, x.pop(n)) for n in "qkv")}
    return {**x, "qkv": jnp.concatenate(list(wide.values()), -1)} if fused else {**x, **wide}


def mixer(H):
    def call(x, **options):
        x = dict(x)
        qkv = x.pop("qkv") if "qkv" in x else tuple(x.pop(n) for n in "qkv")
        conv, gate = pg.ShortConv(x.pop("weight"), x.pop("bias")), pg.SoftplusGate(x.pop("A_log"), x.pop("dt_bias"))
        state = pg.MixerState(x.pop("initial_state"), x.pop("conv_state"))
        o, after = pg.gated_delta_mixer(
            qkv, x.pop("g"), conv=conv, gate=gate, num_heads=H, key_dim=K, state=state, output_final_state=True,
            **x, **options,
        )  # fmt: skip
        return o, *after

    return call


def layers(x, **options):
    """The rule twice over, by a scan that remembers nothing but its input."""
    x = dict(x)
    v = x.pop("v")
    one = jax.checkpoint(lambda v, _: (pg.gated_delta_rule(v=v, **x, **options)[0], None))
    return (jax.lax.scan(one, v, None, length=2)[0],)


def over_an_axis(x, **options):
    x = {n: jnp.stack([a, 0.5 * a]) for n, a in x.items()}
    return jax.vmap(lambda x: rule(x, **options))(x)


def spec(name, H):
    if name in ("weight", "bias"):
        return P()
    if name in ("A_log", "dt_bias"):
        return P("heads")
    if name == "initial_state":
        return P("data", "heads")
    if name in ("conv_state", "qkv") or (name in ("q", "k") and H % 4):
        return P("data")
    return P("data", None, "heads")


def loss(call):
    return lambda x: sum((jnp.sin(a) * jnp.cos(jnp.arange(a.size)).reshape(a.shape)).sum() for a in call(x))


def error(want, got):
    pairs = zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True)
    return max(float(jnp.linalg.norm(a - b) / jnp.linalg.norm(a)) for a, b in pairs)


CASES = {
    "rule": (rule, operands(4, 8), 4),
    "key heads that do not divide": (rule, operands(3, 12), 3),
    "step": (step, operands(4, 8), 4),
    "mixer": (mixer(4), mixing(4, 8, False), 4),
    "mixer, key heads that do not divide": (mixer(3), mixing(3, 12, False), 3),
    "layers": (layers, operands(2, 8), 2),
    "vmap": (over_an_axis, operands(4, 8), 4),
}
#: Cases whose gradients are compiled, too.
TRAINED = ("rule", "mixer", "key heads that do not divide", "layers")
found = {}
for name, (call, x, H) in CASES.items():
    slopes = jax.grad(loss(call)) if name in TRAINED else call
    want, gradients = jax.jit(lambda x, call=call, slopes=slopes: (call(x), slopes(x)))(x)
    for mesh in (AUTO, EXPLICIT):
        y = {n: jax.device_put(a, NamedSharding(mesh, spec(n, H))) for n, a in x.items()}
        split = (lambda y, call=call: call(y, sharding=ASKED)) if mesh is AUTO else call
        with jax.set_mesh(mesh):
            forward = jax.jit(split).lower(y).compile()
            both = jax.jit(jax.grad(loss(split)) if name in TRAINED else split).lower(y).compile()
            got = forward(y)
            found[f"{name}, {'auto' if mesh is AUTO else 'explicit'}"] = {
                "forward": error(want, got),
                "gradient": error(gradients, both(y)),
                "collectives": collectives(forward.as_text()),
                "collectives of both": collectives(both.as_text()),
                "o": str((*got[0].sharding.spec,)),
            }
        if name in ("rule", "mixer", "step"):
            found[f"{name}, {'auto' if mesh is AUTO else 'explicit'}"]["eager"] = error(want, call(y))

x = operands(4, 8)
where = {n: NamedSharding(AUTO, spec(n, 4)) for n in x}
y = {n: jax.device_put(a, where[n]) for n, a in x.items()}
o = rule(y, backend="pallas-interpret")
found["interpreted"] = {"error": error(rule(x), o), "o": str((*o[0].sharding.spec,))}
every = pg.gated_delta_rule(**y, output_states_every=16)[1].every
found["states on the way"] = error(pg.gated_delta_rule(**x, output_states_every=16)[1].every, every)
tokens = {**y, "q": jax.device_put(x["q"], NamedSharding(AUTO, P(None, "data")))}
found["tokens of one operand"] = error(rule(x), rule(tokens))
nested = jax.shard_map(
    lambda x: rule(x, sharding=pg.Sharding(heads="heads")), mesh=AUTO, in_specs=(P("data"),), out_specs=P("data"),
    axis_names={"data"},
)  # fmt: skip
found["inside a shard_map over rows"] = error(rule(x), jax.jit(nested)(y))
found["explain"] = str(pg.explain(**y))

sentences = found["sentences"] = {}


def refuse(name, call):
    try:
        call()
    except pg.GdnError as reason:
        sentences[name] = str(reason)


odd = operands(4, 4)
refuse("rows", lambda: rule({n: a[:3] for n, a in x.items()}, sharding=ASKED))
refuse("heads", lambda: rule(operands(1, 6), sharding=ASKED))
refuse("name", lambda: rule(x, sharding=pg.Sharding("date", mesh=AUTO)))
refuse("no mesh", lambda: rule(x, sharding=pg.Sharding("data")))
refuse("no sharding", lambda: rule(x, sharding="data"))
packed = {n: a[:1] for n, a in x.items() if n != "initial_state"}
refuse("packed", lambda: rule({**packed, "cu_seqlens": [0, T]}, sharding=pg.Sharding("data", mesh=AUTO)))
refuse("numpy", lambda: rule({n: np.asarray(a) for n, a in x.items()}, sharding=ASKED))
one = Mesh(np.array(jax.devices()[:1]), ("data",))
refuse("devices", lambda: rule(y, sharding=pg.Sharding("data", mesh=one)))
by_tokens = jax.device_put(x["q"], NamedSharding(EXPLICIT, P(None, "data")))
refuse("explicit tokens", lambda: rule({**x, "q": by_tokens}))
channels = jax.device_put(x["k"], NamedSharding(EXPLICIT, P(None, None, None, "heads")))
refuse("explicit channels", lambda: rule({**x, "k": channels}))
over_rows = {"mesh": AUTO, "in_specs": (P("data"),), "out_specs": P("data"), "axis_names": {"data"}}
refuse("manual", lambda: jax.shard_map(lambda x: rule(x, sharding=pg.Sharding("data")), **over_rows)(y))
refuse("twice", lambda: pg.Sharding("data", "data"))
print(json.dumps(found))
