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

MATMUL = """
import triton
import triton.language as tl

@triton.jit(do_not_specialize=["seed"])
def matmul(a, b, c, M, N, K, stride, seed, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        x = tl.load(a + m[:, None] * K + k[None, :] * stride, mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        y = tl.load(b + k[:, None] * N + n[None, :], mask=(k[:, None] < K) & (n[None, :] < N), other=0.0)
        total = tl.dot(x, y, total)
    tl.store(c + m[:, None] * N + n[None, :], (total + seed).to(tl.bfloat16), mask=(m[:, None] < M) & (n[None, :] < N))
"""

SPECIALISED = """
import json, sys, warnings
warnings.simplefilter("error")  # Triton's own are not to be met by whoever asks for a report
from kernels import matmul
from portable_gdn.gpu import compile_report
from portable_gdn.spec.errors import GdnError

arrays = dict.fromkeys("abc", "*bf16")
large = {"stride": 1, "seed": 16, "M": 4096, "N": 4096, "K": 4096}
blocks = {"BM": 128, "BN": 128, "BK": 64}
def of(signature, sizes=None, constants=blocks, arch="sm_90", num_warps=8, num_stages=3):
    more = {"constants": constants, "arch": arch, "num_warps": num_warps, "num_stages": num_stages}
    return compile_report(matmul, signature, sizes=sizes, **more)
noted = {**arrays, **dict.fromkeys("MNK", "i32:16"), "stride": "i32:1", "seed": "i32"}
reports = {
    "any": of({**arrays, **dict.fromkeys("MNK", "i32"), "stride": "i32:1", "seed": "i32"}),
    "noted": of(noted),
    "noted arrays": of({**noted, **dict.fromkeys("abc", "*bfloat16:16")}),
    "sizes": of(arrays, large),
    "odd": of(arrays, {**large, "K": 4100}),
    "too much": of(arrays, large, {"BM": 128, "BN": 256, "BK": 128}, num_stages=4),
    "AMD": of(arrays, large, arch="gfx942", num_warps=4),
}
sentences = []
for change in json.loads(sys.argv[1]):
    given = {"signature": noted, "sizes": None, **change}
    try:
        of(**given)
    except GdnError as error:
        sentences.append(str(error))
print(json.dumps([{name: {**r.as_dict(), "text": str(r)} for name, r in reports.items()}, sentences]))
"""

LAUNCHED = """
import json, sys
from portable_gdn.gpu.compiling import machine, targets, usage
target = targets.target_named(sys.argv[1])
machine.pretend(target)
import torch
from kernels import matmul
found = []
take = lambda name, config, compiled, log: found.append(usage.usage(compiled, log))
with machine.compile_launches(take, False):
    a, b, c = (torch.zeros(4096, 4096, dtype=torch.bfloat16) for _ in range(3))
    for K in (4096, 4100):
        matmul[(1,)](a, b, c, 4096, 4096, K, 1, 16, 128, 128, 64, num_warps=int(sys.argv[2]), num_stages=3)
print(json.dumps(found))
"""


