"""Nothing is lost and nothing guessed: what must be there, what else lies in the folder, what a model is, what a cast
makes of it, and what config.json may say."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoints import FAMILIES, checkpoint, facts, load, read_file, save, save_raw, tensors, write_file
from typer.testing import CliRunner

from portable_gdn.checkpoint import back, load_layer, load_tree, plan_of, port
from portable_gdn.checkpoint.reader import Checkpoint
from portable_gdn.checkpoint.source import read
from portable_gdn.checkpoint.table import Spec
from portable_gdn.cli.main import app
from portable_gdn.spec.errors import GdnError

pytest.importorskip("safetensors")


class Headers(Checkpoint):
    """A checkpoint of which only names, dtypes and shapes exist."""

    def __init__(self, shapes, config, dtype="F32"):
        self.folder = self.path = Path("somewhere")
        self.config, self.index, self._shapes, self._dtype = config, None, shapes, dtype
        self.where = dict.fromkeys(shapes, ("file", None))

    @property
    def inventory(self):
        dtypes = self._dtype if isinstance(self._dtype, dict) else {}
        default = "F32" if dtypes else self._dtype
        return {name: Spec(dtypes.get(name, default), tuple(shape)) for name, shape in self._shapes.items()}


def refused(shapes, config, dtype="F32") -> str:
    with pytest.raises(GdnError) as error:
        read(Headers(shapes, config, dtype))
    return str(error.value)


# --- what must be there --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_every_kind_of_tensor_must_be_there(name):
    """One of each kind is taken away, the last of those that are alike; then whole layers."""
    found = facts(name)
    shapes, config = found["tensors"], found["config"]
    read(Headers(shapes, config))
    kinds = {re.sub(r"\.\d+\.", ".*.", key): key for key in shapes}
    for key in kinds.values():
        rest = {n: shape for n, shape in shapes.items() if n != key}
        if key == "lm_head.weight" and config.get("tie_word_embeddings"):
            read(Headers(rest, config))
        else:
            assert key in refused(rest, config)
    layers = config.get("text_config", config).get("num_hidden_layers", 0)
    for layer in range(layers if layers > 1 else 0):
        rest = {n: shape for n, shape in shapes.items() if f"layers.{layer}." not in n}
        assert f"layer {layer} (all of it)" in refused(rest, config)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe_text", "kimi_linear", "bailing_hybrid", "glm5_next_text"])
def test_all_experts_must_be_there(name):
    """In order or not, the first, one between, the last, and as many as config.json says."""
    found = facts(name)
    for expert in (0, 3, 7):
        rest = {n: s for n, s in found["tensors"].items() if f"layers.3.mlp.experts.{expert}." not in n}
        rest = {n: s for n, s in rest.items() if f"layers.3.block_sparse_moe.experts.{expert}." not in n}
        assert f".experts.{expert}." in refused(rest, found["config"])
    for key in ("num_experts", "n_routed_experts", "num_local_experts"):
        if key in found["config"]:
            assert f"{key} is 9" in refused(found["tensors"], {**found["config"], key: 9})


def test_more_layers_than_the_configuration_says():
    """They are for multi-token prediction if something in them shows it, and else a contradiction."""
    for name in ("qwen3_5_text", "kimi_linear", "olmo_hybrid", "bailing_hybrid"):
        found = facts(name)
        config = {k: v for k, v in found["config"].items() if k != "linear_attn_config"}
        config.update({"linear_head_dim": 16, "linear_num_heads": 4, "num_hidden_layers": 2})
        assert "num_hidden_layers is 2, and the files hold layers 2, 3 too" in refused(found["tensors"], config)
    found = facts("bailing_hybrid")
    more = {
        **found["tensors"], "model.layers.4.eh_proj.weight": [64, 128], "model.layers.4.enorm.weight": [64],
        "model.layers.4.attention.q_proj.weight": [64, 64],
    }  # fmt: skip
    ((rule, names, tree),) = read(Headers(more, found["config"])).carried
    assert "multi-token prediction" in rule
    assert len(names) == 3
    assert not tree


def test_what_may_be_absent():
    """By the configuration: a convolution, an output gate, biases, a head; and one kind of query or the other."""
    found = facts("fla_gated_deltanet")
    shapes, config = found["tensors"], found["config"]
    no_conv = {n: s for n, s in shapes.items() if "conv1d" not in n}
    read(Headers(no_conv, {**config, "use_short_conv": False}))
    assert "q_conv1d.weight" in refused(no_conv, config)
    assert "use_short_conv = false" in refused(shapes, {**config, "use_short_conv": False})
    no_gate = {n: s for n, s in shapes.items() if "attn.g_proj" not in n}
    read(Headers(no_gate, {**config, "use_gate": False}))
    assert "g_proj" in refused(no_gate, config)
    assert "use_gate = false" in refused(shapes, {**config, "use_gate": False})
    biases = {f"model.layers.0.attn.{n}_conv1d.bias": [w] for n, w in (("q", 32), ("k", 32), ("v", 64))}
    read(Headers({**shapes, **biases}, config))
    read(Headers({**shapes, **biases}, {**config, "conv_bias": True}))
    assert "conv1d.bias" in refused(shapes, {**config, "conv_bias": True})
    biases.popitem()
    assert "v_conv1d.bias" in refused({**shapes, **biases}, config)  # all or none
    attention = {**config["attn"], "qkv_bias": True}
    more = {f"model.layers.1.attn.{n}_proj.bias": [w] for n, w in (("q", 64), ("k", 32), ("v", 32))}
    read(Headers({**shapes, **more}, {**config, "attn": attention}))
    assert "q_proj.bias" in refused(shapes, {**config, "attn": attention})
    assert "q_norm.weight" in refused(shapes, {**config, "attn": [{**config["attn"], "qk_norm": True}]})
    found = facts("kimi_linear")
    low = {n: s for n, s in found["tensors"].items() if "layers.3.self_attn.q_proj" not in n}
    at = "model.layers.3.self_attn.q_"
    low |= {at + "a_proj.weight": [24, 64], at + "a_layernorm.weight": [24], at + "b_proj.weight": [96, 24]}
    read(Headers(low, {**found["config"], "q_lora_rank": 24}))
    assert "q_a_layernorm.weight" in refused(
        {n: s for n, s in low.items() if "q_a_layernorm" not in n}, {**found["config"], "q_lora_rank": 24}
    )
    found = facts("qwen3_next")
    headless = {n: s for n, s in found["tensors"].items() if n != "lm_head.weight"}
    read(Headers(headless, {**found["config"], "tie_word_embeddings": True}))
    read(Headers(headless, {**found["config"], "architectures": ["Qwen3NextModel"]}))
    assert "lm_head.weight" in refused(headless, {**found["config"], "architectures": ["Qwen3NextForCausalLM"]})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layer_types": ["linear_attention"] * 4}, "layer 3 has linear attention, and .*self_attn"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types says that layer 0 has full attention"),
        ({"full_attention_interval": 7}, "full_attention_interval says that layer 3 has linear attention"),
        ({"full_attention_interval": 2}, "full_attention_interval says that layer 1 has full attention"),
        ({"hidden_size": 128}, "hidden_size is 128, and .* by which it is 64"),
        ({"vocab_size": 512}, "vocab_size is 512"),
        ({"head_dim": 64}, "head_dim is 64"),
        ({"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim is 3"),
        ({"moe_intermediate_size": 48}, "moe_intermediate_size is 48"),
        ({"linear_num_value_heads": 3}, "multiple of linear_num_key_heads"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types is a list of 3"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; it must be 'silu'"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"num_hidden_layers": 2**30}, "at most 10000"),
        ({"num_experts": 2**30}, "at most 100000"),
        ({"output_gate_type": "tanh"}, "output gate is 'tanh'"),
        ({"mlp_layer_types": ["dense"] * 4}, "mlp_layer_types says that the feed-forward of layer 0 is of kind dense"),
    ],
)  # fmt: skip
def test_configuration_and_tensors_must_agree(change, said):
    found = facts("qwen3_next")
    assert re.search(said, refused(found["tensors"], {**found["config"], **change}))


def test_shards_are_counted(tmp_path):
    """By their names where there is no index, by the index where there is one; and what the absent ones would hold."""
    whole = checkpoint(tmp_path / "whole", "qwen3_5_text", files=3)
    index = "model.safetensors.index.json"
    listed = json.loads((whole / index).read_text())

    def spoilt(name, change) -> str:
        shutil.copytree(whole, tmp_path / name)
        change(tmp_path / name)
        with pytest.raises(GdnError) as error:
            port(tmp_path / name, tmp_path / "out", "jax")
        return str(error.value)

    two = "model-00002-of-00003.safetensors"
    said = spoilt("a", lambda f: ((f / index).unlink(), (f / two).unlink()))
    assert f"not complete: {two} is not there" in said
    said = spoilt("b", lambda f: (f / two).unlink())
    assert two in said
    assert any(name in said for name, file in listed["weight_map"].items() if file == two)
    assert "names no tensor" in spoilt("c", lambda f: (f / index).write_text('{"weight_map": {}}'))
    part = {name: file for name, file in listed["weight_map"].items() if file != two}
    said = spoilt("d", lambda f: ((f / two).unlink(), (f / index).write_text(json.dumps({"weight_map": part}))))
    assert f"does not name {two}" in said
    with pytest.raises(GdnError, match="one of 3 files; their folder"):
        port(whole / two, tmp_path / "out", "jax")
    assert not list(tmp_path.glob("out*"))


def test_ports_that_are_not_whole_are_not_loaded(tmp_path):
    """Whether a leaf was lost since, or was never there because an earlier version let it pass."""
    pytest.importorskip("flax")
    source = checkpoint(tmp_path / "src", "qwen3_next")
    port(str(source), str(tmp_path / "out"), "nnx")
    assert not back(str(tmp_path / "out"), str(tmp_path / "back")).changed
    assert load_layer(str(tmp_path / "out"), 0).num_heads == 2
    assert set(load_tree(str(tmp_path / "out"), under="layers.1.mixer")) == set(
        load_tree(tmp_path / "out")["layers"]["1"]["mixer"]
    )
    file = "model-00001-of-00001.safetensors"
    x = {n: np.array(a) for n, a in read_file(tmp_path / "out" / file).items()}
    for n, lost in enumerate(
        ("layers.0.mixer.q_conv1d.kernel", "layers.1.mixer.A_log", "embed.embedding", "norm.scale")
    ):
        for recorded in (True, False):
            folder = tmp_path / f"{n}{recorded}"
            shutil.copytree(tmp_path / "out", folder)
            write_file(folder / file, {name: a for name, a in x.items() if name != lost})
            if not recorded:  # as a port of an incomplete source would say of itself
                told = json.loads((folder / "portable_gdn.json").read_text())
                told["tensors"].pop(lost)
                (folder / "portable_gdn.json").write_text(json.dumps(told))
            for ask, given in ((load_layer, {"layer": 0}), (load_tree, {}), (load_tree, {"under": "layers.2"})):
                with pytest.raises(GdnError, match=f"not complete: {lost}"):
                    ask(folder, **given)
        with pytest.raises(GdnError, match="not in the port; it must be whole"):
            back(folder, tmp_path / "never")


def test_trees_of_other_targets_must_be_whole(tmp_path):
    """Orbax's and MaxText's leaves, another family's layers ported onward, layers that would lack something."""
    source = checkpoint(tmp_path / "src", "qwen3_next")
    port(source, tmp_path / "orbax", "orbax")
    shutil.rmtree(tmp_path / "orbax" / "state" / "layers.0.mixer.q_conv1d.kernel")
    for ask in (lambda: load_tree(tmp_path / "orbax"), lambda: back(tmp_path / "orbax", tmp_path / "never")):
        with pytest.raises(GdnError, match=r"layers\.0\.mixer\.q_conv1d\.kernel"):
            ask()
    port(source, tmp_path / "maxtext", "maxtext", layout="unscanned")
    shutil.rmtree(next((tmp_path / "maxtext" / "0" / "items").glob("*layers_1.attention.A_log")))
    with pytest.raises(GdnError, match="A_log"):
        back(tmp_path / "maxtext", tmp_path / "never")
    port(source, tmp_path / "fla", "fla")
    port(tmp_path / "fla", tmp_path / "onward", "nnx")  # layers alone, and said to be
    back(tmp_path / "onward", tmp_path / "fla again")
    assert {p.name for p in (tmp_path / "fla again").iterdir()} == {p.name for p in (tmp_path / "fla").iterdir()}
    file = tmp_path / "fla" / "model-00001-of-00001.safetensors"
    x = {n: np.array(a) for n, a in read_file(file).items()}
    lost = "model.layers.2.attn.k_conv1d.weight"
    write_file(file, {n: a for n, a in x.items() if n != lost})
    (tmp_path / "fla" / "model.safetensors.index.json").unlink()
    (tmp_path / "fla" / "side-00001-of-00001.safetensors").unlink()
    with pytest.raises(GdnError, match=f"not complete: {lost}"):
        port(tmp_path / "fla", tmp_path / "never", "nnx")
    for target in ("orbax", "maxtext", "onward"):
        with pytest.raises(GdnError, match=r"is a port to .*--back"):
            port(tmp_path / target, tmp_path / "never", "jax")
    # full-rank decay and gate have no place in KDA's two factors; a convolution's bias has none in Qwen3-Next
    with pytest.raises(GdnError, match="which FLA KDA must have"):
        port(checkpoint(tmp_path / "ling", "bailing_hybrid"), tmp_path / "never", "fla")
    found = facts("fla_gated_deltanet")
    biases = {f"model.layers.0.attn.{n}_conv1d.bias": [w] for n, w in (("q", 32), ("k", 32), ("v", 64))}
    biased = save(tmp_path / "biased", tensors({**found["tensors"], **biases}), found["config"])
    with pytest.raises(GdnError, match=r"conv1d\.bias has no place in hf and is not zero"):
        port(biased, tmp_path / "never", "hf")


