"""The public call: its signature, its results, sequences, masks, gates and resets, on every library."""

from __future__ import annotations

import inspect
import itertools

import numpy as np
import pytest
from conftest import (
    DECAYS,
    DTYPES,
    EPS,
    SMALL,
    assert_all_close,
    assert_close,
    call,
    cotangents,
    make,
    oracle,
    tokens,
)

import portable_gdn as pg

VARIANTS = list(DECAYS)
GATES = ["g", "beta", "erase", "write"]


# Signatures and results ----------------------------------------------------------------------------------------------


def _rule(
    q,
    k,
    v,
    g=None,
    *,
    beta=None,
    erase=None,
    write=None,
    scale=None,
    initial_state=None,
    output_final_state=False,
    cu_seqlens=None,
    segment_ids=None,
    mask=None,
    qk_l2norm=False,
    gate=None,
    chunk_size=None,
    precision=None,
    state_layout="kv",
    deterministic=False,
    check_values=False,
    output_states_every=None,
    backend=None,
    sharding=None,
): ...


def _form(function):
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def test_signature_of_the_rule():
    assert _form(pg.gated_delta_rule) == _form(_rule)


def test_explain_takes_the_arguments_of_the_rule_and_those_of_an_update():
    form = _form(pg.explain)
    count = len(_form(_rule))
    assert form[:count] == _form(_rule)
    assert [(name, default) for name, _, default in form[count:]] == [
        ("pool", None),
        ("batch", None),
        ("window", None),
        ("checkpoint_every", None),
    ]
    assert all(kind is inspect.Parameter.KEYWORD_ONLY for _, kind, _ in form[count:])


def test_signature_of_the_step():
    form = _form(pg.gated_delta_rule_step)
    assert form[:4] == _form(_rule)[:4]
    assert all(kind is inspect.Parameter.KEYWORD_ONLY for _, kind, _ in form[4:])
    whole = {
        "initial_state",
        "output_final_state",
        "cu_seqlens",
        "segment_ids",
        "mask",
        "chunk_size",
        "output_states_every",
    }
    want = {name: default for name, _, default in _form(_rule)[4:] if name not in whole} | {"state": None}
    assert {name: default for name, _, default in form[4:]} == want


def test_signature_of_the_mixer():
    form = _form(pg.gated_delta_mixer)
    assert [name for name, kind, _ in form if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD] == ["qkv", "g"]
    defaults = {name: default for name, _, default in form}
    assert defaults["conv"] is inspect.Parameter.empty
    assert {"state", "mask", "cu_seqlens", "segment_ids", "qk_l2norm", "gate", "precision", "backend"} <= set(defaults)
    assert _form(pg.ShortConv)[1:] == _form(lambda weight, bias=None, activation="silu": None)[1:]
    assert pg.MixerState._fields == ("recurrent", "conv")
    assert [n for n, *_ in _form(pg.SoftplusGate)] == ["A_log", "dt_bias"]
    assert [n for n, *_ in _form(pg.BoundedGate)] == ["A_log", "dt_bias", "lower_bound"]


def test_a_pair_is_returned_and_the_state_only_when_asked_for(library):
    x = library.arrays(make())
    pair = pg.gated_delta_rule(**x, **SMALL)
    assert isinstance(pair, tuple)
    assert len(pair) == 2
    assert pair[1] is None
    assert type(pair[0]) is type(x["v"])
    assert pg.gated_delta_rule(**x, output_final_state=True, **SMALL)[1].shape == (2, 4, 16, 24)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_o_has_the_dtype_of_v_and_the_state_is_float32(library, dtype):
    x = make("GDN", dtype=dtype)
    o, state = library.rule(x, **SMALL)
    want = oracle(x)
    assert o.dtype == DTYPES[dtype]
    assert state.dtype == np.float32
    assert_close(o, want.o, want.sizes["o"], dtype=dtype)
    assert_close(state, want.state, want.sizes["state"])


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_gates_of_any_float_dtype_are_promoted(library, dtype):
    x = make()
    x |= {name: x[name].astype(dtype) for name in ("g", "beta")}
    assert_close(library.rule(x, **SMALL)[0], oracle(x).o)


