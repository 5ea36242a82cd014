"""Run the part of a listing that controls it: how often each bundle runs, and how many bytes are copied, without jax.

Only scalars, predicates, branches and copies are followed, and only those scalars on which a branch or a copy depends.
The results of vector units and the contents of memory that was not given are unknown, and so is everything computed
from them. A branch that depends on something unknown is not guessed: the code that it may skip counts as possibly run,
and a loop counts as one iteration of an unknown number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .listing import DELAY, Bundle, Instruction

__all__ = ["Copies", "Loop", "Run", "run"]

#: Instructions followed before a run is given up: some seconds.
BUDGET = 4_000_000

_UNKNOWN = None


class Loop(NamedTuple):
    """A loop: its first bundle, the one behind its last, how deep it lies, and its turns in the whole run.

    turns is None where it hangs on something unknown: then its bundles count as run once.
    """

    begin: int
    end: int
    level: int
    turns: int | None


class Copies(NamedTuple):
    """Copies from one memory to another ("hbm", "vmem", "smem", "?"): how many, and granules; perhaps: those that may
    not have run, or are of an unknown size."""

    source: str
    target: str
    number: int
    granules: int
    perhaps: int


class Run(NamedTuple):
    """What a listing does.

    counts: how often each bundle runs, at most; least: how often for certain.
    complete: whether it was followed to its end.
    """

    counts: np.ndarray
    least: np.ndarray
    loops: tuple[Loop, ...]
    copies: tuple[Copies, ...]
    complete: bool

    @property
    def exact(self) -> bool:
        """Whether nothing unknown had a say."""
        return (
            self.complete
            and bool((self.counts == self.least).all())
            and all(loop.turns is not None for loop in self.loops)
        )


class _Operand(NamedTuple):
    """The address of an operand of the kernel, or of a piece of it."""

    index: int  # type: ignore[assignment]  # no address is searched for in another


class _Memory(NamedTuple):
    """An address in scalar memory: an allocation's name, and the word."""

    allocation: str
    word: int


def run(bundles: Sequence[Bundle], operands: Mapping[int, np.ndarray] | None = None) -> Run:
    """Follow a listing from its first bundle to its last.

    Args:
        bundles: of one kernel.
        operands: values of those integer operands that are known, by their number; a kernel copies them to scalar
            memory and reads them there.
    """
    return _Machine(bundles, operands or {}).run()


