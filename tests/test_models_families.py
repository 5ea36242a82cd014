"""Whole models of the other families: Kimi-Linear and OLMo-Hybrid against transformers, flash-linear-attention's
against models put together of transformers' parts, and each detail of theirs wrong once."""

from __future__ import annotations

import dataclasses
import json
import shutil
from functools import cache

import numpy as np
import pytest

pytest.importorskip("safetensors")
pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from whole import (  # noqa: E402
    LIMIT,
    MARGIN,
    distance,
    error,
    original_logits,
    original_tokens,
    plain_transformers,
    ported,
    prompts,
    run,
)

from portable_gdn.models import blocks, generate, load_model  # noqa: E402
from portable_gdn.spec.errors import GdnError  # noqa: E402

THEIRS = ("kimi_linear", "kimi_grouped", "olmo_hybrid", "olmo_released", "olmo_rotary")
FLA = ("fla_gated_deltanet", "fla_hybrid", "fla_tied", "fla_kda", "fla_gdn2")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    base = tmp_path_factory.mktemp("families")
    return cache(lambda name: ported(base, name))


@pytest.fixture(scope="module")
def transformers():
    yield from plain_transformers()


@pytest.fixture(scope="module")
def kept(made):
    return cache(lambda name: load_model(made(name), precision="highest"))


@pytest.fixture(scope="module")
def apart(made):
    """A family's model with a module for each layer, loaded once; tests change clones of it."""
    return cache(lambda name: load_model(made(name), precision="highest", scan=False))


@pytest.mark.slow
@pytest.mark.parametrize("name", THEIRS)
def test_logits_and_tokens_are_those_of_transformers(made, kept, transformers, name):
    """Row 2 padded on the left; 64 greedy tokens, none of which is a tie."""
    source = made(name).parent / "src"
    assert distance(kept(name), source) < LIMIT
    ids, mask = prompts()
    want = original_tokens(source, 64)
    assert (np.asarray(generate(kept(name), ids, 64, mask=mask).tokens) == want).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", FLA)
def test_logits_and_tokens_are_those_of_fla_put_together(made, kept, transformers, name):
    """Rows of the reference have no padding. It reads prompt and new tokens at once: each must be the one that it finds
    likeliest after those before."""
    from fla_reference import reference

    ids, mask = prompts()
    logits = np.asarray(run(kept(name), ids, mask)[0])
    tokens = np.asarray(generate(kept(name), ids, 64, mask=mask).tokens)
    assert len(np.unique(tokens)) > 16
    for row in range(2):
        prompt = ids[row][mask[row]].tolist()
        want = reference(made(name).parent / "src", [*prompt, *tokens[row].tolist()])
        assert error(logits[row][mask[row]], want[: len(prompt)]) < LIMIT
        after = want[len(prompt) - 1 : -1]
        best = np.sort(after, axis=-1)
        assert (best[:, -1] - best[:, -2]).min() > MARGIN
        assert (after.argmax(-1) == tokens[row]).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kimi_grouped", "olmo_rotary", "fla_hybrid", "fla_gdn2"])
def test_a_prompt_in_pieces_and_token_by_token_is_the_whole(kept, name):
    ids, mask = prompts(length=19)
    model = kept(name)
    want = np.asarray(run(model, ids, mask)[0])
    cache, parts = model.init_cache(2, 24), []
    for piece in (slice(0, 8), slice(8, 15), slice(15, 16), slice(16, 17), slice(17, 18), slice(18, 19)):
        logits, cache = run(model, ids[:, piece], None if piece.start else mask[:, piece], cache)
        parts.append(logits)
    assert error(np.concatenate(parts, 1)[mask], want[mask]) < 1e-5
    alone = np.asarray(run(model, ids[1:, mask[1]])[0])
    assert error(want[1, mask[1]], alone[0]) < 1e-5


def _replace(parts, **settings):
    for part in parts:
        part.settings = dataclasses.replace(part.settings, **settings)


def _attentions(m):
    return [layer.attention for layer in m.layers if hasattr(layer, "attention")]


def _mixers(m):
    return [layer.mixer for layer in m.layers if hasattr(layer, "mixer")]