@pytest.mark.parametrize("layout", ["kv", "vk"])
@pytest.mark.parametrize("V", [24, 16], ids=["K != V", "K == V"])
def test_state_layouts(library, layout, V):
    x = make(state=True, V=V)
    want = oracle(x)
    if layout == "vk":
        x["initial_state"] = np.ascontiguousarray(np.swapaxes(x["initial_state"], -1, -2))
    o, state = library.rule(x, state_layout=layout, **SMALL)
    assert_close(o, want.o)
    assert_close(state if layout == "kv" else np.swapaxes(state, -1, -2), want.state)


@pytest.mark.parametrize("variant", VARIANTS)
def test_values_and_gradients_of_every_variant(framework, variant):
    if framework.name == "jax" and variant.startswith("GLA"):
        pytest.skip("seconds of compiling, for a path that GDN-2 takes too")
    x = make(variant, state=True)
    d = cotangents(x)
    want = oracle(x, d)
    o, state, grads = framework.both(x, d, **SMALL)
    assert_close(o, want.o, want.sizes["o"])
    assert_close(state, want.state, want.sizes["state"])
    assert_all_close(grads, want)


def test_scale_is_the_inverse_root_of_k_unless_given(library):
    x = make()
    o = library.rule(x, **SMALL)[0]
    assert_close(library.rule(x, scale=1.0, **SMALL)[0], 4.0 * o.astype(np.float64))


def test_inputs_that_are_not_contiguous(library):
    x = make("KDA", state=True)
    if library.name == "torch":
        strided = {name: library.array(np.moveaxis(a, 1, -1)).movedim(-1, 1) for name, a in x.items()}
    elif library.name == "numpy":
        strided = {name: np.moveaxis(np.moveaxis(a, 1, -1).copy(), -1, 1) for name, a in x.items()}
    else:
        pytest.skip("JAX arrays have no strides")
    o, state = pg.gated_delta_rule(**strided, output_final_state=True, **SMALL)
    want = library.rule(x, **SMALL)
    np.testing.assert_array_equal(library.numpy(o), want[0])
    np.testing.assert_array_equal(library.numpy(state), want[1])


def test_inputs_are_not_written(library):
    x = make("GDN", state=True)
    arrays = library.arrays(x)
    call("rule", arrays, output_final_state=True, **SMALL)
    for name, a in x.items():
        np.testing.assert_array_equal(library.numpy(arrays[name]), a)


# No tokens, one token ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("empty", [{"T": 0}, {"B": 0}], ids=str)
@pytest.mark.parametrize("state", [False, True])
def test_a_call_without_tokens_returns_the_states(library, empty, state):
    x = make("GDN", state=state, **empty)
    o, after = library.rule(x)
    assert o.shape == x["v"].shape
    assert o.dtype == np.float32
    assert after.dtype == np.float32
    given = x["initial_state"] if state else np.zeros((x["q"].shape[0], 4, 16, 24), np.float32)
    np.testing.assert_array_equal(after, given)


@pytest.mark.parametrize("empty", [{"T": 0}, {"B": 0}], ids=str)
@pytest.mark.parametrize("variant", ["GDN", "GDN-2", "DeltaNet"])
def test_a_call_without_tokens_has_gradients(framework, empty, variant):
    x = make(variant, state=True, **empty)
    d = cotangents(x)
    grads = framework.gradients(x, d)  # compiled by jax.jit
    np.testing.assert_array_equal(grads.pop("initial_state"), d["state"])
    for name, a in grads.items():
        assert a.shape == x[name].shape
        assert not a.any()


