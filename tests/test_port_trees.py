"""Ports to MaxText's trees and to Orbax: names and shapes of real models, elements, what Orbax reads, the way back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoints import checkpoint, facts, read_file, save, tensors, write_file
from typer.testing import CliRunner

from portable_gdn.checkpoint import back, port, provenance, run
from portable_gdn.checkpoint.plan import plan_port
from portable_gdn.checkpoint.reader import Checkpoint
from portable_gdn.checkpoint.source import read
from portable_gdn.checkpoint.table import Spec
from portable_gdn.cli.main import app
from portable_gdn.spec.errors import GdnError

pytest.importorskip("safetensors")


class Headers(Checkpoint):
    """A checkpoint of which only names, dtypes and shapes exist."""

    def __init__(self, shapes, config):
        self.folder = self.path = Path("somewhere")
        self.config, self.index, self._shapes = config, None, shapes
        self.where = dict.fromkeys(shapes, ("file", None))

    @property
    def inventory(self):
        return {name: Spec("BF16", tuple(shape)) for name, shape in self._shapes.items()}


def real(model: str) -> Headers:
    """Qwen3-Next 80B-A3B or Qwen3.5 35B-A3B by name and shape."""
    E, new = 2048, model.startswith("qwen3.5")
    layers, X, V = (40, 256, 248320) if new else (48, 512, 151936)
    p = "model.language_model." if new else "model."
    shapes = {p + "embed_tokens.weight": [V, E], p + "norm.weight": [E], "lm_head.weight": [V, E]}
    for i in range(layers):
        at = f"{p}layers.{i}."
        if (i + 1) % 4:
            m = at + "linear_attn."
            if new:
                shapes |= {m + "in_proj_qkv.weight": [8192, E], m + "in_proj_z.weight": [4096, E]}
                shapes |= {m + "in_proj_b.weight": [32, E], m + "in_proj_a.weight": [32, E]}
            else:
                shapes |= {m + "in_proj_qkvz.weight": [12288, E], m + "in_proj_ba.weight": [64, E]}
            shapes |= {m + "conv1d.weight": [8192, 1, 4], m + "A_log": [32], m + "dt_bias": [32]}
            shapes |= {m + "norm.weight": [128], m + "out_proj.weight": [E, 4096]}
        else:
            m = at + "self_attn."
            shapes |= {m + "q_proj.weight": [8192, E], m + "k_proj.weight": [512, E], m + "v_proj.weight": [512, E]}
            shapes |= {m + "o_proj.weight": [E, 4096], m + "q_norm.weight": [256], m + "k_norm.weight": [256]}
        m = at + "mlp."
        shapes |= {m + "gate.weight": [X, E], m + "shared_expert_gate.weight": [1, E]}
        for name in ("gate", "up"):
            shapes[f"{m}shared_expert.{name}_proj.weight"] = [512, E]
        shapes[m + "shared_expert.down_proj.weight"] = [E, 512]
        if new:
            shapes |= {m + "experts.gate_up_proj": [X, 1024, E], m + "experts.down_proj": [X, E, 512]}
        else:
            for e in range(X):
                shapes |= {f"{m}experts.{e}.{n}_proj.weight": [512, E] for n in ("gate", "up")}
                shapes[f"{m}experts.{e}.down_proj.weight"] = [E, 512]
        shapes |= {at + "input_layernorm.weight": [E], at + "post_attention_layernorm.weight": [E]}
    config = {
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "num_attention_heads": 16, "num_key_value_heads": 2, "num_hidden_layers": layers,
    }  # fmt: skip
    config = {"model_type": "qwen3_5_moe", "text_config": config} if new else {"model_type": "qwen3_next", **config}
    return Headers(shapes, config)


@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        ("qwen3.5-35b-a3b", ("scanned", "unscanned", "blocks")),
        pytest.param("qwen3-next-80b-a3b", ("scanned", "unscanned"), marks=pytest.mark.slow),
    ],
)
def test_names_and_shapes_of_maxtext(model, layouts):
    """Of the real models, against what MaxText 0.2.5 itself says."""
    source = read(real(model))
    trees = facts("maxtext")["trees"]
    for layout in layouts:
        plan = plan_port(source, "maxtext", layout=layout)
        have = {o.name.removeprefix("params."): list(o.spec.shape) for o in plan.outputs if o.name != "step"}
        want = trees[f"{model} {'unscanned' if layout == 'unscanned' else 'scanned'}"]
        if layout == "unscanned":
            assert len(have) == {"qwen3.5-35b-a3b": 673, "qwen3-next-80b-a3b": 807}[model]
            shown = {n: s for n, s in have.items() if "layers_" not in n or n.split(".")[2] in ("layers_0", "layers_3")}
            assert shown == want
        else:
            assert have == want
        assert not plan.side
        assert all(len(o.slabs(run.SLAB)) > 8 for o in plan.outputs if o.nbytes > 2**30)  # none is held whole


@pytest.mark.parametrize("layout", ["unscanned", "scanned", "blocks"])
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe_conditional"])
def test_to_maxtext_and_back(tmp_path, name, layout):
    source = checkpoint(tmp_path / "src", name, files=2)
    port(source, tmp_path / "out", "maxtext", layout=layout)
    assert not back(tmp_path / "out", tmp_path / "back").changed
    for path in source.iterdir():
        assert path.read_bytes() == (tmp_path / "back" / path.name).read_bytes(), path.name
    result = CliRunner().invoke(
        app, ["port", str(source), "x", "--to", "maxtext", "--like", str(tmp_path / "out"), "--dry-run", "--json"]
    )
    told = json.loads(result.stdout)["outputs"]
    own = plan_port(read(Checkpoint(source)), "maxtext", layout=layout)
    assert sum(o["count"] for o in told) == len(own.outputs)
    assert sum(o["bytes"] for o in told) == sum(o.nbytes for o in own.outputs)


def test_elements_of_stacked_leaves(tmp_path):
    """Eight layers, two blocks: each element of a doubly stacked leaf is the one that the file had."""
    found = facts("qwen3_next")
    shapes = dict(found["tensors"])
    for name, shape in found["tensors"].items():
        for i in range(4):
            shapes[name.replace(f"layers.{i}.", f"layers.{i + 4}.")] = shape
    x = tensors(shapes)
    source = save(tmp_path / "src", x, {**found["config"], "num_hidden_layers": 8})
    port(source, tmp_path / "out", "maxtext", layout="scanned")
    leaves = provenance.open_port(tmp_path / "out", provenance.load(tmp_path / "out"))
    start = "params.params.decoder.layers."
    wi = leaves.array(start + "local_layers.mlp.routed_experts.wi_0")
    qkvz = leaves.array(start + "local_layers.attention.in_proj_qkvz.kernel")
    conv = leaves.array(start + "local_layers.attention.conv1d.kernel")
    assert (wi.shape, qkvz.shape, conv.shape) == ((8, 2, 3, 64, 32), (64, 2, 3, 192), (4, 2, 3, 1, 128))
    for g in range(2):
        for j in range(3):
            at = f"model.layers.{4 * g + j}."
            assert np.array_equal(qkvz[:, g, j], x[at + "linear_attn.in_proj_qkvz.weight"].T)
            assert np.array_equal(conv[:, g, j], x[at + "linear_attn.conv1d.weight"].transpose(2, 1, 0))
            for e in range(8):
                assert np.array_equal(wi[e, g, j], x[f"{at}mlp.experts.{e}.gate_proj.weight"].T)
        query = leaves.array(start + "global_layer.attention.attention.query.kernel")[:, g]
        q = x[f"model.layers.{4 * g + 3}.self_attn.q_proj.weight"]
        assert np.array_equal(query, q.reshape(4, 64, 64).transpose(2, 0, 1))  # each head's q and gate side by side
    whole = {name: np.array(leaves.array(name)) for name in leaves.where}
    (tmp_path / "slabs").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "SLAB", 3000)
        port(source, tmp_path / "slabs" / "out", "maxtext", layout="scanned")
    again = provenance.open_port(tmp_path / "slabs" / "out", provenance.load(tmp_path / "slabs" / "out"))
    assert all(np.array_equal(again.array(name), a) for name, a in whole.items())


@pytest.mark.parametrize(("name", "to"), [("kimi_linear", "orbax"), ("qwen3_next", "maxtext")])
def test_orbax_reads_it(tmp_path, monkeypatch, name, to):
    """Both of Orbax's interfaces, whole and in shards."""
    pytest.importorskip("orbax.checkpoint")
    import jax
    import orbax.checkpoint as ocp
    from orbax.checkpoint import v1

    from portable_gdn.checkpoint import orbax

    monkeypatch.setattr(orbax, "_PART", 1000)  # several parts a leaf
    port(checkpoint(tmp_path / "src", name), tmp_path / "out", to, layout="scanned" if to == "maxtext" else None)
    leaves = provenance.open_port(tmp_path / "out", provenance.load(tmp_path / "out"))
    tree: dict = {}
    for leaf in leaves.where:
        if leaf.startswith("mtp"):
            continue
        *path, last = leaf.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = np.array(leaves.array(leaf))
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    sharding = jax.NamedSharding(mesh, jax.P())
    if to == "orbax":
        abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree)
        got = v1.load(tmp_path / "out", abstract)
    else:
        tree["opt_state"] = {}
        abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree)
        options = ocp.checkpoint_utils.construct_restore_args(abstract)
        with ocp.PyTreeCheckpointer() as checkpointer:
            got = checkpointer.restore(tmp_path / "out" / "0" / "items", restore_args=options)
        assert got["params"]["params"].keys() == {"decoder", "token_embedder"}
    assert jax.tree.structure(got) == jax.tree.structure(tree)
    same = jax.tree.map(lambda a, b: a.dtype == b.dtype and np.array_equal(np.asarray(a), b), got, tree)
    assert jax.tree.all(same)


