"""Triton kernels compiled for GPUs that are not here: known kernels, what is wrong with a request, what calls launch.

In processes of their own: whether Triton interprets or compiles is chosen for a whole process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if any(importlib.util.find_spec(name) is None for name in ("torch", "triton", "fla")):
    pytest.skip("FLA is not installed", allow_module_level=True)

KERNELS = """
import triton
import triton.language as tl

@triton.autotune(configs=[triton.Config({"BLOCK": b}, num_warps=w) for b in (64, 128) for w in (4, 8)], key=["n"])
@triton.heuristics({"ADDS": lambda args: args["other"] is not None})
@triton.jit
def copy(x, y, other, n, BLOCK: tl.constexpr, ADDS: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + at, mask=at < n)
    if ADDS:
        a += tl.load(other + at, mask=at < n)
    tl.store(y + at, a, mask=at < n)

@triton.jit
def product(x, y, out, N: tl.constexpr):
    row = tl.arange(0, N)
    at = row[:, None] * N + row[None, :]
    tl.store(out + at, tl.dot(tl.load(x + at), tl.load(y + at)))
"""

REPORTS = """
import json
from kernels import copy, product
from portable_gdn.gpu import TARGETS, compile_report
bf16 = {"x": "*bf16", "y": "*bf16", "out": "*fp32"}
of = lambda *a, **more: compile_report(*a, **more).as_dict()
plain = {"x": "*fp32", "y": "*fp32", "n": "i32"}
print(json.dumps({
    "products": {arch: of(product, bf16, constants={"N": 64}, arch=arch) for arch in TARGETS},
    "configs": of(copy, plain, all_configs=True),
    "adds": of(copy, {**plain, "other": "*fp32"}, num_warps=2),
    "odd": of(product, bf16, constants={"N": 100}),
    "large": of(product, {name: "*fp32" for name in bf16}, constants={"N": 256}),
}))
from portable_gdn.spec.errors import GdnError
for work in (
    lambda: compile_report(product, bf16, constants={"N": 64}, arch="sm_9"),
    lambda: compile_report(product, {**bf16, "z": "i32"}, constants={"N": 64}),
    lambda: compile_report(len, bf16),
    lambda: compile_report(product, bf16, constants={"N": 64}, warps=4),
):
    try:
        work()
    except GdnError as error:
        print(error)
