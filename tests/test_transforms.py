"""The call as a native operation: under JAX's transformations and torch's, and where only one of them is there."""

from __future__ import annotations

import importlib.util
import statistics
import subprocess
import sys
import warnings

import numpy as np
import pytest
from conftest import SMALL, assert_all_close, assert_close, call, make, oracle, slowness

import portable_gdn as pg
from portable_gdn.spec.oracle import Core, token_by_token

NAMES = ("q", "k", "v", "g", "beta", "initial_state")


def loss(o, state):
    """Not linear in the results, so that second derivatives see them."""
    return (o * o).sum() + (state * state).sum()


def rule(*x, **options):
    return call("rule", dict(zip(NAMES, x, strict=False)), output_final_state=True, **SMALL, **options)


def loss_gradients(x):
    """Gradients of ``loss`` in float64, with their summands."""
    e = oracle(x)
    return oracle(x, {"o": 2 * e.o, "state": 2 * e.state})


# JAX -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def jx(jax_library):
    return {name: jax_library.array(a) for name, a in make(state=True).items()}


def test_grad_without_jit_and_within(jx):
    import jax

    want = loss_gradients({name: np.asarray(a) for name, a in jx.items()})
    gradient = jax.grad(lambda x: loss(*rule(*(x[name] for name in NAMES))))
    for function in (gradient, jax.jit(gradient)):
        assert_all_close({name: np.asarray(a) for name, a in function(jx).items()}, want, eps=16)


def test_vmap_is_a_loop(jx):
    import jax
    import jax.numpy as jnp

    many = {name: jnp.stack([a, 0.5 * a, 0.25 * a]) for name, a in jx.items()}
    out = jax.vmap(lambda x: rule(*(x[name] for name in NAMES)))(many)
    for i in range(3):
        want = oracle({name: np.asarray(a[i]) for name, a in many.items()})
        assert_close(out[0][i], want.o, want.sizes["o"])
        assert_close(out[1][i], want.state, want.sizes["state"])
    grads = jax.jit(jax.vmap(jax.grad(lambda x: loss(*rule(*(x[name] for name in NAMES))))))(many)
    for i in range(3):
        assert_all_close(
            {name: np.asarray(a[i]) for name, a in grads.items()},
            loss_gradients({name: np.asarray(a[i]) for name, a in many.items()}),
            eps=16,
        )


def test_vmap_over_some_operands_only(jx):
    import jax
    import jax.numpy as jnp

    q = jnp.stack([jx["q"], 2 * jx["q"]])
    o = jax.vmap(lambda q: rule(q, *(jx[name] for name in NAMES[1:]))[0])(q)
    assert_close(np.asarray(o[1]), 2 * np.asarray(o[0], np.float64))


@pytest.mark.parametrize("remat", [False, True], ids=["kept", "rematerialised"])
def test_scan_over_layers(jx, remat):
    import jax
    import jax.numpy as jnp

    x = {name: a for name, a in jx.items() if name != "initial_state"}
    gains = jnp.array([0.5, 1.5, -1.0], jnp.float32)

    def layer(v, gain):
        return v + gain * pg.gated_delta_rule(**{**x, "v": v}, **SMALL)[0], None

    step = jax.checkpoint(layer) if remat else layer

    @jax.jit
    @jax.value_and_grad
    def scanned(gains):
        return (jax.lax.scan(step, x["v"], gains)[0] ** 2).sum()

    value, grads = scanned(gains)
    host = {name: np.asarray(a) for name, a in x.items()}
    inputs, v = [], host["v"].astype(np.float64)
    for gain in np.asarray(gains, np.float64):
        inputs.append((v, gain, oracle({**host, "v": v.astype(np.float32)}).o))
        v = v + gain * inputs[-1][2]
    assert_close(np.asarray(value), (v**2).sum(), eps=64)  # three layers, each rounding its values
    dv, want = 2 * v, []
    for v, gain, o in inputs[::-1]:
        want.append((dv * o).sum())
        dv = dv + oracle({**host, "v": v.astype(np.float32)}, {"o": gain * dv}).gradients["v"]
    assert_close(np.asarray(grads), np.array(want[::-1]), np.abs(want).sum() + np.zeros(3), eps=64)


