"""FLA's own Triton kernels, interpreted: in processes of their own, since the interpreter is chosen before triton."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from portable_gdn import dispatch
from portable_gdn.gpu import pieces
from portable_gdn.harness.cases import cases_named
from portable_gdn.harness.library_faults import library_fault
from portable_gdn.harness.quick_proof import LISTED
from portable_gdn.harness.verify import verify
from portable_gdn.spec.precision import OPERANDS
from portable_gdn.spec.problem import Meta, Options
from portable_gdn.spec.rules import make_signature
from portable_gdn.spec.sequences import Placed

FLA = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "triton", "fla")), reason="FLA is not installed"
)


def python(code, *, blocked=(), **environment):
    first = f"import sys; sys.modules.update(dict.fromkeys({list(blocked)!r}))\n"
    env = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", first + code], capture_output=True, text=True, env=env)


@FLA
@pytest.mark.slow
def test_the_quick_cases_hold_in_a_process_of_their_own():
    names = LISTED["fla-interpret"]
    report = verify(["fla-interpret"], cases=cases_named(names))
    assert report.ok, [row for row in report.rows if not row.ok]
    assert {row.case for row in report.rows if row.backend == "fla-interpret"} == set(names)
    assert not report.not_run


@FLA
@pytest.mark.slow
def test_every_designed_case_holds_is_refused_or_is_known():
    from portable_gdn.harness.cases import designed, recorded

    long = ("two rows, tile-grouped", "resets, tile-grouped")  # minutes: a program a token, and many tokens
    cases = [case for case in (*designed(), *recorded()) if case.name not in long]
    report = verify(["fla-interpret"], full=True, cases=cases)
    assert report.ok, [row for row in report.rows if not row.ok]
    # A head's gradient of dt_bias is a sum that cancels, which states kept in 16 bits move by a tenth.
    cancels = ("softplus gate", "grad_dt_bias")
    unjudged = {row.case for row in report.rows if not row.judged and (row.case, row.tensor) != cancels}
    assert unjudged <= {"one key, beta 1.998, bfloat16"}
    for item in report.not_run:
        assert "resets (below -104) of single channels" in item.why


FAULTS = """
import json, os
os.environ["TRITON_INTERPRET"] = "1"
from portable_gdn.gpu import rule
from portable_gdn.harness.cases import cases_named
from portable_gdn.harness.verify import verify

kernel = rule._kernel

def gate_of_another_head(s, x, S, bounds):
    return kernel(s, x._replace(g=x.g.roll(1, 2)), S, bounds)

def beta_squared(s, x, S, bounds):
    return kernel(s, x._replace(b=x.b ** 2), S, bounds)

def gradient_of_beta_dropped(s, x, S, bounds):
    return kernel(s, x._replace(b=x.b.detach()), S, bounds)

def state_transposed(s, x, S, bounds):
    o, state = kernel(s, x, S, bounds)
    return o, state.mT.reshape(state.shape)

def state_forgotten(s, x, S, bounds):
    return kernel(s, x, 0 * S, bounds)

cases = cases_named(["a chunk and a token"])
found = {}
for fault in (kernel, gate_of_another_head, beta_squared, gradient_of_beta_dropped, state_transposed, state_forgotten):
    rule._kernel = fault
    found[fault.__name__] = verify(["fla-interpret"], full=True, cases=cases, in_process=True).ok
print(json.dumps(found))
"""


@FLA
@pytest.mark.slow
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
    assert "there is no GPU" in json.loads(python(UNAVAILABLE, TRITON_INTERPRET="false").stdout)["fla"]
    assert "interpreted in this process" in json.loads(python(UNAVAILABLE, TRITON_INTERPRET="1").stdout)["fla"]
    call = "import torch, portable_gdn as pg\nx = torch.ones(1, 4, 1, 16)\n"
    end = "try:\n    pg.gated_delta_rule(x, x, x, backend={!r})\nexcept pg.GdnError as error:\n    print(error)\n"
    late = python("import triton\n" + call + end.format("fla-interpret"), TRITON_INTERPRET="0").stdout
    assert "triton was imported without its interpreter; start a fresh process" in late
    assert "backend 'fla' cannot run this call: there is no GPU" in python(call + end.format("fla")).stdout


@FLA
def test_refusals():
    code = """