# --- what else lies in the folder ----------------------------------------------------------------------------------


def everything(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize(("to", "files"), [("jax", 2), ("jax", 1), ("orbax", 2), ("fla", 2)])
def test_every_file_of_the_folder_comes_back(tmp_path, to, files):
    source = checkpoint(tmp_path / "src", "qwen3_next", files=files)
    for name, data in (
        ("README.md", b"# a model\r\n"),
        ("tokenizer.json", b"{}"),
        ("tokenizer.model", bytes(range(256))),
        ("merges.txt", b""),
        ("modeling_custom.py", b"raise SystemExit"),
        ("pytorch_model.bin", b"\x80\x02pickle"),
        ("commit_success.txt", b"the source's own"),
        (".gitattributes", b"*.safetensors filter=lfs"),
        ("image.png", b"\x89PNG"),
        ("original/params.json", b"{}"),
        ("original/weights/consolidated.00.pth", b"PK\x03\x04"),
        ("onnx/model.safetensors", b"whatever"),
        ("source/config.json", b"not the port's"),
    ):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(data)
    beside = ["README.md", "modeling_custom.py", "original/params.json"]
    if files > 1:  # without an index all safetensors files are the model
        beside += ["mtp.safetensors", "consolidated.safetensors"]
        write_file(source / "mtp.safetensors", {"mtp.fc.weight": np.ones((64, 128), np.float32)})
        write_file(source / "consolidated.safetensors", {"layers.0.attention.wq.weight": np.ones((2, 2), np.float32)})
    before = everything(source)
    shown = CliRunner().invoke(app, ["inspect", str(source)]).stdout
    assert all(name in shown.replace("\n", "") for name in beside)
    outcome = port(source, tmp_path / "out", to)
    assert set(beside) < set(outcome.beside)
    assert not list((tmp_path / "out").glob("*.py"))
    done = back(tmp_path / "out", tmp_path / "back")
    assert everything(tmp_path / "back") == before == everything(source)
    assert done.edited == []
    assert all(name in "".join(outcome.notes) for name in beside if name.endswith("tensors"))
    (tmp_path / "out" / "tokenizer.json").write_text('{"more": 1}')
    assert back(tmp_path / "out", tmp_path / "edited").edited == ["tokenizer.json"]
    (tmp_path / "out" / "tokenizer.json").unlink()
    with pytest.raises(GdnError, match=r"tokenizer\.json is not there"):
        back(tmp_path / "out", tmp_path / "never")


def test_what_cannot_be_carried_is_refused_or_said(tmp_path):
    source = checkpoint(tmp_path / "src", "qwen3_5_text", files=2)
    shutil.copy(source / "model-00001-of-00002.safetensors", source / "model.safetensors")
    with pytest.raises(GdnError, match=r"two checkpoints"):
        plan_of(source, "jax")
    (source / "model.safetensors").rename(source / "adapter_model.safetensors")
    with pytest.raises(GdnError, match=r"an adapter \(adapter_model.safetensors\) beside it"):
        plan_of(source, "jax")
    (source / "adapter_model.safetensors").unlink()
    (source / "link").symlink_to(tmp_path / "nothing")
    with pytest.raises(GdnError, match="a link to nothing"):
        plan_of(source, "jax")
    (source / "link").unlink()
    (source / "link").symlink_to(tmp_path, target_is_directory=True)
    with pytest.raises(GdnError, match="a link to a folder"):
        plan_of(source, "jax")
    (source / "link").unlink()
    os.mkfifo(source / "pipe")
    with pytest.raises(GdnError, match="no file"):
        plan_of(source, "jax")
    (source / "pipe").unlink()
    (source / ".git").mkdir()
    (source / ".git" / "HEAD").write_text("ref")
    outcome = port(source, source / "out", "jax")  # in the source's own folder
    assert [name for name in outcome.beside if ".git" in name] == []
    assert any(".git" in note for note in outcome.notes)
    again = port(source, source / "other", "jax")
    assert not any(name.startswith("out") for name in again.beside)
    assert any("out is a port" in note for note in again.notes)


def test_a_record_that_leads_out_of_the_folder_is_refused(tmp_path):
    port(checkpoint(tmp_path / "src", "qwen3_5_text"), tmp_path / "out", "jax")
    path = tmp_path / "out" / "portable_gdn.json"
    told = json.loads(path.read_text())
    for name, place in (
        ("../x", "config.json"),
        ("config.json", "../src/config.json"),
        ("/x", "config.json"),
        ("a", 3),
    ):
        told["source"]["beside"] = {name: {"place": place, "size": 1, "sha256": ""}}
        path.write_text(json.dumps(told))
        with pytest.raises(GdnError, match=r"inside its folder|not whole"):
            back(tmp_path / "out", tmp_path / "never")


# --- what a model is -----------------------------------------------------------------------------------------------


def plain(layers=2, norms=False) -> dict[str, list[int]]:
    """A model of plain attention, as Llama, Mistral, Qwen3 and many others name it."""
    found = {"model.embed_tokens.weight": [64, 32], "model.norm.weight": [32], "lm_head.weight": [64, 32]}
    for n in range(layers):
        at = f"model.layers.{n}."
        found |= {at + f"self_attn.{p}_proj.weight": [32 if p in "qo" else 16, 32] for p in "qkvo"}
        found |= {at + f"mlp.{p}_proj.weight": [48, 32] for p in ("gate", "up")} | {
            at + "mlp.down_proj.weight": [32, 48]
        }
        found |= {at + "input_layernorm.weight": [32], at + "post_attention_layernorm.weight": [32]}
        found |= {at + f"self_attn.{p}_norm.weight": [8] for p in "qk"} if norms else {}
    return found


@pytest.mark.parametrize(
    ("model_type", "norms", "what"),
    [
        ("llama", False, "plain attention"),
        ("mistral", False, "plain attention"),
        ("qwen3", True, "plain attention"),
        ("olmo3", True, "plain attention"),
        ("qwen3_vl", True, "plain attention"),
        ("nobody_knows", False, "plain attention, by its tensors"),
        (None, True, "no model_type"),
        ("qwen3_next", True, "no layer of linear attention"),
        ("kimi_linear", False, "no layer of linear attention"),
        ("glm5_next_text", False, "no layer of linear attention"),
    ],
)
def test_models_of_plain_attention_are_of_no_family(model_type, norms, what):
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "hidden_size": 32}
    if model_type is not None:
        config["model_type"] = model_type
    said = refused(plain(norms=norms), config)
    assert what in said
    assert model_type is None or model_type in said or "no layer" in said
    assert "Kimi-Linear" in said
    for family in ("qwen3_next", "kimi_linear", "olmo_hybrid"):
        with pytest.raises(GdnError, match="no layer of linear attention"):
            read(Headers(plain(norms=norms), config), family)


