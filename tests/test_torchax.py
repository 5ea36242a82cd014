"""Torch tensors that torchax made of JAX arrays, as on a TPU: by the interpreted kernel and by XLA, on a CPU.

torchax 0.0.13 names operations with named dimensions, which torch 2.13 no longer has; while it is set up they are given
placeholders, which nothing calls.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

if any(importlib.util.find_spec(name) is None for name in ("torch", "jax", "torchax")):
    pytest.skip("torchax is not installed", allow_module_level=True)

CODE = """
import torch
from torch._ops import OpOverloadPacket
found = OpOverloadPacket.__getattr__
def named(self, key):
    try:
        return found(self, key)
    except AttributeError:
        if "imname" in key or "names" in key:
            return f"{self}.{key}"
        raise
OpOverloadPacket.__getattr__ = named
import torchax
environment = torchax.default_env()
OpOverloadPacket.__getattr__ = found

import numpy as np
from torchax.interop import jax_view
import portable_gdn as pg
from portable_gdn import dispatch
from portable_gdn.integrations.torchax import Torchax
dispatch.register_backend(Torchax("torchax-interpret", "pallas-interpret"))
torch.manual_seed(0)

def operands(N=1, T=40, g=()):
    x = {"q": torch.randn(1, T, 1, 16), "k": torch.randn(1, T, 1, 16), "v": torch.randn(1, T, 2, 16)}
    x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
    return x | {"g": -torch.rand(1, T, 2, *g), "beta": torch.rand(1, T, 2), "initial_state": torch.randn(N, 2, 16, 16)}

def both(x, backend, state=True, **more):
    leaves = {name: a.detach().clone().requires_grad_() for name, a in x.items()}
    o, S = pg.gated_delta_rule(**leaves, backend=backend, output_final_state=state, **more)
    assert (S is None) != state
    loss = o.float().square().sum() + (S.sum() if state else 0)
    return [a for a in (o, S) if a is not None] + list(torch.autograd.grad(loss, list(leaves.values())))

def close(x, more, backends, tolerance=2e-6, **options):
    wanted = both(x, "torch", **options, **more)
    for backend in backends:
        with environment:
            given = {name: a.to("jax") for name, a in x.items()}
            got = both(given, backend, **options, **more)
        for a, b in zip(got, wanted, strict=True):
            assert isinstance(a, torchax.tensor.Tensor)
            a, b = np.asarray(jax_view(a.detach()), np.float32), b.detach().float().numpy()
            assert a.shape == b.shape and np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b), (backend, more)

every = ("torchax", "torchax-interpret")
close(operands(), {}, every)
close(operands(), {"qk_l2norm": True}, ("torchax",), state=False)
close(operands(N=3), {"cu_seqlens": [0, 9, 9, 40]}, every)
close(operands(g=(16,)), {}, ("torchax",))
half = {name: a.bfloat16() if name in "qkv" else a for name, a in operands().items()}
close(half, {"precision": "highest"}, ("torchax-interpret",), 1e-2)

x = operands()
with environment:
    given = {name: a.to("jax") for name, a in x.items()}
    told = pg.explain(**given)
    assert told.backend == "torchax" and "  by       xla" in str(told), told
    one = {name: a if name == "initial_state" else a[:, 0] for name, a in given.items()}
    one["state"] = one.pop("initial_state")
    o, S = pg.gated_delta_rule_step(**one)
    assert o.shape == (1, 2, 16) and S.shape == (1, 2, 16, 16) and S.device.type == "jax"
    q = given["q"].requires_grad_()
    try:
        torch.autograd.grad(pg.gated_delta_rule(**given)[0].sum(), q, create_graph=True)
        raise AssertionError
    except pg.GdnError as error:
        assert "second derivative" in str(error)
o, _ = pg.gated_delta_rule(**{name: a.detach() for name, a in given.items()})  # outside of torchax's own block too
assert isinstance(o, torchax.tensor.Tensor)
try:
    pg.gated_delta_rule(**x, backend="torchax")
    raise AssertionError
except pg.GdnError as error:
    assert "these tensors are on cpu, and it takes those that torchax made of JAX arrays" in str(error)
assert "no TPU is here" in dispatch.get("torchax").not_here()
"""


@pytest.mark.slow
def test_results_and_gradients_are_those_of_torch():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_it_names_what_is_missing():
    code = "import sys\nsys.modules['torchax'] = None\nfrom portable_gdn import dispatch\n"
    code += "print(dispatch.get('torchax').unavailable())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "torchax is not installed; `pip install torchax` brings it.", done.stderr