import torch, portable_gdn as pg
x = torch.randn(1, 40, 1, 16)
g = torch.full((1, 40, 1), -0.1)
beta = torch.ones(1, 40, 1)
call = {"q": x, "k": x, "v": x, "g": g, "beta": beta, "backend": "fla-interpret"}
def refused(work):
    try:
        work()
    except pg.GdnError as error:
        print(error)
    else:
        print("not refused")
rule = lambda **more: lambda: pg.gated_delta_rule(**{**call, **more})
refused(rule(chunk_size=128))
refused(rule(g=torch.full((1, 40, 1, 4), -0.1), chunk_size=16))
refused(rule(beta=None, erase=torch.ones(1, 40, 1, 16), write=torch.ones(1, 40, 1, 16), chunk_size=32))
refused(rule(q=torch.randn(1, 40, 1, 320), k=torch.randn(1, 40, 1, 320)))
refused(rule(g=torch.full((1, 40, 1, 16), -200.0)))
refused(rule(deterministic=True))
q = x.clone().requires_grad_()
refused(lambda: torch.autograd.grad(rule(q=q)()[0].square().sum(), q, create_graph=True))
refused(lambda: torch.func.grad(lambda q: rule(q=q)()[0].sum())(x))
"""
    done = python(code, TRITON_INTERPRET="1")
    words = (
        "GDN take chunks of 16, 32, 64, and chunk_size is 128", "tile-grouped take chunks of 32, 64, and",
        "take chunks of 64, and", "K is 320",
        "resets (below -104) of single", "not refused", "no second derivative", "torch.func",
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert len(lines) == len(words), done.stderr
    for line, word in zip(lines, words, strict=True):
        assert word in line


@FLA
@pytest.mark.slow
def test_what_is_exact_is_exact():
    code = """
import torch, portable_gdn as pg
torch.manual_seed(0)
x = {"q": torch.randn(1, 130, 1, 16), "k": torch.randn(1, 130, 1, 16), "v": torch.randn(1, 130, 2, 16)}
x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
x |= {"g": -torch.rand(1, 130, 2), "beta": torch.rand(1, 130, 2)}
S = torch.randn(5, 2, 16, 16)
def rule(x, **more):
    return pg.gated_delta_rule(
        **x, initial_state=S, cu_seqlens=[0, 0, 40, 40, 130, 130], output_final_state=True, backend="fla-interpret",
        **more,
    )
o, state = rule(x)
for empty in (0, 2, 4):
    assert torch.equal(state[empty], S[empty])

other = {name: a.clone() for name, a in x.items()}
other["v"][:, 50], other["g"][:, 60] = float("nan"), -float("inf")
o2, state2 = rule(other)
assert torch.equal(o[:, :40], o2[:, :40]) and torch.equal(state[1], state2[1])
assert o2[:, 50:60].isnan().any() and o2[:, 60:].isfinite().all() and o2.is_contiguous()

leaf = {name: a.clone().requires_grad_() for name, a in x.items()}
with torch.no_grad():
    leaf["g"][0, 45, 0], leaf["g"][0, 0, 1], leaf["g"][0, 90, :] = -float("inf"), -1e6, -200.0
rule(leaf)[0].square().sum().backward()
dg = leaf["g"].grad[0]
assert dg[45, 0] == dg[0, 1] == dg[90, 0] == dg[90, 1] == 0 and dg[45, 1] != 0
assert all(a.grad.isfinite().all() for a in leaf.values())

with torch.autocast("cpu", dtype=torch.bfloat16):
    assert torch.equal(rule(x)[0], o)
"""
    done = python(code, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr


@FLA
def test_a_case_holds_and_nothing_imports_triton_before_the_interpreter_is_chosen():
    code = """
import sys, torch, portable_gdn as pg
from portable_gdn.gpu import adapter
from portable_gdn.harness.cases import cases_named
from portable_gdn.harness.verify import verify
verify(["fla-interpret"], full=True, cases=cases_named(["no tokens"]), in_process=True)
assert "triton" not in sys.modules
report = verify(["fla-interpret"], full=True, cases=cases_named(["a chunk and a token"]), in_process=True)
assert report.ok, report
"""
    done = python(code)
    assert done.returncode == 0, done.stderr


@FLA
def test_an_interpreter_that_cannot_be_repaired_is_named_with_its_version():
    code = """