@pytest.mark.parametrize(
    ("model_type", "what"),
    [
        ("granitemoehybrid", "Mamba-2 and attention"), ("falcon_h1", "Mamba-2"), ("nemotron_h", "Mamba-2"),
        ("bamba", "Mamba"), ("jamba", "Mamba"), ("zamba2", "Mamba"), ("mamba2", "Mamba-2"), ("lfm2", "short conv"),
        ("minimax", "lightning"), ("xlstm", "xLSTM"), ("recurrent_gemma", "RG-LRU"), ("rwkv", "RWKV"),
        ("deepseek_v3", "latent attention"), ("gla", "without a delta rule"), ("something_new", "Mamba layers"),
    ],
)  # fmt: skip
def test_other_hybrids_are_named_by_what_they_are(model_type, what):
    shapes = {"model.embed_tokens.weight": [8, 4], "model.layers.0.mamba.A_log": [4], "model.layers.0.mamba.D": [4]}
    said = refused(shapes, {"model_type": model_type})
    assert f"model_type {model_type}" in said
    assert what in said


def test_a_model_type_that_is_not_known_must_be_explained():
    """Names of tensors do not tell whether norms are zero-centred, or anything else that is computed."""
    found = facts("qwen3_next")
    for config in (
        {**found["config"], "model_type": "my_next"},
        {k: v for k, v in found["config"].items() if k != "model_type"},
    ):
        assert "--family qwen3_next says so" in refused(found["tensors"], config)
        assert read(Headers(found["tensors"], config), "qwen3_next").family.name == "qwen3_next"
    nested = {"model_type": "my_vision", "text_config": found["config"]}
    assert read(Headers(found["tensors"], nested)).family.name == "qwen3_next"


