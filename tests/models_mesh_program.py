"""A whole model spread over 2 x 2 x 2 devices, against the same on one; run by test_models_mesh.py."""

from __future__ import annotations

import json
import sys

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType
from mesh_program import collectives

from portable_gdn.models import generate, load_model

folder = sys.argv[1]
ids = np.random.default_rng(0).integers(3, 256, (4, 24))
mesh = jax.make_mesh((2, 2, 2), ("data", "expert", "tensor"), axis_types=(AxisType.Auto,) * 3)
rules = {"embed": "data"}
one = load_model(folder, precision="highest")
many = load_model(folder, precision="highest", mesh=mesh, rules=rules)
run = nnx.jit(lambda model, ids: model(ids)[0])
want, got = run(one, ids), run(many, ids)
places = {".".join(map(str, p)): str((*v[...].sharding.spec,)) for p, v in nnx.to_flat_state(nnx.state(many))}
graph, weights = nnx.split(many)
text = jax.jit(lambda w, ids: nnx.merge(graph, w)(ids)[0]).lower(weights, ids).compile().as_text()
found = {
    "error": float(np.linalg.norm(np.asarray(got) - np.asarray(want)) / np.linalg.norm(np.asarray(want))),
    "places": places,
    "share": max(
        v[...].addressable_shards[0].data.size / v[...].size
        for p, v in nnx.to_flat_state(nnx.state(many))
        if v[...].size > 2000
    ),
    "tokens": bool((np.asarray(generate(one, ids, 8).tokens) == np.asarray(generate(many, ids, 8).tokens)).all()),
    "collectives": sorted(collectives(text)),
}
print(json.dumps(found))