def test_boundaries_known_to_the_device_alone_need_one_program(jax_library):
    import jax

    x = make("GDN", B=1)
    traces = []

    @jax.jit
    def function(x, bounds):
        traces.append(bounds)
        return pg.gated_delta_rule(**x, cu_seqlens=bounds, output_final_state=True, **SMALL)

    for bounds in ([0, 7, 7, 40], [0, 0, 33, 40], [0, 40, 40, 40]):
        bounds = np.array(bounds, np.int32)
        o, state = function(jax_library.arrays(x), jax_library.array(bounds))
        want = oracle({**x, "cu_seqlens": bounds})
        assert_close(np.asarray(o), want.o, want.sizes["o"])
        assert_close(np.asarray(state), want.state, want.sizes["state"])
    assert len(traces) == 1


def test_calls_alike_are_traced_once(jax_library, monkeypatch):
    from portable_gdn.backends import xla_chunks

    count = []
    inner = xla_chunks._run
    monkeypatch.setattr(xla_chunks, "_run", lambda *a: (count.append(1), inner(*a))[1])
    for seed in (0, 1, 2):
        jax_library.rule(make(seed=seed, T=39), **SMALL)
    assert len(count) == 1


def test_explain_under_jit(jx):
    import jax

    found = []

    @jax.jit
    def function(x):
        found.append(pg.explain(**x))
        return x["q"]

    function(jx)
    assert found[0].backend == "pallas"
    assert "traced" in str(found[0])
    assert {"torch", "numpy"} <= {name for name, _ in found[0].passed_over}


def test_a_jitted_call_equals_the_eager_one(jx):
    import jax

    eager = rule(*jx.values())
    jitted = jax.jit(lambda x: rule(*(x[name] for name in NAMES)))(jx)
    for a, b in zip(eager, jitted, strict=True):
        assert_close(np.asarray(b), np.asarray(a, np.float64))


@pytest.mark.parametrize("empty", [{"T": 0}, {"B": 0}], ids=str)
def test_calls_without_tokens_under_transformations(jax_library, empty):
    import jax

    x = jax_library.arrays(make(state=True, **empty))
    value, grads = jax.jit(jax.value_and_grad(lambda x: loss(*rule(*(x[name] for name in NAMES)))))(x)
    state = np.asarray(x["initial_state"], np.float64)
    assert_close(np.asarray(value), (state**2).sum())
    np.testing.assert_array_equal(np.asarray(grads["initial_state"]), 2 * np.asarray(x["initial_state"]))
    o, _ = jax.vmap(lambda v: rule(*[v if name == "v" else x[name] for name in NAMES]))(x["v"][None])
    assert o.shape == (1, *x["v"].shape)


def test_forward_mode_is_a_clear_error(jx):
    import jax

    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: rule(q, *(jx[name] for name in NAMES[1:]))[0], (jx["q"],), (jx["q"],))


# Second derivatives --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("curved", [True, False], ids=["curved loss", "linear loss"])
def test_second_derivatives(framework, curved):
    """Along a direction, against differences of the first derivatives, which the oracle gives from float64 operands."""
    x = make("KDA", B=1, T=6, H=1, HV=1, K=4, V=3, state=True)
    rng = np.random.default_rng(5)
    direction = {name: rng.standard_normal(a.shape).astype(np.float32) for name, a in x.items()}
    got = _second_derivatives(framework, x, direction, loss if curved else lambda o, state: o.sum() + state.sum())
    step = 1e-5
    ahead, behind = (
        _first_derivatives(
            {name: a.astype(np.float64) + sign * step * direction[name] for name, a in x.items()}, curved
        )
        for sign in (1, -1)
    )
    for name in NAMES:
        want = (ahead[name] - behind[name]) / (2 * step)
        assert_close(got[name], want, eps=64)  # what twice six tokens of mild gates can amplify


def _second_derivatives(framework, x, direction, loss):
    x, direction = framework.arrays(x), framework.arrays(direction)
    if framework.name == "torch":
        import torch

        leaves = [a.requires_grad_() for a in x.values()]
        grads = torch.autograd.grad(loss(*rule(*(x[name] for name in NAMES))), leaves, create_graph=True)
        slope = sum((d * g).sum() for d, g in zip(direction.values(), grads, strict=True))
        return dict(zip(x, (a.numpy() for a in torch.autograd.grad(slope, leaves)), strict=True))
    import jax

    def slope(x):
        grads = jax.grad(lambda x: loss(*rule(*(x[name] for name in NAMES))))(x)
        return sum((grads[name] * direction[name]).sum() for name in NAMES)

    return jax.jit(jax.grad(slope))(x)