# --- config.json, dtypes, files that are something else -------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "must"),
    [
        ("text_config", "x", "be an object"),
        ("text_config", [], "be an object"),
        ("rms_norm_eps", "1e-6", "be a positive number"),
        ("rms_norm_eps", None, "be a positive number"),
        ("rms_norm_eps", 0, "be a positive number"),
        ("rms_norm_eps", float("inf"), "be a positive number"),
        ("output_gate_type", ["silu"], "be a string"),
        ("model_type", ["qwen3_5"], "be a string"),
        ("model_type", {}, "be a string"),
        ("hidden_act", 3, "be a string"),
        ("layer_types", "linear_attention", "be a list of strings"),
        ("layer_types", [1, 2, 3, 4], "be a list of strings"),
        ("num_hidden_layers", "4", "be a positive whole number"),
        ("num_hidden_layers", 4.0, "be a positive whole number"),
        ("num_hidden_layers", -1, "be a positive whole number"),
        ("head_dim", True, "be a whole number"),
        ("num_attention_heads", [4], "be a positive whole number"),
        ("tie_word_embeddings", "false", "be true or false"),
        ("quantization_config", "fp8", "be an object"),
        ("linear_attn_config", [1], "be an object"),
        ("linear_attn_config", {"kda_layers": "1,2"}, "be a list of whole numbers"),
        ("expand_v", "1", "be a number"),
        ("use_gate", None, "be true or false"),
        ("kda_lower_bound", None, "be a number"),
        ("linear_attn_config", {"num_heads": "4"}, "be a positive whole number"),
        ("attn", {"layers": "1"}, "be a list of whole numbers"),
        ("architectures", "Qwen3_5ForCausalLM", "be a list of strings"),
        ("attn", "none", "be an object or a list of objects"),
        ("mlp_only_layers", "0", "be a list of whole numbers"),
    ],
)
def test_settings_of_another_type_are_a_sentence(key, value, must):
    found = facts("qwen3_5_text")
    said = refused(found["tensors"], {**found["config"], key: value})
    assert f"config.json's {key}" in said
    assert must in said
    nested = {"model_type": "qwen3_5", "text_config": {**found["config"], key: value}}
    if key != "text_config":
        assert f"text_config.{key}" in refused(found["tensors"], nested)


