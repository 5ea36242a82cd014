"""What the TPU's window kernel costs: code cycles and HBM bytes a value head and row, beside the floor, on this CPU.

    python benchmarks/tpu_decode.py            # compile, and print beside what tpu_decode.json holds
    python benchmarks/tpu_decode.py --write    # and keep the new figures there

A floor is the chip's time for reading and writing a row's state once. Figures are the compiler's own
(docs/tpu-schedule.md) for 16 key and 32 value heads of 128 channels;
all rows are alive. Names say how many tokens were accepted of those that waited, and how many are a row's own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from portable_gdn.spec.problem import ConvKind, PoolKind, Signature
from portable_gdn.spec.variants import VARIANTS, Variant
from portable_gdn.tpu.chips import CHIPS, Chip
from portable_gdn.tpu.scheduling.build import schedules

FILE = Path(__file__).with_suffix(".json")
CHIPS_SHOWN = ("v5e", "v6e", "v7x")
H, HV, K, V = 16, 32, 128, 128


class Entry(NamedTuple):
    """A step to compile: rows of a batch, tokens accepted of those that wait, and own tokens of each row."""

    variant: str
    rows: int
    accepted: int
    own: int
    room: int
    state_dtype: str = "float32"
    precision: str = "default"
    mixer: bool = False

    @property
    def name(self) -> str:
        """Its name in the file."""
        how = f" {self.precision}" if self.precision != "default" else ""
        how += " mixer" if self.mixer else ""
        return f"{self.variant} B={self.rows} {self.accepted}+{self.own} of {self.room} {self.state_dtype}{how}"


#: One step without drafts, one behind a token that waits, and a verification of four tokens after four; GDN-2 and GLA
#: for one step, and the token-by-token form of windows, which keeps bits.
ENTRIES = (
    *(
        Entry(variant, rows, *tokens, dtype)
        for variant in ("GDN", "KDA")
        for tokens in ((0, 1, 0), (4, 4, 4))
        for dtype in ("float32", "bfloat16")
        for rows in (1, 8, 64, 256)
    ),
    *(Entry(variant, 64, *tokens) for variant in ("GDN-2", "GLA") for tokens in ((0, 1, 0), (4, 4, 4))),
    Entry("GDN", 64, 1, 1, 4),
    Entry("GDN", 64, 1, 4, 4),
    Entry("GDN", 64, 8, 8, 8),
    Entry("GDN", 64, 4, 4, 4, mixer=True),
    Entry("GDN", 64, 1, 1, 1),
    Entry("GDN", 64, 4, 4, 4, precision="highest"),
)


def signature(entry: Entry) -> Signature:
    """The update's, bfloat16 inputs and float32 gates."""
    variant: Variant = VARIANTS[entry.variant]
    groups = {"none": 0, "head": 1, "channel": K}[variant.decay.value]
    own = max(entry.own, 1)
    pool = PoolKind(entry.rows + 1, entry.room, entry.room, entry.state_dtype, 0, 0)
    s = Signature(
        "jax", "traced", (), 1, entry.rows * own, entry.rows, H, HV, K, V, groups, "bfloat16", variant, K**-0.5, False,
        False, None, None, entry.precision, "kv", False, False, None,
    )  # fmt: skip
    if entry.mixer:
        conv = ConvKind(4, "silu", True, 2 * H * K + HV * V)
        s = replace(s, operands=("qkv", "g", "beta", "conv_weight"), conv=conv, qk_l2norm=True)
    return replace(s, update=pool)


