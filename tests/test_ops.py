"""FLA's names on our call: the same signatures, the same numbers, and refusals where FLA says nothing.

FLA is imported in a process of its own: it imports Triton, and patches what it finds.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import assert_close, make, oracle

import portable_gdn as pg
from portable_gdn import ops

OPS = {
    "chunk_gated_delta_rule": "GDN",
    "fused_recurrent_gated_delta_rule": "GDN",
    "chunk_kda": "KDA",
    "fused_recurrent_kda": "KDA",
    "chunk_gdn2": "GDN-2",
    "fused_recurrent_gdn2": "GDN-2",
    "chunk_delta_rule": "DeltaNet",
    "fused_recurrent_delta_rule": "DeltaNet",
}


def there(*names):
    return all(importlib.util.find_spec(name) is not None for name in names)


FLA = pytest.mark.skipif(not there("torch", "triton", "fla"), reason="FLA is not installed")
TORCH = pytest.mark.skipif(not there("torch"), reason="torch is not installed")
JAX = pytest.mark.skipif(not there("jax"), reason="jax is not installed")


def operands(op, **options):
    """By FLA's names."""
    x = make(OPS[op], **{"B": 1, "T": 20, **options})
    return {{"erase": "b", "write": "w"}.get(name, name): a for name, a in x.items()}


def truth(x, **options):
    return oracle({{"b": "erase", "w": "write"}.get(name, name): a for name, a in x.items()}, **options)


def run(library, op, x, **more):
    """o and the state as numpy; arrays among the options are converted too."""
    y = {name: library.array(a) if isinstance(a, np.ndarray) else a for name, a in {**x, **more}.items()}
    o, state = getattr(ops, op)(**y)
    return library.numpy(o), library.numpy(state)