def test_a_call_without_tokens_keeps_the_state_bit_for_bit(library):
    x = make("GDN", state=True, T=0)
    x["initial_state"][:, :, 0] = -0.0
    assert library.rule(x)[1].tobytes() == x["initial_state"].tobytes()


def test_empty_results_are_of_the_callers_library(library):
    x = make(T=0, state=True)
    o, state = pg.gated_delta_rule(**library.arrays(x), output_final_state=True)
    kind = type(library.array(x["v"]))
    assert type(o) is kind
    assert type(state) is kind


def test_jax_calls_may_mix_in_numpy_and_still_return_jax_arrays(jax_library):
    import jax

    for T in (0, 5):
        x = make(T=T, state=True)
        x["q"] = jax_library.array(x["q"])
        o, state = pg.gated_delta_rule(**x, output_final_state=True, **SMALL)
        assert isinstance(o, jax.Array)
        assert isinstance(state, jax.Array)


def test_one_token_by_hand(library):
    x = make("GDN", T=1, state=True, H=4)
    o, state = library.rule(x)
    f = {name: a.astype(np.float64) for name, a in x.items()}
    held = np.exp(f["g"][:, 0])[..., None, None] * f["initial_state"]
    k = f["k"][:, 0]
    r = f["v"][:, 0] - np.einsum("bhkv,bhk->bhv", held, k)
    after = held + k[..., None] * (f["beta"][:, 0, :, None] * r)[..., None, :]
    assert_close(state, after)
    assert_close(o[:, 0], np.einsum("bhkv,bhk->bhv", after, f["q"][:, 0]) / 4.0)


# Time taken apart ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["kv", "vk"])
@pytest.mark.parametrize("variant", ["GDN", "GDN-2"])
def test_steps_equal_the_whole(library, variant, layout):
    x = make(variant, state=True, T=20)
    want = oracle(x)
    state = x.pop("initial_state")
    state = state if layout == "kv" else np.swapaxes(state, -1, -2).copy()
    parts = []
    for t in range(20):
        o, state = library.run(
            "step", {**{name: a[:, t] for name, a in x.items()}, "initial_state": state}, state_layout=layout
        )
        parts.append(o)
    assert_close(np.stack(parts, 1), want.o, want.sizes["o"])
    assert_close(state if layout == "kv" else np.swapaxes(state, -1, -2), want.state, want.sizes["state"])


def test_a_step_without_a_state_starts_from_zeros(library):
    x = {name: a[:, 0] for name, a in make("KDA").items()}
    o, state = library.run("step", x)
    want = library.run("step", {**x, "initial_state": np.zeros((2, 4, 16, 24), np.float32)})
    np.testing.assert_array_equal(o, want[0])
    np.testing.assert_array_equal(state, want[1])


def _splits():
    rng = np.random.default_rng(3)
    yield [1, 3, 6, 69, 133, 198]
    for count in (1, 3, 6):
        yield sorted(rng.choice(np.arange(1, 200), count, replace=False).tolist())


@pytest.mark.parametrize("cuts", list(_splits()), ids=str)
@pytest.mark.parametrize("variant", ["GDN", "KDA"])
def test_a_sequence_in_pieces_equals_one_call(framework, variant, cuts):
    if framework.name == "jax" and (len(cuts) > 3 or variant == "KDA"):
        pytest.skip("each piece is a program of its own to compile; fewer of them suffice there")
    x = make(variant, T=200, B=1, H=1, HV=2, state=True)
    want = oracle(x)
    state, parts = x.pop("initial_state"), []
    for a, b in zip([0, *cuts], [*cuts, 200], strict=True):
        o, state = framework.rule({**tokens(x, 0, slice(a, b)), "initial_state": state})
        parts.append(o)
    assert_close(np.concatenate(parts, 1), want.o, want.sizes["o"])
    assert_close(state, want.state, want.sizes["state"])


# Sequences side by side ----------------------------------------------------------------------------------------------

LENGTHS = [0, 13, 0, 0, 1, 16, 10, 0]
BOUNDS = np.cumsum([0, *LENGTHS]).tolist()