def test_a_port_to_orbax_goes_back_continues_and_is_checked(tmp_path):
    source = checkpoint(tmp_path / "src", "kimi_linear")
    seen = 0

    def stop(what: str, done: int, of: int) -> None:
        nonlocal seen
        seen += 1
        if seen > 100:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        port(source, tmp_path / "out", "orbax", progress=stop)
    assert port(source, tmp_path / "out", "orbax").resumed > 5
    back(tmp_path / "out", tmp_path / "back")
    assert (source / "model.safetensors").read_bytes() == (tmp_path / "back" / "model.safetensors").read_bytes()
    place = tmp_path / "out" / "state" / "layers.0.mixer.A_log"
    described = json.loads((place / "zarr.json").read_text())
    (place / "zarr.json").write_text(json.dumps({**described, "shape": [5]}))
    with pytest.raises(GdnError, match="not the array that the port wrote"):
        back(tmp_path / "out", tmp_path / "never")


def test_layouts_are_never_guessed(tmp_path):
    source = checkpoint(tmp_path / "src", "qwen3_next")
    with pytest.raises(GdnError, match="--layout is not given"):
        port(source, tmp_path / "out", "maxtext")
    with pytest.raises(GdnError, match="be one of unscanned, scanned, blocks"):
        port(source, tmp_path / "out", "maxtext", layout="both")
    with pytest.raises(GdnError, match="with --to maxtext only"):
        port(source, tmp_path / "out", "jax", layout="scanned")
    with pytest.raises(GdnError, match="OLMo-Hybrid"):
        port(checkpoint(tmp_path / "olmo", "olmo_hybrid"), tmp_path / "out", "maxtext", layout="unscanned")
    with pytest.raises(GdnError, match="without experts"):
        port(checkpoint(tmp_path / "dense", "qwen3_5_text"), tmp_path / "out", "maxtext", layout="unscanned")
    result = CliRunner().invoke(app, ["port", str(source), "x", "--to", "maxtext", "--like", str(source)])
    assert "Orbax checkpoint of MaxText" in str(result.exception)
    assert [p.name for p in tmp_path.iterdir()] == ["src", "olmo", "dense"] or not (tmp_path / "out").exists()