import portable_gdn as pg
from portable_gdn.gpu import interpreter
interpreter.{repair}
try:
    interpreter.start()
except pg.GdnError as error:
    print(error)
"""
    from importlib.metadata import version

    for repair in ("_bfloat16 = lambda _: None", "_loops = lambda interpreter: interpreter.ASTTransformer()"):
        said = python(code.format(repair=repair)).stdout
        assert f"triton {version('triton')} cannot be made to interpret FLA's kernels: " in said
        assert "triton 3.7 to 3.9 can." in said


def test_pieces_between_resets():
    heads = np.zeros((9, 2), bool)
    heads[[0, 4, 7], 0] = heads[2, 1] = True
    sequences = Placed(*(np.array(a) for a in ([0, 5, 5], [5, 5, 9], [0, 1, 2], [False, False, True], [0, 1, 2])))
    cut, last = pieces.cut_heads_apart(sequences, heads)
    assert list(zip(*(a.tolist() for a in cut), strict=True)) == [
        (0, 4, 0, True), (4, 5, 0, True), (5, 5, 2, False), (5, 7, 4, True), (7, 9, 4, True),
        (9, 11, 1, False), (11, 14, 1, True), (14, 14, 3, False), (14, 18, 5, True),
    ]  # fmt: skip
    assert last.tolist() == [1, 6, 2, 7, 4, 8]
    turns = pieces.cut_in_turn(sequences, heads.any(-1))
    assert [[a.tolist() for a in (turn.state, turn.begin, turn.end)] for turn in turns] == [
        [[0, 2], [0, 5], [2, 7]],
        [[0, 2], [2, 7], [4, 9]],
        [[0], [4], [5]],
    ]


CALLS = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch, portable_gdn as pg
from portable_gdn.gpu import operations, rule
torch.manual_seed(0)
served = []
for form in ("chunked", "recurrent"):
    def counted(s, x, *more, form=form, op=getattr(operations, form)):
        served.append((form, s.family, x))
        return op(s, x, *more)
    setattr(rule, form, counted)

def operands(*lead, H=2, HV=2, dtype=torch.float32):
    x = {"q": torch.randn(*lead, H, 16), "k": torch.randn(*lead, H, 16), "v": torch.randn(*lead, HV, 16)}
    x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
    return {name: a.to(dtype) for name, a in x.items()} | {"g": -torch.rand(*lead, HV), "beta": torch.rand(*lead, HV)}

def close(call, x, tolerance=1e-5, **more):
    served.clear()
    found = call(**x, backend="fla-interpret", **more)
    for a, b in zip(found, call(**x, backend="torch", **more)):
        if a is not None:
            assert (a.float() - b.float()).norm() <= tolerance * b.float().norm(), (a, b)

# gates of one value a head that are not one beta
x = operands(1, 5)
del x["beta"]
close(pg.gated_delta_rule, x | {"erase": torch.rand(1, 5, 2), "write": torch.rand(1, 5, 2)})
assert [kind for _, kind, _ in served] == ["gdn2"]
close(pg.gated_delta_rule, x | {"write": torch.rand(1, 5, 2, 16)})
assert [kind for _, kind, _ in served] == ["gdn2"]

# a single token: the recurrent kernels, and the chunk ones where a gradient is wanted
forms = {
    "gdn": {},
    "kda": {"g": -torch.rand(3, 6, 16)},
    "gdn2": {"beta": None, "erase": torch.rand(3, 6, 16), "write": torch.rand(3, 6, 16)},
    "simple_gla": {"beta": None},
    "gla": {"beta": None, "g": -torch.rand(3, 6, 4)},
}
x = operands(3, H=2, HV=6) | {"state": torch.randn(3, 6, 16, 16)}
for kind, other in forms.items():
    for qk_l2norm in (False, True):
        close(pg.gated_delta_rule_step, {**x, **other}, qk_l2norm=qk_l2norm)
        assert [found[:2] for found in served] == [("recurrent", kind)], served
half = {name: a.bfloat16() if name in "qkv" else a for name, a in x.items()}
close(pg.gated_delta_rule_step, half, 4e-3, qk_l2norm=True)
served.clear()
q = x["q"].clone().requires_grad_()
o, _ = pg.gated_delta_rule_step(**{**x, "q": q}, backend="fla-interpret")
assert [found[:2] for found in served] == [("chunked", "gdn")] and o.requires_grad
served.clear()
with torch.no_grad():
    pg.gated_delta_rule_step(**{**x, "q": q}, backend="fla-interpret")
assert [found[0] for found in served] == ["recurrent"]

# nothing that FLA can take as it is is copied on its way
x = operands(1, 5, H=1, HV=2, dtype=torch.bfloat16)
served.clear()
pg.gated_delta_rule(**x, backend="fla-interpret")
given = served[0][2]
for name in "qkv":
    assert getattr(given, name).data_ptr() == x[name].data_ptr()
assert given.b.data_ptr() == x["beta"].data_ptr()

# no gate is looked at where products are rounded, and a reset lets nothing through and has no gradient
any_ = torch.Tensor.any
def never(*a):
    raise AssertionError("waited for the device")
torch.Tensor.any = never
x["g"][:, 3] = -float("inf")
x["g"].requires_grad_()
o, _ = pg.gated_delta_rule(**x, backend="fla-interpret")
o.float().sum().backward()
torch.Tensor.any = any_
other = {name: a.detach().clone() for name, a in x.items()}
other["v"][:, :3] += 1
assert torch.equal(pg.gated_delta_rule(**other, backend="fla-interpret")[0][:, 3:], o[:, 3:])
assert (x["g"].grad[:, 3] == 0).all() and x["g"].grad.isfinite().all()
"""