"""


def python(code, path, **environment):
    folders = os.pathsep.join(filter(None, [str(path), os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, "PYTHONPATH": folders, **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)


def test_kernels_of_ones_own(tmp_path):
    (tmp_path / "kernels.py").write_text(KERNELS)
    done = python(REPORTS, tmp_path, TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr
    found, *sentences = done.stdout.splitlines()
    found = json.loads(found)
    only = lambda report: report["kernels"][0]  # noqa: E731

    kinds = {arch: set(only(report)["matrix"]) for arch, report in found["products"].items()}
    assert kinds == {"sm_80": {"mma"}, "sm_90": {"wgmma"}, "sm_100": {"tcgen05"}, "gfx942": {"mfma"}}
    # one warp group multiplies 64 x 64 by 16 in one instruction: 64 channels are four
    assert only(found["products"]["sm_90"])["matrix"] == {"wgmma": 4}
    for report in found["products"].values():
        assert only(report)["launches"]
        assert only(report)["registers"] > 0
        assert only(report)["shared"] >= 64 * 64 * 2  # an operand at least

    assert [kernel["config"] for kernel in found["configs"]["kernels"]] == [
        {"BLOCK": b, "num_warps": w, "num_stages": 3} for b in (64, 128) for w in (4, 8)
    ]
    assert all(not k["matrix"] and not k["stack"] for k in found["configs"]["kernels"])
    assert only(found["adds"])["config"]["num_warps"] == 2
    assert only(found["odd"])["failed"] == "CompilationError: arange's range must be a power of 2"
    large = only(found["large"])
    assert large["shared"] >= 2 * 256 * 256 * 4 > large["limit"]
    assert not large["launches"]
    assert large["spill_stores"] > 0
    assert found["large"]["total"] == {"kernels": 1, "cannot_launch": 1, "do_not_compile": 0, "spill": 1}

    assert sentences == [
        "arch is 'sm_9'; it must be one of sm_80, sm_90, sm_100, gfx942.",
        "signature is given for 'z'; it must name parameters of product.",
        "fn is a builtin_function_or_method; it must be a function made by triton.jit.",
        "warps is given; it must be one of num_warps, num_stages, num_ctas, maxnreg.",
    ]


def test_an_interpreting_process_cannot_compile(tmp_path):
    (tmp_path / "kernels.py").write_text(KERNELS)
    code = REPORTS.splitlines()[1:5]
    done = python(
        "\n".join([*code, 'compile_report(product, bf16, constants={"N": 64})']), tmp_path, TRITON_INTERPRET="1"
    )
    assert "TRITON_INTERPRET is on, and an interpreted kernel is not compiled; start a new process." in done.stderr


def command(*words):
    return subprocess.run(
        [Path(sys.executable).with_name("portable-gdn"), "gpu-report", *words], capture_output=True, text=True
    )


SMALL = ("--heads", "1", "--key-dim", "32", "--value-dim", "32", "--seqlen", "128")
CALLS = [
    ("sm_90", "gdn", "backward,step", {"mma", "wgmma"}, {
        "gdn forward": {"l2norm_fwd_kernel", "chunk_gated_delta_rule_fwd_kkt_solve_kernel", "chunk_fwd_kernel_o"},
        "gdn backward": {"chunk_bwd_kernel_dqkwg", "prepare_wy_repr_bwd_kernel", "l2norm_bwd_kernel"},
        "gdn step forward": {"fused_recurrent_gated_delta_rule_fwd_kernel"},
    }),
    ("gfx942", "gla,gdn2", "forward,step", {"mfma"}, {
        "gla forward": {"l2norm_fwd_kernel", "chunk_gla_fwd_A_kernel_intra_sub_inter", "chunk_gla_fwd_kernel_o"},
        "gla step forward": {"fused_recurrent_fwd_kernel"},
        "gdn2 forward": {"l2norm_fwd_kernel", "recompute_w_u_fwd_gdn2_kernel"},  # the norm is compiled once
        "gdn2 step forward": {"fused_recurrent_gdn2_fwd_kernel"},
    }),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "variant", "op", "matrix", "names"), CALLS)
def test_every_kernel_of_a_call(arch, variant, op, matrix, names):
    done = command("--arch", arch, "--variant", variant, "--op", op, "--json", *SMALL)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    found = {}
    for kernel in report["kernels"]:
        found.setdefault(kernel["phase"], set()).add(kernel["name"])
        assert kernel["launches"]
        assert kernel["failed"] is None
    assert set(found) == set(names)
    assert all(names[phase] <= found[phase] for phase in names), found
    kinds = {kind for kernel in report["kernels"] for kind in kernel["matrix"]}
    kinds -= {"of them tf32"}  # a part of the others, counted beside them
    assert kinds
    assert kinds <= matrix


@pytest.mark.slow
def test_highest_precision_leaves_tf32_to_the_inverse_alone():
    call = ("--variant", "gdn", "--op", "forward", "--dtype", "float32", "--precision", "highest", "--no-l2norm")
    done = command(*call, "--json", *SMALL)
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout)["kernels"]
    rounded = {kernel["name"] for kernel in kernels if kernel["matrix"].get("of them tf32")}
    assert rounded == {"chunk_gated_delta_rule_fwd_kkt_solve_kernel"}
    assert {"chunk_fwd_kernel_o", "recompute_w_u_fwd_kernel"} <= {kernel["name"] for kernel in kernels}


@pytest.mark.slow
def test_every_configuration_of_a_kernel():
    done = command("--variant", "gla", "--op", "step", "--no-l2norm", "--all-configs", "--json", *SMALL)
    assert done.returncode == 0, done.stderr
    warps = [kernel["config"]["num_warps"] for kernel in json.loads(done.stdout)["kernels"]]
    assert len(warps) == len(set(warps)) > 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--arch", "sm_91"), "arch is 'sm_91'; it must be one of sm_80, sm_90, sm_100, gfx942."),
        (("--variant", "gdn,foo"), "--variant is 'foo'; it must be one of gdn, delta, kda, gdn2, grouped, gla."),
        (("--op", "sideways"), "--op is 'sideways'; it must be one of forward, backward, step."),
        (("--heads", "0"), "--heads is 0; it must be at least 1."),
        (("--variant", "kda", "--key-dim", "512"), "take key dims up to 256, and K is 512"),
        (("--heads", "2", "--value-heads", "3"), "v is of 3 heads; it must have a multiple of the 2 heads of q and k."),
        (("--precision", "double"), "precision is 'double'; it must be None or one of 'highest', 'default', 'fast'."),
    ],
)
def test_what_is_wrong_is_said(words, sentence):
    done = command(*words)
    assert done.returncode == 2
    assert sentence in done.stderr


def test_the_file_holds_every_architecture():
    path = Path(__file__).parents[1] / "benchmarks" / "gpu_compile.json"
    for figures in json.loads(path.read_text()).values():
        for kernels in figures.values():
            phases = {name.split(":")[0] for name in kernels}
            assert {"gdn forward", "gdn backward", "kda forward", "kda backward", "gdn2 step forward"} <= phases
            assert not any("failed" in row for row in kernels.values())