@pytest.mark.parametrize("variant", ["GDN", "GDN-2"])
def test_packed_sequences_equal_each_alone(library, variant):
    x = make(variant, B=1, state=True, N=len(LENGTHS))
    d = cotangents(x)
    x_packed = {**x, "cu_seqlens": np.array(BOUNDS, np.int32)}
    o, state, grads = library.both(x_packed, d, **SMALL)
    for n, (a, b) in enumerate(itertools.pairwise(BOUNDS)):
        alone = {**tokens(x, 0, slice(a, b)), "initial_state": x["initial_state"][n : n + 1]}
        if a == b:
            assert state[n].tobytes() == x["initial_state"][n].tobytes()
            np.testing.assert_array_equal(grads["initial_state"][n], d["state"][n])
            continue
        want = oracle(alone, {"o": d["o"][:, a:b], "state": d["state"][n : n + 1]})
        assert_close(o[:, a:b], want.o, want.sizes["o"])
        assert_close(state[n : n + 1], want.state, want.sizes["state"])
        for name, value in want.gradients.items():
            got = grads[name][n : n + 1] if name == "initial_state" else grads[name][:, a:b]
            assert_close(got, value, want.sizes[name])


@pytest.mark.parametrize("form", ["list", "tuple", "numpy", "own int32", "own int64"])
def test_boundaries_in_every_form(library, form):
    if library.name == "jax" and form == "own int64":
        pytest.skip("JAX has no int64 by default")
    x = make(B=1)
    want = library.rule({**x, "cu_seqlens": np.array(BOUNDS, np.int32)}, **SMALL)
    own = library.array(np.array(BOUNDS, "int64" if form.endswith("64") else "int32"))
    bounds = {"list": BOUNDS, "tuple": tuple(BOUNDS), "numpy": np.array(BOUNDS)}.get(form, own)
    o, state = call("rule", library.arrays(x), cu_seqlens=bounds, output_final_state=True, **SMALL)
    np.testing.assert_array_equal(library.numpy(o), want[0])
    np.testing.assert_array_equal(library.numpy(state), want[1])


def test_only_empty_sequences_return_their_states(library):
    x = make(B=1, T=0, state=True, N=3)
    o, state = library.rule({**x, "cu_seqlens": np.zeros(4, np.int32)})
    assert o.shape == (1, 0, 4, 24)
    np.testing.assert_array_equal(state, x["initial_state"])


def test_segments_equal_separate_calls(library):
    x = make("KDA", state=True)
    d = cotangents(x)
    ids = np.zeros((2, 40), np.int32)
    ids[0, 9:30], ids[0, 30:], ids[1, 17:] = 7, 0, -1  # an id may come back: it is another segment
    x["segment_ids"] = ids
    o, state, grads = library.both(x, d, **SMALL)
    for row, cuts in ((0, [0, 9, 30, 40]), (1, [0, 17, 40])):
        for a, b in itertools.pairwise(cuts):
            alone = {name: v for name, v in tokens(x, row, slice(a, b)).items() if name != "segment_ids"}
            given = x["initial_state"][row : row + 1]
            alone["initial_state"] = given if a == 0 else np.zeros_like(given)
            end = d["state"][row : row + 1] if b == 40 else np.zeros_like(given)
            want = oracle(alone, {"o": d["o"][row : row + 1, a:b], "state": end})
            assert_close(o[row : row + 1, a:b], want.o, want.sizes["o"])
            if b == 40:
                assert_close(state[row : row + 1], want.state, want.sizes["state"])
            for name, value in want.gradients.items():
                if name == "initial_state":
                    if a == 0:
                        assert_close(grads[name][row : row + 1], value, want.sizes[name])
                else:
                    assert_close(grads[name][row : row + 1, a:b], value, want.sizes[name])


