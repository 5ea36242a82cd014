"""Calls whose tokens are split over devices: the maps of pieces by the oracle, and calls on 8 CPU devices."""

from __future__ import annotations

import numpy as np
import pytest
from mesh_program import run_on_devices

from portable_gdn import door
from portable_gdn.spec import transition
from portable_gdn.spec.operands import at_tokens
from portable_gdn.spec.problem import Options

r = np.random.default_rng(0)
N, T, H, HV, K, V = 2, 12, 1, 2, 4, 5


def _operands(variant):
    unit = lambda a: a / np.linalg.norm(a, axis=-1, keepdims=True)  # noqa: E731
    draw = lambda *s: r.standard_normal(s).astype(np.float32)  # noqa: E731
    x = {"q": draw(N, T, H, K), "k": unit(draw(N, T, H, K)), "v": draw(N, T, HV, V)}
    x["g"] = -np.abs(draw(N, T, HV, *([K] if variant in ("KDA", "GDN-2") else [])))
    if variant == "GDN-2":
        x |= {"erase": r.random((N, T, HV, K)).astype("f4"), "write": r.random((N, T, HV, V)).astype("f4")}
    else:
        x["beta"] = (2 * r.random((N, T, HV))).astype("f4")
    if variant == "resets":
        x["g"][:, 7] = -np.inf
    return x


def _oracle(x, state, cotangents=None):
    problem, oracle = door.normalise({**x, "initial_state": state}, Options(output_final_state=True), "numpy")
    if cotangents is None:
        return door.run(problem, oracle)
    return door.run_with_gradients(problem, oracle, cotangents)[1]


def _map(x):
    state = transition.widened_state(np, np.zeros((N, HV, K, V), np.float32))
    result = _oracle(transition.widened(np, x, K), state)
    return transition.apart(result.state, V), result.o[..., :V], result.o[..., V:]


@pytest.mark.parametrize("variant", ["GDN", "KDA", "GDN-2", "resets"])
def test_pieces_are_affine_maps_of_the_state(variant):
    x = _operands(variant)
    state = r.standard_normal((N, HV, K, V)).astype(np.float32)
    whole = _oracle(x, state)
    pieces = [at_tokens(x, slice(a, b)) for a, b in ((0, 3), (3, 4), (4, 9), (9, T))]
    maps = [_map(piece) for piece in pieces]
    entered, last = transition.entering(np.matmul, [t for t, _, _ in maps], state)
    np.testing.assert_allclose(last, whole.state, atol=2e-6)
    o = [o + np.einsum("bthk,bhkv->bthv", P, S) for (_, o, P), S in zip(maps, entered, strict=True)]
    np.testing.assert_allclose(np.concatenate(o, 1), whole.o, atol=2e-6)
    if variant == "resets":
        assert np.all(maps[2][0].A == 0)
        assert np.all(maps[2][2][:, 3:] == 0)
    # Joined in any grouping the maps are that of the whole, and its transpose takes cotangents back.
    a, b, c, d = (t for t, _, _ in maps)
    join = lambda later, earlier: transition.joined(np.matmul, later, earlier)  # noqa: E731
    for joined in (join(d, join(c, join(b, a))), join(join(d, c), join(b, a))):
        for part, expected in zip(joined, _map(x)[0], strict=True):
            np.testing.assert_allclose(part, expected, atol=2e-6)
    assert np.abs(join(a, join(b, join(c, d))).B - joined.B).max() > 1e-2  # the order matters
    d_state = r.standard_normal(state.shape).astype(np.float32)
    expected = _oracle(x, state, {"o": np.zeros_like(whole.o), "state": d_state})["initial_state"]
    np.testing.assert_allclose(transition.adjoint(np, joined, d_state, np.matmul), expected, atol=2e-6)


@pytest.mark.parametrize("variant", ["GDN", "KDA", "GDN-2", "GLA"])
def test_a_map_is_no_larger_than_its_bound(variant):
    """On random maps with keys of many lengths, and of one token without decay exactly."""
    jnp = pytest.importorskip("jax.numpy")
    from portable_gdn.parallel.maps import log_norm

    k = r.standard_normal((1, T, H, K)) * r.random((1, T, H, 1)) * 1.5
    g = -r.random((1, T, HV, K if variant in ("KDA", "GDN-2") else 1)) / 4
    b = {"GLA": None, "GDN-2": 2 * r.random((1, T, HV, K))}.get(variant, 2 * r.random((1, T, HV, 1)))
    bound = np.asarray(log_norm(*(None if a is None else jnp.asarray(a, jnp.float32) for a in (k, g, b))))
    for head in range(HV):
        A = np.eye(K)
        for t in range(T):
            erase = 0 if b is None else np.outer(k[0, t, 0], b[0, t, head] * k[0, t, 0])
            A = (np.eye(K) - erase) @ np.diag(np.exp(np.broadcast_to(g[0, t, head], K))) @ A
        assert np.linalg.norm(A, 2) <= np.exp(bound[0, head])
        if b is not None:
            one = np.eye(K) - np.outer(k[0, 0, 0], b[0, 0, head] * k[0, 0, 0])
            exact = log_norm(*(jnp.asarray(a[:, :1], jnp.float32) for a in (k, 0 * g, b)))[0, head]
            np.testing.assert_allclose(exact, np.log(np.linalg.norm(one, 2)), atol=1e-5)


#: One case of each kind: of decays, of rows and packed sequences, of forgetting, of the mixer.
FEW = (
    "GDN", "an odd number of states", "no state, uneven", "KDA", "GDN-2", "resets", "packed at borders",
    "forgets in some pieces", "mixer, packed",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("names", [FEW, pytest.param((), marks=pytest.mark.exhaustive)], ids=["few", "all"])
def test_tokens_split_over_devices(names):
    pytest.importorskip("jax")
    found = run_on_devices("tokens_program.py", *names)
    assert found.pop("taken wrongly")["forward"] > 1e-3
    assert len(found) == (len(names) or 22)
    for name, result in found.items():
        assert result["forward"] < 3e-6, (name, result)
        # With beta near 2 and no decay a rounding stays as large to the end: one a token on each of both sides.
        limit = 2 * 64 * 2.0**-23 if name == "DeltaNet, beta near 2" else 6e-6
        if name == "packed, forgets":
            # Decays of a chunk add up to some 300, and a sum G is known to eps |G|: g's gradient on one device is 7e-6
            # from the float64 oracle itself, and so is that of eight.
            limit = 5 * 64 * 2.0**-23
        assert result["gradient"] < limit, (name, result)
    # 2 rows of 4 heads divide by 8 devices: the maps go there and the states back, 8 x 12 and 8 x (8 + 12) numbers a
    # head, and the final states are shared. One row does not: 3 rounds of both parts of the map, and one to the right.
    assert found["GDN"]["collectives"] == {"all-to-all": [160, 96], "all-reduce": [768]}
    odd = found["an odd number of states"]["collectives"]
    assert len(odd["collective-permute"]) == 8
    assert max(odd["collective-permute"]) == 4 * 8 * 12