def python(code, path, *words, **environment):
    folders = os.pathsep.join(filter(None, [str(path), os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, "PYTHONPATH": folders, **environment}
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, env=env)


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


WRONG = [  # a change of a request that is right, and what must be said of it
    ({"signature": {"a": "bf16*"}}, "'bf16*'; it must be one of Triton's", "did you mean '*bf16'?"),
    ({"signature": {"a": "*bf15:16"}}, "'*bf15:16'; it must be one of Triton's", "did you mean '*bf16:16'?"),
    ({"signature": {"a": "torch.float32"}}, "'torch.float32'", "did you mean 'fp32'?"),
    ({"signature": {"a": 3}}, "the type of 'a' in signature is 3; it must be one of Triton's", ""),
    ({"signature": {"M": "i32:8"}}, "the type of 'M' in signature is 'i32:8'; it must end in :16 or :1", ""),
    ({"signature": {"M": "fp32:16"}}, "a launch looks at integers and arrays alone", ""),
    ({"signature": {"seed": "i32:16"}}, "the type of 'seed'", "do_not_specialize"),
    ({"signature": {"c": None}}, "signature does not name 'c'; it must give a type to each parameter of matmul", ""),
    ({"signature": {"N": None, "K": None}}, "signature does not name 'N' and 'K'", ""),
    ({"signature": {"Mm": "i32"}}, "signature is given for 'Mm'", "did you mean 'M'?"),
    ({"constants": {"BM": 128, "BK": 64}}, "constants does not name 'BN'; it must give a value", ""),
    ({"constants": {"BM": 128, "BN": 128, "BK": 64, "M": 1}}, "M is given in constants and in signature", ""),
    ({"sizes": {"M": 17}}, "sizes['M'] is 17; it must be divisible by 16, as its type in signature says", ""),
    ({"sizes": {"M": 2**40}}, "must be an integer that fits into i32", ""),
    ({"sizes": {"M": "many"}}, "sizes['M'] is 'many'; it must be a number", ""),
    ({"sizes": {"a": 64}}, "sizes['a'] is given; it must be left out: 'a' is an array", ""),
    ({"sizes": {"BQ": 64}}, "sizes is given for 'BQ'; it must name parameters of matmul", ""),
]


def request(change):
    signature = {**dict.fromkeys("abc", "*bf16"), **dict.fromkeys("MNK", "i32:16"), "stride": "i32:1", "seed": "i32"}
    signature = {name: kind for name, kind in {**signature, **change.get("signature", {})}.items() if kind is not None}
    return {**change, "signature": signature}


@pytest.mark.slow
def test_a_report_takes_integers_as_a_launch_does(tmp_path):
    (tmp_path / "kernels.py").write_text(MATMUL)
    changes = json.dumps([request(change) for change, _, _ in WRONG])
    done = python(SPECIALISED, tmp_path, changes, TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    reports, sentences = json.loads(done.stdout)
    found = {name: report["kernels"][0] for name, report in reports.items()}
    # Three stages of 128 x 64 and 64 x 128 in 16 bits; without known divisors nothing can be copied ahead.
    assert (found["any"]["shared"], found["any"]["copies"]) == (32_768, {})
    for name in ("noted", "noted arrays", "sizes"):
        assert found[name]["shared"] == 3 * 2 * 128 * 64 * 2 == 98_304
        assert found[name]["copies"]["cp.async"] > 0
        figures = ("registers", "matrix", "copies", "shared")
        assert [found[name][f] for f in figures] == [found["sizes"][f] for f in figures]
    assert found["odd"]["shared"] < found["sizes"]["shared"] or found["odd"]["copies"] != found["sizes"]["copies"]
    assert found["too much"]["shared"] == 393_216 > found["too much"]["limit"] == 232_448
    assert not found["too much"]["launches"]
    assert "cannot launch" in reports["too much"]["text"]
    assert "1 kernel: none does not compile, 1 wants more shared memory" in reports["too much"]["text"]

    assert found["any"]["taken"]["M"].startswith("i32, any (a launch finds out whether 16 divides it")
    assert found["noted"]["taken"]["M"] == "i32 divisible by 16"
    assert found["sizes"]["taken"] == {
        **dict.fromkeys("abc", "*bf16 divisible by 16"), **dict.fromkeys("MNK", "4096 (i32 divisible by 16)"),
        "stride": "1, a constant", "seed": "16 (i32, any: the kernel says do_not_specialize)",
    }  # fmt: skip
    assert "taken for a, b, c: *bf16 divisible by 16; stride: 1, a constant;" in reports["sizes"]["text"]
    assert found["AMD"]["taken"]["a"] == "*bf16 divisible by 16, of less than 2 GiB"

    assert len(sentences) == len(WRONG)
    for sentence, (_, words, more) in zip(sentences, WRONG, strict=True):
        assert words in sentence
        assert more in sentence

    for arch, warps, name in (("sm_90", "8", "sizes"), ("gfx942", "4", "AMD")):
        launched = python(LAUNCHED, tmp_path, arch, warps, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path / "c"))
        assert launched.returncode == 0, launched.stderr
        even, odd = json.loads(launched.stdout)
        assert {f: found[name][f] for f in even} == even  # a launch's own specialisation
        if arch == "sm_90":
            assert {f: found["odd"][f] for f in odd} == odd


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


def test_the_tables_of_the_page_are_what_the_command_gives():
    """The file on record was made with the page's command: heads, variants, first configurations."""
    root = Path(__file__).parents[1]
    page = (root / "docs" / "from-triton.md").read_text()
    versions = json.loads((root / "benchmarks" / "gpu_compile.json").read_text())
    (made_with,) = (name for name in versions if all(part in page.replace("\n", " ") for part in name.split(", ")))
    kernels = versions[made_with]["sm_90"]
    rows = 0
    sections = [s for s in page.split("\n## ") if s.splitlines()[0].endswith((" forward", " backward"))]
    assert len(sections) == 4
    for section in sections:
        variant, phase = ("gdn", "kda")["KDA" in section.splitlines()[0]], section.splitlines()[0].split()[-1]
        for cells in (line.split(" | ") for line in section.splitlines() if line.startswith("| `")):
            figures = [part.split(", ") for part in cells[2].split(" / ")]
            names = cells[0].strip("|").split("`")[1::2]
            if len(names) > 1 or not cells[2].strip() or len(figures[0]) < 2:
                continue
            name = names[0].lstrip("._")
            (row,) = (row for key, row in kernels.items() if key.startswith(f"{variant} {phase}: ") and name in key)
            registers, shared, *stored = figures[0]
            assert row["registers"] == int(registers), names
            bytes_ = float(shared.split()[0]) * (1024 if "KiB" in shared else 1)
            assert 0 <= row.get("shared", 0) - bytes_ < 1024, names
            assert row.get("spill_stores", 0) == int(*stored or [0]), names
            rows += 1
    assert rows > 15