def _first_derivatives(x, curved):
    first = lambda a: np.moveaxis(a, 1, 2)  # noqa: E731  [1, 1, T, D]
    b = first(x["beta"][..., None])
    core = Core(*(first(x[name]) for name in ("q", "k", "v", "g")), b, b, x["initial_state"])
    r = token_by_token(core, x["q"].shape[-1] ** -0.5)
    d = (2 * r.o, 2 * r.S) if curved else (np.ones_like(r.o), np.ones_like(r.S))
    d = token_by_token(core, x["q"].shape[-1] ** -0.5, *d).gradients
    back = dict(zip("qkvg", (np.moveaxis(a, 1, 2) for a in d[:4]), strict=True))
    return {**back, "beta": np.moveaxis(d.b + d.w, 1, 2)[..., 0], "initial_state": d.S}


# torch ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tx(torch_library):
    return {name: torch_library.array(a) for name, a in make(state=True).items()}


def test_backward_fills_grad(tx):
    want = loss_gradients({name: a.numpy() for name, a in tx.items()})
    leaves = {name: a.requires_grad_() for name, a in tx.items()}
    loss(*rule(*leaves.values())).backward()
    assert_all_close({name: a.grad.numpy() for name, a in leaves.items()}, want, eps=16)


@pytest.mark.parametrize("alone", NAMES)
def test_backward_where_one_operand_alone_has_a_gradient(tx, alone):
    want = loss_gradients({name: a.numpy() for name, a in tx.items()})
    leaf = tx[alone].requires_grad_()
    loss(*rule(*tx.values())).backward()
    assert_close(leaf.grad.numpy(), want.gradients[alone], want.sizes[alone], eps=16)
    assert all(a.grad is None for name, a in tx.items() if name != alone)


def test_backward_twice_through_a_retained_graph(tx):
    import torch

    q = tx["q"].requires_grad_()
    o, state = rule(*tx.values())
    (first,) = torch.autograd.grad(loss(o, state), q, retain_graph=True)
    (second,) = torch.autograd.grad(loss(o, state), q)
    np.testing.assert_array_equal(first.numpy(), second.numpy())


def test_backward_from_the_state_alone(tx):
    q, k = tx["q"].requires_grad_(), tx["k"].requires_grad_()
    state = rule(*tx.values())[1]
    (state * state).sum().backward()
    x = {name: a.detach().numpy() for name, a in tx.items()}
    want = oracle(x, {"state": 2 * oracle(x).state})
    assert_close(k.grad.numpy(), want.gradients["k"], want.sizes["k"], eps=16)
    assert q.grad is None or not q.grad.any()


def test_no_graph_without_gradients(tx):
    import torch

    tx["q"].requires_grad_()
    with torch.no_grad():
        assert not rule(*tx.values())[0].requires_grad
    with torch.inference_mode():
        o = rule(*tx.values())[0]
    np.testing.assert_array_equal(o.numpy(), rule(*tx.values())[0].detach().numpy())


def test_an_operand_changed_in_place_before_backward_does_no_harm_in_silence(tx):
    want = loss_gradients({name: a.numpy() for name, a in tx.items()})
    q = tx["q"].clone().requires_grad_()
    k = tx["k"].clone()
    value = loss(*rule(q, k, *(tx[name] for name in NAMES[2:])))
    k.mul_(2)
    try:
        value.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)  # noqa: PT017
    else:
        assert_close(q.grad.numpy(), want.gradients["q"], want.sizes["q"], eps=16)


def test_torch_checkpoint(tx):
    from torch.utils.checkpoint import checkpoint

    want = loss_gradients({name: a.numpy() for name, a in tx.items()})
    leaves = {name: a.requires_grad_() for name, a in tx.items()}
    loss(*checkpoint(rule, *leaves.values(), use_reentrant=False)).backward()
    assert_all_close({name: a.grad.numpy() for name, a in leaves.items()}, want, eps=16)


def test_gradients_that_will_be_differentiated_are_the_same(tx):
    import torch

    leaves = {name: a.requires_grad_() for name, a in tx.items()}
    want = loss_gradients({name: a.detach().numpy() for name, a in tx.items()})
    grads = torch.autograd.grad(loss(*rule(*leaves.values())), list(leaves.values()), create_graph=True)
    assert_all_close({name: a.detach().numpy() for name, a in zip(leaves, grads, strict=True)}, want, eps=16)