# Padding -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("junk", [1e3, np.nan], ids=["junk", "NaN"])
@pytest.mark.parametrize("variant", ["GDN", "GDN-2"])
def test_padding_changes_nothing(library, variant, junk):
    x = make(variant, state=True)
    mask = np.ones((2, 40), bool)
    mask[0, :11], mask[1, 33:] = False, False  # left and right
    rng = np.random.default_rng(5)
    for name in set(x) - {"initial_state"}:
        x[name][~mask] = junk * rng.standard_normal(x[name][~mask].shape)
    d = cotangents(x)
    d["o"][~mask] = rng.standard_normal(d["o"][~mask].shape)
    full = {**x, "mask": mask}
    o, state, grads = library.both(full, d, **SMALL)
    assert (o[~mask] == 0).all()
    for name in set(grads) - {"initial_state"}:
        assert (grads[name][~mask] == 0).all(), name
    for row, real in ((0, slice(11, 40)), (1, slice(0, 33))):
        alone = {**tokens(x, row, real), "initial_state": x["initial_state"][row : row + 1]}
        want = oracle(alone, {"o": d["o"][row : row + 1, real], "state": d["state"][row : row + 1]})
        assert_close(o[row : row + 1, real], want.o, want.sizes["o"])
        assert_close(state[row : row + 1], want.state, want.sizes["state"])
        for name, value in want.gradients.items():
            where = slice(None) if name == "initial_state" else real
            assert_close(grads[name][row : row + 1, where], value, want.sizes[name])


def test_padding_with_gates_norm_and_segments(framework):
    x = make("GDN", state=True)
    x |= {"g": 4 * x["g"] + 1, "A_log": np.linspace(-1, 1, 4).astype(np.float32), "dt_bias": np.ones(4, np.float32)}
    options = {"gate": "softplus", "qk_l2norm": True}
    mask = np.random.default_rng(6).uniform(size=(2, 40)) < 0.6
    ids = np.repeat(np.arange(4), 10)[None].repeat(2, 0).astype(np.int32)
    for name in ("q", "k", "v", "g", "beta"):
        x[name][~mask] = np.nan
    full = {**x, "mask": mask, "segment_ids": ids}
    d = cotangents(x)
    want = oracle(full, d, **options)
    o, state, grads = framework.both(full, d, **options, **SMALL)
    assert_close(o, want.o, want.sizes["o"])
    assert_close(state, want.state, want.sizes["state"])
    assert_all_close(grads, want, eps=16)  # the norm's and gates' own roundings


def test_a_row_that_is_all_padding_keeps_its_state(library):
    x = make("GDN", state=True)
    mask = np.ones((2, 40), bool)
    mask[1] = False
    o, state = library.rule({**x, "mask": mask}, **SMALL)
    assert (o[1] == 0).all()
    np.testing.assert_array_equal(state[1], x["initial_state"][1])


def test_outputs_of_padding_are_zero_even_after_nan(library):
    x = make("GDN")
    x["v"][0, 3] = np.nan
    mask = np.ones((2, 40), bool)
    mask[0, 10:20] = False
    assert (library.rule({**x, "mask": mask}, **SMALL)[0][~mask] == 0).all()


# Heads, and one variant as another -----------------------------------------------------------------------------------


def test_value_head_reads_key_head_of_its_group(library):
    x = {
        "q": np.zeros((1, 1, 2, 16), np.float32),
        "k": np.zeros((1, 1, 2, 16), np.float32),
        "v": np.ones((1, 1, 6, 24), np.float32),
        "beta": np.ones((1, 1, 6), np.float32),
    }
    x["q"][..., 0] = [[[8, 16]]]
    x["k"][..., 0] = 1
    o = library.rule(x)[0]
    np.testing.assert_array_equal(o[0, 0, :, 0], [2, 2, 2, 4, 4, 4])


