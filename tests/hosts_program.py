"""One of two processes that share a mesh of four CPU devices; run by test_hosts.py with its number and a port."""

from __future__ import annotations

import json
import sys

import jax

number, port, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=number)

import numpy as np  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import portable_gdn as pg  # noqa: E402

assert len(jax.devices()) == 4
assert len(jax.local_devices()) == 2
mesh = jax.make_mesh((2, 2), ("hosts", "own"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
B, T, H, HV, K, V = 2, 96, 2, 4, 16, 16
rng = np.random.default_rng(0)
whole = {
    "q": rng.standard_normal((B, T, H, K), np.float32),
    "k": rng.standard_normal((B, T, H, K), np.float32),
    "v": rng.standard_normal((B, T, HV, V), np.float32),
    "g": -rng.random((B, T, HV), np.float32),
    "beta": rng.random((B, T, HV), np.float32),
}
o, state = pg.gated_delta_rule(**whole, qk_l2norm=True, output_final_state=True)  # numpy's, in float64 within


def placed(array, spec):
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index: array[index])


def distance(a, b):
    """Of the parts that this process holds."""
    parts = [(np.asarray(s.data), b[s.index]) for s in a.addressable_shards]
    return max(float(np.linalg.norm(x - y) / np.linalg.norm(y)) for x, y in parts)


found = {}
for name, spec, split in (
    ("rows over hosts", P("hosts", None, "own"), pg.Sharding("hosts", "own", mesh=mesh)),
    ("heads over hosts", P("own", None, "hosts"), pg.Sharding("own", "hosts", mesh=mesh)),
    ("tokens over hosts", P(None, "hosts", "own"), pg.Sharding(heads="own", sequence="hosts", mesh=mesh)),
):
    x = {key: placed(a, spec) for key, a in whole.items()}

    def rule(x, split=split):
        return pg.gated_delta_rule(**x, qk_l2norm=True, output_final_state=True, sharding=split)

    got, after = jax.jit(rule)(x)
    slopes = jax.jit(jax.grad(lambda x, rule=rule: (rule(x)[0] ** 2).sum()))(x)
    alone = jax.grad(lambda x: (pg.gated_delta_rule(**x, qk_l2norm=True, backend="xla")[0] ** 2).sum())(
        jax.tree.map(jax.numpy.asarray, whole)
    )
    found[name] = {
        "o": distance(got, o),
        "state": distance(after, state),
        "gradient": max(distance(slopes[key], np.asarray(alone[key])) for key in whole),
        "held here": sum(s.data.size for s in x["v"].addressable_shards) / whole["v"].size,
    }

from flax import nnx  # noqa: E402

from portable_gdn.checkpoint import load_layer  # noqa: E402

layer = load_layer(folder, 0, mesh=mesh, rules={"batch": "hosts", "heads": "own", "key_heads": "own", "embed": "hosts"})
kernel = layer.q_proj.kernel[...]
inputs = rng.standard_normal((2, 24, layer.hidden_size), np.float32)
y, _ = nnx.jit(lambda layer, x: layer(x))(layer, placed(inputs, P("hosts")))
alone, _ = load_layer(folder, 0)(jax.numpy.asarray(inputs))
found["layer"] = {
    "part of q_proj on a device": max(s.data.size for s in kernel.addressable_shards) / kernel.size,
    "y": distance(y, np.asarray(alone)),
}
print(json.dumps(found))
