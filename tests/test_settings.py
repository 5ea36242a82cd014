"""Self-tests, probes, proofs and kernels under whatever the caller has set for torch, JAX and numpy."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from contextlib import nullcontext

import numpy as np
import pytest

from portable_gdn import dispatch
from portable_gdn.harness.cases import cases_named
from portable_gdn.harness.compute import Settings, build, one
from portable_gdn.harness.environment import environment
from portable_gdn.spec.undisturbed import undisturbed

here = importlib.util.find_spec
TORCH = pytest.mark.skipif(here("torch") is None, reason="torch is not installed")
FLA = pytest.mark.skipif(any(here(name) is None for name in ("torch", "triton", "fla")), reason="FLA is not installed")
JAX = pytest.mark.skipif(here("jax") is None, reason="jax is not installed")

OF_TORCH = """
from contextlib import contextmanager, nullcontext
import warnings
import numpy as np
import torch


@contextmanager
def setting(get, put, value):
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


@contextmanager
def switch(owner, value):
    with setting(lambda: owner.fp32_precision, lambda v: setattr(owner, "fp32_precision", v), value):
        yield


def matmul_precision(value):
    return setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, value)


def default_dtype(value):
    return setting(torch.get_default_dtype, torch.set_default_dtype, value)


SETTINGS = {
    "none": nullcontext,
    "autocast to bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", torch.float16),
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "default device meta": lambda: torch.device("meta"),
    "deterministic": lambda: setting(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "products of float32 in bfloat16": lambda: matmul_precision("medium"),
    "TF32 by its newer name": lambda: switch(torch.backends.cuda.matmul, "tf32"),
    "bfloat16 products on a CPU": lambda: switch(torch.backends.mkldnn.matmul, "bf16"),
    "numpy raises": lambda: np.errstate(all="raise"),
    "warnings are errors": lambda: warnings.catch_warnings(action="error"),
}
"""
NAMES = [line.split('"')[1] for line in OF_TORCH.splitlines() if line.startswith('    "')]


def of_torch(name):
    found = {}
    exec(OF_TORCH, found)
    return found["SETTINGS"][name]()


CALLS = """
import json, os, sys
os.environ["TRITON_INTERPRET"] = "1"
import portable_gdn as pg
from portable_gdn import dispatch, door
from portable_gdn.gpu import interpreter
from portable_gdn.spec.problem import Options

rng = np.random.default_rng(0)
draw = lambda *shape: torch.from_numpy(rng.standard_normal(shape).astype(np.float32))
x = {"q": draw(1, 20, 1, 16), "k": draw(1, 20, 1, 16), "v": draw(1, 20, 1, 16)}
x |= {"g": -draw(1, 20, 1).abs(), "beta": draw(1, 20, 1).sigmoid()}
backend = dispatch.get("fla-interpret")

def digest(a):
    return f"{str(a.dtype)} {a.detach().double().abs().sum().item():.12g}"

found = {}
for name in sys.argv[1:]:
    try:
        with SETTINGS[name]():
            o = pg.gated_delta_rule(**x, qk_l2norm=True, backend="fla-interpret")[0]
            interpreter._test()
            stages = backend.probe(door.normalise(x, Options(qk_l2norm=True), "fla-interpret")[0])
        parts = [digest(a) for stage in stages.values() for a in stage if a is not None]
        found[name] = [digest(o), *parts]
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


def interpreted(*names):
    done = subprocess.run(
        [sys.executable, "-c", OF_TORCH + CALLS, *names], capture_output=True, text=True, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def in_one_process():
    return interpreted(*NAMES)


@FLA
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES[1:])
def test_the_interpreters_self_test_calls_and_probes_under(name, in_one_process):
    assert in_one_process[name] == in_one_process["none"]
    assert in_one_process["none"][0].startswith("torch.float32 ")


@FLA
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["autocast to bfloat16", "default device meta", "default dtype float64", "inference mode", "numpy raises"]
)
def test_a_first_call_under(name):
    found = interpreted(name, "none")
    assert found[name] == found["none"]


@TORCH
@pytest.mark.parametrize("name", NAMES[1:])
def test_a_case_is_computed_as_without(name):
    backend, (case,) = dispatch.get("torch"), cases_named(["one token"])
    plain = one(backend, case.name, build(case), Settings(stages=True))
    with of_torch(name):
        outcome = one(backend, case.name, build(case), Settings(stages=True))
        facts = environment(backend)
    assert outcome.status == "done", outcome.why
    assert set(outcome.tensors) == set(plain.tensors)
    for tensor, a in outcome.tensors.items():
        assert a.dtype == plain.tensors[tensor].dtype
        assert np.array_equal(a, plain.tensors[tensor]), tensor
    json.dumps(facts)