class _Machine:
    def __init__(self, bundles: Sequence[Bundle], operands: Mapping[int, np.ndarray]) -> None:
        self.operands = operands
        self.size = len(bundles)
        self.program, self.ends = _relevant(bundles)
        self.events = sorted(self.program)
        self.following = self._following()
        self.values: dict[str, Any] = {}
        self.written: dict[str, int] = {}
        self.memory: dict[Any, Any] = {}
        self.clock = 0
        self.counts = np.zeros(self.size + 1, np.int64)  # differences: a run of bundles costs two additions
        self.perhaps = np.zeros(self.size + 1, np.int64)
        self.copies: dict[tuple[str, str], list[int]] = {}
        self.loops: dict[tuple[int, int], int | None] = {}
        self.unsure: list[tuple[int, list[str]]] = []  # ends of regions that may not run, and what they computed

    def _following(self) -> np.ndarray:
        """For each address, the first one from there at which something happens, or the end."""
        following = np.full(self.size + 1, self.size, np.int64)
        for at in reversed(self.events):
            following[at] = at
        return np.minimum.accumulate(following[::-1])[::-1]

    def run(self) -> Run:
        pc, complete = 0, True
        while pc < self.size:
            if self.clock > BUDGET:
                complete = False
                self._count(pc, self.size)
                break
            while self.unsure and pc >= self.unsure[-1][0]:
                self._forget(self.unsure.pop()[1])
            stop = int(self.following[pc])
            if self.unsure:
                stop = min(stop, self.unsure[-1][0])
            if stop > pc:
                self._count(pc, stop)
                pc = stop
                continue
            branch = self._step(pc)
            self._count(pc, pc + 1)
            pc = pc + 1 if branch is None else self._branch(pc, branch)
        counts, perhaps = (np.cumsum(a[:-1]) for a in (self.counts, self.perhaps))
        return Run(
            counts + perhaps,
            counts,
            _nested(self.loops, complete),
            tuple(Copies(*where, *figures) for where, figures in sorted(self.copies.items())),
            complete,
        )

    def _count(self, begin: int, end: int) -> None:
        counter = self.perhaps if self.unsure else self.counts
        counter[begin] += 1
        counter[end] -= 1

    def _step(self, pc: int) -> Instruction | None:
        """Run a bundle's instructions; a branch is handed back."""
        branch = None
        for instruction in self.program[pc]:
            self.clock += 1
            if instruction.op.startswith("sbr"):
                branch = instruction
            else:
                self._run(instruction)
        return branch

    def _branch(self, pc: int, branch: Instruction) -> int:
        """Where it goes on, after the bundles of the branch's delay have run."""
        end, target = min(pc + 1 + DELAY, self.size), int(branch.args[0]) if branch.args else self.size
        taken = self._holds(branch) if branch.args else _UNKNOWN
        for at in range(pc + 1, end):
            if at in self.program:
                self._step(at)
            self._count(at, at + 1)
        if target <= pc:
            key = (target, end)
            if taken is _UNKNOWN:
                self.loops[key] = None
                self._forget([i.result for at in self.events if target <= at < end for i in self.program[at]])
                return end
            turns = self.loops.get(key, 0)
            if turns is not None:
                self.loops[key] = turns + 1
            return target if taken else end
        if taken is _UNKNOWN:
            self.unsure.append((min(target, self.unsure[-1][0]) if self.unsure else target, []))
            return end
        return target if taken else end

    def _forget(self, names: list[Any]) -> None:
        """What was computed where it is not known whether it was."""
        for name in names:
            if isinstance(name, str):
                self.values[name] = _UNKNOWN
            else:
                self.memory[name] = _UNKNOWN
        if self.unsure:
            self.unsure[-1][1].extend(names)

    def _set(self, name: str, value: Any) -> None:
        self.values[name] = value
        self.written[name] = self.clock
        if self.unsure:
            self.unsure[-1][1].append(name)

    def _holds(self, i: Instruction) -> bool | None:
        """Whether the guard lets it run."""
        if not i.guard:
            return True
        value = self._value(i.guard)
        return _UNKNOWN if value is _UNKNOWN else bool(value) != i.inverted

    def _value(self, text: str) -> Any:
        """The value of an operand: a name, a number, an address or a sum of two of them."""
        if text.startswith("!"):
            value = self._value(text[1:])
            return _UNKNOWN if value is _UNKNOWN else int(not value)
        if text.startswith("%"):
            return self.values.get(text, _UNKNOWN)
        if text.startswith("["):
            return self._address(text)
        if text.startswith("$"):
            text = text[1:]
        try:
            return int(text, 0)
        except ValueError:
            return {"true": 1, "false": 0}.get(text, _UNKNOWN)

    def _address(self, text: str) -> Any:
        inner = text.strip("[]").removeprefix("smem:").strip("[]")
        base, _, offset = (part.strip(" []") for part in inner.partition("+"))
        if base.startswith("#"):
            at: Any = _Memory(base, 0)
        else:
            at = self._value(base)
        step = self._value(offset) if offset else 0
        if not isinstance(at, _Memory) or not isinstance(step, int):
            return _UNKNOWN
        return _Memory(at.allocation, at.word + step)

    def _run(self, i: Instruction) -> None:
        holds = self._holds(i)
        if i.op.startswith("dma."):
            self._copy(i, holds)
        elif i.op == "sst":
            self._store(i, holds)
        elif i.result:
            value = _UNKNOWN
            if holds is True:
                value = self._compute(i)
            elif holds is False and i.otherwise:
                value = self._value(i.otherwise)
            self._set(i.result, value)

    def _store(self, i: Instruction, holds: bool | None) -> None:
        at = self._address(i.args[0])
        if at is _UNKNOWN:
            # It may have been anywhere, but for what the compiler put away for itself.
            self.memory = {at: value for at, value in self.memory.items() if at.allocation.endswith("_spill")}
        elif holds is not False:
            self.memory[at] = self._value(i.args[1]) if holds and len(i.args) > 1 else _UNKNOWN
            if self.unsure:
                self.unsure[-1][1].append(at)

    def _copy(self, i: Instruction, holds: bool | None) -> None:
        if holds is False or len(i.args) < 3:
            return
        source, target = self.ends[id(i)]
        size = self._value(i.args[1])
        figures = self.copies.setdefault((source, target), [0, 0, 0])
        if holds is True and not self.unsure and isinstance(size, int):
            figures[0] += 1
            figures[1] += size
        else:
            figures[2] += 1
        if target == "smem" and holds is True:
            where, what = self._value(i.args[2]), self._value(i.args[0])
            if isinstance(where, _Memory) and isinstance(what, _Operand) and what.index in self.operands:
                for word, value in enumerate(np.ravel(self.operands[what.index]).tolist()):
                    self.memory[_Memory(where.allocation, where.word + word)] = int(value)

    def _compute(self, i: Instruction) -> Any:
        op = i.op
        if op == "inlined_call_operand.vmem" or op.startswith("inlined_call_operand"):
            number = i.note.partition("index:")[2] or " ".join(i.args).partition("index:")[2]
            digits = number.strip().split(",")[0].split()
            return _Operand(int(digits[0])) if digits and digits[0].isdigit() else _UNKNOWN
        if op == "sld":
            if "core id" in i.note:
                return 0  # of two that share the work, the first
            return self.memory.get(self._address(i.args[0]), _UNKNOWN)
        if op == "sphi":
            latest = max(i.args, key=lambda name: self.written.get(name, -1))
            return self._value(latest)
        if op.startswith("int_to_ptr"):
            return self._value(i.args[-1])
        args = [self._value(a) for a in i.args]
        if op == "scalar_select":
            if args[0] is _UNKNOWN:
                return args[1] if args[1] == args[2] else _UNKNOWN
            return args[1] if args[0] else args[2]
        if op in ("smov", "pmov"):
            return args[0]
        if op in ("por", "pand", "pnand", "pnor"):
            return _logic(op, args)
        if isinstance(args[0], _Operand):  # an address in other units, or of a piece, is still that operand's
            return args[0] if op.startswith(("sshll", "sshr", "scalar_lea")) else _UNKNOWN
        if any(not isinstance(a, int) for a in args):
            return _UNKNOWN
        return _arithmetic(op, args)