def test_torch_func_grad_and_vmap(tx):
    import torch

    want = loss_gradients({name: a.numpy() for name, a in tx.items()})
    grads = torch.func.grad(lambda x: loss(*rule(*(x[name] for name in NAMES))))(tx)
    assert_all_close({name: a.numpy() for name, a in grads.items()}, want, eps=16)
    many = {name: torch.stack([a, 0.5 * a]) for name, a in tx.items()}
    grads = torch.func.vmap(torch.func.grad(lambda x: loss(*rule(*(x[name] for name in NAMES)))))(many)
    for i in range(2):
        want = loss_gradients({name: a[i].numpy() for name, a in many.items()})
        assert_all_close({name: a[i].numpy() for name, a in grads.items()}, want, eps=16)


@pytest.mark.parametrize("T", [0, 1])
def test_torch_func_at_the_edges(torch_library, T):
    import torch

    x = torch_library.arrays(make(T=T, state=True))
    grads = torch.func.grad(lambda x: loss(*rule(*(x[name] for name in NAMES))))(x)
    assert grads["q"].shape == x["q"].shape
    assert bool(grads["initial_state"].any())


def test_torch_func_with_packed_sequences(torch_library):
    import torch

    x = make(B=1)
    bounds = np.array([0, 7, 7, 40])
    want = oracle({**x, "cu_seqlens": bounds})
    o = torch.func.vmap(
        lambda q: rule(q, *map(torch_library.array, list(x.values())[1:]), cu_seqlens=torch_library.array(bounds))[0]
    )(torch_library.array(x["q"])[None])
    assert_close(o[0].numpy(), want.o, want.sizes["o"])


@pytest.mark.parametrize("empty", [{"T": 0}, {"B": 0}], ids=str)
@pytest.mark.parametrize("alone", NAMES)
def test_torch_calls_without_tokens_have_gradients(torch_library, empty, alone):
    x = torch_library.arrays(make(state=True, **empty))
    leaf = x[alone].requires_grad_()
    o, state = rule(*x.values())
    (o.sum() + state.sum()).backward()
    assert leaf.grad is None or leaf.grad.shape == leaf.shape


def test_results_are_not_views_of_the_operands(torch_library):
    for T in (0, 5):
        x = torch_library.arrays(make(T=T, state=True))
        before = x["initial_state"].clone()
        o, state = rule(*x.values())
        state.fill_(9)
        o.fill_(9)
        np.testing.assert_array_equal(x["initial_state"].numpy(), before.numpy())


@pytest.mark.parametrize("fill", [None, "mask", "cu_seqlens", "segment_ids"])
def test_no_warnings(framework, fill):
    x = make(B=1)
    x |= {
        None: {},
        "mask": {"mask": np.ones((1, 40), bool)},
        "cu_seqlens": {"cu_seqlens": np.array([0, 9, 40], np.int32)},
        "segment_ids": {"segment_ids": np.zeros((1, 40), np.int32)},
    }[fill]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        framework.rule(x, **SMALL)


def _compiled(function):
    import torch

    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")  # all of the tracing, none of the C++ compiler


