"""Whole models of ports: against transformers, in pieces and at once, and with each detail of a family wrong once."""

from __future__ import annotations

import re
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from checkpoints import checkpoint, read_file

from portable_gdn.checkpoint import port
from portable_gdn.spec.errors import GdnError

pytest.importorskip("safetensors")
pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from whole import (  # noqa: E402
    LIMIT,
    PAD,
    distance,
    error,
    original,
    original_logits,
    original_tokens,
    plain_transformers,
    ported,
    prompts,
    run,
)

from portable_gdn.models import attention, blocks, generate, generation, load_model  # noqa: E402
from portable_gdn.models.sampling import pick  # noqa: E402

FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
PAGE = Path(__file__).parents[1] / "docs" / "models.md"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of a family's port, made once; its source lies beside it as ``src``."""
    base = tmp_path_factory.mktemp("models")

    return cache(lambda name: ported(base, name))


@pytest.fixture(scope="module")
def model(made):
    return load_model(made("qwen3_next"), precision="highest")


@pytest.fixture(scope="module")
def apart(made):
    """The same with a module for each layer, which tests change one by one."""
    return load_model(made("qwen3_next"), precision="highest", scan=False)


@pytest.fixture(scope="module")
def transformers():
    yield from plain_transformers()


def test_a_model_has_the_ports_leaves(model, made):
    leaves = model.leaves()
    stored = read_file(made("qwen3_next") / "model-00001-of-00001.safetensors")
    assert leaves.keys() == stored.keys()
    assert all(np.array_equal(leaves[name], a) for name, a in stored.items())


@pytest.mark.slow
def test_a_prompt_in_pieces_and_token_by_token_is_the_whole(model):
    ids, mask = prompts(length=13)
    whole, nothing = run(model, ids, mask)
    assert nothing is None
    cache, parts = model.init_cache(2, 16), []
    for piece in (slice(0, 8), slice(8, 9), slice(9, 12)):  # the first with row 2's padding
        logits, cache = run(model, ids[:, piece], mask[:, piece], cache)
        parts.append(logits)
    logits, cache = run(model, ids[:, 12:], None, cache)
    assert error(np.concatenate([*parts, logits], 1)[mask], np.asarray(whole)[mask]) < 1e-5
    assert int(cache.used) == 13
    assert cache.positions().tolist() == [13, 13 - PAD]


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 3, 63, 64, 65])
def test_prefill_then_steps_is_the_whole(model, length):
    ids = np.random.default_rng(length).integers(0, 256, (2, length + 6))
    want = np.asarray(run(model, ids)[0])
    got, cache = run(model, ids[:, :length], None, model.init_cache(2, 80))
    parts = [got]
    for t in range(length, length + 6):
        logits, cache = run(model, ids[:, t : t + 1], None, cache)
        parts.append(logits)
    assert error(np.concatenate(parts, 1), want) < 1e-5
    alone = np.asarray(run(model, ids[1:])[0])
    assert error(want[1:], alone) < 1e-5


def test_long_attention_runs_by_blocks(monkeypatch):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 11, h, 8)), jnp.float32) for h in (4, 2, 2))
    seen = jnp.asarray(rng.random((2, 11)) < 0.7)

    def both(q, k, v):
        o = attention.attend(q, k, v, seen, 0, "highest")
        return jnp.sum(jnp.sin(o)), o

    want = jax.grad(both, (0, 1, 2), has_aux=True)(q, k, v)
    monkeypatch.setattr(attention, "QUERIES", 4)
    got = jax.grad(both, (0, 1, 2), has_aux=True)(q, k, v)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert error(a, b) < 1e-6


