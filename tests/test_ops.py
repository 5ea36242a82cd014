"""FLA's names on our call: the same signatures, the same numbers, and refusals where FLA says nothing."""

from __future__ import annotations

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

FLA = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "triton", "fla")), reason="FLA is not installed"
)

SIGNATURES = """
import inspect, json, warnings
warnings.filterwarnings("ignore")
import fla.ops.delta_rule, fla.ops.gated_delta_rule, fla.ops.gdn2, fla.ops.kda
found = {}
for module in (fla.ops.delta_rule, fla.ops.gated_delta_rule, fla.ops.gdn2, fla.ops.kda):
    for name, function in vars(module).items():
        if name.startswith(("chunk_", "fused_recurrent_")) and callable(function):
            parameters = inspect.signature(inspect.unwrap(function)).parameters.values()
            found[name] = [(p.name, p.kind.name, repr(None if p.default is p.empty else p.default)) for p in parameters]
print(json.dumps(found))
"""


@FLA
def test_signatures_are_those_of_fla():
    done = subprocess.run([sys.executable, "-c", SIGNATURES], capture_output=True, text=True)
    theirs = json.loads(done.stdout.splitlines()[-1])
    for name in ops.__all__:
        parameters = inspect.signature(getattr(ops, name)).parameters.values()
        ours = [[p.name, p.kind.name, repr(None if p.default is p.empty else p.default)] for p in parameters]
        assert ours == theirs[name], name


def run(library, op, x, **more):
    y = {name: library.array(a) for name, a in x.items()}
    o, state = getattr(ops, op)(**y, **more)
    return library.numpy(o), None if state is None else library.numpy(state)


@pytest.mark.parametrize(
    ("op", "variant"),
    [
        ("chunk_gated_delta_rule", "GDN"),
        ("fused_recurrent_gated_delta_rule", "GDN"),
        ("chunk_kda", "KDA"),
        ("fused_recurrent_kda", "KDA"),
        ("chunk_gdn2", "GDN-2"),
        ("fused_recurrent_gdn2", "GDN-2"),
        ("chunk_delta_rule", "DeltaNet"),
        ("fused_recurrent_delta_rule", "DeltaNet"),
    ],
)
def test_numbers_are_those_of_the_oracle(library, op, variant):
    x = make(variant, B=1, T=20, state=True)
    want = oracle(x)
    y = {{"erase": "b", "write": "w"}.get(name, name): a for name, a in x.items()}
    o, state = run(library, op, y, output_final_state=True)
    assert_close(o, want.o, want.sizes["o"])
    assert_close(state, want.state, want.sizes["state"])
    assert run(library, op, y)[1] is None


def test_states_v_first_and_the_old_name(library):
    x = make("KDA", B=1, T=20, state=True)
    o, state = run(library, "chunk_kda", x, output_final_state=True)
    turned = {**x, "initial_state": np.ascontiguousarray(np.swapaxes(x["initial_state"], -1, -2))}
    for keyword in ("state_v_first", "transpose_state_layout"):
        o2, state2 = run(library, "chunk_kda", turned, output_final_state=True, **{keyword: True})
        np.testing.assert_array_equal(o2, o)
        np.testing.assert_array_equal(np.swapaxes(state2, -1, -2), state)


def test_beta_in_the_kernel(library):
    x = make("GDN", B=1, T=20)
    x["beta"] = np.random.default_rng(0).standard_normal(x["beta"].shape).astype(np.float32)
    for negative in (False, True):
        beta = (1 + negative) / (1 + np.exp(-x["beta"].astype(np.float64)))
        want = oracle({**x, "beta": beta.astype(np.float32)})
        got = run(library, "chunk_gated_delta_rule", x, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=negative)
        assert_close(got[0], want.o, want.sizes["o"], eps=16)
    del x["beta"]
    ones = {**x, "beta": np.ones((1, 20, 4), np.float32)}
    np.testing.assert_array_equal(
        run(library, "fused_recurrent_gated_delta_rule", x)[0], run(library, "chunk_gated_delta_rule", ones)[0]
    )


