"""How long the TPU's compiler takes for each kernel of a mixer, with its output norm and gate inside and without.

    python benchmarks/tpu_compile_time.py                  # docs/tpu-layer.md has the figures
    python benchmarks/tpu_compile_time.py --only gdn --chip v5e --rounds 5

Each kernel is compiled alone, on this CPU: lowered by Mosaic, and then by libtpu. Rounds alternate between both forms,
in one process, and medians of its CPU seconds are shown. The exit code is 1 if a kernel takes more than 1.5 times as
long with the norm. Kernels that are the same with it and without are compiled once.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from portable_gdn.tpu.chips import CHIPS, chip_named
from portable_gdn.tpu.scheduling.compile import compile_for, environment, on

environment(os.environ)  # before jax is imported

import jax  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import track  # noqa: E402
from rich.table import Table  # noqa: E402

MOST = 1.5  # times as long to compile as without the norm


class Kernel(NamedTuple):
    """A Pallas kernel alone: a function of its operands, their shapes, and its text."""

    run: Callable[..., Any]
    operands: tuple[jax.ShapeDtypeStruct, ...]
    text: str


def pallas_calls(jaxpr: Any) -> Iterator[Any]:
    """Equations of Pallas kernels in a jaxpr, in the order in which they run."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation
            continue
        chosen = equation.params.get("kernel")  # where the lowering chooses between a kernel and another program
        for part in jax.tree.leaves(list(equation.params.values())) if chosen is None else [chosen]:
            if hasattr(part, "jaxpr") or hasattr(part, "eqns"):
                yield from pallas_calls(getattr(part, "jaxpr", part))


def kernels_of(chip: str, function: Callable[..., Any], shapes: Any) -> dict[str, Kernel]:
    """The Pallas kernels of a function by name, numbered where a name repeats."""
    found: dict[str, Kernel] = {}
    with on(chip_named(chip)):
        traced = jax.make_jaxpr(function)(*shapes)
    for equation in pallas_calls(traced.jaxpr):
        name, number = equation.params["name"], 1
        while (label := name if number == 1 else f"{name} {number}") in found:
            number += 1
        operands = tuple(jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in equation.invars)
        run = lambda *args, e=equation: e.primitive.bind(*args, **e.params)  # noqa: E731
        found[label] = Kernel(run, operands, f"{equation.params['jaxpr']} {equation.params['grid_mapping']}")
    return found


def seconds(chip: str, kernel: Kernel) -> float:
    """CPU seconds of one compilation of a kernel."""
    begin = time.process_time()
    compile_for(chip_named(chip), lambda *args: kernel.run(*args), *kernel.operands)  # a new function: none is cached
    return time.process_time() - begin


def medians(chip: str, kernels: dict[Any, Kernel], rounds: int, note: str = "compile") -> dict[Any, float]:
    """CPU seconds of each kernel's compilation, the median of rounds over all of them."""
    compile_for(chip_named(chip), jax.numpy.sin, jax.ShapeDtypeStruct((8, 128), "float32"))  # loads the compiler
    taken: dict[Any, list[float]] = {key: [] for key in kernels}
    for _ in track(range(rounds), note, console=Console(stderr=True)):
        for key, kernel in kernels.items():
            taken[key].append(seconds(chip, kernel))
    return {key: statistics.median(times) for key, times in taken.items()}


def main() -> int:
    """Compile all, and show seconds. The exit code is 1 if a kernel takes too much longer with the norm."""
    from tpu_layer import MODELS

    from portable_gdn.harness.layer_report import LayerShape, layer_call

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chip", default="v6e", choices=sorted(CHIPS))
    parser.add_argument("--precision", default="fast", choices=("fast", "default"))
    parser.add_argument("--only", default="", help="names of variants, with commas between them")
    parser.add_argument("--directions", default="forward,train")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    slower = False
    for variant, hidden, shape in MODELS:
        if options.only and variant not in options.only.split(","):
            continue
        for direction in options.directions.split(","):
            forms = [
                kernels_of(
                    options.chip,
                    *layer_call(LayerShape("mixer", variant, direction, hidden, shape, options.precision, norm=norm)),
                )
                for norm in (False, True)
            ]
            each = {(norm, name): kernel for norm, form in enumerate(forms) for name, kernel in form.items()}
            same = {
                name for name, kernel in forms[1].items() if name in forms[0] and kernel.text == forms[0][name].text
            }
            compiled = {key: kernel for key, kernel in each.items() if not (key[0] and key[1] in same)}
            taken = medians(options.chip, compiled, options.rounds, f"{variant} {direction}")
            title = f"{variant} mixer, {direction}, {options.precision}, {options.chip}: CPU seconds to compile"
            table = Table("kernel", "without", "with", "ratio", title=title)
            for name in forms[1]:
                without, inside = taken.get((0, name)), taken.get((1, name))
                ratio = inside / without if inside and without else None
                slower |= ratio is not None and ratio > MOST
                shown = ["" if a is None else f"{a:.2f}" for a in (without, inside, ratio)]
                table.add_row(name, *(shown if name not in same else (shown[0], "the same", "")))
            Console(width=120).print(table)
    return int(slower)


if __name__ == "__main__":
    sys.exit(main())