def test_settings_that_are_null_are_not_said():
    found = facts("fla_gated_deltanet_ungated")
    config = {**found["config"], "expand_v": None, "num_v_heads": None, "output_gate_activation": None, "attn": None}
    assert read(Headers(found["tensors"], config)).sizes["Dv"] == 32  # as FLA's own default has it
    found = facts("qwen3_5_conditional")
    for depth in ("1", None, 2**40, []):
        config = {**found["config"], "vision_config": {"depth": depth}}
        read(Headers(found["tensors"], config))


def test_a_byte_order_mark_is_read_and_given_back(tmp_path):
    source = checkpoint(tmp_path / "src", "qwen3_5_text", files=2)
    for name in ("config.json", "model.safetensors.index.json"):
        (source / name).write_bytes(b"\xef\xbb\xbf" + (source / name).read_bytes())
    before = everything(source)
    port(source, tmp_path / "out", "jax")
    back(tmp_path / "out", tmp_path / "back")
    assert everything(tmp_path / "back") == before


@pytest.mark.parametrize("dtype", ["I8", "U8", "I32", "F8_E4M3", "F8_E5M2", "BOOL"])
def test_weights_that_are_no_floating_point_numbers_need_scales(dtype):
    found = facts("qwen3_5_text")
    name = "model.layers.1.linear_attn.in_proj_z.weight"
    said = refused(found["tensors"], found["config"], {name: dtype})
    assert f"{name} is {dtype}" in said
    assert "scales" in said


