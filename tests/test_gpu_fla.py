"""FLA's own Triton kernels, interpreted: in processes of their own, since the interpreter is chosen before triton."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from portable_gdn import dispatch
from portable_gdn.harness.cases import cases_named
from portable_gdn.harness.verify import verify

FLA = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "triton", "fla")), reason="FLA is not installed"
)


def python(code, *, blocked=(), **environment):
    first = f"import sys; sys.modules.update(dict.fromkeys({list(blocked)!r}))\n"
    env = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", first + code], capture_output=True, text=True, env=env)


@FLA
def test_the_quick_cases_hold_in_a_process_of_their_own():
    names = dispatch.get("fla-interpret").quick_cases
    report = verify(["fla-interpret"], cases=cases_named(names))
    assert report.ok, [row for row in report.rows if not row.ok]
    assert {row.case for row in report.rows if row.backend == "fla-interpret"} == set(names)
    assert not report.not_run


@FLA
@pytest.mark.slow
def test_every_designed_case_holds_is_refused_or_is_known():
    from portable_gdn.harness.cases import designed, recorded

    report = verify(["fla-interpret"], full=True, cases=[*designed(), *recorded()])
    assert report.ok, [row for row in report.rows if not row.ok]
    assert {row.case for row in report.rows if not row.judged} <= {"one key, beta 1.998, bfloat16"}
    for item in report.not_run:
        assert "it has DeltaNet, GDN, KDA" in item.why or "takes any number" in item.why


FAULTS = """
import json, os
os.environ["TRITON_INTERPRET"] = "1"
from portable_gdn.gpu import adapter
from portable_gdn.harness.cases import cases_named
from portable_gdn.harness.verify import verify

kernel = adapter._kernel

def gate_of_another_head(s, x, S, bounds):
    return kernel(s, [*x[:3], x[3].roll(1, 2), x[4]], S, bounds)

def beta_squared(s, x, S, bounds):
    return kernel(s, [*x[:4], x[4] ** 2], S, bounds)

def gradient_of_beta_dropped(s, x, S, bounds):
    return kernel(s, [*x[:4], x[4].detach()], S, bounds)

def state_transposed(s, x, S, bounds):
    o, state = kernel(s, x, S, bounds)
    return o, state.mT.reshape(state.shape)

def state_forgotten(s, x, S, bounds):
    return kernel(s, x, 0 * S, bounds)

cases = cases_named(["a chunk and a token"])
found = {}
for fault in (kernel, gate_of_another_head, beta_squared, gradient_of_beta_dropped, state_transposed, state_forgotten):
    adapter._kernel = fault
    found[fault.__name__] = verify(["fla-interpret"], full=True, cases=cases, in_process=True).ok
print(json.dumps(found))
"""


@FLA
def test_a_fault_in_the_adapter_is_found():
    done = python(FAULTS)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("_kernel")
    assert len(found) == 5
    assert not any(found.values()), found


UNAVAILABLE = """
import json
from portable_gdn import dispatch
print(json.dumps({name: dispatch.get(name).unavailable() for name in ("fla", "fla-interpret")}))
"""


@pytest.mark.parametrize(
    ("blocked", "name"), [("torch", "torch"), ("triton", "triton"), ("fla", "flash-linear-attention")]
)
def test_what_is_missing_is_named_with_what_brings_it(blocked, name):
    if blocked != "torch":
        pytest.importorskip("torch")
    done = python(UNAVAILABLE, blocked=[blocked])
    assert done.returncode == 0, done.stderr
    sentence = f"{name} is not installed; `pip install 'portable-gdn[gpu]'` brings it."
    if blocked == "fla" and importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed, and is named first")
    assert json.loads(done.stdout) == {"fla": sentence, "fla-interpret": sentence}


@FLA
def test_triton_without_a_driver_and_processes_that_chose_otherwise():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert "there is no GPU" in json.loads(python(UNAVAILABLE).stdout)["fla"]
    assert "interpreted in this process" in json.loads(python(UNAVAILABLE, TRITON_INTERPRET="1").stdout)["fla"]
    call = "import torch, portable_gdn as pg\nx = torch.ones(1, 4, 1, 16)\n"
    end = "try:\n    pg.gated_delta_rule(x, x, x, backend={!r})\nexcept pg.GdnError as error:\n    print(error)\n"
    late = python("import triton\n" + call + end.format("fla-interpret"), TRITON_INTERPRET="0").stdout
    assert "triton was imported without its interpreter; start a fresh process" in late
    assert "backend 'fla' cannot run this call: there is no GPU" in python(call + end.format("fla")).stdout


@FLA
def test_refusals_and_resets():
    code = """
import torch, portable_gdn as pg
x = torch.randn(1, 40, 1, 16)
g = torch.full((1, 40, 1), -0.1)
def refused(**more):
    try:
        beta = torch.ones(1, 40, 1)
        pg.gated_delta_rule(**{"q": x, "k": x, "v": x, "g": g, "beta": beta, **more}, backend="fla-interpret")
    except pg.GdnError as error:
        print(error)
refused(beta=None)
refused(g=torch.full((1, 40, 1, 4), -0.1))
refused(chunk_size=128)
refused(q=torch.randn(1, 40, 1, 320), k=torch.randn(1, 40, 1, 320))
refused(g=torch.full((1, 40, 1), -200.0))
"""
    lines = python(code, TRITON_INTERPRET="1").stdout.splitlines()
    for line, words in zip(
        lines,
        ("this is GLA (scalar)", "this is tile-grouped", "chunk_size is 128", "K is 320", "g holds resets"),
        strict=True,
    ):
        assert words in line
