"""Torch tensors that torchax made of JAX arrays, as on a TPU: by the interpreted kernel and by XLA, on a CPU; and whole
models of transformers as JAX programs."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

if any(importlib.util.find_spec(name) is None for name in ("torch", "jax", "torchax")):
    pytest.skip("torchax is not installed", allow_module_level=True)

PAGE = Path(__file__).parents[1] / "docs" / "torchax.md"

CODE = """
import torch
from portable_gdn.integrations import patch_torchax
patch_torchax()
import torchax
environment = torchax.default_env()

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
    with pg.watch() as calls:
        pg.gated_delta_rule(**given)
        torchax.interop.jax_jit(lambda x: pg.gated_delta_rule(**x)[0])(given)
    assert [c.backend for c in calls] == ["torchax", "torchax"] and calls[0].by.startswith("xla")
    assert calls[1].by.startswith("pallas if compiled for a TPU, xla elsewhere: plain kernel")
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


MODELS = """
import os, sys, warnings
from portable_gdn.tpu.scheduling.compile import compile_for, environment
environment(os.environ)
sys.modules["fla"] = None
warnings.simplefilter("ignore")
import jax, numpy as np, torch
import portable_gdn as pg
from portable_gdn.integrations import patch_torchax, patch_transformers
mended, patched = patch_torchax(), patch_transformers()
import torchax
import transformers
from torchax.interop import jax_view
from portable_gdn.tpu.chips import chip_named
transformers.logging.set_verbosity_error()

def made(kind, dim, **more):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, linear_key_head_dim=dim, linear_value_head_dim=dim, linear_num_key_heads=2,
        linear_num_value_heads=4, layer_types=["linear_attention", "full_attention"], **more)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, 0.0, 0.1) if p.ndim > 1 else None
    return model

def close(got, want, tolerance):
    got, want = np.asarray(got, np.float64), want.detach().double().numpy()
    assert np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want) > 0, np.linalg.norm(got - want)

experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
model = made("qwen3_next", 16, shared_expert_intermediate_size=32, **experts)
model.save_pretrained("my-model")
ids = torch.randint(0, 128, (2, 20))
names = {}
exec(sys.argv[2], names)
weights, forward = names["weights"], names["forward"]
close(names["logits"], model(torch.tensor([[11, 12, 13, 14]])).logits, 2e-6)

def pieces(weights, ids):
    first = forward(weights, (ids[:, :19],), {"use_cache": True})
    later = forward(weights, (ids[:, 19:],), {"use_cache": True, "past_key_values": first.past_key_values})
    return jax.numpy.concatenate([first.logits, later.logits], 1)

with pg.watch() as calls:
    found = jax.jit(pieces)(weights, ids.numpy())
want = model(ids, use_cache=False).logits
close(found, want, 2e-6)
assert [c.signature.T for c in calls] == [19, 1], calls
assert calls[0].by.startswith("pallas if compiled for a TPU, xla elsewhere"), calls
want.square().sum().backward()
slopes = jax.jit(jax.grad(lambda weights, ids: (forward(weights, (ids,), {"use_cache": False}).logits ** 2).sum()))
trained = {name: p.grad for name, p in model.named_parameters()}
found = slopes({name: weights[name] for name in weights}, ids.numpy())
for name, slope in trained.items():
    close(found[name], slope, 1e-4)

a, b, offs = torch.randn(6, 8), torch.randn(3, 8, 4), torch.tensor([1, 1, 6], dtype=torch.int32)
want = [torch._grouped_mm(a, b, offs=offs), torch._grouped_mm(a.T, a, offs=offs)]
with torchax.default_env():
    x, y, ends = a.to("jax"), b.to("jax"), offs.to("jax")
    for got, one in zip([torch._grouped_mm(x, y, offs=ends), torch._grouped_mm(x.T, x, offs=ends)], want):
        close(jax_view(got), one, 1e-6)
    try:
        torch._grouped_mm(y, y.transpose(1, 2))
        raise AssertionError
    except pg.GdnError as error:
        assert "a grouped product is of shapes [3, 8, 4] and [3, 4, 8]; it must be of rows" in str(error), error
    kept = torch.zeros(6, 4, device="jax")
    kept.copy_(x[:, 2:6])
    close(jax_view(kept), a[:, 2:6], 1e-9)
    mended.undo()
    try:
        torch._grouped_mm(x, y, offs=ends)
        raise AssertionError
    except Exception as error:
        assert "no lowering" in str(error), error

if sys.argv[1] == "compile":
    model = made("qwen3_5_text", 128).bfloat16()
    weights, forward = torchax.extract_jax(model)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), weights)
    run = lambda weights, ids: forward(weights, (ids,), {"use_cache": False}).logits
    text = compile_for(chip_named("v5e"), run, shapes, jax.ShapeDtypeStruct((1, 256), "int32")).as_text()
    assert "gated_delta_rule_forward" in text
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_whole_models_of_transformers_are_jax_programs(tmp_path):
    """The block of docs/torchax.md; a mixture's logits, token by token too, its gradients, and a dense model compiled
    for a TPU with the kernel."""
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    compiles = "compile" if importlib.util.find_spec("libtpu") is not None else "no"
    command = [sys.executable, "-c", MODELS, compiles, block]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_other_releases_are_refused(monkeypatch):
    from portable_gdn.integrations import patch_torchax, torchax_patch
    from portable_gdn.spec.errors import GdnError

    for changed, here in (("torch", "2.14.0"), ("torchax", "0.0.14.dev1"), ("torch", "2.130.0")):
        releases = {"torch": "2.13.0+cpu", "torchax": "0.0.13", changed: here}
        monkeypatch.setattr(torchax_patch.metadata, "version", releases.get)
        with pytest.raises(GdnError) as caught:
            patch_torchax()
        assert str(caught.value) == (
            f"torchax {releases['torchax']} with torch {releases['torch']} is installed; patch_torchax mends "
            f"torchax 0.0.13 with torch 2.13, and these must be installed."
        )
    monkeypatch.setattr(torchax_patch.importlib.util, "find_spec", lambda name: None if name == "torchax" else name)
    with pytest.raises(GdnError, match="torchax is not installed; `pip install torchax` brings it"):
        patch_torchax()


def test_it_names_what_is_missing():
    code = "import sys\nsys.modules['torchax'] = None\nfrom portable_gdn import dispatch\n"
    code += "print(dispatch.get('torchax').unavailable())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "torchax is not installed; `pip install torchax` brings it.", done.stderr
