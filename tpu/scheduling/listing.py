"""Reads a listing of VLIW bundles, as libtpu writes it after register allocation. It does not import jax.

One bundle stands on a line, ``address marks : { instruction ;; instruction ... }``; comments may reach over several
lines and hold others. The bundle's address is its number, and each bundle is one cycle, the empty ones too: they wait.
Of the instructions, only those that steer the program are parsed: scalars, predicates, branches and copies.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["DELAY", "Bundle", "Instruction", "parse"]

#: Bundles behind a branch that run before it takes effect.
DELAY = 4


class Instruction(NamedTuple):
    """One parsed instruction.

    result: its name, "%s12_s3" say; "" where it has none.
    op: its name, "sadd.s32" say.
    guard: predicate under which it runs, or "", and whether it runs where that is false.
    otherwise: value of the result where it does not run, or "".
    args: operands as text, in order.
    note: its comment, which tells a core's number and an operand's.
    """

    result: str
    op: str
    guard: str
    inverted: bool
    otherwise: str
    args: tuple[str, ...]
    note: str


class Bundle(NamedTuple):
    """A cycle: whether nothing is in it, the regions that start in it, its parsed instructions, and how many loads of
    rows into matrix units begin in it."""

    empty: bool
    regions: tuple[int, ...]
    instructions: tuple[Instruction, ...]
    pushes: int = 0


_LINE = re.compile(r"^\s*(0x[0-9a-f]+|\d+)\s+(?:[A-Z]{2}[, ]*)*:")
_INSTRUCTION = re.compile(
    r"^(?:(?P<result>%\S+) = )?(?P<op>[a-z_][\w.]*)\s*(?:\[thread:[^\]]*\])?\s*"
    r"(?:\((?P<inv>!?)(?P<guard>%[\w.]+)(?:,\s*(?P<other>[^)]+))?\)\s*,?)?\s*(?P<args>.*)$",
    re.S,
)
_STEERS = re.compile(r"= (?:s[a-z_0-9]+|p[a-z]+|int_to_ptr|inlined_call(?:_operand)?|scalar_|dma)\b|= s[a-z_]+\.")
_COMMENT = re.compile(r"/\*|\*/")
_ARGUMENT = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]|[^,\s\[]+(?:\s+=\s+\S+)?")
_STARTS = re.compile(r"Start(?:/End empty)? region (\d+)")


def parse(text: str) -> list[Bundle]:
    """The bundles of a listing, in order.

    Raises:
        ValueError: addresses do not count up from 0, so that this is not such a listing.
    """
    bundles: list[Bundle] = []
    for line in _joined(text):
        address, body = line
        if address != len(bundles):
            raise ValueError(f"bundle {len(bundles)} is missing: the listing goes on with {address}")
        bundles.append(_bundle(body))
    return bundles


def _joined(text: str) -> list[tuple[int, str]]:
    """Address and body of each bundle, with the lines that its comments go on to."""
    found: list[tuple[int, list[str]]] = []
    for line in text.splitlines():
        match = _LINE.match(line)
        if match:
            found.append((int(match[1], 0), [line[match.end() :]]))
        elif found:
            found[-1][1].append(line)
    return [(address, "\n".join(lines)) for address, lines in found]


def _bundle(body: str) -> Bundle:
    regions = tuple(int(n) for n in _STARTS.findall(body)) if "region" in body else ()
    start = body.find("{")
    inside = body[start + 1 :].lstrip()
    if start < 0 or inside.startswith("}"):
        return Bundle(True, regions, ())
    pushes = body.count("= vmatpush")
    steers = tuple(_instructions(inside)) if _STEERS.search(body) else ()
    return Bundle(False, regions, steers, pushes)


def _instructions(inside: str) -> list[Instruction]:
    found = []
    for text, note in _split(inside):
        match = _INSTRUCTION.match(text)
        if match is None or not _STEERS.search("= " + match["op"]):
            continue
        args = match["args"].strip().rstrip("}").strip()
        if match["op"].startswith("sbr"):
            arguments: tuple[str, ...] = tuple(re.findall(r"bundleno = (\d+)", args))
        else:
            arguments = tuple(a.strip() for a in _ARGUMENT.findall(args))
        found.append(
            Instruction(
                match["result"] or "",
                match["op"],
                match["guard"] or "",
                bool(match["inv"]),
                (match["other"] or "").strip(),
                arguments,
                note,
            )
        )
    return found


def _split(inside: str) -> list[tuple[str, str]]:
    """Text and comments of each instruction of a bundle; comments hold others, and separators."""
    pieces: list[tuple[str, str]] = []
    text, note, depth, at = [], [], 0, 0
    marks = list(_COMMENT.finditer(inside))
    for match in [*marks, None]:
        end = match.start() if match else len(inside)
        part = inside[at:end]
        if depth:
            note.append(part)
        else:
            *whole, rest = part.split(";;")
            for piece in whole:
                text.append(piece)
                pieces.append(("".join(text).strip(), " ".join(note)))
                text, note = [], []
            text.append(rest)
        if match:
            depth = max(0, depth + (1 if match[0] == "/*" else -1))
            at = match.end()
    pieces.append(("".join(text).strip(), " ".join(note)))
    return pieces