@FLA
@pytest.mark.slow
def test_what_serves_a_call_and_what_it_is_given():
    done = python(CALLS)
    assert done.returncode == 0, done.stderr


LAUNCHES = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch, portable_gdn as pg
from portable_gdn.gpu import rule as fla
kernel, launches = fla._kernel, []
def counted(s, x, S, bounds):
    launches.append(None if bounds is None else len(bounds) - 1)
    return kernel(s, x, S, bounds)
fla._kernel = counted
torch.manual_seed(0)
x = {"q": torch.randn(1, 24, 1, 16), "k": torch.randn(1, 24, 1, 16), "v": torch.randn(1, 24, 2, 16)}
x |= {"g": -torch.rand(1, 24, 2), "beta": torch.rand(1, 24, 2)}
x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
rule = lambda x, backend="fla-interpret", **more: pg.gated_delta_rule(**x, backend=backend, **more)[0]
rule(x)
assert launches == [None], launches
resets = {**x, "g": torch.where(torch.arange(24)[None, :, None] % 2 == 0, -float("inf"), x["g"])}
o = rule(resets)
assert launches[1:] == [24], launches
assert torch.allclose(o, rule(resets, "torch"), atol=1e-5)
fla.MOST_BLOCKS = 10
assert torch.equal(rule(resets), o)
assert launches[2:] == [10, 10, 4], launches

any_, sought = torch.Tensor.any, []
torch.Tensor.any = lambda a, *more: sought.append(a) or any_(a, *more)
rule({name: a for name, a in x.items() if name != "g"})
kda = {**x, "g": torch.randn(1, 24, 2, 16)}
rule(kda, gate=pg.BoundedGate(torch.zeros(2), torch.zeros(2, 16), -5.0))
assert not sought
rule(x)
assert sought
"""


@FLA
@pytest.mark.slow
def test_resets_of_heads_take_one_launch_and_none_are_sought_where_there_are_none():
    done = python(LAUNCHES)
    assert done.returncode == 0, done.stderr


@FLA
@pytest.mark.slow
def test_long_falls_hold_or_are_refused():
    code = """
from dataclasses import replace
from portable_gdn.harness import verify as proof
from portable_gdn.harness.cases import Case

build = proof.build
def strong(value):
    def built(case):
        inputs = build(case)
        inputs.operands["g"][:, 20:40] = value
        return inputs
    return built

for value in (-50.0, -70.0, -100.0):
    proof.build = strong(value)
    report = proof.verify(["fla-interpret"], full=True, cases=[Case("strong", T=70, HV=4)], in_process=True)
    print(report.ok, [item.why for item in report.not_run], [row for row in report.rows if not row.ok])
    if value == -100:
        report = proof.verify(
            ["fla-interpret"], full=True, cases=[Case("strong", T=70, HV=4, dtype="bfloat16")], in_process=True
        )
        print(report.ok, report.not_run, report.rows)