@pytest.mark.parametrize(
    ("method", "renamed", "title"),
    [
        ({"quant_method": "gptq", "bits": 4}, {"weight": "qweight"}, "GPTQ (4 bit)"),
        ({}, {"weight": "g_idx"}, "GPTQ"),
        ({"quant_method": "awq"}, {"weight": "qweight"}, "AWQ"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, {}, "bitsandbytes (4 bit)"),
        ({}, {"weight": "weight.absmax"}, "bitsandbytes (4 bit)"),
        ({}, {"weight": "SCB"}, "bitsandbytes (8 bit)"),
        (
            {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
            {"weight": "weight_packed"},
            "nvfp4",
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, {"weight": "weight_scale_2"}, "ModelOpt (NVFP4)"),
        ({"quant_method": "hqq"}, {"weight": "W_q"}, "HQQ"),
        ({"quant_method": "auto-round"}, {"weight": "qweight"}, "AutoRound"),
        ({"quant_method": "brand-new"}, {"weight": "qweight"}, "brand-new"),
    ],
)
def test_quantised_sources_are_named_by_their_quantiser(method, renamed, title):
    found = facts("qwen3_5_text")
    name = "model.layers.0.linear_attn.in_proj_qkv.weight"
    shapes = dict(found["tensors"])
    config = {**found["config"], "quantization_config": method} if method else found["config"]
    for old, new in renamed.items():
        shapes[name.replace(old, new)] = [8, 8]
    packed = [5120, 1] if not renamed else shapes[name]
    said = refused({**shapes, name: packed}, config, {name: "U8"})
    assert f"quantised with {title}" in said if title != "nvfp4" else title in said
    assert "dequantised first" in said
    assert ("--dequantise" in said) == ("nvfp4" in said.lower())


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 4\n", "pointer of git-lfs"),
        (b"<!DOCTYPE html><html>" + b" " * 50, "page of HTML"),
        (b"PK\x03\x04" + b"\0" * 60, "zip archive"),
        (b"GGUF" + b"\x03" * 60, "GGUF file"),
        (b"\x80\x02}q\x00" + b"x" * 60, "pickle"),
    ],
)  # fmt: skip
def test_files_that_are_something_else_are_named(tmp_path, data, what):
    source = checkpoint(tmp_path / "src", "qwen3_5_text")
    (source / "model.safetensors").write_bytes(data)
    with pytest.raises(GdnError, match=what):
        port(source, tmp_path / "out", "jax")


