"""The torch and xla backends against transformers' own torch code, on a CPU: time, and with --memory peak memory.

Every contestant computes the same call from the same float32 inputs; outputs and gradients are compared before anything
is timed. Runs alternate, so that what else the machine does falls on all alike; medians are shown.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import inspect
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

BASELINE = "transformers"
CONTESTANTS = (BASELINE, "torch", "xla")
MODES = ("forward", "both")
TITLES = {"forward": "forward", "both": "forward + backward"}
WANTED_SPEED = 2.0  # times as fast as transformers
WANTED_MEMORY = 1.0  # of transformers' peak, at most
AGREE = 1e-4  # relative difference of outputs and gradients, by norm
OPERANDS = ("q", "k", "v", "g", "beta")
SOURCES = {
    "gdn": ("transformers.models.qwen3_next.modeling_qwen3_next", "torch_chunk_gated_delta_rule"),
    "kda": ("transformers.models.kimi_linear.modeling_kimi_linear", "chunk_kimi_delta_attention"),
}


@dataclass(frozen=True)
class Case:
    """The call to compute."""

    variant: str = "gdn"
    B: int = 1
    T: int = 2048
    H: int = 16
    HV: int = 32
    K: int = 128
    V: int = 128
    threads: int = 2
    chunk: int | None = None


@dataclass(frozen=True)
class Contestant:
    """The same call by one implementation; each function waits until the result is there.

    forward() returns o; both() returns o and the gradients of OPERANDS; compile(mode) does beforehand what only the
    first call has to do.
    """

    forward: Callable[[], Any]
    both: Callable[[], Any]
    compile: Callable[[str], None] = lambda mode: None


def inputs(case: Case) -> dict[str, np.ndarray]:
    """Operands and the cotangent of o, as a model has them: gates that forget slowly, betas in (0, 1)."""
    rng = np.random.default_rng(0)
    lead = (case.B, case.T)
    decays = (*lead, case.HV) if case.variant == "gdn" else (*lead, case.HV, case.K)
    x = {
        "q": rng.standard_normal((*lead, case.H, case.K), np.float32),
        "k": rng.standard_normal((*lead, case.H, case.K), np.float32),
        "v": rng.standard_normal((*lead, case.HV, case.V), np.float32),
        "g": -rng.exponential(0.1, decays).astype(np.float32),
        "beta": rng.uniform(0, 1, (*lead, case.HV)).astype(np.float32),
    }
    x["do"] = rng.standard_normal(x["v"].shape, np.float32)
    return x


def build(name: str, case: Case, x: dict[str, np.ndarray]) -> Contestant:
    """The contestant of this name, its inputs in its own library."""
    if name == "xla":
        return _jax(case, x)
    return _torch(case, x, _transformers(case) if name == BASELINE else None)


def limit_threads(threads: int, shared: bool = False) -> None:
    """Must come before torch and jax are imported; children inherit it."""
    if shared:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["NPROC"] = str(threads)  # the size of XLA's pool
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)


def _transformers(case: Case) -> Callable[..., Any]:
    """transformers' own function, with no kernel library in reach."""
    sys.modules["fla"] = sys.modules["causal_conv1d"] = None  # type: ignore[assignment]
    module, name = SOURCES[case.variant]
    found: Callable[..., Any] = inspect.unwrap(getattr(importlib.import_module(module), name))
    return found


def _torch(case: Case, x: dict[str, np.ndarray], theirs: Callable[..., Any] | None) -> Contestant:
    import torch

    import portable_gdn as pg

    torch.set_num_threads(case.threads)
    tensors = {name: torch.from_numpy(a) for name, a in x.items()}
    leaves = [tensors[name] for name in OPERANDS]

    def call(*operands: Any) -> Any:
        q, k, v, g, beta = operands
        if theirs is not None:
            more = {} if case.chunk is None else {"chunk_size": case.chunk}
            return theirs(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True, **more)[0]
        return pg.gated_delta_rule(q, k, v, g, beta=beta, qk_l2norm=True, chunk_size=case.chunk, backend="torch")[0]

    def forward() -> Any:
        with torch.no_grad():
            return call(*leaves)

    def both() -> Any:
        fresh = [a.detach().requires_grad_() for a in leaves]
        o = call(*fresh)
        return o.detach(), torch.autograd.grad(o, fresh, tensors["do"])

    return Contestant(forward, both)