def test_repeated_keys_read_only_the_last_value(library):
    x = make("DeltaNet")
    x["k"] = np.broadcast_to(x["k"][:, :1], x["k"].shape).copy()
    x["k"] /= np.linalg.norm(x["k"].astype(np.float64), axis=-1, keepdims=True).astype(np.float32)
    x["beta"] = np.ones_like(x["beta"])
    o = library.rule(x, **SMALL)[0]
    qk = np.repeat(np.einsum("bthk,bthk->bth", x["q"].astype(np.float64), x["k"]), 2, -1)
    # |k|^2 is 1 within a few roundings of float32, and what that leaves of older values adds up over a chunk.
    assert_close(o, qk[..., None] / 4 * x["v"], np.abs(x["q"]).sum() / x["q"].size * np.abs(x["v"]), eps=32)


def _pairs():
    x = make("DeltaNet", state=True)
    yield "no g is g = 0", x, {**x, "g": np.zeros((2, 40, 4), np.float32)}
    x = make("GDN", state=True)
    yield "a decay a head, repeated by channel", x, {**x, "g": np.repeat(x["g"][..., None], 16, -1)}
    x = make("KDA", state=True)
    two = {name: a for name, a in x.items() if name != "beta"}
    two["erase"] = np.repeat(x["beta"][..., None], 16, -1)
    two["write"] = np.repeat(x["beta"][..., None], 24, -1)
    yield "GDN-2 with erase = write = beta", x, two
    x = make("tile-grouped", state=True)
    yield "two groups, repeated by channel", x, {**x, "g": np.repeat(x["g"], 8, -1)}


@pytest.mark.parametrize(("x", "y"), [p[1:] for p in _pairs()], ids=[p[0] for p in _pairs()])
def test_a_coarse_variant_equals_the_finer_one_that_repeats_it(framework, x, y):
    d = cotangents(x)
    want = oracle(x, d)
    (*results, coarse), (*others, fine) = (framework.both(operands, d, **SMALL) for operands in (x, y))
    for o, state in (results, others):
        assert_close(o, want.o, want.sizes["o"])
        assert_close(state, want.state, want.sizes["state"])
    for name, value in coarse.items():
        if name in fine:
            got = fine[name]
            if got.shape != value.shape:  # the sum over what was repeated
                got = got.reshape(*value.shape, -1).sum(-1)
        else:  # beta is erase and write together
            got = fine["erase"].sum(-1) + fine["write"].sum(-1)
        assert_close(got, want.gradients[name], want.sizes[name])


# Gates and resets ----------------------------------------------------------------------------------------------------


def _raw(variant, **options):
    x = make(variant, seed=2, **options)
    rng = np.random.default_rng(8)
    x["g"] = (3 * rng.standard_normal(x["g"].shape)).astype(np.float32)
    x["A_log"] = np.log(rng.uniform(0.1, 4, 4)).astype(np.float32)
    x["dt_bias"] = rng.standard_normal(x["g"].shape[2:]).astype(np.float32)
    return x


@pytest.mark.parametrize(("variant", "gate"), [("GDN", "softplus"), ("KDA", "softplus"), ("KDA", -4.0)])
def test_gates_are_their_formulas(library, variant, gate):
    x = _raw(variant)
    A = x["A_log"].astype(np.float64)
    A = np.exp(A if variant == "GDN" else A[:, None])
    raw = x["g"].astype(np.float64) + x["dt_bias"]
    g = -A * np.logaddexp(0, raw) if gate == "softplus" else gate / (1 + np.exp(-A * raw))
    plain = {name: a for name, a in x.items() if name not in ("A_log", "dt_bias")} | {"g": g}
    want = oracle(plain)
    o, state = library.rule(x, gate=gate, **SMALL)
    assert_close(o, want.o, want.sizes["o"])
    assert_close(state, want.state, want.sizes["state"])


def test_the_gates_bias_may_be_flat(library):
    x = _raw("KDA")
    flat = {**x, "dt_bias": x["dt_bias"].reshape(-1)}
    np.testing.assert_array_equal(*(library.rule(a, gate=-4.0, **SMALL)[0] for a in (x, flat)))