"""
    done = python(code, TRITON_INTERPRET="1")
    lines = done.stdout.splitlines()
    assert len(lines) == 4, done.stderr
    assert all(lines[i].startswith("True []") for i in (0, 1, 3)), lines
    assert lines[2].startswith("False"), lines
    assert "g falls by 20" in lines[2]


@FLA
def test_what_it_declares_to_round():
    meta = lambda dtype, *more: {  # noqa: E731
        name: Meta((1, 8, 2, 16) if name in "qkv" else (1, 8, 2, *(more if name == "g" else ())), kind, "cuda")
        for name, kind in dict.fromkeys("qkv", dtype).items() | {("g", "float32"), ("beta", "float32")}
    }
    of = lambda *a, **options: make_signature("torch", "cuda", meta(*a), Options(**options))  # noqa: E731
    interpreted = dispatch.get("fla-interpret")
    assert interpreted.rounding(of("float32")).exact
    assert interpreted.rounding(of("bfloat16", precision="highest")).exact
    assert set(interpreted.rounding(of("bfloat16", qk_l2norm=True)).operands) == set(OPERANDS) - {"A"}
    gdn, kda = (interpreted.rounding(of("bfloat16", *more)).operands for more in ((), (16,)))
    assert set(OPERANDS) - set(gdn) == {"A"}
    assert set(OPERANDS) - set(kda) == {"A", "dA"}
    assert set(gdn.values()) == set(kda.values()) == {"bfloat16"}
    fla = dispatch.get("fla")
    assert fla.refuses(of("float32", deterministic=True)) is None


def test_a_version_is_found_by_either_name_or_none(monkeypatch):
    from portable_gdn.gpu.versions import metadata

    def version(installed):
        def found(name):
            if name != installed:
                raise metadata.PackageNotFoundError(name)
            return "0.6.0"

        return found

    case = "one key, beta 1.998, bfloat16"
    for installed in ("flash-linear-attention", "fla-core"):
        monkeypatch.setattr(metadata, "version", version(installed))
        assert "error 0.18" in library_fault("fla", case)
        assert library_fault("fla-interpret", case) == library_fault("fla", case)
        assert library_fault("fla", "one key, beta 1") == library_fault("torch", case) == ""
    monkeypatch.setattr(metadata, "version", version(None))
    assert library_fault("fla", case) == ""


@FLA
def test_tf32_is_declared_only_where_there_is_tf32(monkeypatch):
    import torch

    from portable_gdn.gpu import adapter, interpreter

    fla = dispatch.get("fla")
    meta = {name: Meta((1, 8, 2, 16), "float32", "cuda") for name in "qkv"}
    of = lambda precision, more: make_signature("torch", "cuda", {**meta, **more}, Options(precision=precision))  # noqa: E731
    beta = {"beta": Meta((1, 8, 2), "float32", "cuda")}
    monkeypatch.setattr(interpreter, "chosen", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, products in (((7, 5), "float32"), ((8, 0), "tf32"), ((9, 0), "tf32")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=capability: found)
        assert adapter.products_of_float32(of("default", beta)) == products
        assert adapter.products_of_float32(of("highest", beta)) == "float32"
        assert set(fla.rounding(of("default", beta)).operands.values()) == {products} - {"float32"}
        # FLA's kernels invert in TF32 whatever is asked for
        inverse = {"A": "tf32", "T": "tf32"} if products == "tf32" else {}
        assert fla.rounding(of("highest", beta)).operands == inverse
        assert fla.rounding(of("highest", {})).exact
        assert ("inverses in TF32" in fla.serves(of("highest", beta))) == (products == "tf32")
    assert "products of float32 in TF32" in fla.serves(of("default", beta))
    monkeypatch.setattr(torch.version, "hip", "6")
    device = type("Device", (), {"gcnArchName": "gfx942:sramecc+"})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device_: device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert adapter.products_of_float32(of("highest", beta)) == "tf32"  # cannot be asked for there
    assert set(fla.rounding(of("highest", beta)).operands.values()) == {"tf32"}


SERVED = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch, portable_gdn as pg
from portable_gdn.gpu import launching, serving
torch.manual_seed(0)
x = {"q": torch.randn(1, 20, 1, 16), "k": torch.randn(1, 20, 1, 16), "v": torch.randn(1, 20, 2, 16)}
x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
x |= {"g": -torch.rand(1, 20, 2), "beta": torch.rand(1, 20, 2)}
leaves = {name: a.clone().requires_grad_() for name, a in x.items()}
def both(**more):
    o, state = pg.gated_delta_rule(**leaves, backend="fla-interpret", output_final_state=True, **more)
    with serving() as behind:
        grads = torch.autograd.grad(o.sum() + state.sum(), list(leaves.values()), retain_graph=True)
    return (o, state, *grads), behind

with serving() as outside:
    free, behind = both()
    with serving() as inside:
        pinned, _ = both(deterministic=True)
assert all(torch.equal(a, b) for a, b in zip(free, pinned))
names = [served.name for served in inside]
assert "chunk_fwd_kernel_o" in names and "prepare_wy_repr_bwd_kernel" in names
assert all(served in outside for served in inside) and {served.library for served in outside} == {"fla"}
assert "chunk_bwd_kernel_dqkwg" in [s.name for s in behind] and "chunk_fwd_kernel_o" not in [s.name for s in behind]
assert str(inside[0]) == "fla: chunk_local_cumsum_scalar_kernel (BT=64 num_warps=1 num_stages=3)"
with serving() as nothing:
    pass
assert nothing == []

# pinned: the first configuration that fits, whatever the tuner would find
from triton import Config
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import OutOfResources
class Kernel:
    arg_names, tried = ["x", "B"], []
    def run(self, *args, B, **options):
        self.tried.append(B)
        if B > 2:
            raise OutOfResources(B, 2, "shared memory")
        return B
kernel = Kernel()
tuner = object.__new__(Autotuner)
tuner.fn, tuner.arg_names = kernel, kernel.arg_names
tuner.configs = [Config({"B": b}) for b in (4, 2, 1)]
with launching.launching(launching.Settings(pinned=True)):
    assert tuner.run(0) == 2 and kernel.tried == [4, 2]
    tuner.configs = tuner.configs[:1]
    try:
        tuner.run(0)
        raise AssertionError
    except OutOfResources:
        pass

# and other libraries are asked only where nothing is pinned
from fla.backends import BackendRegistry, BaseBackend
class Other(BaseBackend):
    backend_type = "other"
    def rule(self, x):
        return "other"
registry = BackendRegistry("test")
registry.register(Other())
def rule(x):
    return "fla"
import fla.backends
fla.backends._DISPATCH_DISABLED = False
rule = registry.dispatch(rule)
with serving() as served:
    assert rule(1) == "other"
assert [str(s) for s in served] == ["other: rule"]
with launching.launching(launching.Settings(pinned=True)):
    assert rule(1) == "fla"

told = str(pg.explain(**x, backend="fla-interpret", deterministic=True))
assert "  by       chunk_gated_delta_rule of flash-linear-attention" in told and "first of its configurations" in told
try:
    torch.autograd.grad(both(deterministic=True)[0][0].sum(), leaves["q"], create_graph=True)
except pg.GdnError as error:
    print(error)
"""