def _jax(case: Case, x: dict[str, np.ndarray]) -> Contestant:
    import jax
    import jax.numpy as jnp

    import portable_gdn as pg

    operands = [jnp.asarray(x[name]) for name in OPERANDS]
    do = jnp.asarray(x["do"])

    def call(q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
        return pg.gated_delta_rule(q, k, v, g, beta=beta, qk_l2norm=True, chunk_size=case.chunk, backend="xla")[0]

    def gradients(do: Any, *operands: Any) -> Any:
        o, pull = jax.vjp(call, *operands)
        return o, pull(do)

    programs: dict[str, Any] = {}

    def program(mode: str) -> Any:
        if mode not in programs:
            f, args = (call, operands) if mode == "forward" else (gradients, [do, *operands])
            programs[mode] = jax.jit(f).lower(*args).compile()
        return programs[mode]

    ready: Callable[[Any], Any] = jax.block_until_ready
    return Contestant(
        lambda: ready(program("forward")(*operands)), lambda: ready(program("both")(do, *operands)), program
    )


def distances(found: Any, wanted: Any) -> dict[str, float]:
    """Relative differences, by norm, of o and of each gradient."""
    pairs = [("o", found[0], wanted[0]), *zip(("dq", "dk", "dv", "dg", "dbeta"), found[1], wanted[1], strict=True)]
    out = {}
    for name, a, b in pairs:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        out[name] = float(np.linalg.norm(a - b) / np.linalg.norm(b))
    return out


def measure_time(
    case: Case, rounds: int, names: list[str], modes: list[str], note: Callable[[str], None]
) -> dict[str, Any]:
    """Milliseconds by mode and contestant (every run), and how far results are from transformers'."""
    x = inputs(case)
    ready = {name: build(name, case, x) for name in names}
    note("comparing results")
    wanted = ready[BASELINE].both()
    errors = {name: distances(one.both(), wanted) for name, one in ready.items() if name != BASELINE}
    del wanted
    runs: dict[str, dict[str, list[float]]] = {mode: {name: [] for name in names} for mode in modes}
    for mode in modes:
        for turn in range(rounds + 1):  # the first one warms up
            note(f"{TITLES[mode]}, round {turn} of {rounds}")
            for i in range(len(names)):
                name = names[(i + turn) % len(names)]
                gc.collect()
                start = time.perf_counter()
                getattr(ready[name], mode)()
                passed = 1e3 * (time.perf_counter() - start)
                if turn:
                    runs[mode][name].append(passed)
    return {"runs_ms": runs, "errors": errors}


# Memory: one process a measurement -----------------------------------------------------------------------------------


def peak_bytes() -> int:
    """The most memory this process has held. On Linux not by getrusage: it counts the parent that started us, too."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def forget_peak() -> None:
    """Make the peak what is held now, where the system can; elsewhere it stays, and what follows may look smaller."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def child(case: Case, name: str, mode: str) -> dict[str, int]:
    """Peaks of one run above what imports, inputs and a tiny first call left, and of compiling for it. In bytes."""
    tiny = replace(case, T=16, H=1, HV=case.HV // case.H, chunk=None if case.chunk is None else 16)
    getattr(build(name, tiny, inputs(tiny)), mode)()
    one = build(name, case, inputs(case))
    gc.collect()
    forget_peak()
    before = peak_bytes()
    one.compile(mode)
    compiled = peak_bytes() - before
    gc.collect()
    forget_peak()
    before = peak_bytes()
    getattr(one, mode)()
    return {"run": peak_bytes() - before, "compile": compiled, "before": before}


def measure_memory(
    case: Case, repeats: int, names: list[str], modes: list[str], note: Callable[[str], None]
) -> dict[str, Any]:
    """Median peaks by mode and contestant, each measured in processes of its own."""
    found: dict[str, Any] = {mode: {} for mode in modes}
    for mode in modes:
        for name in names:
            note(f"memory of {name}, {TITLES[mode]}")
            command = [sys.executable, __file__, "--child", json.dumps([asdict(case), name, mode])]
            seen = []
            for _ in range(repeats):
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    raise SystemExit(f"The measurement of {name} ({mode}) failed:\n{done.stderr[-2000:]}")
                seen.append(json.loads(done.stdout.splitlines()[-1]))
            found[mode][name] = {key: statistics.median(one[key] for one in seen) for key in seen[0]}
    return found


# Report --------------------------------------------------------------------------------------------------------------


def summarise(case: Case, timed: dict[str, Any], memory: dict[str, Any] | None) -> dict[str, Any]:
    """Everything that the tables show, and the requirements that do not hold."""
    rows, failed = [], []
    for mode, runs in timed["runs_ms"].items():
        base = statistics.median(runs[BASELINE])
        for name, every in runs.items():
            middle = statistics.median(every)
            row = {"mode": mode, "name": name, "ms": middle, "min_ms": min(every), "max_ms": max(every)}
            rows.append({**row, "times_as_fast": base / middle})
            if name != BASELINE and base / middle < WANTED_SPEED:
                failed.append(f"{name}, {TITLES[mode]}: {base / middle:.2f} times as fast, wanted {WANTED_SPEED:g}")
    for name, errors in timed["errors"].items():
        worst = max(errors, key=lambda key: errors[key])
        if not errors[worst] <= AGREE:
            failed.append(f"{name}: {worst} differs by {errors[worst]:.1e}, wanted at most {AGREE:g}")
    peaks = []
    for mode, by_name in (memory or {}).items():
        base = by_name[BASELINE]["run"]
        for name, one in by_name.items():
            peaks.append({"mode": mode, "name": name, **one, "ratio": one["run"] / base})
            if name != BASELINE and one["run"] > WANTED_MEMORY * base:
                share = one["run"] / base
                failed.append(f"{name}, {TITLES[mode]}: {share:.2f} of the memory, wanted at most {WANTED_MEMORY:g}")
    return {"case": asdict(case), "time": rows, "errors": timed["errors"], "memory": peaks, "failed": failed}


def show(console: Console, report: dict[str, Any]) -> None:
    """The tables."""
    c = report["case"]
    console.print(
        f"{c['variant'].upper()}, float32, B={c['B']} T={c['T']} H={c['H']} HV={c['HV']} K={c['K']} V={c['V']}, "
        f"{c['threads']} threads, chunk {c['chunk'] or 'as each prefers'}",
        highlight=False,
    )
    for name, errors in report["errors"].items():
        line = "  ".join(f"{key} {value:.1e}" for key, value in errors.items())
        console.print(f"{name} differs from {BASELINE} by  {line}", highlight=False, soft_wrap=True)
    table = Table(title="Time")
    for column in ("", "contestant"):
        table.add_column(column, no_wrap=True)
    for column in ("ms (median)", "range", "as fast"):
        table.add_column(column, justify="right")
    for row in report["time"]:
        span = f"{row['min_ms']:.0f} .. {row['max_ms']:.0f}"
        table.add_row(
            TITLES[row["mode"]],
            row["name"],
            f"{row['ms']:.0f}",
            span,
            f"{row['times_as_fast']:.2f} x",
            end_section=row["name"] == report["time"][-1]["name"],
        )
    console.print(table)
    if report["memory"]:
        table = Table(title="Peak memory of one run, above its inputs")
        for column in ("", "contestant"):
            table.add_column(column)
        for column in ("MB", f"of {BASELINE}", "compiling, MB"):
            table.add_column(column, justify="right")
        for row in report["memory"]:
            compiling = f"{row['compile'] / 1e6:.0f}" if row["name"] == "xla" else ""
            table.add_row(
                TITLES[row["mode"]],
                row["name"],
                f"{row['run'] / 1e6:.0f}",
                f"{row['ratio']:.2f}",
                compiling,
                end_section=row["name"] == report["memory"][-1]["name"],
            )
        console.print(table)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--variant", choices=tuple(SOURCES), default="gdn")
    p.add_argument("--batch", type=int, default=1, metavar="B")
    p.add_argument(
        "--tokens",
        type=int,
        metavar="T",
        help="default 2048; 512 for kda, where transformers needs C x C x K numbers a chunk",
    )
    p.add_argument("--key-heads", type=int, metavar="H", help="default 16 (kda: as many as value heads)")
    p.add_argument("--value-heads", type=int, default=32, metavar="HV")
    p.add_argument("--key-dim", type=int, default=128, metavar="K")
    p.add_argument("--value-dim", type=int, default=128, metavar="V")
    p.add_argument("--chunk-size", type=int, help="for all; default: each one's own")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--rounds", type=int, default=5, help="timed runs of each, after one to warm up")
    p.add_argument("--only", choices=CONTESTANTS[1:], help=f"compare this one alone with {BASELINE}")
    p.add_argument("--mode", choices=MODES, help="time this alone")
    p.add_argument(
        "--shared", action="store_true", help="on a busy machine: torch's waiting threads sleep instead of spinning"
    )
    p.add_argument("--memory", action="store_true", help="measure peak memory, too")
    p.add_argument("--repeats", type=int, default=1, help="processes a memory measurement")
    p.add_argument("--check", action="store_true", help="exit with 1 if a requirement does not hold")
    p.add_argument("--json", action="store_true", help="print JSON instead of tables")
    p.add_argument("--child", help=argparse.SUPPRESS)
    return p.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0, or 1 if --check was given and a requirement does not hold, or 2 for a call that cannot be made."""
    a = parse(arguments)
    if a.child:
        raw, name, mode = json.loads(a.child)
        case = Case(**raw)
        limit_threads(case.threads)
        print(json.dumps(child(case, name, mode)))
        return 0
    kda = a.variant == "kda"
    case = Case(
        a.variant,
        a.batch,
        a.tokens or (512 if kda else 2048),
        a.key_heads or (a.value_heads if kda else 16),
        a.value_heads,
        a.key_dim,
        a.value_dim,
        a.threads,
        a.chunk_size,
    )
    if case.HV % case.H or (kda and case.H != case.HV) or a.rounds < 1 or a.repeats < 1:
        wrong = "equal" if kda else "be a multiple of"
        print(f"--value-heads must {wrong} --key-heads; --rounds and --repeats must be at least 1.", file=sys.stderr)
        return 2
    limit_threads(case.threads, a.shared)
    names = [BASELINE, a.only] if a.only else list(CONTESTANTS)
    modes = [a.mode] if a.mode else list(MODES)
    with Console(stderr=True).status("starting") as status:
        # Memory first: the smaller this process, the more is left for its children.
        memory = measure_memory(case, a.repeats, names, modes, status.update) if a.memory else None
        timed = measure_time(case, a.rounds, names, modes, status.update)
    report = summarise(case, timed, memory)
    if a.json:
        print(json.dumps({**report, "runs_ms": timed["runs_ms"]}, indent=2))
    else:
        show(Console(), report)
    if a.check and report["failed"]:
        print("A requirement does not hold. " + "; ".join(report["failed"]) + ".", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
