"""Where two variants are the same rule: outputs and gradients of torch, jax and the interpreted TPU kernels.

Both sides are computed and compared; the gradient of what one side gives more finely is summed to the coarser one.
"""

from __future__ import annotations

import numpy as np
import pytest
from conftest import SMALL, assert_close, cotangents, make, oracle

from portable_gdn import door
from portable_gdn.spec.problem import Options
from portable_gdn.spec.variants import VARIANTS

K, V = 16, 24


def repeat(a, n):
    return np.repeat(a[..., None], n, -1)


def gdn():
    return make(state=True)


def kda_of_gdn():
    x = gdn()
    return {**x, "g": repeat(x["g"], K)}


def kda():
    return make("KDA", state=True)


def gdn2_of_kda():
    x = kda()
    beta = x.pop("beta")
    return {**x, "erase": repeat(beta, K), "write": repeat(beta, V)}


def delta():
    return make("DeltaNet", state=True)


def delta_with_zeros():
    x = delta()
    return {**x, "g": np.zeros(x["beta"].shape, np.float32)}


def grouped():
    return make("tile-grouped", state=True)


def kda_of_grouped():
    x = grouped()
    return {**x, "g": np.repeat(x["g"], K // x["g"].shape[-1], -1)}


def one_group():
    x = gdn()
    return {**x, "g": x["g"][..., None]}


def gla():
    return make("GLA", state=True)


def gdn2_of_gla():
    x = gla()
    shape = x["g"].shape[:-1]
    return {**x, "erase": np.zeros((*shape, K), np.float32), "write": np.ones((*shape, V), np.float32)}


EQUAL = {
    "KDA with equal channels is GDN": (gdn, kda_of_gdn),
    "GDN-2 with b = w = beta is KDA": (kda, gdn2_of_kda),
    "no decay is a decay of 0": (delta, delta_with_zeros),
    "groups are KDA with repeated decays": (grouped, kda_of_grouped),
    "one group is GDN": (gdn, one_group),
    "GLA is erase 0, write 1": (gla, gdn2_of_gla),
}
each = pytest.mark.parametrize(
    ("coarse", "fine"),
    [pytest.param(*pair, id=name, marks=pytest.mark.slow if i else ()) for i, (name, pair) in enumerate(EQUAL.items())],
)


def both_agree(library, coarse, fine, **options):
    """With the oracle, and so with each other."""
    x, y = coarse(), fine()
    d = cotangents(x)
    want = oracle(x, d)
    for operands in (x, y):
        o, state, grads = library.both(operands, d, **options, **SMALL)
        assert_close(o, want.o, want.sizes["o"])
        assert_close(state, want.state, want.sizes["state"])
        for name, exact in want.gradients.items():
            if name == "beta" and "beta" not in grads:
                got = grads["erase"].sum(-1) + grads["write"].sum(-1)
            elif grads[name].shape == exact.shape:
                got = grads[name]
            else:  # channels, or one group, summed to what the other side has
                got = grads[name].reshape(*exact.shape, -1).sum(-1)
            assert_close(got, exact, want.sizes[name], eps=16)


@each
def test_outputs_and_gradients_are_equal(framework, coarse, fine):
    both_agree(framework, coarse, fine)


@each
def test_they_are_equal_on_the_interpreted_tpu_kernels(jax_library, coarse, fine):
    both_agree(jax_library, coarse, fine, backend="pallas-interpret")


def test_as_many_groups_as_channels_are_kda():
    """Not only the same numbers: the same call."""
    x = kda()
    problem, _ = door.normalise(x, Options(), "numpy")
    assert problem.signature.groups == K
    assert problem.signature.variant == VARIANTS["KDA"]