@FLA
@pytest.mark.slow
def test_what_serves_is_recorded_and_can_be_pinned():
    done = python(SERVED)
    assert done.returncode == 0, done.stderr
    assert "no second derivative" in done.stdout


STAGES = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch
from portable_gdn import dispatch, door
from portable_gdn.gpu import probe
from portable_gdn.harness.cases import Case, build
from portable_gdn.harness.compute import Settings, one
from portable_gdn.harness.stages import Side, StageTruth, chunk_of, stage_errors
from portable_gdn.spec.errors import GdnError
fla = dispatch.get("fla-interpret")

def errors(case, precision=None):
    inputs = build(case)
    found = one(fla, case.name, inputs, Settings(stages=True, precision=precision))
    assert found.status == "done", found.why
    return stage_errors(StageTruth(inputs, chunk_of(found.stages)), Side("fla", found.stages, found.rounding))

for case in (
    Case("gdn", T=70, HV=4, dtype="bfloat16", l2norm=True), Case("kda", T=70, variant="KDA", gate="bounded"),
    Case("grouped", T=20, variant="tile-grouped"), Case("gdn2", T=20, HV=4, variant="GDN-2", dtype="float16"),
    Case("gla", T=70, HV=4, variant="GLA"), Case("scalar", T=70, B=2, variant="GLA (scalar)", layout="left padding"),
    Case("linear", T=20, variant="linear attention"), Case("delta", T=5, variant="DeltaNet", dtype="bfloat16"),
):
    for stage, (error, budget) in errors(case).items():
        assert error <= budget, (case.name, stage, error, budget)