@pytest.mark.parametrize("gate", ["softplus", -4.0])
def test_gradients_through_gates(framework, gate):
    x = _raw("KDA", state=True)
    d = cotangents(x)
    want = oracle(x, d, gate=gate)
    assert_all_close(framework.gradients(x, d, gate=gate, **SMALL), want, eps=16)  # exp and log round too


def test_bounded_gate_needs_no_parameters(library):
    x = _raw("KDA")
    bare = {name: a for name, a in x.items() if name not in ("A_log", "dt_bias")}
    zeros = {**bare, "A_log": np.zeros(4, np.float32), "dt_bias": np.zeros((4, 16), np.float32)}
    np.testing.assert_array_equal(library.rule(bare, gate=-5.0, **SMALL)[0], library.rule(zeros, gate=-5.0, **SMALL)[0])


@pytest.mark.parametrize("projection", [-200.0, 3.0], ids=["closed", "reset"])
def test_gate_with_a_factor_that_overflows(library, projection):
    """exp(A_log) is inf: with softplus 0 the gate is 0, else a reset, and no derivative is NaN."""
    x = _raw("GDN", state=True)
    x["g"][:] = projection
    x["A_log"][:], x["dt_bias"][:] = 100, 0
    d = cotangents(x)
    o, state, grads = library.both(x, d, gate="softplus", **SMALL)
    plain = {name: a for name, a in x.items() if name not in ("A_log", "dt_bias")}
    plain["g"] = np.full_like(x["g"], 0 if projection < 0 else -np.inf)
    want = oracle(plain, d)
    assert_close(o, want.o, want.sizes["o"])
    assert_close(state, want.state, want.sizes["state"])
    for name in ("g", "A_log", "dt_bias"):  # in float64 softplus(-200) is not quite 0
        assert (np.abs(grads[name]) <= (1e-38 if library.name == "numpy" else 0)).all(), name
    for name in ("q", "k", "v", "beta", "initial_state"):
        assert_close(grads[name], want.gradients[name], want.sizes[name])


@pytest.mark.parametrize("value", [-np.inf, -1e6, -200.0], ids=str)
@pytest.mark.parametrize("variant", ["GDN", "KDA"])
def test_nothing_before_a_reset_matters(framework, variant, value):
    x = make(variant, state=True)
    x["g"][:, 21] = value
    x["g"][0, 33] = value
    d = cotangents(x)
    want = oracle(x, d)
    o, state, grads = framework.both(x, d, **SMALL)
    assert_close(o, want.o, want.sizes["o"])
    assert_close(state, want.state, want.sizes["state"])
    assert_all_close(grads, want)
    assert (grads["g"][:, 21] == 0).all()
    assert (grads["g"][0, 33] == 0).all()

    other = make(variant, state=True, seed=9)  # finite changes before the reset leave not a trace behind it
    for name, a in other.items():
        if name != "initial_state":
            a[:, 21:] = x[name][:, 21:]
    other["g"] = x["g"]
    o_other, state_other, grads_other = framework.both(other, d, **SMALL)
    assert not np.array_equal(o_other[:, :21], o[:, :21])
    np.testing.assert_array_equal(o_other[:, 21:], o[:, 21:])
    np.testing.assert_array_equal(state_other, state)
    for name in ("q", "v", "beta"):
        np.testing.assert_array_equal(grads_other[name][:, 21:], grads[name][:, 21:])


@pytest.mark.parametrize("variant", ["GDN", "KDA"])
def test_not_even_decays_before_a_reset_matter(framework, variant):
    x = make(variant, state=True)
    x["g"][:, 21] = -np.inf
    d = cotangents(x)
    o, state, _ = framework.both(x, d, **SMALL)
    other = {**x, "g": x["g"].copy()}
    other["g"][:, :21] *= 3
    o_other, state_other, _ = framework.both(other, d, **SMALL)
    np.testing.assert_array_equal(o_other[:, 21:], o[:, 21:])
    np.testing.assert_array_equal(state_other, state)


