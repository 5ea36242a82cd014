"""Ported layers on meshes of eight CPU devices, against the same on one; run by test_layers_on_meshes.py."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from mesh_program import collectives

from portable_gdn.checkpoint import load_layer, provenance
from portable_gdn.checkpoint.loading import load_tree

KINDS = {"auto": jax.sharding.AxisType.Auto, "explicit": jax.sharding.AxisType.Explicit}
AXES, ROWS = ("data", "fsdp", "tensor"), ("data", "fsdp")


def mesh_of(kind, sizes=(2, 2, 2)):
    return jax.make_mesh(sizes, AXES, axis_types=(KINDS[kind],) * 3)


def distance(a, b):
    a, b = np.asarray(a), np.asarray(b)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def loaded(folder, number, **options):
    """The layer with float32 weights, so that its gradients are not rounded to the file's bfloat16."""
    graph, weights = nnx.split(load_layer(folder, number, **options))
    return nnx.merge(graph, jax.tree.map(lambda a: a.astype(jnp.float32), weights))


def gradients(layer, x):
    graph, weights = nnx.split(layer, nnx.Param)
    return jax.jit(jax.grad(lambda w, x: (nnx.merge(graph, w)(x)[0] ** 2).mean()))(weights, x)


def compared(folder):
    """Distances from one device of outputs, states, a step and gradients, and what the forward pass sends."""
    number = provenance.load(folder)["linear_layers"][0]
    one = loaded(folder, number)
    x = jax.random.normal(jax.random.key(0), (4, 32, one.hidden_size))
    y, state = one(x, output_final_state=True)
    token, _ = one.step(x[:, 0], state)
    slopes = nnx.to_flat_state(gradients(one, x))
    found = {}
    for kind in KINDS:
        mesh = mesh_of(kind)
        layer = loaded(folder, number, mesh=mesh)
        with jax.set_mesh(mesh):
            rows = jax.device_put(x, jax.NamedSharding(mesh, jax.P(ROWS)))
            got, after = nnx.jit(lambda layer, x: layer(x, output_final_state=True))(layer, rows)
            step, _ = layer.step(rows[:, 0], after)
            graph, weights = nnx.split(layer, nnx.Param)
            text = jax.jit(lambda w, x, graph=graph: nnx.merge(graph, w)(x)[0]).lower(weights, rows).compile().as_text()
            own = nnx.to_flat_state(gradients(layer, rows))
        weight = max(leaf[...].size for _, leaf in nnx.to_flat_state(weights))
        sent = collectives(text)
        found[kind] = {
            "y": distance(got, y),
            "state": distance(after.recurrent, state.recurrent),
            "step": distance(step, token),
            "gradient": max(distance(a[...], b[...]) for (_, a), (_, b) in zip(own, slopes, strict=True)),
            "state is split by": str(tuple(after.recurrent.sharding.spec[:2])),
            "largest part of q_proj": max(s.data.size for s in layer.q_proj.kernel[...].addressable_shards),
            "q_proj": layer.q_proj.kernel[...].size,
            "kinds": sorted(sent),
            "sent at most": max(size for sizes in sent.values() for size in sizes),
            "weight": weight,
        }
    return found


def other_mesh(folder):
    """A sharded layer through Orbax onto a mesh of another shape."""
    import orbax.checkpoint as ocp

    number = provenance.load(folder)["linear_layers"][0]
    layer = load_layer(folder, number, mesh=mesh_of("auto"))
    saved = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    there = load_layer(folder, number, mesh=mesh_of("auto", (1, 4, 2)))
    want = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding),
        nnx.to_pure_dict(nnx.state(there, nnx.Param)),
    )
    with tempfile.TemporaryDirectory() as room, ocp.StandardCheckpointer() as writer:
        writer.save(Path(room) / "layer", saved)
        writer.wait_until_finished()
        restored = writer.restore(Path(room) / "layer", want)
    same = jax.tree.map(lambda a, b, c: bool((a == b).all()) and b.sharding == c.sharding, saved, restored, want)
    return all(jax.tree.leaves(same))


def refusals(folder):
    number = provenance.load(folder)["linear_layers"][0]
    mesh = jax.make_mesh((8,), ("x",))
    heads = load_layer(folder, number).num_value_heads
    found = {}
    for name, options in {
        "an axis without a rule": {"mesh": mesh},
        "a rule of nothing": {"mesh": mesh, "rules": {"head": "x"}},
        "rules without a mesh": {"rules": {"heads": "x"}},
        "both": {"mesh": mesh, "rules": {"heads": "x"}, "sharding": lambda name, shape: None},
    }.items():
        try:
            load_layer(folder, number, **options)
        except ValueError as error:
            found[name] = str(error)
    if heads % 8:
        layer = load_layer(folder, number, mesh=mesh, rules={"heads": "x"})
        try:
            layer(jnp.ones((1, 8, layer.hidden_size)))
        except ValueError as error:
            found["heads that do not divide"] = str(error)
    assert load_tree(folder, under=f"layers.{number}.mixer")
    return found


folders = [Path(name) for name in sys.argv[1:]]
result = {folder.name: compared(folder) for folder in folders}
result["orbax"] = other_mesh(folders[0])
result["refusals"] = refusals(folders[0])
print(json.dumps(result))