def _logic(op: str, args: list[Any]) -> Any:
    """The value of a logical operation on predicates, some of them unknown: one operand may decide."""
    decides = 1 if op in ("por", "pnor") else 0
    if any(a is not _UNKNOWN and bool(a) == bool(decides) for a in args):
        value: Any = decides
    elif any(a is _UNKNOWN for a in args):
        return _UNKNOWN
    else:
        value = 1 - decides
    return int(not value) if op in ("pnand", "pnor") else value


def _signed(x: int) -> int:
    return (x + 2**31) % 2**32 - 2**31


def _arithmetic(op: str, args: list[int]) -> Any:
    """32 bits, two's complement."""
    name, _, kind = op.partition(".")
    if name == "pneg":
        return int(not args[0])
    if name in ("snot", "sneg"):
        return _signed(~args[0] if name == "snot" else -args[0])
    if len(args) != 2:
        return _UNKNOWN
    unsigned = "u32" in kind
    a, b = (x % 2**32 if unsigned else _signed(x) for x in args)
    if name == "scmp":
        return _compare(kind.partition(".")[0], a, b)
    shift = args[1] % 2**32
    results = {
        "sadd": a + b,
        "ssub": a - b,
        "smul": a * b,
        "sand": a & b,
        "sor": a | b,
        "sxor": a ^ b,
        "smin": min(a, b),
        "smax": max(a, b),
        "sshll": a << shift if shift < 32 else 0,
        "sshrl": (a % 2**32) >> shift if shift < 32 else 0,
        "sshra": _signed(a) >> min(shift, 31),
        "scalar_lea": a + b,
    }
    return _signed(results[name]) if name in results else _UNKNOWN