fwd_o = probe._by_head
def wrong(s, x, Vn, h, G, C):
    return fwd_o(s, x._replace(q=x.q.flip(2)), Vn, h, G, C)
probe._by_head = wrong
found = errors(Case("gdn", T=20))
assert {stage for stage, (error, budget) in found.items() if error > budget} == {"scores", "output"}, found

for case in (Case("packed", layout="packed"), Case("segments", layout="segments"), Case("resets", gates="one -inf")):
    inputs = build(case)
    problem, _ = door.normalise(fla.from_numpy(inputs.operands), inputs.options, "fla-interpret")
    try:
        fla.probe(problem)
    except GdnError as error:
        print(error)
"""


@FLA
@pytest.mark.slow
def test_stages_are_those_of_the_specification():
    done = python(STAGES)
    assert done.returncode == 0, done.stderr
    packed, segments, resets = done.stdout.splitlines()
    assert packed.startswith("cu_seqlens is given; it must be None where stages are probed")
    assert segments.startswith("segment_ids is given; it must be None where stages are probed")
    assert resets.startswith("g holds resets (below -104)")


COMPILED = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch, portable_gdn as pg
from torch._dynamo.backends.debugging import aot_eager
torch.manual_seed(0)
graphs = []
def backend(module, example):
    graphs.append(module)
    return aot_eager(module, example)

def operands(T=20, N=1):
    x = {"q": torch.randn(1, T, 1, 16), "k": torch.randn(1, T, 1, 16), "v": torch.randn(1, T, 2, 16)}
    x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
    return x | {"g": -torch.rand(1, T, 2), "beta": torch.rand(1, T, 2), "initial_state": torch.randn(N, 2, 16, 16)}

def call(x, bounds=None, **more):
    return pg.gated_delta_rule(**x, cu_seqlens=bounds, output_final_state=True, backend="fla-interpret", **more)

def compiled(function, dynamic=None):
    torch._dynamo.reset()
    graphs.clear()
    return torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)

def both(function, x, *a, **more):
    leaves = {name: v.clone().requires_grad_() for name, v in x.items()}
    o, state = function(leaves, *a, **more)
    return (o, state, *torch.autograd.grad(o.float().square().sum() + state.sum(), list(leaves.values())))

def same(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        assert b.abs().sum() > 0 and torch.allclose(a, b, atol=1e-6), (a, b)

x = operands()
half = {name: a.bfloat16() if name in "qkv" else a for name, a in x.items()}
function = compiled(call)
same(both(function, x, deterministic=True), both(call, x, deterministic=True))
same(both(function, half, qk_l2norm=True), both(call, half, qk_l2norm=True))

# boundaries of as many sequences compile once, of other numbers once more, and not at all where sizes are dynamic
function = compiled(call)
for bounds, times in (([0, 9, 9, 20], 1), ([0, 1, 15, 20], 1), ([0, 1, 2, 10, 20], 2), ([0, 10, 20], 2)):
    x = operands(N=len(bounds) - 1)
    bounds = torch.tensor(bounds)
    same(both(function, x, bounds), both(call, x, bounds))
    assert len(graphs) == times, (bounds, len(graphs))
function = compiled(call, dynamic=True)
for T in (20, 13, 31):
    same(function(operands(T))[:0], ())
    assert len(graphs) == 1

one = {name: a if name == "initial_state" else a[:, 0] for name, a in operands().items()}
one["state"] = one.pop("initial_state")
step = lambda x: pg.gated_delta_rule_step(**x, backend="fla-interpret")
same(compiled(step)(one), step(one))
"""


@FLA
@pytest.mark.slow
def test_torch_compile_takes_it_as_one_operation():
    done = python(COMPILED)
    assert done.returncode == 0, done.stderr