def test_tokens_are_drawn_by_their_shares():
    logits = jnp.log(jnp.array([[0.5, 0.1, 0.3, 0.1]]))
    keys = jax.random.split(jax.random.key(0), 4000)

    def shares(temperature=1.0, top_k=None, top_p=None):
        drawn = jax.vmap(lambda key: pick(logits, key, False, temperature, top_k, top_p)[0])(keys)
        return np.bincount(drawn, minlength=4) / len(keys)

    near = {"atol": 0.03, "rtol": 0}
    np.testing.assert_allclose(shares(), [0.5, 0.1, 0.3, 0.1], **near)
    np.testing.assert_allclose(shares(top_k=2), [0.625, 0, 0.375, 0], **near)
    np.testing.assert_allclose(shares(top_p=0.6), [0.625, 0, 0.375, 0], **near)
    np.testing.assert_allclose(shares(top_p=0.45), [1, 0, 0, 0], rtol=0, atol=0)
    np.testing.assert_allclose(shares(temperature=0.5), [25 / 36, 1 / 36, 9 / 36, 1 / 36], **near)
    assert shares(top_k=3, top_p=0.85)[[0, 2]].sum() == 1  # of three, two have 8/9
    assert pick(logits, None, True, 1.0, None, None).tolist() == [0]


@pytest.mark.slow
def test_generation_stops_and_draws(model):
    ids, mask = prompts(length=9)
    free = generate(model, ids, 8, mask=mask)
    tokens = np.asarray(free.tokens)
    assert free.lengths.tolist() == [8, 8]
    stop = int(tokens[0, 2])
    first = [int(np.argmax(row == stop)) if stop in row else 7 for row in tokens]
    got = generate(model, ids, 8, mask=mask, stop=[stop])
    assert got.lengths.tolist() == [n + 1 for n in first]
    for row, have, n in zip(tokens, np.asarray(got.tokens), first, strict=True):
        assert have[: n + 1].tolist() == row[: n + 1].tolist()
        assert (have[n:] == have[n]).all()
    both = generate(model, ids, 8, mask=mask, stop=tokens[:, 0].tolist())  # all rows stop before the loop begins
    assert both.lengths.tolist() == [1, 1]
    assert (np.asarray(both.tokens) == tokens[:, :1]).all()
    drawn = [np.asarray(generate(model, ids, 8, mask=mask, temperature=2.0, rng=rng).tokens) for rng in (1, 1, 2)]
    assert (drawn[0] == drawn[1]).all()
    assert (drawn[0] != drawn[2]).any()
    one = np.asarray(generate(model, ids, 8, mask=mask, temperature=2.0, top_k=1, rng=1).tokens)
    assert (one == tokens).all()


@pytest.mark.slow
def test_generation_compiles_one_loop_for_prompts_of_any_length(model):
    before = generation._continue._cache_size()
    for length, temperature in ((9, 0.0), (9, 0.0), (30, 0.0), (9, 0.5), (11, 0.7)):
        ids, mask = prompts(length=length)
        generate(model, ids, 8, mask=mask, temperature=temperature, rng=0)
    assert generation._continue._cache_size() <= before + 2  # greedy, and drawn


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_tokens_are_those_of_transformers(made, transformers, name):
    """Row 2 padded on the left; 64 greedy tokens, none of which is a tie."""
    folder = made(name)
    model = load_model(folder, precision="highest")
    assert distance(model, folder.parent / "src") < LIMIT
    ids, mask = prompts()
    want = original_tokens(folder.parent / "src", 64)
    assert (np.asarray(generate(model, ids, 64, mask=mask).tokens) == want).all()


@pytest.mark.slow
def test_bfloat16_is_as_near_as_that_of_transformers(made, transformers):
    import torch

    folder = made("qwen3_5_text")
    want = original_logits(folder.parent / "src")
    ids, mask = prompts()
    theirs = original(folder.parent / "src", "bfloat16")
    with torch.no_grad():
        other = theirs(torch.from_numpy(ids), attention_mask=torch.from_numpy(mask).long(), use_cache=False).logits
    model = load_model(folder, dtype=jnp.bfloat16)
    got, _ = run(model, ids, mask)
    assert got.dtype == jnp.bfloat16
    assert error(got[mask], want[mask]) < 1.5 * error(other.float().numpy()[mask], want[mask])
    assert generate(model, ids, 4, mask=mask).tokens.shape == (2, 4)  # the loop's carry keeps its dtypes


def _layers(model, kind):
    return [layer for layer in model.layers if hasattr(layer, kind)]


def _modules(model, kind):
    return [m for _, m in nnx.iter_modules(model) if isinstance(m, kind)]


def _replace(parts, **settings):
    import dataclasses

    for part in parts:
        part.settings = dataclasses.replace(part.settings, **settings)


