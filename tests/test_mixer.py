"""The mixer: convolution, norm, gates and rule in one call, against the same by hand in float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from conftest import SMALL, assert_all_close, assert_close, call, make, oracle

import portable_gdn as pg

H, HV, K, V, W = 2, 4, 16, 24, 4
CHANNELS = 2 * H * K + HV * V
HEADS = {"num_heads": H, "key_dim": K, "qk_l2norm": True}


def operands(*, B=2, T=40, N=None, bias=False, state=False, seed=0, dtype=np.float32, width=W):
    """Operands by name; gates are those of GDN."""
    rng = np.random.default_rng(seed)
    x = {
        "qkv": rng.standard_normal((B, T, CHANNELS)).astype(dtype),
        "conv_weight": (rng.standard_normal((CHANNELS, width)) / 2).astype(np.float32),
    }
    if bias:
        x["conv_bias"] = rng.standard_normal(CHANNELS).astype(np.float32)
    rule = make("GDN", B=B, T=T, seed=seed)
    x |= {"g": rule["g"], "beta": rule["beta"]}
    if state:
        x["initial_state"] = rng.standard_normal((N or B, HV, K, V)).astype(np.float32)
        x["conv_state"] = rng.standard_normal((N or B, width - 1, CHANNELS)).astype(np.float32)
    return x


def by_hand(x, row, where, state, conv_state, activation="silu"):
    """One sequence: o, recurrent and convolution state in float64, from the tokens of a row, and o's summands."""
    f = {name: np.asarray(a, np.float64) for name, a in x.items() if np.asarray(a).dtype.kind not in "bi"}
    width = f["conv_weight"].shape[-1]
    seen = np.concatenate([conv_state, f["qkv"][row, where]])
    tokens = len(seen) - (width - 1)
    y = np.zeros((tokens, CHANNELS))
    for t in range(tokens):
        for j in range(width):  # the last tap meets the current token
            y[t] += f["conv_weight"].reshape(CHANNELS, width)[:, j] * seen[t + j]
    y = y + f.get("conv_bias", 0.0)
    y = y / (1 + np.exp(-y)) if activation == "silu" else y
    q, k, v = np.split(y, [H * K, 2 * H * K], -1)
    q, k, v = q.reshape(tokens, H, K), k.reshape(tokens, H, K), v.reshape(tokens, HV, V)
    q, k = (a / np.sqrt((a * a).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
    q, k = (np.repeat(a, HV // H, 1) for a in (q, k))
    S, o, size = np.array(state), np.zeros((tokens, HV, V)), np.zeros((tokens, HV, V))
    g, beta = f["g"][row, where], f["beta"][row, where]
    for t in range(tokens):
        S = np.exp(g[t])[:, None, None] * S
        r = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", S, k[t]))
        S = S + k[t][..., None] * r[:, None]
        o[t] = np.einsum("hkv,hk->hv", S, q[t]) * K**-0.5
        size[t] = np.einsum("hkv,hk->hv", np.abs(S), np.abs(q[t])) * K**-0.5
    return o, S, seen[tokens:], size


def _zeros(x, row):
    width = x["conv_weight"].shape[-1]
    state = x["initial_state"][row] if "initial_state" in x else np.zeros((HV, K, V))
    return state, x["conv_state"][row] if "conv_state" in x else np.zeros((width - 1, CHANNELS))


def check_rows(x, o, recurrent, conv, places, **options):
    """Every row against the sequence that its tokens at ``places`` make by themselves."""
    for row, where in enumerate(places):
        want = by_hand(x, row, where, *_zeros(x, row), **options)
        assert_close(o[row, where], want[0], want[3], eps=16)  # convolution and norm round too
        assert_close(recurrent[row], want[1], eps=16)
        assert_close(conv[row], want[2], eps=1)


@pytest.mark.parametrize("state", [False, True], ids=["from zeros", "from a state"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_mixer_is_its_parts(library, state, bias):
    x = operands(bias=bias, state=state)
    check_rows(x, *library.run("mixer", x, output_final_state=True, **HEADS, **SMALL), [np.s_[:], np.s_[:]])


def test_mixer_without_activation(library):
    x = operands()
    out = library.run("mixer", x, output_final_state=True, activation=None, **HEADS, **SMALL)
    check_rows(x, *out, [np.s_[:], np.s_[:]], activation=None)


def test_convolution_of_one_tap_has_no_state(library):
    x = operands(width=1)
    o, recurrent, conv = library.run("mixer", x, output_final_state=True, **HEADS, **SMALL)
    assert conv.shape == (2, 0, CHANNELS)
    check_rows(x, o, recurrent, conv, [np.s_[:], np.s_[:]])


def test_last_tap_multiplies_the_current_token(library):
    """Weights coded by channel and tap: one token of ones, everything else zero, without activation or norm."""
    x = operands(T=6, B=1)
    x["qkv"][:] = 0
    x["qkv"][0, 2, 2 * H * K :] = 1  # values of token 2
    x["conv_weight"][:] = 0
    x["conv_weight"][: 2 * H * K] = 0
    x["conv_bias"] = np.zeros(CHANNELS, np.float32)
    x["conv_bias"][[0, K, H * K, H * K + K]] = 1  # q = k = the first unit vector, for both key heads
    x["conv_weight"][2 * H * K :] = np.arange(HV * V)[:, None] + 1000 * np.arange(1, W + 1)
    x["beta"][:], x["g"][:] = 1, 0
    o = library.run("mixer", x, activation=None, **{**HEADS, "qk_l2norm": False, "scale": 1.0}, **SMALL)[0]
    code = np.arange(HV * V).reshape(HV, V)
    np.testing.assert_allclose(o[0, 1], 0)
    for back in range(W):
        np.testing.assert_allclose(o[0, 2 + back], code + 1000 * (W - back), rtol=1e-6)


def test_qkv_as_one_array_or_three_and_torchs_weight_shape(library):
    x = operands(bias=True, state=True)
    want = library.run("mixer", x, output_final_state=True, **HEADS, **SMALL)
    three = {name: a for name, a in x.items() if name != "qkv"}
    three |= dict(zip("qkv", np.split(x["qkv"], [H * K, 2 * H * K], -1), strict=True))
    three["conv_weight"] = x["conv_weight"][:, None]
    for options in (HEADS, {**HEADS, "key_dim": None}):
        for got, a in zip(library.run("mixer", three, output_final_state=True, **options, **SMALL), want, strict=True):
            assert_close(got, a)


def test_o_has_the_dtype_of_qkv_and_nothing_is_rounded_before_it(library):
    x = operands(dtype=np.float16)
    o, recurrent, conv = library.run("mixer", x, output_final_state=True, precision="highest", **HEADS, **SMALL)
    assert o.dtype == np.float16
    assert recurrent.dtype == conv.dtype == np.float32
    for row in range(2):
        want = by_hand(x, row, np.s_[:], *_zeros(x, row))
        assert_close(recurrent[row], want[1], eps=16)
        assert_close(o[row], want[0], want[3], eps=16, dtype="float16")


def test_mixer_returns_a_pair_and_the_state_when_asked(library):
    x = library.arrays(operands())
    arguments = dict(conv=pg.ShortConv(x["conv_weight"]), beta=x["beta"], num_heads=H, key_dim=K, **SMALL)
    assert pg.gated_delta_mixer(x["qkv"], x["g"], **arguments)[1] is None
    state = pg.gated_delta_mixer(x["qkv"], x["g"], output_final_state=True, **arguments)[1]
    assert isinstance(state, pg.MixerState)
    assert state.recurrent.shape == (2, HV, K, V)
    assert state.conv.shape == (2, W - 1, CHANNELS)


# In pieces, packed, padded -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["kv", "vk"])
@pytest.mark.parametrize("lengths", [[1, 2, 3, 0, 1, 1, 2, 0, 3, 3, 1, 2, 1], [1, 19], [17, 3], [20, 0]], ids=str)
def test_mixer_in_pieces_of_any_length(library, lengths, layout):
    if library.name == "jax" and lengths[0] == 17:
        pytest.skip("lengths that need programs of their own; the others suffice")
    x = operands(T=20, state=True, bias=True)
    state = (x.pop("initial_state"), x.pop("conv_state"))
    want = [by_hand(x, row, np.s_[:], state[0][row], state[1][row]) for row in range(2)]
    swap = (lambda a: a) if layout == "kv" else (lambda a: np.ascontiguousarray(np.swapaxes(a, -1, -2)))
    state, parts, start = (swap(state[0]), state[1]), [], 0
    for n in lengths:
        piece = {name: x[name][:, start : start + n] for name in ("qkv", "g", "beta")}
        piece |= {
            "conv_weight": x["conv_weight"],
            "conv_bias": x["conv_bias"],
            "initial_state": state[0],
            "conv_state": state[1],
        }
        o, *state = library.run("mixer", piece, output_final_state=True, state_layout=layout, **HEADS)
        parts.append(o)
        start += n
    assert start == 20
    o = np.concatenate(parts, 1)
    for row, (out, recurrent, conv, size) in enumerate(want):
        assert_close(o[row], out, size, eps=16)
        assert_close(swap(state[0])[row], recurrent, eps=16)
        np.testing.assert_array_equal(state[1][row], conv.astype(np.float32))


LENGTHS = [0, 13, 1, 0, 2, 21, 3, 0]


def test_packed_mixer_equals_each_sequence_alone(library):
    bounds = np.cumsum([0, *LENGTHS])
    x = operands(B=1, N=len(LENGTHS), state=True, bias=True)
    x["cu_seqlens"] = bounds.astype(np.int32)
    o, recurrent, conv = library.run("mixer", x, output_final_state=True, **HEADS, **SMALL)
    for n, (a, b) in enumerate(itertools.pairwise(bounds)):
        if a == b:
            assert recurrent[n].tobytes() == x["initial_state"][n].tobytes()
            assert conv[n].tobytes() == x["conv_state"][n].tobytes()
            continue
        want = by_hand(x, 0, np.s_[a:b], *_zeros(x, n))
        assert_close(o[0, a:b], want[0], want[3], eps=16)
        assert_close(recurrent[n], want[1], eps=16)
        np.testing.assert_array_equal(conv[n], want[2].astype(np.float32))


def test_segmented_mixer_starts_anew_at_each_segment(library):
    cuts = [0, 13, 14, 16, 38, 40]  # the last segment is shorter than the convolution's window
    x = operands(B=1, state=True, bias=True)
    x["segment_ids"] = np.repeat(np.arange(5), np.diff(cuts))[None].astype(np.int32)
    o, recurrent, conv = library.run("mixer", x, output_final_state=True, **HEADS, **SMALL)
    for a, b in itertools.pairwise(cuts):
        start = _zeros(x, 0) if a == 0 else _zeros({"conv_weight": x["conv_weight"]}, 0)
        want = by_hand(x, 0, np.s_[a:b], *start)
        assert_close(o[0, a:b], want[0], want[3], eps=16)
    assert_close(recurrent[0], want[1], eps=16)
    np.testing.assert_array_equal(conv[0], want[2].astype(np.float32))


MASKS = {
    "left": [0] * 9 + [1] * 31,
    "right": [1] * 33 + [0] * 7,
    "holes": [1, 0, 0, 1] * 10,
    "two tokens": [0] * 30 + [1, 0, 1] + [0] * 7,
}


@pytest.mark.parametrize("junk", [7.0, np.nan], ids=["junk", "NaN"])
@pytest.mark.parametrize(("first", "second"), [("left", "right"), ("holes", "two tokens")])
def test_masked_tokens_reach_neither_convolution_nor_state(library, first, second, junk):
    x = operands(state=True, bias=True)
    mask = np.array([MASKS[first], MASKS[second]], bool)
    for name in ("qkv", "g", "beta"):
        x[name][~mask] = junk
    x["mask"] = mask
    o, recurrent, conv = library.run("mixer", x, output_final_state=True, **HEADS, **SMALL)
    assert (o[~mask] == 0).all()
    check_rows(x, o, recurrent, conv, [np.flatnonzero(m) for m in mask])


def test_mask_with_packed_sequences(library):
    bounds = np.array([0, 10, 10, 15, 40])
    x = operands(B=1, N=4, state=True)
    mask = np.random.default_rng(2).uniform(size=(1, 40)) < 0.6
    mask[0, 10:15] = False  # a sequence of nothing but padding
    for name in ("qkv", "g", "beta"):
        x[name][~mask] = np.nan
    x |= {"mask": mask, "cu_seqlens": bounds.astype(np.int32)}
    o, recurrent, conv = library.run("mixer", x, output_final_state=True, **HEADS, **SMALL)
    assert (o[~mask] == 0).all()
    for n, (a, b) in enumerate(itertools.pairwise(bounds)):
        where = a + np.flatnonzero(mask[0, a:b])
        want = by_hand(x, 0, where, *_zeros(x, n))
        assert_close(o[0, where], want[0], want[3], eps=16)
        assert_close(recurrent[n], want[1], eps=16)
        np.testing.assert_array_equal(conv[n], want[2].astype(np.float32))


@pytest.mark.parametrize("T", [0, 1, 2])
def test_conv_state_of_a_short_call_keeps_older_inputs(library, T):
    x = operands(T=T, state=True)
    conv = library.run("mixer", x, output_final_state=True, **HEADS)[2]
    np.testing.assert_array_equal(conv, np.concatenate([x["conv_state"], x["qkv"]], 1)[:, T:])


# Gradients -----------------------------------------------------------------------------------------------------------


def _cotangents(x, seed=3):
    rng = np.random.default_rng(seed)
    d = {"o": rng.standard_normal((*x["beta"].shape, V)).astype(np.float32)}
    if "initial_state" in x:
        d["state"] = rng.standard_normal(x["initial_state"].shape).astype(np.float32)
    return d


def test_the_oracles_gradients_are_finite_differences():
    x = {name: a.astype(np.float64) for name, a in operands(T=7, B=1, state=True, bias=True).items()}
    d = _cotangents(x)
    grads = oracle({name: a.astype(np.float32) for name, a in x.items()}, d, "mixer", **HEADS).gradients
    x = {name: a.astype(np.float32).astype(np.float64) for name, a in x.items()}

    def loss(x):
        o, S, _, _ = by_hand(x, 0, np.s_[:], x["initial_state"][0], x["conv_state"][0])
        return (o * d["o"][0]).sum() + (S * d["state"][0]).sum()

    rng = np.random.default_rng(4)
    for name in grads:
        direction = rng.standard_normal(x[name].shape)
        step = 1e-5
        ahead, behind = (loss({**x, name: x[name] + s * step * direction}) for s in (1, -1))
        slope = (grads[name] * direction).sum()
        # the error of a central difference is step^2 times a third derivative, and rounding / step: 1e-9 is both
        assert abs((ahead - behind) / (2 * step) - slope) < 1e-7 * np.linalg.norm(grads[name]) * np.linalg.norm(
            direction
        ), name


@pytest.mark.parametrize("form", ["plain", "packed", "segments", "mask"])
def test_gradients_of_the_mixer(framework, form):
    packed = form == "packed"
    x = operands(B=1 if packed else 2, N=5 if packed else None, state=True, bias=True)
    if packed:
        x["cu_seqlens"] = np.array([0, 2, 2, 5, 22, 40], np.int32)
    elif form == "segments":
        x["segment_ids"] = np.repeat([[0, 1, 2]], [5, 33, 2], axis=1).astype(np.int32).repeat(2, 0)
    elif form == "mask":
        x["mask"] = np.array([MASKS["left"], MASKS["holes"]], bool)
        for name in ("qkv", "g", "beta"):
            x[name][~x["mask"]] = np.nan
    d = _cotangents(x)
    want = oracle(x, d, "mixer", **HEADS)
    o, state, grads = framework.both(x, d, "mixer", **HEADS, **SMALL)
    assert_close(o, want.o, want.sizes["o"], eps=16)
    assert_close(state, want.state, want.sizes["state"], eps=16)
    assert_all_close(grads, want, eps=16)


@pytest.mark.parametrize("T", [1, 2, 3])
def test_gradients_of_pieces_shorter_than_the_window(torch_library, T):
    x = operands(T=T, state=True, bias=True)
    d = _cotangents(x)
    want = oracle(x, d, "mixer", **HEADS)
    assert_all_close(torch_library.gradients(x, d, "mixer", **HEADS), want, eps=16)


def test_gradients_flow_from_one_piece_into_the_one_before(torch_library):
    """Convolution and recurrent state carry gradients: two pieces together have those of the whole."""
    import torch

    x = operands(T=20, bias=True, state=True)
    d = _cotangents(x)
    want = oracle(x, d, "mixer", **HEADS)
    leaves = {name: torch_library.array(a).requires_grad_() for name, a in x.items()}
    fixed = {name: leaves[name] for name in ("conv_weight", "conv_bias")}
    parts, states = [], {name: leaves[name] for name in ("initial_state", "conv_state")}
    for a, b in ((0, 2), (2, 3), (3, 20)):
        piece = {name: leaves[name][:, a:b] for name in ("qkv", "g", "beta")}
        o, recurrent, conv = call("mixer", {**piece, **fixed, **states}, output_final_state=True, **HEADS)
        parts.append(o)
        states = {"initial_state": recurrent, "conv_state": conv}
    loss = (torch.cat(parts, 1) * torch_library.array(d["o"])).sum() + (
        recurrent * torch_library.array(d["state"])
    ).sum()
    loss.backward()
    assert_all_close({name: a.grad.numpy() for name, a in leaves.items()}, want, eps=16)


def test_gates_in_the_mixer(framework):
    x = operands(state=True)
    rng = np.random.default_rng(6)
    x |= {
        "g": rng.standard_normal(x["g"].shape).astype(np.float32),
        "A_log": rng.standard_normal(HV).astype(np.float32),
        "dt_bias": rng.standard_normal(HV).astype(np.float32),
    }
    d = _cotangents(x)
    want = oracle(x, d, "mixer", gate="softplus", **HEADS)
    o, state, grads = framework.both(x, d, "mixer", gate="softplus", **HEADS, **SMALL)
    assert_close(o, want.o, want.sizes["o"], eps=16)
    assert_close(state, want.state, want.sizes["state"], eps=16)
    assert_all_close(grads, want, eps=16)
