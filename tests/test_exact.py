"""What holds bit for bit: causality, independence of neighbours, and how far a NaN may reach."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import SMALL, cotangents, make

VARIANTS = ["GDN", "tile-grouped", "KDA", "GDN-2"]
BOUNDS = [0, 11, 11, 28, 40]  # no boundary is one of a chunk; one sequence is empty
PACKED = {"B": 1, "N": 4, "state": True}


def changed(x, where, seed=7, value=None):
    """Operands with other finite values (or one value) at some tokens, gates among them."""
    other = make_like(x, seed)
    out = {name: a.copy() for name, a in x.items()}
    for name in other:
        out[name][where] = other[name][where] if value is None else value
    return out


def make_like(x, seed):
    rng = np.random.default_rng(seed)
    tokens = {name: a for name, a in x.items() if name not in ("initial_state", "cu_seqlens", "segment_ids", "mask")}
    signs = {"g": -1.0}
    return {
        name: (
            signs[name] * rng.exponential(0.3, a.shape)
            if name in signs
            else rng.uniform(0, 1, a.shape)
            if name in ("beta", "erase", "write")
            else rng.standard_normal(a.shape) / np.sqrt(a.shape[-1])
        ).astype(a.dtype)
        for name, a in tokens.items()
    }


def equal(got, want, where):
    assert not np.isnan(want[where]).any()
    np.testing.assert_array_equal(got[where], want[where])


@pytest.mark.parametrize("P", [1, 9, 16, 31])
@pytest.mark.parametrize("variant", VARIANTS)
def test_later_tokens_leave_earlier_outputs_and_their_gradients_unchanged(framework, variant, P):
    x = make(variant, state=True)
    d = cotangents(x)
    d["o"][:, P:], d["state"][:] = 0, 0  # a loss of the first outputs alone
    y = changed(x, np.s_[:, P:])
    o, state, grads = framework.both(x, d, **SMALL)
    o_y, state_y, grads_y = framework.both(y, d, **SMALL)
    assert not np.array_equal(state, state_y)
    equal(o_y, o, np.s_[:, :P])
    for name, a in grads.items():
        where = np.s_[:] if name == "initial_state" else np.s_[:, :P]
        equal(grads_y[name], a, where)
        if name != "initial_state":
            assert (grads_y[name][:, P:] == 0).all()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("value", [None, np.nan], ids=["finite", "NaN"])
@pytest.mark.parametrize("n", [0, 2, 3])
def test_packed_sequences_do_not_see_their_neighbours(framework, variant, value, n):
    x = {**make(variant, **PACKED), "cu_seqlens": np.array(BOUNDS, np.int32)}
    d = cotangents(x)
    inside = np.zeros((1, 40), bool)
    inside[:, BOUNDS[n] : BOUNDS[n + 1]] = True
    y = changed(x, inside, value=value)
    if value is not None:
        y["initial_state"][n] = value
        d_y = {name: a.copy() for name, a in d.items()}
        d_y["o"][inside], d_y["state"][n] = value, value
    else:
        d_y = d
    o, state, grads = framework.both(x, d, **SMALL)
    o_y, state_y, grads_y = framework.both(y, d_y, **SMALL)
    others = np.arange(4) != n
    assert not np.array_equal(o_y, o)
    equal(o_y, o, ~inside)
    equal(state_y, state, others)
    for name, a in grads.items():
        equal(grads_y[name], a, others if name == "initial_state" else ~inside)


@pytest.mark.parametrize("variant", ["GDN", "KDA"])
def test_rows_do_not_see_their_neighbours(framework, variant):
    x = make(variant, state=True)
    d = cotangents(x)
    y = changed(x, np.s_[0], value=np.nan)
    y["initial_state"][0] = np.nan
    o, state, grads = framework.both(x, d, **SMALL)
    o_y, state_y, grads_y = framework.both(y, d, **SMALL)
    assert np.isnan(o_y[0]).all()
    equal(o_y, o, np.s_[1])
    equal(state_y, state, np.s_[1])
    for name, a in grads.items():
        equal(grads_y[name], a, np.s_[1])


@pytest.mark.parametrize("variant", VARIANTS)
def test_segments_do_not_see_their_neighbours(framework, variant):
    ids = np.repeat([[5, 3, 5]], [11, 17, 12], axis=1).astype(np.int32).repeat(2, 0)
    x = {**make(variant, state=True), "segment_ids": ids}
    for a, b in ((0, 11), (11, 28), (28, 40)):
        inside = np.zeros((2, 40), bool)
        inside[:, a:b] = True
        o, state = framework.rule(x, **SMALL)
        o_y, state_y = framework.rule(changed(x, inside), **SMALL)
        equal(o_y, o, ~inside)
        if b < 40:
            np.testing.assert_array_equal(state_y, state)


def test_nan_in_one_segment_never_reaches_another(framework):
    ids = np.repeat([[0, 1]], [20, 20], axis=1).astype(np.int32).repeat(2, 0)
    x = {**make("GDN", state=True), "segment_ids": ids}
    y = changed(x, np.s_[:, :20], value=np.nan)
    equal(framework.rule(y, **SMALL)[0], framework.rule(x, **SMALL)[0], np.s_[:, 20:])


@pytest.mark.parametrize("variant", ["GDN", "KDA"])
def test_nan_reaches_no_earlier_chunk(framework, variant):
    x = make(variant, state=True)
    d = cotangents(x)
    y = changed(x, np.s_[:, 20], value=np.nan)
    o, _, _ = framework.both(x, d, **SMALL)
    o_y, state_y, _ = framework.both(y, d, **SMALL)
    equal(o_y, o, np.s_[:, :16])
    assert np.isnan(o_y[:, 20:]).all()
    assert np.isnan(state_y).all()


def test_masked_tokens_may_hold_anything(framework):
    mask = np.random.default_rng(4).uniform(size=(2, 40)) < 0.7
    x = {**make("GDN", state=True), "mask": mask}
    d = cotangents(x)
    d["o"][~mask] = 0
    want = framework.both(x, d, **SMALL)
    for value in (None, np.nan, np.inf):
        y = changed(x, ~mask, value=value)
        o, state, grads = framework.both(y, d, **SMALL)
        np.testing.assert_array_equal(o, want[0])
        np.testing.assert_array_equal(state, want[1])
        for name, a in want[2].items():
            np.testing.assert_array_equal(grads[name], a)


@pytest.mark.parametrize("special", [-0.0, np.inf, np.nan], ids=str)
def test_the_state_of_an_empty_sequence_comes_back_bit_for_bit(framework, special):
    x = {**make("GDN", **PACKED), "cu_seqlens": np.array([0, 0, 20, 40, 40], np.int32)}
    for n in (0, 3):
        x["initial_state"][n, :, :3] = special
    o, state = framework.rule(x, **SMALL)
    assert np.isfinite(o).all()
    assert state[0].tobytes() == x["initial_state"][0].tobytes()
    assert state[3].tobytes() == x["initial_state"][3].tobytes()


def test_the_same_call_gives_the_same_bits(framework):
    x = {**make("GDN", **PACKED), "cu_seqlens": np.array(BOUNDS, np.int32)}
    d = cotangents(x)
    first, second = (framework.both(x, d, **SMALL) for _ in range(2))
    np.testing.assert_array_equal(first[0], second[0])
    for name, a in first[2].items():
        np.testing.assert_array_equal(second[2][name], a)