def _compare(how: str, a: int, b: int) -> Any:
    results = {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}
    return int(results[how]) if how in results else _UNKNOWN


def _names(i: Instruction) -> list[str]:
    """What an instruction reads."""
    texts = [*i.args, i.guard, i.otherwise]
    return [word.strip("[]!,") for text in texts for word in text.replace("smem:", " ").split() if "%" in word]


def _copies(i: Instruction) -> bool:
    """Whether it starts a copy. ``dma.general`` follows a table of strides, and does not say from where to where."""
    return i.op.startswith("dma.") and ("_to_" in i.op or i.op == "dma.general")


def _ends(i: Instruction, makers: Mapping[str, list[Instruction]], stores: Sequence[Instruction]) -> tuple[str, str]:
    """The memories that a copy reads and writes: from its name, or from what made its addresses."""
    source, _, target = i.op.removeprefix("dma.").partition("_to_")
    if target:
        return source, target
    return _memory(i.args[0], makers, stores), _memory(i.args[2], makers, stores)


def _memory(text: str, makers: Mapping[str, list[Instruction]], stores: Sequence[Instruction]) -> str:
    """The memory of an address; "?" where nothing tells. It may have been moved, chosen, or put away in between."""
    pending, seen = [text], set()
    while pending:
        name = pending.pop(0)
        if name in seen:
            continue
        seen.add(name)
        for i in makers.get("%" + name.lstrip("%"), []):
            memory = i.op.rpartition(".")[2]
            if memory in ("hbm", "vmem", "smem"):
                return memory
            pending += _names(i)
            if i.op == "sld":
                place = i.args[0].strip("[]").removeprefix("smem:").strip("[]").split("+")[0].strip()
                pending += [n for store in stores if place in store.args[0] for n in _names(store)]
    return "?"


def _relevant(bundles: Sequence[Bundle]) -> tuple[dict[int, list[Instruction]], dict[int, tuple[str, str]]]:
    """By address, in the order in which they take effect, the instructions that a branch or a copy hangs on; and by
    ``id`` the memories that each copy goes between."""
    everything = [(at, i) for at, bundle in enumerate(bundles) for i in bundle.instructions]
    makers: dict[str, list[Instruction]] = {}
    stores: list[Instruction] = []
    for _, i in everything:
        if i.result:
            makers.setdefault(i.result, []).append(i)
        if i.op == "sst":
            stores.append(i)
    wanted: set[int] = set()
    everywhere = list(stores)
    pending = [i for _, i in everything if i.op.startswith("sbr") or _copies(i)]
    while pending:
        i = pending.pop()
        if id(i) in wanted:
            continue
        wanted.add(id(i))
        for name in _names(i):
            pending += makers.get("%" + name.lstrip("%"), [])
        if i.op == "sld":
            pending += stores
            stores = []
    program: dict[int, list[Instruction]] = {}
    for at, i in everything:
        if id(i) in wanted:
            program.setdefault(at, []).append(i)
    for instructions in program.values():  # a bundle reads what is there before it writes; phis are there first
        instructions.sort(key=lambda i: (i.op != "sphi", i.op.startswith("sbr")))
    ends = {id(i): _ends(i, makers, everywhere) for _, i in everything if _copies(i) and len(i.args) > 2}
    return program, ends


def _nested(loops: Mapping[tuple[int, int], int | None], complete: bool) -> tuple[Loop, ...]:
    found = []
    for (begin, end), turns in sorted(loops.items(), key=lambda item: (item[0][0], -item[0][1])):
        level = 1 + sum(b <= begin and end <= e and (b, e) != (begin, end) for b, e in loops)
        found.append(Loop(begin, end, level, turns if complete else None))
    return tuple(found)
