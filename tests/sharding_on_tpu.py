"""Compiles calls for several TPUs, without any, and prints what the programs hold; run by test_sharding.py."""

from __future__ import annotations

import json
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from mesh_program import collectives

import portable_gdn as pg
from portable_gdn.tpu.chips import chip_named
from portable_gdn.tpu.scheduling.compile import on

topology, rows, heads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
mesh = Mesh(np.array(devices).reshape(rows, heads), ("data", "heads"))
B, T, H, HV, K, V = rows, 512, heads, 2 * heads, 128, 128


def shape(*dims, dtype=jnp.bfloat16, spec=("data", None, "heads")):
    return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, P(*spec)))


gates = {name: shape(B, T, HV, dtype=jnp.float32) for name in ("g", "beta")}
x = {"q": shape(B, T, H, K), "k": shape(B, T, H, K), "v": shape(B, T, HV, V), **gates}
split = {"sharding": pg.Sharding("data", "heads", mesh=mesh)}
found = {}


def rule(x, **options):
    return pg.gated_delta_rule(**x, output_final_state=True, **options)


def loss(x, **options):
    return sum((a.astype(jnp.float32) ** 2).sum() for a in rule(x, **options))


def compiled(name, function):
    with on(chip_named(topology.partition(":")[0])), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        text = jax.jit(function).trace(x).lower(lowering_platforms=("tpu",)).compile().as_text()
    found[name] = {
        "kernels": text.count('custom_call_target="tpu_custom_call"'),
        "collectives": collectives(text),
        "warned": any("XLA cannot partition a kernel" in str(w.message) for w in told),
    }


compiled("alone", rule)
compiled("alone, gradient", jax.grad(loss))
compiled("split", lambda x: rule(x, **split))
compiled("named", lambda x: rule(x, backend="pallas", **split))
compiled("split, gradient", jax.grad(lambda x: loss(x, **split)))
specs = {name: a.sharding.spec for name, a in x.items()}
compiled("shard_map", jax.shard_map(rule, mesh=mesh, in_specs=(specs,), out_specs=(specs["v"], P("data", "heads"))))
compiled("tokens", lambda x: rule(x, sharding=pg.Sharding("data", sequence="heads", mesh=mesh)))
try:
    compiled("refused", lambda x: rule(x, backend="pallas"))
except pg.GdnError as reason:
    found["refused"] = str(reason)
print(json.dumps(found))
