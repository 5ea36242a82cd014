"""One script for whoever has a GPU: does the GPU backend hold there, and what does it cost?

    python benchmarks/gpu_check.py -o my_gpu.json               # at most 8 minutes, no downloads
    python benchmarks/gpu_check.py --backend fla-interpret --seconds 60    # the script itself, on a CPU, without times

In order of importance; what does not fit into the time is named as left out:

1. proof     variants, dtypes and precisions, forward and gradients, against the float64 oracle, with computed budgets
2. stages    the seven stages of each operation of FLA
3. times     our call against FLA called directly: device and host time, and memory; which kernels served both
4. recording for ``portable-gdn compare`` on another machine, beside the results

The proof pins each kernel to one configuration, so that it compiles one and not all; times are of autotuned kernels.
Results are JSON with the device's name; the exit code is 1 if something does not hold.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

import portable_gdn as pg
from portable_gdn.gpu import serving
from portable_gdn.harness.cases import Case, build
from portable_gdn.harness.compute import Settings, backend_for, one
from portable_gdn.harness.environment import environment
from portable_gdn.harness.judge import judge
from portable_gdn.harness.record import record
from portable_gdn.harness.stages import Side, StageTruth, chunk_of, stage_errors
from portable_gdn.harness.suites import suite
from portable_gdn.harness.truth import Truth
from portable_gdn.spec.errors import GdnError

MOST_MICROSECONDS = 20.0  # that our call may cost beside FLA's own

_ONE = {"H": 2, "HV": 4, "K": 64, "V": 64, "T": 130}


def cases() -> list[tuple[Case, str | None]]:
    """What is proved, and the precision asked for; few shapes, since each compiles a dozen kernels."""
    of = lambda name, precision=None, **more: (Case(name, **{**_ONE, **more}), precision)  # noqa: E731
    bf16, f16, f32 = ({"dtype": dtype} for dtype in ("bfloat16", "float16", "float32"))
    found = [
        of("GDN", **bf16, l2norm=True), of("KDA", variant="KDA", **bf16), of("DeltaNet", variant="DeltaNet", **bf16),
        of("GDN, resets", gates="many resets", **bf16), of("GDN, one key", keys="repeated", beta="1", **bf16),
        of("KDA, resets", variant="KDA", gates="many resets", **bf16),
        of("GDN-2", variant="GDN-2", **bf16), of("GLA", variant="GLA", **bf16),
        of("GLA, scalar", variant="GLA (scalar)", **bf16), of("tile-grouped", variant="tile-grouped", **bf16),
        of("KDA, bounded gates", variant="KDA", gate="bounded", **bf16),
        of("GDN, float16", **f16), of("GDN, TF32", "default", **f32), of("KDA, TF32", "default", variant="KDA", **f32),
        of("GDN, IEEE", "highest", **f32), of("GDN, IEEE, a reset", "highest", gates="one -inf", **f32),
        of("KDA, IEEE", "highest", variant="KDA", **f32),
        of("packed with empties", layout="packed with empties", **bf16),
        of("segments, KDA", layout="segments", variant="KDA", **bf16),
        of("left padding", layout="left padding", **bf16),
    ]  # fmt: skip
    for variant in ("GDN", "KDA", "GDN-2", "GLA"):
        found.append(of(f"step, {variant}", variant=variant, layout="step", T=1, **bf16))
    found.append(of("heads of 128", H=1, HV=2, K=128, V=128, **bf16))
    found.append(of("heads of 256 x 192", H=1, HV=2, K=256, V=192, **bf16))
    return found


STAGES = [
    Case("GDN", T=130, H=1, HV=2, K=64, V=64, dtype="bfloat16"),
    Case("KDA", "KDA", T=130, H=1, HV=2, K=64, V=64, dtype="bfloat16"),
    Case("GDN-2", "GDN-2", T=130, H=1, HV=2, K=64, V=64, dtype="bfloat16"),
    Case("GLA", "GLA", T=130, H=1, HV=2, K=64, V=64, dtype="bfloat16"),
]


class Clock(NamedTuple):
    """Seconds that are left."""

    end: float

    def left(self) -> float:
        return self.end - time.monotonic()


def proof(backend: Any, clock: Clock, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Each case's worst tensor: error, what was expected, budget."""
    for case, precision in cases():
        if clock.left() < 20:
            yield {"case": case.name, "left_out": "the time is over"}
            continue
        say(case.name)
        inputs = build(case)
        inputs = inputs._replace(options=inputs.options._replace(deterministic=True, precision=precision))
        outcome = one(backend, case.name, inputs, Settings())
        if outcome.status != "done":
            yield {"case": case.name, "ok": outcome.status == "refused", outcome.status: outcome.why}
            continue
        truth = Truth(inputs)
        expectation, s = truth.expectation(outcome.rounding), truth.problem.signature
        verdicts = [judge(name, outcome.tensors[name], expectation, s) for name in expectation.exact]
        worst = max(verdicts, key=lambda v: (not v.ok, v.error / v.budget if v.budget else float(v.error > 0)))
        yield {
            "case": case.name, "ok": all(v.ok for v in verdicts), "tensor": worst.tensor, "error": worst.error,
            "expected": worst.expected, "budget": worst.budget, "rounds": outcome.rounding.describe(),
            "seconds": round(outcome.seconds, 2),
        }  # fmt: skip


