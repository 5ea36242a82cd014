"""Ports of a synthetic checkpoint, against a plain copy of the same bytes on the same disk: throughput and peak memory.

The checkpoint has Qwen3-Next's names, shapes and dtypes, with as many layers and experts as its size asks for. Copy and
ports alternate, each in a process of its own, with the source dropped from the system's cache before and everything
written through to the disk at the end; processor time is measured too, since speed depends on what else the machine
does. Wanted: half of the copy's throughput, and at most 1 GiB more than the largest tensor.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

WANTED_SPEED = 0.5  # of a plain copy's
WANTED_MEMORY = 2**30  # bytes beyond the largest tensor
LEAVE = 10 * 2**30  # bytes of the disk to leave free
E, M, SHARD = 2048, 512, 4 * 10**9
TARGETS = ("jax", "fla", "orbax", "maxtext", "back")


def layer(i: int, experts: int) -> dict[str, tuple[list[int], str]]:
    """Tensors of one layer: shapes and dtypes."""
    at = f"model.layers.{i}."
    found: dict[str, tuple[list[int], str]] = {}
    if (i + 1) % 4:
        m = at + "linear_attn."
        for name, shape in {
            "in_proj_qkvz.weight": [12288, E], "in_proj_ba.weight": [64, E], "conv1d.weight": [8192, 1, 4],
            "dt_bias": [32], "out_proj.weight": [E, 4096],
        }.items():  # fmt: skip
            found[m + name] = (shape, "BF16")
        found |= {m + "A_log": ([32], "F32"), m + "norm.weight": ([128], "F32")}
    else:
        m = at + "self_attn."
        shapes = {"q_proj": [8192, E], "k_proj": [512, E], "v_proj": [512, E], "o_proj": [E, 4096]}
        found |= {f"{m}{name}.weight": (shape, "BF16") for name, shape in shapes.items()}
        found |= {f"{m}{name}.weight": ([256], "BF16") for name in ("q_norm", "k_norm")}
    m = at + "mlp."
    for e in range(experts):
        found |= {f"{m}experts.{e}.{name}_proj.weight": ([M, E], "BF16") for name in ("gate", "up")}
        found[f"{m}experts.{e}.down_proj.weight"] = ([E, M], "BF16")
    found |= {m + "gate.weight": ([experts, E], "BF16"), m + "shared_expert_gate.weight": ([1, E], "BF16")}
    found |= {f"{m}shared_expert.{name}_proj.weight": ([M, E], "BF16") for name in ("gate", "up")}
    found[m + "shared_expert.down_proj.weight"] = ([E, M], "BF16")
    found |= {f"{at}{name}.weight": ([E], "BF16") for name in ("input_layernorm", "post_attention_layernorm")}
    return found


def make(folder: Path, size: int) -> int:
    """Write the checkpoint, about ``size`` bytes; its largest tensor's bytes."""
    folder.mkdir()
    vocabulary = 151936
    tensors = {"model.embed_tokens.weight": ([vocabulary, E], "BF16")}
    bytes_of = lambda item: prod(item[0]) * {"BF16": 2, "F32": 4}[item[1]]  # noqa: E731
    one = 3 * M * E * 2
    experts = int(max(8, min(512, (size / 4 - 2**28) // one)))
    layers = 0
    while layers % 4 or sum(map(bytes_of, tensors.values())) < size - 4 * experts * one // 2:
        tensors |= layer(layers, experts)
        layers += 1
    tensors |= {"model.norm.weight": ([E], "BF16"), "lm_head.weight": ([vocabulary, E], "BF16")}
    groups: list[dict[str, Any]] = [{}]
    filled = 0
    for name, item in tensors.items():
        if filled + bytes_of(item) > SHARD:
            groups.append({})
            filled = 0
        groups[-1][name] = item
        filled += bytes_of(item)
    noise = np.random.default_rng(0).integers(0, 256, 2**24, np.uint8).tobytes()
    where = {}
    for n, group in enumerate(groups, 1):
        file = f"model-{n:05d}-of-{len(groups):05d}.safetensors"
        header, at = {}, 0
        for name, item in group.items():
            header[name] = {"dtype": item[1], "shape": item[0], "data_offsets": [at, at + bytes_of(item)]}
            at += bytes_of(item)
            where[name] = file
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            while at:
                at -= out.write(noise[: min(at, len(noise))])
            os.fsync(out.fileno())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    config = {
        "model_type": "qwen3_next", "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_attention_heads": 16, "num_key_value_heads": 2,
        "num_hidden_layers": layers, "num_experts": experts, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return max(map(bytes_of, tensors.values()))


def forget(folder: Path) -> None:
    """Drop a folder's files from the system's cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def work(what: str, source: Path, out: Path) -> None:
    """In a process of its own: copy or port, and print seconds and peak memory."""
    began = time.monotonic()
    if what == "copy":
        shutil.copytree(source, out)
        for path in out.rglob("*"):
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)
    else:
        from portable_gdn.checkpoint import back, port

        if what == "back":
            back(source, out)
        else:
            port(source, out, what, layout="scanned" if what == "maxtext" else None)
    seconds = time.monotonic() - began
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu = used.ru_utime + used.ru_stime
    print(json.dumps({"seconds": seconds, "cpu": cpu, "peak": used.ru_maxrss * 1024}))


def measure(what: str, source: Path, out: Path) -> dict[str, float]:
    """Run ``work`` in a process, from a cold cache."""
    forget(source)
    done = subprocess.run(
        [sys.executable, __file__, "--work", what, str(source), str(out)], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


def main() -> None:
    """Measure and print; with --check exit with 1 where a requirement fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=2.0, help="size of the checkpoint")
    parser.add_argument("--to", nargs="+", default=["jax", "maxtext", "back"], choices=TARGETS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to write; the system's temporary folder if none"
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.work[0], Path(given.work[1]), Path(given.work[2]))
        return
    with tempfile.TemporaryDirectory(dir=given.folder, prefix="port-benchmark-") as folder:
        place = Path(folder)
        copies = 3 if "back" in given.to else 2
        free = shutil.disk_usage(place).free - LEAVE
        if copies * given.gib * 2**30 > free:
            raise SystemExit(f"{copies} x {given.gib} GiB are needed and {free / 2**30:.1f} may be used.")
        largest = make(place / "source", int(given.gib * 2**30))
        size = sum(path.stat().st_size for path in (place / "source").iterdir())
        found: dict[str, list[dict[str, float]]] = {}
        for _ in range(given.rounds):
            for what in ("copy", *given.to):
                source = place / "source"
                if what == "back":
                    subprocess.run(
                        [sys.executable, __file__, "--work", "jax", str(source), str(place / "port")],
                        check=True,
                        capture_output=True,
                    )
                    source = place / "port"
                found.setdefault(what, []).append(measure(what, source, place / "out"))
                shutil.rmtree(place / "out")
                shutil.rmtree(place / "port", ignore_errors=True)
    rows = []
    copy = statistics.median(run["seconds"] for run in found["copy"])
    for what, runs in found.items():
        seconds, peak = statistics.median(r["seconds"] for r in runs), max(r["peak"] for r in runs)
        rows.append(
            {
                "what": what, "seconds": seconds, "MB_s": size / seconds / 1e6, "of_copy": copy / seconds,
                "cpu_s_GiB": statistics.median(r["cpu"] for r in runs) / (size / 2**30),
                "peak_MiB": peak / 2**20, "beyond_largest_MiB": (peak - largest) / 2**20,
            }
        )  # fmt: skip
    facts = {"GiB": size / 2**30, "largest_MiB": largest / 2**20, "rows": rows}
    if given.json:
        print(json.dumps(facts, indent=1))
    else:
        console = Console()
        console.print(
            f"{facts['GiB']:.1f} GiB, largest tensor {facts['largest_MiB']:.0f} MiB, medians of {given.rounds}"
        )
        table = Table(
            "", "s", "MB/s", "of a copy's speed", "processor, s/GiB", "peak memory, MiB",
            "beyond the largest tensor, MiB",
        )  # fmt: skip
        for row in rows:
            table.add_row(
                row["what"], f"{row['seconds']:.1f}", f"{row['MB_s']:.0f}", f"{row['of_copy']:.2f}",
                f"{row['cpu_s_GiB']:.2f}",
                f"{row['peak_MiB']:.0f}", f"{row['beyond_largest_MiB']:.0f}",
            )  # fmt: skip
        console.print(table)
    ports = [row for row in rows if row["what"] != "copy"]
    holds = all(r["of_copy"] >= WANTED_SPEED and r["peak_MiB"] * 2**20 <= largest + WANTED_MEMORY for r in ports)
    if given.check and not holds:
        sys.exit(1)


if __name__ == "__main__":
    main()
