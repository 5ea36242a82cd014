"""Layers that repeat, compiled once: which they are, that they compute the same, and that depth costs no compiling."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from whole import error, prompts, run  # noqa: E402

from portable_gdn.models import (  # noqa: E402
    AttentionSettings,
    Decoder,
    DecoderSettings,
    ExpertSettings,
    LatentSettings,
    MixerSettings,
    stepping,
)
from portable_gdn.models.period import bodies, find_period  # noqa: E402


@pytest.mark.parametrize(
    ("kinds", "found"),
    [
        ("LLLA" * 12, (0, 4, 12)),
        ("LLLA", (0, 1, 3)),
        ("L", (1, 0, 0)),
        ("LA", (2, 0, 0)),
        ("A" * 5, (0, 1, 5)),
        ("D" + "LLA" + "LLLA" * 5 + "LLA", (1, 4, 6)),  # Kimi-Linear: it begins and ends within a period
        ("DLLLALLLA", (1, 4, 2)),
    ],
)
def test_the_period_is_found(kinds, found):
    assert find_period(kinds) == found
    numbers = sorted(number for body in bodies(kinds, True) for number in body)
    assert numbers == list(range(len(kinds)))
    assert all(len({kinds[number] for number in body}) == 1 for body in bodies(kinds, True))
    assert bodies(kinds, False) == tuple((i,) for i in range(len(kinds)))


def settings(layers: int, latent: bool = False) -> DecoderSettings:
    """Layers as those of Kimi-Linear: the first dense, every fourth with attention."""
    linear = tuple(i % 4 != 3 for i in range(layers))
    attention = (
        LatentSettings(2, 16, 8, 16, 24, None, 1e-6)
        if latent
        else AttentionSettings(4, 2, 16, 8, 1e4, True, "head", 1e-6)
    )
    return DecoderSettings(
        vocabulary=256,
        hidden_size=32,
        linear=linear,
        dense=(True, *[False] * (layers - 1)),
        intermediate_size=48,
        norm_eps=1e-6,
        zero_centred=True,
        tied=False,
        mixer=MixerSettings("gdn", 2, 4, 8, 8, "silu", 1e-6),
        attention=attention,
        experts=ExpertSettings(4, 2, 16, 16, True, True),
    )


@pytest.mark.slow
@pytest.mark.parametrize("latent", [False, True])
def test_stacked_layers_compute_what_layers_apart_do(latent):
    one = Decoder(settings(10, latent), rngs=nnx.Rngs(0), precision="highest")
    apart = Decoder(settings(10, latent), rngs=nnx.Rngs(1), precision="highest", scan=False)
    assert len(one.bodies) == 6  # 0, (1, 5), (2, 6), (3, 7), (4, 8), 9
    leaves = one.leaves()
    state = nnx.state(apart)
    nnx.update(
        apart, nnx.from_flat_state([(p, v.replace(leaves[".".join(map(str, p))])) for p, v in nnx.to_flat_state(state)])
    )
    assert apart.leaves().keys() == leaves.keys()
    ids, mask = prompts(length=19)
    assert error(run(one, ids, mask)[0], run(apart, ids, mask)[0]) < 1e-6
    caches = [model.init_cache(2, 24) for model in (one, apart)]
    for piece in (slice(0, 9), slice(9, 17), slice(17, 18), slice(18, 19)):
        both = []
        for i, model in enumerate((one, apart)):
            logits, caches[i] = run(model, ids[:, piece], None if piece.start else mask[:, piece], caches[i])
            both.append(logits)
        assert error(*both) < 1e-6

    def slopes(model):
        return nnx.grad(lambda model: jnp.sin(model(ids)[0]).sum())(model)

    for model in (one, apart):
        nnx.update(model, nnx.jit(slopes)(model))
    for name, a in apart.leaves().items():
        assert error(one.leaves()[name], a) < 1e-5, name


@pytest.mark.slow
def test_depth_costs_no_compiling():
    """Programs before compilation are as long for 28 layers as for 12; layers apart make them grow."""

    def length(layers, scan):
        model = nnx.eval_shape(lambda: Decoder(settings(layers), rngs=nnx.Rngs(0), scan=scan))
        graph, weights = nnx.split(model)
        ids = jax.ShapeDtypeStruct((1, 40), np.int32)
        return len(stepping.prefill.lower(graph, weights, ids, None, 64).as_text().splitlines())

    assert length(28, True) < 1.02 * length(12, True)
    assert length(28, False) > 1.8 * length(12, False)