def test_a_reset_of_some_channels_keeps_the_others(framework):
    x = make("KDA", state=True)
    x["g"][:, 21, :, :8] = -np.inf
    d = cotangents(x)
    want = oracle(x, d)
    o, state, grads = framework.both(x, d, **SMALL)
    assert_close(o, want.o, want.sizes["o"])
    assert_close(state, want.state, want.sizes["state"])
    assert_all_close(grads, want)
    assert (grads["g"][:, 21, :, :8] == 0).all()
    assert (grads["g"][:, 21, :, 8:] != 0).all()


def test_a_step_at_a_reset(framework):
    x = {name: a[:, 0] for name, a in make("KDA").items()}
    x["g"][:] = -np.inf
    x["initial_state"] = make("KDA", state=True)["initial_state"]
    d = {"o": np.ones((2, 4, 24), np.float32), "state": np.ones((2, 4, 16, 24), np.float32)}
    o, _, grads = framework.both(x, d, "step")
    want = oracle(x, d, "step")
    assert_close(o, want.o, want.sizes["o"])
    assert (grads["g"] == 0).all()
    assert (grads["initial_state"] == 0).all()
    assert_all_close(grads, want)


# Norm, and settings of the process -----------------------------------------------------------------------------------


def test_l2norm_adds_its_constant_to_the_sum_of_squares(library):
    x = make("DeltaNet")
    x["k"][:, ::2] *= 1e-3  # where the constant matters
    x["k"][:, 5] = 0
    f = {name: a.astype(np.float64) for name, a in x.items()}
    for name in ("q", "k"):
        f[name] /= np.sqrt((f[name] ** 2).sum(-1, keepdims=True) + 1e-6)
    f |= {name: f[name].astype(np.float32) for name in ("q", "k", "v")}
    want = oracle(f)
    assert_close(library.rule(x, qk_l2norm=True, **SMALL)[0], want.o, want.sizes["o"], eps=16)  # two roundings more


def test_autocast_rounds_nothing(torch_library):
    import torch

    x = make()
    want = torch_library.rule(x, **SMALL)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        np.testing.assert_array_equal(torch_library.rule(x, **SMALL)[0], want)


def test_gradients_under_autocast(torch_library):
    import torch

    x = make()
    d = cotangents(x)
    want = torch_library.gradients(x, d, **SMALL)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        leaves = {name: torch_library.array(a).requires_grad_() for name, a in x.items()}
        o = call("rule", leaves, **SMALL)[0]
    o.backward(torch_library.array(d["o"]))
    for name, a in leaves.items():
        assert_close(torch_library.numpy(a.grad), want[name])


def test_64_bit_defaults_change_nothing(framework):
    x = make("GDN", state=True)
    x |= {"mask": np.ones((2, 40), bool), "segment_ids": np.zeros((2, 40), np.int32)}
    want = framework.rule(x, qk_l2norm=True, **SMALL)
    if framework.name == "torch":
        import torch

        torch.set_default_dtype(torch.float64)
        try:
            got = framework.rule(x, qk_l2norm=True, **SMALL)
        finally:
            torch.set_default_dtype(torch.float32)
    else:
        import jax

        with jax.enable_x64(True):
            got = framework.rule(x, qk_l2norm=True, **SMALL)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == np.float32
        assert_close(a, b)


def test_precisions_and_chunk_sizes_agree_in_float32(framework):
    """On a CPU products are float32 whatever the precision allows."""
    x = make("GDN")
    want = oracle(x)
    for options in ({"precision": "fast", **SMALL}, {"chunk_size": 32, "deterministic": True}):
        assert_close(framework.rule(x, **options)[0], want.o, want.sizes["o"])


def test_eps_is_that_of_float32():
    assert EPS == 2.0**-23