def test_other_things_in_a_folder_are_named(tmp_path):
    """A recording, and adapters that are no LoRA."""
    folder = tmp_path / "recording"
    folder.mkdir()
    text = json.dumps(
        {"__metadata__": {"format": "portable-gdn-run"}, "0/o": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    )
    (folder / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text.encode() + b"\0" * 4)
    with pytest.raises(GdnError, match="a recording of `portable-gdn record`"):
        plan_of(folder, "jax")
    base = checkpoint(tmp_path / "base", "qwen3_5_text")
    at = "base_model.model.model.layers.0.linear_attn.in_proj_z."
    for n, (part, title) in enumerate((("lokr_w1", "LoKr"), ("hada_w1_a", "LoHa"), ("ia3_l", "IA3"))):
        adapter = save(tmp_path / str(n), {at + part: np.ones((4, 4), np.float32)}, None)
        for given in (base, None):
            with pytest.raises(GdnError, match=f"adapter of kind {title}"):
                plan_of(adapter, "nnx", base=given)


# --- casts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "to", "large"),
    [("bfloat16", "float16", 1e5), ("float32", "float16", -7e4), ("float32", "bfloat16", 3.4e38)],
)
def test_casts_that_overflow_are_counted_and_refused(tmp_path, recwarn, dtype, to, large):
    x = {
        n: a.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
        for n, a in tensors(facts("qwen3_5_text")["tensors"]).items()
    }
    x["model.layers.0.linear_attn.out_proj.weight"][:2, 0] = large
    x["model.layers.3.mlp.up_proj.weight"][1, 2] = large
    x["model.layers.1.mlp.up_proj.weight"][0, 0] = np.inf  # was not finite before
    source = save_raw(tmp_path / "src", x, facts("qwen3_5_text")["config"])
    with pytest.raises(GdnError, match="3 elements of the source are finite and would not be") as error:
        port(source, tmp_path / "out", "jax", dtype=to)
    assert "layers.0.mixer.o_proj.kernel (2), layers.3.mlp.up_proj.kernel (1)" in str(error.value)
    assert [p.name for p in tmp_path.iterdir()] == ["src"]
    shown = CliRunner().invoke(
        app, ["port", str(source), str(tmp_path / "out"), "--to", "jax", "--dtype", to, "--allow-overflow"]
    )
    assert shown.exit_code == 0, shown.output
    assert "layers.3.mlp.up_proj.kernel (1)" in shown.stdout.replace("\n", "")
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]
    assert not np.isfinite(load(tmp_path / "out")["layers.3.mlp.up_proj.kernel"].astype(np.float32)).all()


