"""Ported layers split over meshes by the names of their parameters' axes."""

from __future__ import annotations

import pytest

for module in ("jax", "flax", "safetensors", "orbax.checkpoint"):
    pytest.importorskip(module)

from checkpoints import checkpoint  # noqa: E402
from mesh_program import run_on_devices  # noqa: E402

FAMILIES = ("fla_gated_deltanet", "kimi_linear", "fla_gdn2_layer")


@pytest.mark.slow
def test_layers_on_meshes(tmp_path):
    from portable_gdn.checkpoint import port

    for family in FAMILIES:
        port(checkpoint(tmp_path / f"{family}-source", family), tmp_path / family, "nnx")
    found = run_on_devices("layers_program.py", *[str(tmp_path / family) for family in FAMILIES])
    for family in FAMILIES:
        for kind, seen in found[family].items():
            where = (family, kind, seen)
            # Sums of the projections run in another order, and decays add up over the tokens.
            assert max(seen["y"], seen["state"], seen["step"]) < 2e-5, where
            assert seen["gradient"] < 3e-4, where  # a gradient that is not summed, or summed twice, is off by half
            assert seen["state is split by"] == str((("data", "fsdp"), "tensor")), where
            assert seen["largest part of q_proj"] * 4 == seen["q_proj"], where
            assert set(seen["kinds"]) <= {"all-gather", "all-reduce", "collective-permute"}, where
            assert seen["sent at most"] <= seen["weight"], where
    assert found["orbax"]
    said = found["refusals"]
    assert "the mesh has an axis 'x', which no rule speaks of" in said["an axis without a rule"]
    assert "rules is about 'head'; it must be about" in said["a rule of nothing"]
    assert "rules are given without a mesh" in said["rules without a mesh"]
    assert "mesh and sharding are both given" in said["both"]


def test_specs_by_names():
    import jax
    from flax import nnx
    from jax.sharding import AbstractMesh
    from jax.sharding import PartitionSpec as P

    from portable_gdn.layers import GatedDeltaNet, partition_specs
    from portable_gdn.parallel import call_sharding

    sizes = {"num_heads": 2, "num_value_heads": 4, "key_dim": 8, "value_dim": 8}
    layer = nnx.eval_shape(lambda: GatedDeltaNet(32, rngs=nnx.Rngs(0), **sizes))
    mesh = AbstractMesh((2, 4), ("fsdp", "tensor"))
    specs = {".".join(p): leaf.get_value() for p, leaf in nnx.to_flat_state(partition_specs(layer, mesh))}
    assert specs["q_proj.kernel"] == P("fsdp", None)  # two key heads are not cut in four
    assert specs["v_proj.kernel"] == P("fsdp", "tensor")
    assert specs["o_proj.kernel"] == P("tensor", "fsdp")
    assert specs["A_log"] == P("tensor")
    assert specs["o_norm.scale"] == specs["q_conv1d.kernel"] == P()
    split = call_sharding(mesh)
    assert (split.batch, split.heads, split.sequence) == (("fsdp",), ("tensor",), None)
    named = partition_specs(layer, AbstractMesh((4,), ("model",)), {"heads": "model"})
    assert named["v_proj"]["kernel"].get_value() == P(None, "model")
    assert jax.tree.structure(partition_specs(layer, mesh)) == jax.tree.structure(nnx.state(layer, nnx.Param))