def _swap(parts, one, other):
    for part in parts:
        a, b = getattr(part, one), getattr(part, other)
        setattr(part, one, b)
        setattr(part, other, a)


def _reorder(parts, *shape):
    """Columns of the query projection, [E, (a, b, D)], as (b, a, D)."""
    for part in parts:
        kernel = part.q_proj.kernel
        E, n = kernel.shape
        kernel[...] = kernel[...].reshape(E, *shape, n // shape[0] // shape[1]).swapaxes(1, 2).reshape(E, n)


def plain_norms(m):
    for norm in _modules(m, blocks.Norm):
        norm.zero_centred = False


def plain_query_norm(m):
    for layer in _layers(m, "attention"):
        layer.attention.q_norm.zero_centred = False


def plain_final_norm(m):
    m.norm.zero_centred = False


def larger_eps(m):
    for norm in _modules(m, blocks.Norm):
        norm.eps = 1e-4


def centred_output_norm(m):
    for layer in _layers(m, "mixer"):
        layer.mixer.o_norm.scale[...] += 1


def sigmoid_output_gate(m):
    for layer in _layers(m, "mixer"):
        layer.mixer.o_norm.gate = "sigmoid"


def doubled_beta(m):
    for layer in _layers(m, "mixer"):
        layer.mixer.beta_scale = 2.0


def ungated_attention(m):
    for layer in _layers(m, "attention"):
        layer.attention.q_proj.kernel[...] = layer.attention.q_proj.kernel[...].at[:, 32:64].set(0)


def gate_before_query(m):
    for layer in _layers(m, "attention"):
        kernel = layer.attention.q_proj.kernel
        kernel[...] = kernel[...].reshape(64, 4, 2, 32)[:, :, ::-1].reshape(64, -1)


def gates_behind_all_queries(m):
    _reorder([layer.attention for layer in _layers(m, "attention")], 2, 4)


def grouped_by_turns(m):
    _reorder([layer.attention for layer in _layers(m, "attention")], 2, 2)


def rotary_on_all(m):
    _replace([layer.attention for layer in _layers(m, "attention")], rotary_dim=32)


def another_theta(m):
    _replace([layer.attention for layer in _layers(m, "attention")], rope_theta=1e4)


def not_renormalised(m):
    _replace(_modules(m, blocks.MoE), renormalised=False)


def one_expert_less(m):
    _replace(_modules(m, blocks.MoE), per_token=1)


def experts_up_before_gate(m):
    _swap(_modules(m, blocks.Experts), "gate_proj", "up_proj")


def shared_up_before_gate(m):
    _swap([part.shared_expert for part in _modules(m, blocks.MoE)], "gate_proj", "up_proj")


def shared_without_switch(m):
    for part in _modules(m, blocks.MoE):
        part.shared_expert_gate.kernel[...] *= 0


def norms_exchanged(m):
    _swap(m.layers, "input_norm", "mlp_norm")


MUTATIONS = (
    plain_norms, plain_query_norm, plain_final_norm, larger_eps, centred_output_norm, sigmoid_output_gate, doubled_beta,
    ungated_attention, gate_before_query, gates_behind_all_queries, grouped_by_turns, rotary_on_all, another_theta,
    not_renormalised, one_expert_less, experts_up_before_gate, shared_up_before_gate, shared_without_switch,
    norms_exchanged,
)  # fmt: skip


@pytest.mark.slow
def test_every_detail_that_is_wrong_shows(apart, made, transformers):
    source = made("qwen3_next").parent / "src"
    assert distance(nnx.clone(apart), source) < LIMIT
    hidden = []
    for mutate in MUTATIONS:
        wrong = nnx.clone(apart)
        mutate(wrong)
        if not distance(wrong, source) > 2 * LIMIT:
            hidden.append(mutate.__name__)
    assert not hidden
    ids, mask = prompts()
    assert error(run(apart, ids)[0][mask], original_logits(source)[mask]) > 2 * LIMIT  # padding that is not masked


def test_wrong_input_gets_a_sentence(model):
    ids, mask = prompts(length=8)
    cases = [
        (lambda: model(ids[0]), r"ids is of shape \[8\]; it must have shape \[B, T\]"),
        (lambda: model(ids + 250), "ids is from .*; it must be from 0 to 255, the vocabulary's last"),
        (lambda: model(ids - 300), "ids is from -"),
        (lambda: model(ids * 1.0), "ids is of dtype float64; it must be whole numbers"),
        (lambda: model([[1, 2], [3]]), "rows of different lengths"),
        (lambda: model(ids, mask[:, 1:]), r"mask is of shape \[2, 7\]; it must have that of ids, \[2, 8\]"),
        (lambda: model(ids, None, model.init_cache(2, 7)), "8 tokens a row, and the cache has room for 7; it must"),
        (lambda: model(ids, None, model.init_cache(1, 9)), "cache is of 1 rows; it must have as many as ids, 2"),
        (lambda: model(ids, None, ()), "cache is a tuple; it must be None or what init_cache"),
        (lambda: model.init_cache(2, 0), "length is 0; it must be a positive whole number"),
        (lambda: generate(model, ids, 0), "max_new_tokens is 0"),
        (lambda: generate(model, ids + 250, 4), "ids is from"),
        (lambda: generate(model, ids, 4, mask=mask[:, ::-1]), "mask is False after a token in row 1"),
        (lambda: generate(model, ids, 4, temperature=-1), "temperature is -1; it must be 0 or a positive number"),
        (lambda: generate(model, ids, 4, temperature=1.0), "rng is None, and temperature is 1.0; to draw tokens"),
        (lambda: generate(model, ids, 4, top_k=3), "top_k is 3; it must be None where temperature is 0"),
        (lambda: generate(model, ids, 4, temperature=1.0, top_p=2), "top_p is 2; it must be None or a number"),
        (lambda: generate(model, ids, 4, stop=256), "stop is with 256; it must hold tokens from 0 to 255"),
        (lambda: generate(model, ids, 4, temprature=1.0), "did you mean 'temperature'"),
        (lambda: generate("model", ids, 4), "model is a str; it must be a Decoder"),
    ]
    for call, says in cases:
        with pytest.raises(GdnError, match=says):
            call()


def test_a_port_that_is_no_such_model_gets_a_sentence(made, tmp_path):
    ling = tmp_path / "ling"
    port(checkpoint(tmp_path / "k", "bailing_hybrid"), ling, "jax")
    with pytest.raises(GdnError, match=r"the port is of Ling.*; it must be of Qwen3-Next, Qwen3.5, 3.6, 3.8, Kimi-Lin"):
        load_model(ling)
    hf = tmp_path / "hf"
    port(checkpoint(tmp_path / "q", "qwen3_5_text"), hf, "fla")
    with pytest.raises(GdnError, match="a port to fla; it must be one to jax"):
        load_model(hf)
    with pytest.raises(GdnError, match=re.escape("it must be what `portable-gdn port` wrote")):
        load_model(tmp_path / "q")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is None; it must be a positive whole number"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "rope_type is 'yarn'"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta is None; it must be a positive number"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9; it must be at most num_experts = 8"),
        ({"num_key_value_heads": 1}, "k_proj.kernel of .* has shape .*; by config.json it must have"),
        ({"mlp_only_layers": [1]}, "layers.1.mlp.gate_proj.kernel"),
        ({"tie_word_embeddings": True}, "says by tie_word_embeddings that the head is the embedding"),
        (None, "no config.json"),
    ],
)
def test_a_configuration_that_does_not_fit_gets_a_sentence(made, tmp_path, change, says):
    import json

    shutil.copytree(made("qwen3_next"), tmp_path / "out")
    for path in (*tmp_path.rglob("config.json"),):
        if change is None:
            path.unlink()
        else:
            config = {**json.loads(path.read_text()), **change}
            path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    with pytest.raises(GdnError, match=says):
        load_model(tmp_path / "out")


@pytest.mark.slow
def test_the_page_runs(made, tmp_path, monkeypatch):
    """Each block of docs/models.md, one after the other, as a reader would type them."""
    pytest.importorskip("optax")
    shutil.copytree(made("qwen3_5_text"), tmp_path / "my-model-jax")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert len(blocks) >= 4
    for block in blocks:
        exec(block, names)
    assert names["tokens"].shape == (2, 32)
    assert names["losses"][-1] < names["losses"][0]
    assert (tmp_path / "my-model-tuned").is_dir()
