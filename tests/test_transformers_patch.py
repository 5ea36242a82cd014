"""Five models of transformers on our call, against transformers' own torch code, in float32.

In a process of their own, in which FLA and Triton are there: transformers before 5.25 then calls their kernels, which
need a GPU.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib import metadata

import pytest

if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
    pytest.skip("transformers is not installed", allow_module_level=True)

START = """
import inspect, sys, warnings
warnings.simplefilter("ignore")
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from portable_gdn.integrations import MODELS, patch_transformers
from portable_gdn.integrations.transformers import _RULES
from portable_gdn.harness.capture import _MODELS
torch.manual_seed(0)
torch.set_num_threads(1)
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}

def build(name):
    kind = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}.get(name, name)
    config = _MODELS[kind].config if kind in _MODELS else {**_MODELS["qwen3_5_text"].config, **MOE}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config)).eval()
    return model, sys.modules[f"transformers.models.{name}.modeling_{name}"]

def torch_path(module, name, work):
    saved = {f: getattr(module, f) for f in _RULES[name]}
    for f, wrapped in saved.items():
        setattr(module, f, inspect.unwrap(wrapped))
    try:
        return work()
    finally:
        for f, wrapped in saved.items():
            setattr(module, f, wrapped)
"""

LOGITS = """
ids = torch.randint(3, 200, (2, 75))
mask = torch.ones_like(ids)
mask[0, :9] = 0
bounds = torch.tensor([0, 20, 21, 75], dtype=torch.int32)
ends = list(zip(bounds.tolist(), bounds.tolist()[1:]))
places = torch.cat([torch.arange(b - a) for a, b in ends])[None]
packing = {
    "cu_seq_lens": {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 54, "max_length_k": 54},
    "seq_idx": {"seq_idx": torch.repeat_interleave(torch.arange(3), bounds.diff())[None].int()},
}

for name in MODELS:
    model, module = build(name)
    fails = False
    try:
        model(ids)
    except RuntimeError as error:
        fails = "0 active drivers" in str(error)

    def cached():
        cache, found = None, []
        for a, b in [(0, 40), (40, 70), *((i, i + 1) for i in range(70, 75))]:
            out = model(ids[:, a:b], use_cache=True, past_key_values=cache)
            cache = out.past_key_values
            found.append(out.logits)
        return torch.cat(found, 1)

    def padded():
        return model(ids, attention_mask=mask).logits[mask.bool()]

    def gradient():
        model.zero_grad()
        model(ids, use_cache=False).logits.square().sum().backward()
        return model.get_input_embeddings().weight.grad.clone()

    def alone():
        return torch.cat([model(ids[:1, a:b], use_cache=False).logits for a, b in ends], 1)

    def packed(**more):
        return lambda: model(ids[:1], position_ids=places, use_cache=False, **more).logits

    works = [("full", lambda: model(ids).logits, None), ("cached", cached, None), ("padded", padded, None)]
    works += [(key, packed(**more), alone) for key, more in packing.items()]
    for what, work, reference in works:
        with torch.no_grad():
            want = torch_path(module, name, reference or work)
            with patch_transformers():
                got = work()
        difference = (got - want).abs().max().item()
        assert difference <= 1e-5 and want.abs().max() > 0.1, (name, what, difference)
    want = torch_path(module, name, gradient)
    with patch_transformers(name):
        got = gradient()
    assert (got - want).norm() <= 1e-4 * want.norm() > 0, (name, got, want)
    print(name, fails)
"""

UNDO = """
_, module = build("kimi_linear")
chunk, step = _RULES["kimi_linear"]
norm = module.KimiLinearRMSNormGated
now = lambda: (getattr(module, chunk), getattr(module, step), module.causal_conv1d_fn, norm.forward)
before = now()
outer = patch_transformers("kimi_linear")
inner = patch_transformers(["kimi_linear"], backend="torch", precision="highest")
assert all(a is not b for a, b in zip(now(), before))
inner.undo()
inner.undo()
outer.undo()
assert now() == before
mine = lambda *a, **k: None
with patch_transformers():
    setattr(module, chunk, mine)
assert getattr(module, chunk) is mine
setattr(module, chunk, before[0])

import portable_gdn as pg
qwen = sys.modules["transformers.models.qwen3_next.modeling_qwen3_next"]
kept = [getattr(qwen, f) for f in _RULES["qwen3_next"]]
delattr(module, step)
try:
    patch_transformers(["qwen3_next", "kimi_linear"])
except pg.GdnError as error:
    print(error)
setattr(module, step, before[1])
assert [getattr(qwen, f) for f in _RULES["qwen3_next"]] == kept
try:
    patch_transformers("bert")
except pg.GdnError as error:
    print(error)
sys.modules["transformers.models.olmo_hybrid"] = None
del sys.modules["transformers.models.olmo_hybrid.modeling_olmo_hybrid"]
try:
    patch_transformers("olmo_hybrid")
except pg.GdnError as error:
    print(error)
"""


def python(code):
    done = subprocess.run([sys.executable, "-c", START + code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_logits_are_those_of_transformers():
    import torch

    fla = all(importlib.util.find_spec(name) is not None for name in ("triton", "fla"))
    older = tuple(map(int, metadata.version("transformers").split(".")[:2])) < (5, 25)  # it calls FLA on a CPU too
    fails = str(fla and older and not torch.cuda.is_available())
    models = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "kimi_linear", "olmo_hybrid")
    assert python(LOGITS) == [f"{name} {fails}" for name in models]


@pytest.mark.slow
def test_a_patch_is_undone_and_what_cannot_be_patched_is_said():
    old, unknown, missing = python(UNDO)
    assert "has no recurrent_kimi_delta_attention in transformers.models.kimi_linear.modeling_kimi_linear" in old
    assert "kimi_linear can be patched in 5.24." in old
    assert unknown == (
        "models is given with 'bert'; it must hold of qwen3_next, qwen3_5, qwen3_5_moe, kimi_linear, olmo_hybrid."
    )
    assert "has no transformers.models.olmo_hybrid.modeling_olmo_hybrid; olmo_hybrid can be patched in 5.24." in missing