def stages(backend: Any, clock: Clock, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Error and budget of each stage."""
    for case in STAGES:
        if clock.left() < 20:
            yield {"case": case.name, "left_out": "the time is over"}
            continue
        say(f"stages, {case.name}")
        inputs = build(case)
        inputs = inputs._replace(options=inputs.options._replace(deterministic=True))
        found = one(backend, case.name, inputs, Settings(stages=True))
        if found.status != "done" or not found.stages:
            yield {"case": case.name, "ok": False, "why": found.why}
            continue
        truth = StageTruth(inputs, chunk_of(found.stages))
        errors = stage_errors(truth, Side(backend.name, found.stages, found.rounding))
        holds = all(error <= budget for error, budget in errors.values())
        yield {"case": case.name, "ok": holds, "stages": {name: list(pair) for name, pair in errors.items()}}


def times(clock: Clock, say: Callable[[str], None], rounds: int = 30) -> Iterator[dict[str, Any]]:
    """Our call and FLA's own on the same tensors, bfloat16, q and k normalised in both: medians of alternating runs."""
    import torch
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    for variant, op in (("gdn", chunk_gated_delta_rule), ("kda", chunk_kda)):
        for T in (256, 8192):
            if clock.left() < 60:
                yield {"variant": variant, "tokens": T, "left_out": "the time is over"}
                continue
            say(f"times, {variant}, {T} tokens")
            H, HV, K = (16, 32, 128) if variant == "gdn" else (32, 32, 128)
            rng = torch.Generator("cuda").manual_seed(0)
            array = lambda *dims, rng=rng: torch.randn(dims, device="cuda", generator=rng)  # noqa: E731
            q, k, v = (array(1, T, h, K).bfloat16().requires_grad_() for h in (H, H, HV))
            g = (-array(1, T, HV, *((K,) if variant == "kda" else ())).abs() / 10).requires_grad_()
            beta = array(1, T, HV).sigmoid().requires_grad_()
            leaves = (q, k, v, g, beta)

            def ours(leaves: Any = leaves) -> Any:
                q, k, v, g, beta = leaves
                return pg.gated_delta_rule(
                    q, k, v, g, beta=beta, output_final_state=True, qk_l2norm=True, backend="fla"
                )[0]

            def theirs(leaves: Any = leaves, op: Any = op) -> Any:
                q, k, v, g, beta = leaves
                return op(q, k, v, g=g, beta=beta, output_final_state=True, use_qk_l2norm_in_kernel=True)[0]

            def both(call: Callable[[], Any], leaves: Any = leaves) -> Any:
                o = call()
                return torch.autograd.grad(o, leaves, o.detach())

            row: dict[str, Any] = {"variant": variant, "tokens": T, "heads": [H, HV], "dims": [K, K]}
            for name, mode in (("forward", lambda call: call()), ("forward and backward", both)):
                if name == "forward":
                    with torch.no_grad():
                        row[name] = _compared(ours, theirs, mode, rounds)
                else:
                    row[name] = _compared(ours, theirs, mode, rounds)
            with serving() as by_us, torch.no_grad():
                ours()
            with serving() as by_them, torch.no_grad():
                theirs()
            row["served"] = {"ours": list(map(str, by_us)), "fla": list(map(str, by_them))}
            yield row


def _compared(ours: Any, theirs: Any, mode: Any, rounds: int) -> dict[str, Any]:
    """Milliseconds on the device, microseconds on the host until the call returns, peak bytes beside the operands."""
    import torch

    found: dict[str, dict[str, list[float]]] = {"ours": {}, "fla": {}}
    for i in range(rounds + 3):
        for name, call in (("ours", ours), ("fla", theirs)):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            started = time.perf_counter()
            kept = mode(call)
            host = time.perf_counter() - started
            end.record()
            torch.cuda.synchronize()
            if i >= 3:  # the first compile and tune
                row = found[name]
                row.setdefault("device_ms", []).append(begin.elapsed_time(end))
                row.setdefault("host_us", []).append(host * 1e6)
                row.setdefault("peak_bytes", []).append(float(torch.cuda.max_memory_allocated() - held))
            del kept
    medians = {name: {what: statistics.median(v) for what, v in row.items()} for name, row in found.items()}
    more = {what: medians["ours"][what] - medians["fla"][what] for what in medians["ours"]}
    return {**medians, "difference": more}


def main() -> int:
    """Run what fits into the time; the exit code is 1 if something does not hold, 2 if there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--backend", choices=("fla", "fla-interpret"), default="fla")
    parser.add_argument("--seconds", type=float, default=480, help="of all together")
    options = parser.parse_args()
    console = Console(highlight=False)
    clock = Clock(time.monotonic() + options.seconds)
    try:
        backend = backend_for(options.backend, Settings())
    except GdnError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    results: dict[str, Any] = {"backend": backend.name}
    with console.status("") as status:
        results["environment"] = environment(backend)
        for name, rows in (("proof", proof), ("stages", stages)):
            results[name] = []
            for row in rows(backend, clock, status.update):
                results[name].append(row)
                _write(options.output, results)
        if backend.name == "fla":
            results["times"] = []
            for row in times(clock, status.update):
                results["times"].append(row)
                _write(options.output, results)
            if clock.left() > 60:
                status.update("recording")
                path = options.output.with_suffix(".safetensors")
                path.unlink(missing_ok=True)
                done = record(path, backend, "quick", suite("quick"), Settings())
                results["recording"] = {"file": path.name, **done._asdict()}
    _write(options.output, results)
    return _show(console, results, options.output)


def _write(path: Path, results: dict[str, Any]) -> None:
    text = json.dumps(results, indent=1, default=lambda x: x.item() if isinstance(x, np.generic) else str(x))
    part = path.with_suffix(".part")
    part.write_text(text + "\n")
    part.replace(path)


def _show(console: Console, results: dict[str, Any], path: Path) -> int:
    checked = [*results["proof"], *results["stages"]]
    for row in checked:
        if not row.get("ok", True):
            console.print(f"  FAILS: {row}", markup=False)
    left = [row.get("case", row.get("variant")) for row in (*checked, *results.get("times", [])) if "left_out" in row]
    if left:
        console.print(f"left out, since the time was over: {', '.join(map(str, left))}")
    for row in results.get("times", []):
        for name in ("forward", "forward and backward"):
            if name in row:
                ours, fla, more = (row[name][who] for who in ("ours", "fla", "difference"))
                within = "within" if more["host_us"] <= MOST_MICROSECONDS else "above"
                console.print(
                    f"{row['variant']}, {row['tokens']} tokens, {name}: {ours['device_ms']:.3f} ms, FLA directly "
                    f"{fla['device_ms']:.3f}; host {more['host_us']:+.0f} us, {within} {MOST_MICROSECONDS:.0f}; "
                    f"peak {more['peak_bytes'] / 2**20:+.1f} MiB"
                )
    held = sum(row.get("ok", False) for row in checked)
    console.print(f"{held} of {len(checked)} hold on {results['environment']['device']}; {path}")
    return int(not all(row.get("ok", True) for row in checked) or not held)


if __name__ == "__main__":
    sys.exit(main())
