"""Sequences begun on one backend and continued on another, with the states passed on in a file or directly.

For each case the file has the recurrent state, [N, HV, K, V] or [N, HV, V, K], and the state of the convolution, both
in float32, with the recipe of the whole call and the token at which it was cut. The second half reads the states in the
other layout, and is compared with the oracle's results for the whole sequence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .. import door
from ..spec.backend import Backend
from ..spec.errors import GdnError
from ..spec.precision import Rounding
from ..spec.undisturbed import undisturbed
from .cases import TOKENS, Case, Inputs, build
from .compute import as_json
from .judge import allowance, by_head
from .run_file import digest, inputs_digest
from .tensor_file import TensorFile, TensorWriter
from .truth import Truth

__all__ = ["CASES", "Carried", "HandedOver", "begin", "finish", "load", "save"]

FORMAT = "portable-gdn-handover"
VERSION = "1"

#: Cases cut within a chunk, with states that are not zero, both layouts, heads that share keys, and a convolution.
CASES = (
    Case("GDN, bfloat16", T=150, dtype="bfloat16", HV=6, l2norm=True),
    Case("DeltaNet, states [V, K]", variant="DeltaNet", T=150, state_layout="vk"),
    Case("KDA", variant="KDA", T=150, HV=4, state_layout="vk"),
    Case("GDN-2", variant="GDN-2", T=150),
    Case("mixer", T=150, conv=4, gate="softplus", l2norm=True, HV=6, dtype="bfloat16"),
)
CUT = 90


class Carried(NamedTuple):
    """The states of one case at its cut, which pass from one backend to the other."""

    case: Case
    backend: str
    cut: int
    state: np.ndarray
    conv_state: np.ndarray | None
    rounding: Rounding


class HandedOver(NamedTuple):
    """One tensor of one case after the second half, with its error and budget and whether it is within the budget.

    Figures are relative L2 norms, those of the worst head.
    """

    case: str
    tensor: str
    layouts: str
    error: float
    budget: float
    ok: bool


def _part(inputs: Inputs, part: slice) -> dict[str, Any]:
    return {name: a[:, part] if name in TOKENS else a for name, a in inputs.operands.items()}


@undisturbed()
def _run(backend: Backend, operands: Mapping[str, Any], options: Any) -> tuple[dict[str, np.ndarray], Rounding]:
    problem, _ = door.normalise(backend.from_numpy(operands), options, backend.name, check_values=True)
    result = door.run(problem, backend)
    found = {"o": result.o, "state": result.state, "conv_state": result.conv_state}
    arrays = {name: np.asarray(backend.to_numpy(a)) for name, a in found.items() if a is not None}
    return arrays, backend.rounding(problem.signature)


def begin(
    backend: Backend, cases: Sequence[Case], progress: Callable[[str, int, int], None] | None = None
) -> tuple[list[Carried], dict[str, str], dict[str, str]]:
    """Compute the first part of each case.

    Returns:
        The states; the cases that the backend refuses, with the reasons; and those on which it fails, with the reasons.
    """
    carried, refused, failed = [], {}, {}
    for i, case in enumerate(cases):
        if progress is not None:
            progress(case.name, i, len(cases))
        inputs = build(case)
        try:
            found, rounding = _run(backend, _part(inputs, slice(0, CUT)), inputs.options)
        except GdnError as error:
            refused[case.name] = str(error)
            continue
        except Exception as error:  # continue with the other cases
            failed[case.name] = f"{backend.name}: {type(error).__name__}: {error}"
            continue
        carried.append(Carried(case, backend.name, CUT, found["state"], found.get("conv_state"), rounding))
    return carried, refused, failed


def finish(
    backend: Backend, carried: Sequence[Carried], progress: Callable[[str, int, int], None] | None = None
) -> tuple[list[HandedOver], dict[str, str], dict[str, str]]:
    """Compute the rest of each case from the carried states, in the other layout of states.

    Returns:
        The judged tensors; the cases that the backend refuses, with the reasons; and those on which it fails, with the
        reasons.
    """
    rows, refused, failed = [], {}, {}
    for i, item in enumerate(carried):
        if progress is not None:
            progress(item.case.name, i, len(carried))
        other = "vk" if item.case.state_layout == "kv" else "kv"
        whole = build(replace(item.case, state_layout=other))
        x = _part(whole, slice(item.cut, None))
        x["initial_state"] = np.ascontiguousarray(np.swapaxes(item.state, -1, -2))
        if item.conv_state is not None:
            x["conv_state"] = item.conv_state
        try:
            found, rounding = _run(backend, x, whole.options)
        except GdnError as error:
            refused[item.case.name] = str(error)
            continue
        except Exception as error:
            failed[item.case.name] = f"{backend.name}: {type(error).__name__}: {error}"
            continue
        truth = Truth(whole, gradients=False)
        s = truth.problem.signature
        expected = truth.expectation(item.rounding), truth.expectation(rounding)
        for name, value in found.items():
            exact = expected[0].exact[name]
            exact = exact[:, item.cut :] if name == "o" else exact
            norm, off = by_head(name, exact, s), by_head(name, np.asarray(value, np.float64) - exact, s)
            _, budget = allowance(name, off, *expected)
            with np.errstate(invalid="ignore", divide="ignore"):
                head = int(np.argmax(np.where(np.isnan(off), np.inf, off / budget)))
            unit = norm[head] or 1.0
            ok = bool(np.all(off <= budget))
            layouts = "" if name == "o" else f"{item.case.state_layout} to {other}" if name == "state" else "as it was"
            rows.append(
                HandedOver(item.case.name, name, layouts, float(off[head] / unit), float(budget[head] / unit), ok)
            )
    return rows, refused, failed


def save(path: Path, carried: Sequence[Carried]) -> None:
    """Write the states to a file, completely or not at all."""
    with TensorWriter(path) as file:
        entries = []
        for i, item in enumerate(carried):
            tensors = {"state": item.state} | ({} if item.conv_state is None else {"conv_state": item.conv_state})
            for name, a in tensors.items():
                file.add(f"{i}/{name}", a)
            entries.append(
                {
                    "recipe": asdict(item.case), "cut": item.cut, "rounding": as_json(item.rounding),
                    "inputs": inputs_digest(build(item.case)), "sha256": digest(tensors), "tensors": sorted(tensors),
                }
            )  # fmt: skip
        file.metadata = {
            "format": FORMAT, "version": VERSION, "backend": carried[0].backend if carried else "",
            "cases": json.dumps(entries),
        }  # fmt: skip


def load(path: Path) -> list[Carried]:
    """Read the states from a file.

    Raises:
        GdnError: the file is not such a file, is damaged, or belongs to other inputs than those of this version.
    """
    file = TensorFile(path)
    for key, must in (("format", FORMAT), ("version", VERSION)):
        if file.metadata.get(key) != must:
            raise GdnError(f"{path}: metadata {key} is {file.metadata.get(key)!r}; it must be {must!r}.")
    carried = []
    try:
        for i, entry in enumerate(json.loads(file.metadata["cases"])):
            case = Case(**entry["recipe"])
            tensors = {name: file.read(f"{i}/{name}") for name in entry["tensors"]}
            if digest(tensors) != entry["sha256"]:
                raise GdnError(f"{path}: the states of case {case.name!r} do not have the hash that was recorded.")
            if inputs_digest(build(case)) != entry["inputs"]:
                raise GdnError(f"{path}: this portable-gdn builds other inputs for case {case.name!r}; begin again.")
            rounding = Rounding(**entry["rounding"])
            carried.append(
                Carried(
                    case, file.metadata["backend"], entry["cut"], tensors["state"], tensors.get("conv_state"), rounding
                )
            )
    except (KeyError, TypeError) as error:
        raise GdnError(f"{path}: the metadata are not valid ({error}).") from error
    return carried