def test_gates_in_the_kernel(library):
    x = make("KDA", B=1, T=20)
    rng = np.random.default_rng(0)
    x["g"] = rng.standard_normal(x["g"].shape).astype(np.float32)
    x |= {"A_log": rng.uniform(0, 2, 4).astype(np.float32), "dt_bias": rng.standard_normal(64).astype(np.float32)}
    raw = x["g"].astype(np.float64) + x["dt_bias"].reshape(4, 16)
    A = np.exp(x["A_log"].astype(np.float64))[:, None]
    plain = {name: a for name, a in x.items() if name not in ("A_log", "dt_bias")}
    for bound, g in ((None, -A * np.log1p(np.exp(raw))), (-5.0, -5 / (1 + np.exp(-A * raw)))):
        want = oracle({**plain, "g": g.astype(np.float32)})
        for safe in (False, True):  # which changes nothing
            got = run(library, "chunk_kda", x, use_gate_in_kernel=True, lower_bound=bound, safe_gate=safe)[0]
            assert_close(got, want.o, want.sizes["o"], eps=32)


def test_decays_by_head_and_channel_add_up(library):
    x = make("KDA", B=1, T=20)
    g = x.pop("g")
    head = -np.random.default_rng(0).uniform(0, 1, (1, 20, 4)).astype(np.float32)
    want = oracle({**x, "g": g + head[..., None]})
    assert_close(
        run(library, "fused_recurrent_gated_delta_rule", {**x, "g": head, "gk": g})[0], want.o, want.sizes["o"]
    )


@pytest.mark.parametrize(
    ("op", "more", "words"),
    [
        ("chunk_gated_delta_rule", {"use_qk_l2norm": True}, "use_qk_l2norm is not a keyword of chunk_gated_delta_rule"),
        ("chunk_gated_delta_rule", {"head_first": True}, "head_first is True"),
        ("chunk_gated_delta_rule", {"cp_context": object()}, "cp_context is given; it must be left out"),
        ("chunk_gated_delta_rule", {"A_log": np.zeros(4, np.float32)}, "A_log is given without use_gate_in_kernel"),
        ("chunk_gated_delta_rule", {"use_gate_in_kernel": True}, "A_log is None"),
        ("chunk_gated_delta_rule", {"allow_neg_eigval": True}, "allow_neg_eigval is True without"),
        ("chunk_gated_delta_rule", {"chunk_size": 48}, "chunk_size is 48"),
        ("fused_recurrent_gated_delta_rule", {"gv": np.zeros((1, 20, 4, 24), np.float32)}, "gv is given"),
        ("fused_recurrent_gated_delta_rule", {"state_first": 1}, "state_first is not a keyword"),
        ("chunk_kda", {"use_graph": True}, "use_graph is True"),
        ("chunk_kda", {"return_intermediate_states": True}, "return_intermediate_states is True"),
        ("chunk_kda", {"state_v_first": True, "transpose_state_layout": False}, "transpose_state_layout is False"),
        ("chunk_kda", {"use_gate_in_kernel": True, "lower_bound": -6.0}, "gate.lower_bound is -6.0"),
    ],
)
def test_what_is_not_offered_is_refused(library, op, more, words):
    x = make("GDN" if "gated" in op else "KDA", B=1, T=20)
    more = {name: library.array(a) if isinstance(a, np.ndarray) else a for name, a in more.items()}
    with pytest.raises(pg.GdnError, match=re.escape(words)):
        run(library, op, x, **more)


def test_gates_of_key_heads_are_refused(library):
    """FLA reads beyond the end of them."""
    x = make("GDN", B=1, T=20)
    with pytest.raises(pg.GdnError, match="g is of shape"):
        run(library, "chunk_gated_delta_rule", {**x, "g": x["g"][..., :2]})


@FLA
def test_the_example_of_the_page_runs_and_agrees():
    page = (Path(__file__).parent.parent / "docs" / "from-fla.md").read_text()
    example = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", example.group(1)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    difference = float(done.stdout.splitlines()[-1].split()[-1])
    assert difference < 1e-5