def kernel(entry: Entry, chip: Chip) -> tuple[Any, tuple[Any, ...]]:
    """The window kernel of a step and the shapes of its operands, with the table's values."""
    import jax
    import jax.numpy as jnp

    from portable_gdn.tpu.kernels.pipelined.prologue import HISTORY
    from portable_gdn.tpu.kernels.window.chunk import ChunkOperands
    from portable_gdn.tpu.kernels.window.forward import WindowOperands, windows
    from portable_gdn.tpu.kernels.window.plan import TAPS, window_plan

    p = window_plan(signature(entry), chip)
    assert p is not None
    shape = lambda *dims, dtype=jnp.float32: jax.ShapeDtypeStruct((p.rows, p.blocks, *dims), dtype)  # noqa: E731
    x: ChunkOperands | WindowOperands
    if p.chunked:
        gates = (not p.by_channel) + (p.erases and not p.erases_channels)
        channels = (1 + p.erases_channels) * p.places if p.by_channel else 0
        length, dtype, taps = p.places, jnp.float32, ()
        if p.before is not None:
            length, dtype = length + HISTORY, jnp.bfloat16
            heads = ((p.key_heads, 2 * TAPS, K), (p.value_heads, TAPS, V))
            taps = tuple(jax.ShapeDtypeStruct((1, p.blocks, *dims), jnp.float32) for dims in heads)
        x = ChunkOperands(
            shape(p.key_heads, 2 * length, K, dtype=dtype), shape(p.value_heads, length, V, dtype=dtype),
            shape(p.places, gates * p.value_heads) if gates else None,
            shape(p.value_heads, channels, K) if channels else None, *taps,
        )  # fmt: skip
    else:
        factors = 1 if p.by_channel else 3 if p.erases else 2
        x = WindowOperands(
            shape(p.places, 2 * p.key_heads, K), shape(p.places, p.value_heads, V),
            shape(p.places, factors * p.value_heads),
            shape(p.places, 3 * p.value_heads, K) if p.by_channel else None,
        )  # fmt: skip
    pool = jax.ShapeDtypeStruct((entry.rows + 1, HV, K, V), entry.state_dtype)
    total = entry.accepted + entry.own
    committed = entry.accepted if entry.room else total
    table = np.concatenate([np.arange(p.rows) + 1, *(np.full(p.rows, n) for n in (total, committed, 0, 0))]).astype(
        np.int32
    )
    run = jax.jit(lambda table, x, pool: windows(p, table, x, pool, False)[:2], donate_argnums=2)
    return run, (table, x, pool)


def measure(entry: Entry, chips: Sequence[str] = CHIPS_SHOWN) -> dict[str, Any]:
    """Figures by chip, or why there are none."""
    found = {}
    for name in chips:
        run, args = kernel(entry, CHIPS[name])
        (report,) = schedules(run, *args, chips=[name])
        found[name] = figures(entry, CHIPS[name], report) if hasattr(report, "kernels") else str(report)
    return found


def figures(entry: Entry, chip: Chip, report: Any) -> dict[str, Any]:
    """Cycles of code and of traffic, bytes, and the longer of both beside the floor, a value head and row."""
    (one,) = report.kernels
    heads = entry.rows * HV
    size = 2 if entry.state_dtype == "bfloat16" else 4
    per_cycle = chip.hbm_bytes_per_second / chip.clock_hz / chip.cores
    moved = one.hbm_bytes / heads
    code = None if one.cycles is None else one.cycles / heads
    floor = 2 * size * K * V / per_cycle
    return {
        "code": None if code is None else round(code, 1),
        "KiB": round(moved / 1024, 1),
        "traffic": round(moved / per_cycle, 1),
        "floor": round(floor, 1),
        "of floor": None if code is None else round(max(code, moved / per_cycle) / floor, 3),
        "spills": one.spills,
    }


def versions() -> str:
    """What the figures depend on."""
    return ", ".join(f"{name} {metadata.version(name)}" for name in ("jax", "libtpu"))


def main() -> None:
    """Compile, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep the figures in tpu_decode.json")
    parser.add_argument("--only", default="", help="entries whose names hold this")
    arguments = parser.parse_args()
    held = json.loads(FILE.read_text())["figures"] if FILE.exists() else {}
    found = {e.name: measure(e) for e in track([e for e in ENTRIES if arguments.only in e.name], "Compiling")}
    table = Table("step", "chip", "code", "KiB", "traffic", "floor", "longer / floor", "code on file")
    for name, chips in found.items():
        for chip, row in chips.items():
            if isinstance(row, str):
                table.add_row(name, chip, row)
                continue
            was = held.get(name, {}).get(chip)
            table.add_row(
                name, chip, *(str(row[key]) for key in ("code", "KiB", "traffic", "floor", "of floor")),
                str(was["code"]) if isinstance(was, dict) else "",
            )  # fmt: skip
    Console(width=140).print(table)
    if arguments.write:
        figures = {e.name: found.get(e.name, held.get(e.name)) for e in ENTRIES}
        figures = {name: chips for name, chips in figures.items() if chips is not None}
        FILE.write_text(json.dumps({"made with": versions(), "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