@TORCH
@pytest.mark.parametrize("name", [name for name in NAMES if "bfloat16" in name or "TF32" in name])
def test_torch_rounds_no_product_whatever_is_set(name):
    """Results and gradients, eager, as one operation, and from threads; the caller's setting is as before behind it."""
    import threading

    import torch

    import portable_gdn as pg

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 96, 2, 32) for _ in range(3))
    beta = torch.rand(1, 96, 2)
    found = []

    def compute(call=pg.gated_delta_rule):
        x = q.clone().requires_grad_()
        o, _ = call(x, k, v, None, beta=beta, qk_l2norm=True, backend="torch")
        found.append([o.detach(), *torch.autograd.grad(o.square().sum(), x)])

    compute()
    state = lambda: (torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision)  # noqa: E731
    with of_torch(name):
        before = state()
        compute()
        threads = [threading.Thread(target=compute) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert state() == before
        compute(torch.compile(pg.gated_delta_rule, backend="eager"))
    for o, dq in found[1:6]:
        assert torch.equal(o, found[0][0])
        assert torch.equal(dq, found[0][1])
    # In one compiled operation the backward pass computes the forward pass again, and the norm is torch's own.
    assert all(torch.allclose(a, b, rtol=0, atol=2e-5 * b.abs().max()) for a, b in zip(found[6], found[0], strict=True))


@TORCH
def test_undisturbed_products_are_whole_and_every_setting_is_as_before_behind_it():
    import torch

    state = lambda: (  # noqa: E731
        torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision,
        torch.get_default_dtype(), torch.empty(0).device.type, torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 64, 64)).astype(np.float32)
    for name in NAMES:
        with of_torch(name):
            before = state()
            with undisturbed(products=True):
                product = (torch.from_numpy(a) @ torch.from_numpy(b)).numpy()
                assert state()[2:] == (torch.float32, "cpu", False, True, False, False)
            assert state() == before
        assert np.abs(product - a.astype(np.float64) @ b).max() < 1e-4, name


def of_jax(name):
    import jax

    return {
        "jax_debug_nans": lambda: jax.debug_nans(True),
        "jax_debug_infs": lambda: jax.debug_infs(True),
        "a transfer guard": lambda: jax.transfer_guard("disallow"),
        "leak checking": lambda: jax.check_tracer_leaks(True),
        "strict promotion": lambda: jax.numpy_dtype_promotion("strict"),
        "no promotion of ranks": lambda: jax.numpy_rank_promotion("raise"),
        "a default device": lambda: jax.default_device(jax.devices("cpu")[0]),
        "numpy raises": lambda: np.errstate(all="raise"),
        "jax_enable_x64": lambda: jax.enable_x64(True),
        "matmul precision": lambda: jax.default_matmul_precision("bfloat16"),
        "none": nullcontext,
    }[name]()


OF_JAX = ["jax_debug_infs", "a transfer guard", "numpy raises"]
SLOW = [
    "jax_debug_nans", "leak checking", "strict promotion", "no promotion of ranks", "a default device",
    "jax_enable_x64", "matmul precision",
]  # fmt: skip


@JAX
@pytest.mark.parametrize("backend", ["xla", pytest.param("pallas-interpret", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [*OF_JAX, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_case_with_resets_is_computed_on_jax_as_without(name, backend):
    backend, (case,) = dispatch.get(backend), cases_named(["gates one -inf"])
    plain = one(backend, case.name, build(case), Settings(stages=True))
    with of_jax(name):
        outcome = one(backend, case.name, build(case), Settings(stages=True))
        json.dumps(environment(backend))
    assert outcome.status == "done", outcome.why
    for tensor, a in outcome.tensors.items():
        assert np.array_equal(a, plain.tensors[tensor]), tensor
    for stage, parts in outcome.stages.items():
        for a, b in zip(parts, plain.stages[stage], strict=True):
            assert (a is None and b is None) or np.array_equal(a, b), stage


@JAX
@pytest.mark.slow
@pytest.mark.parametrize(("op", "fused"), [("forward", True), ("forward", False), ("backward", False)])
@pytest.mark.parametrize("variant", ["gdn", "kda"])
def test_kernels_are_lowered_for_a_tpu_under_any_setting(variant, op, fused):
    import jax

    from portable_gdn.harness.tpu_report import Shape, call
    from portable_gdn.tpu.chips import chip_named
    from portable_gdn.tpu.scheduling.lower import lower

    def text(name):
        jax.clear_caches()
        function, args = call(op, variant, Shape(seqlen=256, heads=1, value_heads=2), precision="default", fused=fused)
        with of_jax(name):
            return lower(chip_named("v6e"), function, args).text

    plain = text("none")
    for name in ("matmul precision", "strict promotion", "jax_debug_nans"):
        assert text(name) == plain, name
    assert "tpu_custom_call" in text("jax_enable_x64")  # what lies around the kernels may count in 64 bits