@pytest.mark.parametrize("form", ["plain", "cu_seqlens", "segment_ids", "mask", "step", "mixer"])
def test_torch_compile_of_the_whole_graph(torch_library, form):
    import torch

    x = make(B=1, state=True, N=3 if form == "cu_seqlens" else 1)
    options = {} if form == "step" else {"output_final_state": True, **SMALL}
    kind = form if form in ("step", "mixer") else "rule"
    if form == "step":
        x = {name: a if name == "initial_state" else a[:, 0] for name, a in x.items()}
    if form == "mixer":
        rng = np.random.default_rng(1)
        x = {
            "qkv": rng.standard_normal((1, 40, 160)).astype(np.float32),
            "g": x["g"],
            "beta": x["beta"],
            "conv_weight": rng.standard_normal((160, 4)).astype(np.float32),
        }
        options |= {"num_heads": 2, "key_dim": 16}
    static = {
        "cu_seqlens": {"cu_seqlens": torch.tensor([0, 9, 9, 40])},
        "segment_ids": {"segment_ids": torch.arange(40)[None] // 13},
        "mask": {"mask": torch.arange(40)[None] % 5 != 2},
    }.get(form, {})
    smooth = torch_library.arrays(x)
    compiled = _compiled(lambda x, static: call(kind, {**x, **static}, **options))
    results = []
    for function in (compiled, lambda x, static: call(kind, {**x, **static}, **options)):
        leaves = {name: a.clone().requires_grad_() for name, a in smooth.items()}
        o, state, *_ = function(leaves, static)
        loss(o, state).backward()
        results.append([o.detach(), state.detach(), *(a.grad for a in leaves.values())])
    for a, b in zip(*results, strict=True):
        assert_close(a.numpy(), b.numpy())


def test_torch_compile_takes_other_lengths_and_scales(torch_library):
    import torch

    function = _compiled(lambda x, scale: rule(*x, scale=scale)[0])
    for T, scale in ((40, 0.3), (33, 0.4), (17, 0.5)):
        x = list(torch_library.arrays(make(T=T)).values())
        assert_close(function(x, scale).numpy(), rule(*x, scale=scale)[0].numpy())
    torch._dynamo.reset()


@pytest.mark.parametrize("form", ["list", "numpy"])
def test_torch_compile_with_boundaries_on_the_host(torch_library, form, request):
    x = torch_library.arrays(make(B=1))
    bounds = [0, 9, 40] if form == "list" else np.array([0, 9, 40])
    function = lambda x: pg.gated_delta_rule(**x, cu_seqlens=bounds, **SMALL)[0]  # noqa: E731
    np.testing.assert_array_equal(_compiled(function)(x).numpy(), function(x).numpy())


@pytest.mark.slow
def test_torch_compile_by_inductor(torch_library):
    import torch

    torch._dynamo.reset()
    x = make(state=True)
    want = loss_gradients(x)
    leaves = {name: a.requires_grad_() for name, a in torch_library.arrays(x).items()}
    torch.compile(lambda x: loss(*rule(*x.values())), fullgraph=True)(leaves).backward()
    assert_all_close({name: a.grad.numpy() for name, a in leaves.items()}, want, eps=16)


def test_torch_compile_may_be_the_first_call_of_a_process(torch_library):
    _python("""
import torch
from portable_gdn import gated_delta_rule
f = torch.compile(lambda q: gated_delta_rule(q, q, q)[0], fullgraph=True, backend="eager")
assert f(torch.zeros(1, 3, 1, 4)).shape == (1, 3, 1, 4)
""")


# Processes with one library or none ----------------------------------------------------------------------------------


def _python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_is_quick_and_brings_nothing_large():
    code = """
import sys, time
import numpy
start = time.perf_counter()
import portable_gdn
print(time.perf_counter() - start)
assert not {"torch", "jax", "rich", "typer", "scipy"} & set(sys.modules)
portable_gdn.gated_delta_rule, portable_gdn.GdnError, portable_gdn.ShortConv, portable_gdn.register_backend
assert not {"torch", "jax", "rich", "typer", "scipy"} & set(sys.modules)
"""
    assert statistics.median(float(_python(code)) for _ in range(5)) < 0.3 * slowness()


def test_numpy_arrays_need_neither_torch_nor_jax():
    _python("""
import sys
import numpy as np
import portable_gdn as pg
x = np.ones((1, 3, 1, 4), np.float32)
pg.gated_delta_rule(x, x, x, check_values=True)
assert pg.explain(x, x, x).backend == "numpy"
assert not {"torch", "jax"} & set(sys.modules)
""")


ALONE = """
import sys
sys.modules[{blocked!r}] = None
{imports}
import portable_gdn as pg
x = ones((1, 3, 1, 4))
o, state = pg.gated_delta_rule(x, x, x, output_final_state=True, check_values=True)
assert type(o) is type(state) is type(x)
pg.gated_delta_rule_step(x[:, 0], x[:, 0], x[:, 0])
found = pg.explain(x, x, x)
assert found.backend == {backend!r}, found
print(found)
"""


def test_jax_where_torch_is_blocked(jax_library):
    out = _python(ALONE.format(blocked="torch", imports="from jax.numpy import ones", backend="xla"))
    assert "not torch" in out


def test_torch_where_jax_is_blocked(torch_library):
    out = _python(ALONE.format(blocked="jax", imports="from torch import ones", backend="torch"))
    assert "not xla" in out


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed")
def test_jax_devices_do_not_mix():
    _python("""
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, portable_gdn as pg
a, b = (jax.device_put(jax.numpy.ones((1, 3, 1, 4)), d) for d in jax.devices())
o = pg.gated_delta_rule(b, b, b)[0]
assert o.devices() == b.devices()
try:
    pg.gated_delta_rule(a, b, a)
except pg.GdnError as error:
    assert str(error).startswith("k is on "), error
else:
    raise SystemExit("no error")
""")