def _all(m, kind):
    return [part for _, part in nnx.iter_modules(m) if isinstance(part, kind)]


def centred_norms(m):
    for norm in _all(m, blocks.Norm):
        norm.zero_centred = True


def biased_weights_used(m):
    """The scores by which experts are chosen as their weights, too."""
    for moe in _all(m, blocks.MoE):
        router = moe.router

        def weights(x, moe=moe, router=router):
            rated = moe._in_groups(jax.nn.sigmoid(router(x)) + router.bias[...])
            found, chosen = jax.lax.top_k(rated, moe.settings.per_token)
            return moe.settings.scale * found / found.sum(-1, keepdims=True), chosen

        moe.weights = weights


def no_choice_bias(m):
    for router in _all(m, blocks.Router):
        router.bias[...] *= 0


def softmax_router(m):
    _replace(_all(m, blocks.MoE), scores="softmax")


def no_groups(m):
    _replace(_all(m, blocks.MoE), groups=1, groups_used=1)


def larger_groups(m):
    _replace(_all(m, blocks.MoE), groups=2, groups_used=1)


def not_renormalised(m):
    _replace(_all(m, blocks.MoE), renormalised=False)


def experts_not_scaled(m):
    _replace(_all(m, blocks.MoE), scale=1.0)


def no_shared_expert(m):
    _replace(_all(m, blocks.MoE), shared_size=0)


def up_before_gate(m):
    for part in _all(m, blocks.Experts | blocks.MLP):
        part.gate_proj, part.up_proj = part.up_proj, part.gate_proj


def latent_norm_with_eps_of_others(m):
    for attention in _attentions(m):
        attention.kv_norm.eps = 1e-5


def scale_of_own_channels(m):
    for attention in _attentions(m):
        attention.q_b_proj.kernel[...] *= (16 / 24) ** -0.5


def shared_key_before_own(m):
    for attention in _attentions(m):
        kernel = attention.q_b_proj.kernel
        heads = kernel[...].reshape(24, 4, 24)
        kernel[...] = np.concatenate([heads[..., 16:], heads[..., :16]], -1).reshape(24, 96)


def value_before_key(m):
    for attention in _attentions(m):
        kernel = attention.kv_b_proj.kernel
        kernel[...] = kernel[...].reshape(32, 4, 2, 16)[:, :, ::-1].reshape(32, 128)


def rotary_in_latent_attention(m):
    """The shared part of keys and queries turned by positions, as in models that have them."""
    from portable_gdn.models.attention import rotated

    for attention in _attentions(m):
        inner = attention._by_heads

        def turned(q, both, seen, start, inner=inner):
            positions = np.arange(q.shape[1])[None]
            shared = rotated(both[:, :, None, 32:], positions, 1e4, 8)[:, :, 0]
            own = np.s_[..., :16], np.s_[..., 16:]
            q = jnp.concatenate([q[own[0]], rotated(q[own[1]], positions, 1e4, 8)], -1)
            return inner(q, jnp.concatenate([both[..., :32], shared], -1), seen, start)

        attention._by_heads = turned


def pre_norm(m):
    """Layers of attention in the order of the linear ones."""
    for layer in m.layers:
        if layer.post_norm:
            layer.post_norm = False
            layer.input_norm, layer.mlp_norm = layer.mixer_post_norm, layer.mlp_post_norm


def norm_over_heads(m):
    for attention in _attentions(m):
        settings, norms = attention.settings, (attention.q_norm, attention.k_norm)

        def normed(norm, x, norms=norms):
            y = x * (jnp.mean(x * x, -1, keepdims=True) + 1e-6) ** -0.5
            return y * norm.scale[...].reshape(x.shape[2:])

        attention._normed = normed
        assert settings.qk_norm == "whole"


def beta_not_doubled(m):
    for mixer in _mixers(m):
        mixer.beta_scale = 1.0


def doubled_beta(m):
    for mixer in _mixers(m):
        mixer.beta_scale = 2.0


def output_norm_with_larger_eps(m):
    for mixer in _mixers(m):
        mixer.o_norm.eps = 1e-3


def another_output_gate(m):
    for mixer in _mixers(m):
        mixer.o_norm.gate = "silu" if mixer.o_norm.gate == "sigmoid" else "sigmoid"