def process(program, *arguments):
    done = subprocess.run([sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


# What FLA says -----------------------------------------------------------------------------------------------------

ASK_FLA = """
import inspect, json, sys, warnings
warnings.filterwarnings("ignore")
import numpy as np, torch
import fla.ops.delta_rule, fla.ops.gated_delta_rule, fla.ops.gdn2, fla.ops.kda
from fla.ops.delta_rule.naive import delta_rule_recurrence
from fla.ops.gated_delta_rule.gate import naive_gdn_gate
from fla.ops.kda.gate import naive_kda_gate, naive_kda_lowerbound_gate
from fla.ops.kda.naive import naive_recurrent_kda

found = {}
for module in (fla.ops.delta_rule, fla.ops.gated_delta_rule, fla.ops.gdn2, fla.ops.kda):
    for name, function in vars(module).items():
        if name.startswith(("chunk_", "fused_recurrent_")) and callable(function):
            parameters = inspect.signature(inspect.unwrap(function)).parameters.values()
            found[name] = [(p.name, p.kind.name, repr(p.default)) for p in parameters]

x = {name: torch.from_numpy(a) for name, a in np.load(sys.argv[1]).items()}
q, k, v, S = x["q"], x["k"], x["v"], x["initial_state"]
say = {}
more = {"initial_state": S, "output_final_state": True}
say["GDN"] = fla.ops.gated_delta_rule.naive_recurrent_gated_delta_rule(q, k, v, x["beta"], x["g"], **more)
say["KDA"] = naive_recurrent_kda(q, k, v, x["gk"], x["beta"], **more)
say["GDN-2"] = fla.ops.gdn2.naive_recurrent_gdn2(q, k, v, x["gk"], x["b"], x["w"], **more)
o, state = delta_rule_recurrence(*(a.transpose(1, 2) for a in (q, k, v, x["beta"])), initial_state=S)
say["DeltaNet"] = o.transpose(1, 2), state
g = naive_gdn_gate(x["raw"][..., 0], x["A_log"], x["dt_bias"][:4])
say["gate GDN"] = fla.ops.gated_delta_rule.naive_recurrent_gated_delta_rule(q, k, v, x["beta"], g, **more)
for name, g in {
    "gate KDA": naive_kda_gate(x["raw"], x["A_log"], x["dt_bias"]),
    "bounded KDA": naive_kda_lowerbound_gate(x["raw"], x["A_log"], x["dt_bias"], -3.0),
    "bounded alone": naive_kda_lowerbound_gate(x["raw"], None, None, -3.0),
}.items():
    say[name] = naive_recurrent_kda(q, k, v, g, 2 * x["beta"].sigmoid(), **more)
arrays = {f"{name}/{part}": a.numpy() for name, pair in say.items() for part, a in zip(("o", "state"), pair)}
np.savez(sys.argv[2], **arrays)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def fla(tmp_path_factory):
    """(FLA's signatures, the operands of its pure-torch references, their results)."""
    folder = tmp_path_factory.mktemp("fla")
    sizes = {"B": 2, "T": 33, "H": 4, "HV": 4}  # none of FLA's references but KDA's takes H < HV
    rng = np.random.default_rng(0)
    two = make("GDN-2", **sizes)
    x = {**make("GDN", state=True, **sizes), "gk": two["g"], "b": two["erase"], "w": two["write"]}
    x["raw"] = rng.standard_normal(x["gk"].shape).astype(np.float32)
    x["A_log"] = rng.uniform(0, 2, 4).astype(np.float32)
    x["dt_bias"] = rng.standard_normal(64).astype(np.float32)
    np.savez(folder / "in.npz", **x)
    found = process(ASK_FLA, folder / "in.npz", folder / "out.npz").splitlines()[-1]
    return json.loads(found), x, dict(np.load(folder / "out.npz"))


@FLA
def test_signatures_are_those_of_fla(fla):
    for name in ops.__all__:
        parameters = inspect.signature(getattr(ops, name)).parameters.values()
        assert [[p.name, p.kind.name, repr(p.default)] for p in parameters] == fla[0][name], name


def test_every_operation_is_tested():
    assert {getattr(ops, name).__name__ for name in ops.__all__} == set(OPS)
    assert ops.chunk_gdn is ops.chunk_gated_delta_rule
    assert ops.fused_recurrent_gdn is ops.fused_recurrent_gated_delta_rule


@FLA
@pytest.mark.parametrize("op", OPS)
def test_numbers_are_those_of_flas_reference(library, fla, op):
    _, x, say = fla
    variant = OPS[op]
    names = {"GDN": ("g", "beta"), "KDA": ("beta",), "GDN-2": ("b", "w"), "DeltaNet": ("beta",)}[variant]
    y = {name: x[name] for name in ("q", "k", "v", *names, "initial_state")}
    if variant in ("KDA", "GDN-2"):
        y["g"] = x["gk"]
    o, state = run(library, op, y, output_final_state=True)
    assert_close(o, say[f"{variant}/o"], eps=32)
    assert_close(state, say[f"{variant}/state"], eps=32)


@FLA
@pytest.mark.parametrize("op", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
def test_gates_are_those_of_flas_reference(library, fla, op):
    _, x, say = fla
    y = {name: x[name] for name in ("q", "k", "v", "beta", "initial_state", "A_log")}
    y |= {"g": x["raw"][..., 0], "dt_bias": x["dt_bias"][:4]}
    o, state = run(library, op, y, output_final_state=True, use_gate_in_kernel=True)
    assert_close(o, say["gate GDN/o"], eps=64)
    assert_close(state, say["gate GDN/state"], eps=64)


@FLA
@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda"])
@pytest.mark.parametrize("gate", ["gate KDA", "bounded KDA", "bounded alone"])
def test_gates_of_kda_are_those_of_flas_reference(library, fla, op, gate):
    """With beta activated on the way."""
    _, x, say = fla
    y = {name: x[name] for name in ("q", "k", "v", "beta", "initial_state")} | {"g": x["raw"]}
    if gate != "bounded alone":
        y |= {"A_log": x["A_log"].reshape(1, 1, 4, 1), "dt_bias": x["dt_bias"]}
    bound = None if gate == "gate KDA" else -3.0
    more = dict.fromkeys(
        ("output_final_state", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval"), True
    )
    for safe in {False, op == "chunk_kda" and bound is not None}:  # which changes nothing
        o, state = run(library, op, y, lower_bound=bound, **more, **({"safe_gate": True} if safe else {}))
        assert_close(o, say[f"{gate}/o"], eps=128)
        assert_close(state, say[f"{gate}/state"], eps=128)


def test_parameters_of_the_gate_of_kda_in_each_shape_there_is(library):
    """A_log [HV], or [1, 1, HV, 1] as checkpoints have it; dt_bias [HV * K] or [HV, K]: the same to the bit."""
    x = operands("chunk_kda", T=5)
    A, bias = np.linspace(0, 1, 4, dtype=np.float32), np.linspace(-1, 1, 64, dtype=np.float32)
    found = [
        run(library, "chunk_kda", {**x, "A_log": A.reshape(a), "dt_bias": bias.reshape(b)}, use_gate_in_kernel=True)[0]
        for a in ((4,), (1, 1, 4, 1))
        for b in ((64,), (4, 16))
    ]
    for o in found[1:]:
        np.testing.assert_array_equal(o, found[0])


# Against the oracle ------------------------------------------------------------------------------------------------


def everything(op):
    """Every option of an operation that is no gate."""
    more = {"scale": 0.5, "use_qk_l2norm_in_kernel": True, "output_final_state": True}
    return more if OPS[op] == "DeltaNet" else {**more, "state_v_first": True}


def turned(op, S):
    """States as ``everything`` has them, and back."""
    return S if OPS[op] == "DeltaNet" else np.ascontiguousarray(np.swapaxes(S, -1, -2))


@pytest.mark.parametrize("op", OPS)
def test_numbers_are_those_of_the_oracle(library, op):
    """With grouped value heads."""
    x = operands(op, state=True)
    want = truth(x, scale=0.5, qk_l2norm=True)
    y = {**x, "initial_state": turned(op, x["initial_state"])}
    o, state = run(library, op, y, **everything(op))
    assert_close(o, want.o, want.sizes["o"], eps=16)
    assert_close(turned(op, state), want.state, want.sizes["state"], eps=16)
    assert run(library, op, operands(op))[1] is None


@pytest.mark.parametrize("op", OPS)
@pytest.mark.skipif(not there("torch", "jax"), reason="needs both libraries")
def test_both_libraries_give_the_same_numbers(torch_library, jax_library, op):
    x = operands(op, state=True)
    x["initial_state"] = turned(op, x["initial_state"])
    ours, theirs = (run(library, op, x, **everything(op)) for library in (torch_library, jax_library))
    assert_close(ours[0], theirs[0], eps=32)
    assert_close(ours[1], theirs[1], eps=32)


@pytest.mark.parametrize("op", OPS)
def test_dtypes_and_lengths_of_what_is_returned(library, op):
    x = operands(op, dtype="bfloat16", state=True)
    x["initial_state"] = x["initial_state"].astype(x["q"].dtype)  # widened, as by FLA
    want = truth({**x, "initial_state": x["initial_state"].astype(np.float32)})
    o, state = run(library, op, x, output_final_state=True)
    assert o.shape == x["v"].shape
    assert str(o.dtype) == "bfloat16"
    assert str(state.dtype) == "float32"
    assert_close(state, want.state, eps=0.02 / np.finfo(np.float32).eps)


@pytest.mark.parametrize("op", OPS)
def test_packed_sequences_and_their_copies(library, op):
    x = operands(op, T=20, state=True, N=3)
    bounds = np.array([0, 7, 7, 20])
    copies = [
        name for name in ("cu_seqlens_cpu", "chunk_indices") if name in inspect.signature(getattr(ops, op)).parameters
    ]
    o, state = run(library, op, x, output_final_state=True, cu_seqlens=bounds, **dict.fromkeys(copies, bounds))
    want = truth({**x, "cu_seqlens": bounds})
    assert_close(o, want.o, want.sizes["o"], eps=16)
    assert_close(state, want.state, want.sizes["state"], eps=16)
    for name in copies:
        with pytest.raises(pg.GdnError, match=f"{name} is given without cu_seqlens"):
            run(library, op, operands(op), **{name: bounds})


@pytest.mark.parametrize("op", [op for op in OPS if OPS[op] != "DeltaNet"])
def test_the_old_name_of_state_v_first(library, op):
    x = operands(op, state=True)
    x["initial_state"] = turned(op, x["initial_state"])
    want = run(library, op, x, **everything(op))
    more = everything(op)
    del more["state_v_first"]
    with pytest.warns(DeprecationWarning, match="transpose_state_layout") as said:
        got = run(library, op, x, transpose_state_layout=True, **more)
    assert said[0].filename == __file__
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(pg.GdnError, match="it looks like state_v_first=True"):
        run(library, op, x)


@pytest.mark.parametrize("op", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "chunk_kda"])
@pytest.mark.parametrize("negative", [False, True])
def test_beta_in_the_kernel_is_activated_in_float32(library, op, negative):
    x = operands(op)
    raw = 30 * np.random.default_rng(0).standard_normal(x["beta"].shape)
    raw[0, 0] = [-1e4, 1e4, 0, -0.0]
    for dtype in (np.float32, np.float16):
        x["beta"] = raw.astype(dtype)
        with np.errstate(over="ignore"):
            beta = (1 + negative) / (1 + np.exp(-x["beta"].astype(np.float64)))
        want = truth({**x, "beta": beta.astype(np.float32)})
        o, _ = run(library, op, x, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=negative)
        assert_close(o, want.o, want.sizes["o"], eps=16)


@pytest.mark.parametrize("op", ["fused_recurrent_gated_delta_rule", "fused_recurrent_delta_rule"])
def test_no_beta_is_one(library, op):
    x = operands(op)
    ones = run(library, op, {**x, "beta": np.ones_like(x["beta"])})[0]
    del x["beta"]
    np.testing.assert_array_equal(run(library, op, x)[0], ones)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_decays_by_head_and_channel_add_up_in_float32(library, dtype):
    x = make("KDA", B=1, T=20)
    x["g"] = x["g"].astype(dtype)
    head = -np.random.default_rng(0).uniform(0, 1, (1, 20, 4)).astype(dtype)
    op = "fused_recurrent_gated_delta_rule"
    for g in (head, None):
        both = x["g"].astype(np.float32) + (0 if g is None else g[..., None].astype(np.float32))
        want = oracle({**x, "g": both})
        assert_close(run(library, op, {**x, "g": g, "gk": x["g"]})[0], want.o, want.sizes["o"])
    x.pop("g")
    np.testing.assert_array_equal(run(library, op, x)[0], run(library, "fused_recurrent_delta_rule", x)[0])


# Gradients and tracing ---------------------------------------------------------------------------------------------


def activated(op):
    """Options that make an operation do all it can before the rule."""
    if OPS[op] == "DeltaNet":
        return {}
    more = {"use_gate_in_kernel": True, "state_v_first": True}
    return more if OPS[op] == "GDN-2" else {**more, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}


def leaves(op):
    x = operands(op)
    if OPS[op] != "DeltaNet":
        x["A_log"] = np.linspace(0, 1, 4, dtype=np.float32)
        x["dt_bias"] = np.linspace(-1, 1, x["g"][0, 0].size, dtype=np.float32)
    return x


@TORCH
@pytest.mark.parametrize("op", OPS)
def test_torch_compiles_the_whole_graph_and_gradients_flow(torch_library, op):
    import torch

    x = {name: torch_library.array(a).requires_grad_() for name, a in leaves(op).items()}
    function = lambda **y: getattr(ops, op)(**y, **activated(op))[0]  # noqa: E731
    plain = torch.autograd.grad(function(**x).square().sum(), list(x.values()))
    assert all(bool(a.abs().sum() > 0) for a in plain)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    traced = torch.autograd.grad(compiled(**x).square().sum(), list(x.values()))
    for a, b in zip(traced, plain, strict=True):
        torch.testing.assert_close(a, b)


@JAX
@pytest.mark.parametrize("op", ["chunk_gated_delta_rule", "fused_recurrent_kda", "chunk_gdn2", "chunk_delta_rule"])
def test_jax_traces_and_gradients_flow(jax_library, op):
    import jax

    x = jax_library.arrays(leaves(op))
    loss = lambda y: (getattr(ops, op)(**y, **activated(op))[0] ** 2).sum()  # noqa: E731
    value, gradients = jax.jit(jax.value_and_grad(loss))(x)
    np.testing.assert_allclose(value, loss(x), rtol=1e-5)
    assert all(abs(a).sum() > 0 for a in gradients.values())


@JAX
def test_no_beta_under_jit(jax_library):
    import jax

    x = jax_library.arrays(operands("fused_recurrent_delta_rule"))
    del x["beta"]
    call = lambda y: ops.fused_recurrent_delta_rule(**y)[0]  # noqa: E731
    np.testing.assert_allclose(jax.jit(call)(x), call(x), rtol=1e-5, atol=1e-6)


# Refusals ----------------------------------------------------------------------------------------------------------

GDN, KDA, GDN2 = "chunk_gated_delta_rule", "chunk_kda", "chunk_gdn2"
STEP = "fused_recurrent_gated_delta_rule"
HEADS = np.zeros(4, np.float32)
CHANNELS = np.zeros((1, 20, 4, 16), np.float32)


@pytest.mark.parametrize("op", [op for op in OPS if op != "fused_recurrent_delta_rule"])
def test_unknown_keywords_are_refused(library, op):
    with pytest.raises(pg.GdnError, match=f"{op}; did you mean 'use_qk_l2norm_in_kernel'?"):
        run(library, op, operands(op), use_qk_l2norm=True)
    with pytest.raises(pg.GdnError, match=f"zzz is no keyword of {op}; its keywords are q, k, v, .*head_first"):
        run(library, op, operands(op), zzz=True)
    assert run(library, op, operands(op), head_first=False)[1] is None
    with pytest.raises(pg.GdnError, match=r"head_first is True; it must be False"):
        run(library, op, operands(op), head_first=True)


@pytest.mark.parametrize("op", OPS)
def test_operands_that_fla_needs_may_not_be_none(library, op):
    x = operands(op)
    for name in x:
        parameter = inspect.signature(getattr(ops, op)).parameters[name]
        if parameter.default is parameter.empty:
            with pytest.raises(pg.GdnError, match=f"^{name} is (None|a builtins.NoneType); it must be a"):
                run(library, op, {**x, name: None})


@pytest.mark.parametrize(
    ("op", "more", "words"),
    [
        (
            GDN,
            {"cp_context": object()},
            "cp_context is a object; it must be None or what fla.ops.cp.build_cp_context returns",
        ),
        (GDN, {"A_log": HEADS}, "A_log is given without use_gate_in_kernel"),
        (GDN, {"dt_bias": HEADS}, "dt_bias is given without use_gate_in_kernel"),
        (GDN, {"use_gate_in_kernel": True}, "A_log is None"),
        (GDN, {"use_gate_in_kernel": True, "A_log": HEADS[:2]}, "A_log is of shape [2]; it must have shape [HV]"),
        (GDN, {"use_gate_in_kernel": True, "A_log": HEADS, "dt_bias": HEADS[:2]}, "dt_bias is of shape [2]"),
        (GDN, {"allow_neg_eigval": True}, "allow_neg_eigval is True without"),
        (GDN, {"chunk_size": 48}, "chunk_size is 48"),
        (GDN, {"g": CHANNELS}, "g is of shape [1, 20, 4, 16]; it must have shape [B, T, HV]."),
        (GDN, {"beta": CHANNELS}, "beta is of shape [1, 20, 4, 16]; it must have shape [B, T, HV]."),
        (GDN, {"g": [0.0]}, "g is a builtins.list"),
        (GDN, {"beta": [0.0], "use_beta_sigmoid_in_kernel": True}, "beta is a builtins.list"),
        (GDN, {"q": [0.0]}, "q is a builtins.list"),
        (GDN, {"use_qk_l2norm_in_kernel": 1}, "use_qk_l2norm_in_kernel is 1; it must be True or False"),
        (GDN, {"initial_state": np.zeros((1, 4, 16, 24), np.int32)}, "initial_state is of dtype int32"),
        (STEP, {"gv": np.zeros((1, 20, 4, 24), np.float32)}, "gv is given"),
        (STEP, {"gk": CHANNELS[..., 0]}, "gk is of shape [1, 20, 4]; it must have shape [B, T, HV, K]; beta is not"),
        (STEP, {"gk": CHANNELS, "use_gate_in_kernel": True, "A_log": HEADS}, "gk is given with use_gate_in_kernel"),
        (STEP, {"gk": CHANNELS, "g": [0.0]}, "g is a builtins.list"),
        (STEP, {"g": None, "use_gate_in_kernel": True, "A_log": HEADS}, "g is None; it must be the raw projection"),
        (STEP, {"beta": None, "use_beta_sigmoid_in_kernel": True}, "beta is None"),
        (STEP, {"beta": None, "v": [0.0], "g": None}, "v is a builtins.list"),
        (KDA, {"g": CHANNELS[..., 0]}, "g is of shape [1, 20, 4]; it must have shape [B, T, HV, K]."),
        (KDA, {"g": CHANNELS[..., :2]}, "g is of shape [1, 20, 4, 2]; it must have shape [B, T, HV, K]."),
        (KDA, {"use_graph": True}, "use_graph is True"),
        (KDA, {"return_intermediate_states": True}, "return_intermediate_states is True"),
        (KDA, {"cp_context": object()}, "cp_context is a object"),
        (KDA, {"state_v_first": True, "transpose_state_layout": False}, "transpose_state_layout is False"),
        (KDA, {"use_gate_in_kernel": True}, "A_log is None"),
        (KDA, {"use_gate_in_kernel": True, "A_log": HEADS, "safe_gate": True}, "lower_bound is None"),
        (KDA, {"use_gate_in_kernel": True, "lower_bound": -6.0}, "lower_bound is -6.0; it must lie in [-5, 0)"),
        ("fused_recurrent_kda", {"use_gate_in_kernel": True}, "A_log is None"),
        ("fused_recurrent_kda", {"A_log": HEADS}, "A_log is given without use_gate_in_kernel"),
        (GDN2, {"b": CHANNELS[..., 0]}, "b is of shape [1, 20, 4]; it must have shape [B, T, HV, K]"),
        (GDN2, {"b": CHANNELS[:, :, :2]}, "b is of shape [1, 20, 2, 16]"),
        (GDN2, {"w": CHANNELS}, "w is of shape [1, 20, 4, 16]; it must have shape [B, T, HV, V]"),
        (GDN2, {"b": CHANNELS.astype(np.int32)}, "b is of dtype int32"),
        (GDN2, {"return_intermediate_states": True}, "return_intermediate_states is True"),
        (GDN2, {"cp_context": object()}, "cp_context is a object"),
        ("chunk_delta_rule", {"beta": CHANNELS}, "beta is of shape [1, 20, 4, 16]"),
    ],
)
def test_what_is_not_offered_or_wrong_is_refused(library, op, more, words):
    with pytest.raises(pg.GdnError, match="^" + re.escape(words)):
        run(library, op, {**operands(op), **more})


def test_what_changes_no_numbers_is_taken(library):
    x = operands(KDA)
    more = {"safe_gate": True, "lower_bound": -5.0, "disable_recompute": True, "max_num_seqs": 3, "chunk_size": 64}
    np.testing.assert_allclose(run(library, KDA, x, **more)[0], run(library, KDA, x)[0], atol=1e-6)


def test_gates_of_key_heads_are_refused(library):
    """FLA reads beyond the end of them."""
    x = operands(GDN)
    for name in ("g", "beta"):
        with pytest.raises(pg.GdnError, match=f"^{name} is of shape"):
            run(library, GDN, {**x, name: x[name][..., :2]})


# The page ----------------------------------------------------------------------------------------------------------

PAGE = (Path(__file__).parent.parent / "docs" / "from-fla.md").read_text()


@TORCH
def test_the_example_of_the_page_runs_and_agrees():
    plain, with_fla, with_jax = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    program = plain + (with_fla if there("triton", "fla") else "") + (with_jax if there("jax") else "")
    said = dict(line.split(" ", 1) for line in process(program).splitlines())
    shown = ast.literal_eval(re.search(r"^    torch (.*)$", PAGE, re.MULTILINE).group(1))
    for name in {"torch", "FLA", "JAX"} & set(said):
        np.testing.assert_allclose(ast.literal_eval(said[name]), shown, atol=2e-4)
    assert float(said.get("difference", 0)) < 1e-5


def test_the_page_names_every_operation():
    assert [name for name in ops.__all__ if f"`{name}`" not in PAGE] == []