def test_an_interrupted_port_does_not_forget_what_overflowed(tmp_path):
    x = {n: a.astype(np.float32) for n, a in tensors(facts("qwen3_5_text")["tensors"]).items()}
    x["model.layers.0.input_layernorm.weight"][0] = 3e38
    x["model.layers.0.linear_attn.out_proj.weight"][0, 0] = 3e38
    source = save_raw(tmp_path / "src", x, facts("qwen3_5_text")["config"])

    def stop(what: str, done: int, of: int) -> None:
        if done > of * 0.9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        port(source, tmp_path / "out", "jax", dtype="float16", shard_size=20000, progress=stop)
    assert list((tmp_path / "out.partial").glob("model-*.safetensors"))
    with pytest.raises(GdnError, match="1 elements of the source are finite"):
        port(source, tmp_path / "out", "jax", dtype="float16", shard_size=20000)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0, -0.0])
def test_scales_that_are_nothing_are_refused(tmp_path, value):
    found = facts("qwen3_5_text")
    config = {**found["config"], "quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 8]}}
    x = tensors(found["tensors"])
    name = "model.layers.0.linear_attn.in_proj_z.weight"
    x[name] = x[name].astype(ml_dtypes.float8_e4m3fn)
    scale = np.ones((12, 8), np.float32)
    scale[3, 2] = value
    source = save_raw(tmp_path / "src", {**x, name + "_scale_inv": scale}, config)
    with pytest.raises(GdnError, match=f"{name}") as error:
        port(source, tmp_path / "out", "jax", dtype="bfloat16")
    assert ("64" in str(error.value)) == (not np.isfinite(value))


# --- Ling-3.0 and others whose head_dim is that of another attention -----------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bailing_hybrid", "kimi_linear", "glm5_next"])
def test_heads_of_linear_layers_beside_latent_attention_as_transformers_saves_them(tmp_path, kind):
    """With transformers' own configuration classes: widths and counts that differ in all of their meanings."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    maps = transformers.models.auto.modeling_auto
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
        "num_hidden_layers": 6, "num_attention_heads": 2, "num_key_value_heads": 2, "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8, "v_head_dim": 20, "kv_lora_rank": 8, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1, "pad_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    own = {
        "bailing_hybrid": {"head_dim": 16, "num_local_experts": 4, "first_k_dense_replace": 1},
        "kimi_linear": {"linear_head_dim": 16, "linear_num_heads": 3, "num_local_experts": 4},
        "glm5_next": {
            "linear_head_dim": 16, "linear_num_heads": 3, "n_routed_experts": 4, "q_lora_rank": 8, "index_head_dim": 8,
            "index_n_heads": 2, "hc_mult": 2, "qk_rope_head_dim": 0,
        },
    }[kind]  # fmt: skip
    if kind == "glm5_next":
        config = transformers.AutoConfig.for_model("glm5_next_text", **{**sizes, **own})
        model = transformers.AutoModel.from_config(config)
    else:
        config = transformers.AutoConfig.for_model(kind, **{**sizes, **own})
        model = maps.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(tmp_path / "src")
    saved = json.loads((tmp_path / "src" / "config.json").read_text())
    assert saved["head_dim"] == (0 if kind == "glm5_next" else 8)  # of the rotary part
    port(tmp_path / "src", tmp_path / "out", "nnx")
    mixer = json.loads((tmp_path / "out" / "portable_gdn.json").read_text())["mixer"]
    assert (mixer["num_heads"], mixer["key_dim"]) == (2 if kind == "bailing_hybrid" else 3, 16)
    assert not back(tmp_path / "out", tmp_path / "back").changed
    assert everything(tmp_path / "back") == everything(tmp_path / "src")


def test_sizes_are_read_where_releases_have_them():
    """Ling's release says head_dim; what GLM's says may stand under linear_attn_config."""
    found = facts("bailing_hybrid")
    assert read(Headers(found["tensors"], found["config"])).sizes["Dk"] == 16
    saved = {**found["config"], "head_dim": 8, "linear_head_dim": 16, "linear_num_heads": 4}
    assert read(Headers(found["tensors"], saved)).mixer.key_dim == 16
    found = facts("glm5_next_text")
    config = {k: v for k, v in found["config"].items() if not k.startswith("linear_")}
    config["linear_attn_config"] = {"head_dim": 16, "num_heads": 4, "gate_lower_bound": -3.0}
    source = read(Headers(found["tensors"], config))
    assert (source.mixer.key_dim, source.mixer.num_heads, source.mixer.lower_bound) == (16, 4, -3.0)