def no_positions(m):
    _replace(_attentions(m), rotary_dim=0)


def half_the_positions(m):
    _replace(_attentions(m), rotary_dim=8)


def another_theta(m):
    _replace(_attentions(m), rope_theta=1e4)


def no_window(m):
    _replace(_attentions(m), window=None)


def a_window_one_wider(m):
    _replace(_attentions(m), window=10)


def no_key_bias(m):
    for attention in _attentions(m):
        attention.v_proj.bias[...] *= 0


def no_query_norm(m):
    _replace(_attentions(m), qk_norm=None)


def bounded_decay(m):
    for mixer in _mixers(m):
        mixer.lower_bound = -5.0


def erase_for_write(m):
    for mixer in _mixers(m):
        mixer.b_proj, mixer.w_proj = mixer.w_proj, mixer.b_proj


MUTATIONS = {
    "kimi_grouped": (
        centred_norms, biased_weights_used, no_choice_bias, softmax_router, no_groups, larger_groups, not_renormalised,
        experts_not_scaled, no_shared_expert, up_before_gate, latent_norm_with_eps_of_others, scale_of_own_channels,
        shared_key_before_own, value_before_key, rotary_in_latent_attention, another_output_gate, bounded_decay,
    ),
    "olmo_rotary": (
        centred_norms, pre_norm, norm_over_heads, beta_not_doubled, output_norm_with_larger_eps, another_output_gate,
        no_positions, half_the_positions, another_theta,
    ),
    "fla_hybrid": (
        centred_norms, beta_not_doubled, no_positions, half_the_positions, another_theta, no_window, a_window_one_wider,
        no_key_bias, no_query_norm, up_before_gate, another_output_gate,
    ),
    "fla_kda": (bounded_decay, doubled_beta, another_output_gate),
    "fla_gdn2": (erase_for_write, doubled_beta, another_output_gate),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_every_detail_that_is_wrong_shows(made, apart, transformers, name):
    source, ids = made(name).parent / "src", prompts()[0]
    if name in THEIRS:
        want = original_logits(source)[0]
    else:
        from fla_reference import reference

        want = reference(source, ids[0].tolist())
    off = lambda model: error(np.asarray(run(model, ids[:1])[0])[0], want)  # noqa: E731
    assert off(nnx.clone(apart(name))) < LIMIT
    hidden = []
    for mutate in MUTATIONS[name]:
        wrong = nnx.clone(apart(name))
        mutate(wrong)
        if not off(wrong) > 2 * LIMIT:
            hidden.append(mutate.__name__)
    assert not hidden


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope is False; it must be True"),
        ("kimi_linear", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func is 'softmax'"),
        ("kimi_linear", {"num_expert_group": 3}, "num_expert_group is 3; it must divide num_experts = 8"),
        ("kimi_linear", {"num_expert_group": 8, "topk_group": 2}, "must leave each group two experts"),
        ("kimi_linear", {"first_k_dense_replace": 2}, "layers.1.mlp.gate_proj.kernel"),
        ("kimi_linear", {"kv_lora_rank": 16}, "kv_a_proj.kernel of .* has shape .*; by config.json it must have"),
        ("kimi_linear", {"qk_rope_head_dim": None}, "qk_rope_head_dim is None; it must be a positive whole number"),
        ("olmo_hybrid", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type is 'yarn'"),
        ("olmo_hybrid", {"num_attention_heads": 8, "num_key_value_heads": 4}, "k_norm.scale of .* has shape"),
        ("fla_gated_deltanet", {"attn": None}, "config.json says nothing of attention"),
        ("fla_gated_deltanet", {"hidden_act": "powlu"}, "hidden_act is 'powlu'; it must be 'swish'"),
        ("fla_gated_deltanet", {"attnres_block_size": 2}, "attnres_block_size is 2; it must be null"),
    ],
)
def test_a_configuration_that_is_not_computed_gets_a_sentence(made, tmp_path, name, change, says):
    shutil.copytree(made(name), tmp_path / "out")
    for path in tmp_path.rglob("config.json"):
        config = {**json.loads(path.read_text()), **change}
        path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    with pytest.raises(GdnError, match=says):
        load_model(tmp_path / "out")