def test_read_file_is_what_orbax_ports_hold(tmp_path):
    """One tree, two containers."""
    source = checkpoint(tmp_path / "src", "olmo_hybrid")
    port(source, tmp_path / "a", "jax")
    port(source, tmp_path / "b", "orbax")
    one = read_file(tmp_path / "a" / "model-00001-of-00001.safetensors")
    other = provenance.open_port(tmp_path / "b", provenance.load(tmp_path / "b"))
    assert all(np.array_equal(one[name], other.array(name)) for name in one)
    assert set(one) == set(other.where)


# --- adapters ------------------------------------------------------------------------------------------------------


def adapter(folder: Path, name: str, modules: dict[str, list[int]], rank: int = 4) -> dict[str, np.ndarray]:
    """A PEFT adapter on modules of a family's model; the factors by module."""
    rng = np.random.default_rng(0)
    x = {}
    for module, (out, inside) in modules.items():
        x[f"base_model.model.{module}.lora_A.weight"] = rng.standard_normal((rank, inside)).astype(np.float32)
        x[f"base_model.model.{module}.lora_B.weight"] = rng.standard_normal((out, rank)).astype(np.float32)
    save(folder, x, None)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 8}))
    return x


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text", "kimi_linear", "fla_gated_deltanet", "lara_mini"])
def test_adapters_port_by_the_tables_of_their_projections(tmp_path, name):
    """The change that the ported factors make is the ported change that the factors make; and back, byte for byte."""
    found = facts(name)
    modules = {
        key.removesuffix(".weight"): shape
        for key, shape in found["tensors"].items()
        if key.endswith(("proj.weight", "qkvz.weight", "ba.weight", "qkv.weight", "_z.weight"))
        if len(shape) == 2 and ".experts." not in key
    }
    x = adapter(tmp_path / "src", name, modules)
    (tmp_path / "config.json").write_text(json.dumps(found["config"]))
    port(tmp_path / "src", tmp_path / "out", "nnx", base=tmp_path / "config.json")
    changes = tensors(found["tensors"])
    for module in modules:
        a, b = (x[f"base_model.model.{module}.lora_{n}.weight"] for n in "AB")
        changes[module + ".weight"] = b @ a
    port(save(tmp_path / "full", changes, found["config"]), tmp_path / "whole", "nnx")
    factors = read_file(tmp_path / "out" / "model-00001-of-00001.safetensors")
    whole = read_file(tmp_path / "whole" / "model-00001-of-00001.safetensors")
    seen = [key.removesuffix(".lora.lora_a") for key in factors if key.endswith("lora_a")]
    assert len(seen) >= len(modules)
    for module in seen:
        product = factors[module + ".lora.lora_a"] @ factors[module + ".lora.lora_b"]
        want = whole[module + ".kernel"]
        assert np.allclose(product, np.asarray(want, np.float32), atol=1e-5), module
    back(tmp_path / "out", tmp_path / "back")
    for path in (tmp_path / "src").iterdir():
        assert path.read_bytes() == (tmp_path / "back" / path.name).read_bytes()


def test_adapters_that_were_trained_apart_cannot_be_joined(tmp_path):
    modules = {"model.layers.0.linear_attn.in_proj_qkvz": [192, 64]}
    adapter(tmp_path / "src", "qwen3_next", modules)
    (tmp_path / "config.json").write_text(json.dumps(facts("qwen3_next")["config"]))
    port(tmp_path / "src", tmp_path / "out", "jax", base=tmp_path / "config.json")
    path = tmp_path / "out" / "model-00001-of-00001.safetensors"
    x = {name: np.array(a) for name, a in read_file(path).items()}
    x["layers.0.mixer.k_proj.lora.lora_a"] += 1
    write_file(path, x)
    with pytest.raises(GdnError, match="which differ"):
        back(tmp_path / "out", tmp_path / "never")
    with pytest.raises(GdnError, match="--base is not given"):
        port(tmp_path / "src", tmp_path / "never", "jax")
    port(tmp_path / "src", tmp_path / "fla", "fla", base=tmp_path / "config.json")
    assert set(read_file(tmp_path / "fla" / "model-00001-of-00001.safetensors")) == {
        f"base_model.model.model.layers.0.attn.{n}_proj.lora_{f}.weight" for n in "qkvg" for f in "AB"
    }
