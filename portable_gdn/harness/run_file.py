"""The file of a recorded run: ``portable-gdn record`` writes one, ``compare`` and ``bisect`` read it.

It is one safetensors file. Its metadata are strings: ``format`` and ``version`` of the file, ``created`` (UTC), and as
JSON ``suite`` (name and version), ``backend``, ``settings``, ``environment``, ``derived`` (stages that the backend
never computes) and ``cases``. Each case has its recipe (the arguments of ``cases.Case``), its status, the declared
rounding, the seconds taken, the code that computed it (kernels with their configuration, if the backend reports them;
not in recordings of earlier versions), a hash of the inputs and one of the case's tensors. The names of tensors begin
with the case's number in that list:

    12/o  12/state  12/conv_state  12/grad_q ...      results
    12/stage/scores/0 ...                              parts of stages, if they were recorded
    12/input/q  12/cotangent/o ...                     inputs, if they were stored

Inputs that are not stored are built again from the recipe, and must have the recorded hash. A case without results has
a reason. Cases are written and read one by one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from ..spec.errors import GdnError, bad
from ..spec.precision import Rounding
from ..spec.problem import GateKind, NormKind, Options
from .cases import Case, Inputs, build
from .compute import Outcome, Settings, as_json, packed_tensors, unpacked, with_settings
from .suites import READABLE, SUITE_VERSION, SUITES
from .tensor_file import TensorFile, TensorWriter

__all__ = ["FORMAT", "VERSION", "RunFile", "RunWriter", "digest", "inputs_digest"]

FORMAT = "portable-gdn-run"
VERSION = "1"


def digest(tensors: Mapping[str, np.ndarray]) -> str:
    """Return the SHA-256 of names, dtypes, shapes and bytes, in the order of the names."""
    h = hashlib.sha256()
    for name in sorted(tensors):
        a = np.ascontiguousarray(tensors[name])
        h.update(f"{name} {a.dtype.name} {a.shape}\n".encode())
        h.update(a.tobytes())
    return h.hexdigest()


def _named(inputs: Inputs) -> dict[str, np.ndarray]:
    return {
        **{f"input/{name}": np.asarray(a) for name, a in inputs.operands.items()},
        **{f"cotangent/{name}": np.asarray(a) for name, a in inputs.cotangents.items()},
    }


def inputs_digest(inputs: Inputs) -> str:
    """Return the hash of a case's inputs: operands, cotangents, and the options that are not defaults.

    Options with default values do not change the hash, so that more options can be added.
    """
    plain = Options()._asdict()
    options = {name: value for name, value in inputs.options._asdict().items() if value != plain[name]}
    text = digest(_named(inputs)) + json.dumps(options, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


class RunWriter:
    """Write a recording: ``with RunWriter(path, ...) as out: out.add(case, inputs, outcome)``.

    The file appears only when the block ends without an error.
    """

    def __init__(
        self, path: Path, suite: str, backend: str, settings: Settings, derived: Sequence[str], store_inputs: bool
    ) -> None:
        self._file = TensorWriter(path)
        self._store = store_inputs
        self._cases: list[dict[str, Any]] = []
        self.environment: dict[str, Any] = {}
        self._facts = {
            "suite": {"name": suite, "version": SUITE_VERSION},
            "backend": backend,
            "settings": settings._asdict(),
            "derived": list(derived),
        }

    def __enter__(self) -> RunWriter:
        return self

    def add(self, case: Case, inputs: Inputs, outcome: Outcome) -> None:
        """Append a case with its inputs, before settings were applied, and its outcome."""
        tensors = packed_tensors(outcome) | (_named(inputs) if self._store else {})
        for name, a in tensors.items():
            self._file.add(f"{len(self._cases)}/{name}", a)
        self._cases.append(
            {
                "recipe": asdict(case),
                "status": outcome.status,
                "why": outcome.why,
                "rounding": as_json(outcome.rounding),
                "seconds": round(outcome.seconds, 4),
                "known": outcome.known,
                "served": list(outcome.served),
                "inputs": inputs_digest(inputs),
                "options": inputs.options._asdict() if self._store else None,
                "sha256": digest(tensors),
                "tensors": sorted(tensors),
            }
        )

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        facts = {**self._facts, "environment": self.environment, "cases": self._cases}
        self._file.metadata = {
            "format": FORMAT,
            "version": VERSION,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            **{name: json.dumps(value) for name, value in facts.items()},
        }
        self._file.__exit__(kind, error, at)


class RunFile:
    """A recorded run, of which only the header is checked when it is opened.

    Attributes:
        suite, backend, environment, settings, derived, created: as recorded.
        cases: the cases, in order.

    Raises:
        GdnError: the file is not such a recording, or has a version or a suite that this package does not know.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._file = path, TensorFile(path)
        meta = self._file.metadata
        if meta.get("format") != FORMAT:
            raise GdnError(
                f"{path}: metadata format is {meta.get('format')!r}; it must be {FORMAT!r}, as `portable-gdn record` "
                "writes it."
            )
        if meta.get("version") != VERSION:
            raise GdnError(
                f"{path}: the recording has format version {meta.get('version')!r}, and this portable-gdn reads "
                f"{VERSION!r}; record again, or use the version that wrote it."
            )
        try:
            self.created = meta["created"]
            suite, self.backend, settings, self.derived, self.environment, entries = (
                json.loads(meta[name]) for name in ("suite", "backend", "settings", "derived", "environment", "cases")
            )
            self.suite, version = str(suite["name"]), str(suite["version"])
        except (KeyError, TypeError, ValueError) as error:
            raise GdnError(f"{path}: the recording's metadata are not valid.") from error
        if self.suite not in SUITES or version not in READABLE:
            raise GdnError(
                f"{path}: the recording is of suite {self.suite!r}, version {version!r}; this portable-gdn knows "
                f"{', '.join(SUITES)} of versions {' and '.join(map(repr, READABLE))}."
            )
        try:
            self.settings = Settings(**settings)
            self.cases = [Case(**entry["recipe"]) for entry in entries]
            self._entries: dict[str, tuple[int, dict[str, Any]]] = {
                case.name: (i, entry) for i, (case, entry) in enumerate(zip(self.cases, entries, strict=True))
            }
            self._roundings = {
                case.name: Rounding(**e["rounding"]) for case, e in zip(self.cases, entries, strict=True)
            }
        except (KeyError, TypeError, ValueError) as error:
            raise GdnError(
                f"{path}: the recording's cases are not as this portable-gdn knows them: {error}."
            ) from error
        for name, (i, entry) in self._entries.items():
            for tensor in entry["tensors"]:
                if f"{i}/{tensor}" not in self._file:
                    raise GdnError(f"{path}: tensor {tensor} of case {name!r} is missing.")

    def _tensors(self, name: str) -> dict[str, np.ndarray]:
        i, entry = self._entries[name]
        return {tensor: self._file.read(f"{i}/{tensor}") for tensor in entry["tensors"]}

    def check(self, progress: Callable[[str, int, int], None] | None = None) -> None:
        """Read every tensor once, and compare it with its hash.

        Raises:
            GdnError: a case's tensors differ from those that were recorded, or results are not finite.
        """
        for i, case in enumerate(self.cases):
            if progress is not None:
                progress(f"reading {case.name}", i, len(self.cases))
            tensors = self._tensors(case.name)
            if digest(tensors) != self._entries[case.name][1]["sha256"]:
                raise GdnError(
                    f"{self.path}: the tensors of case {case.name!r} do not have the hash that was recorded; the file "
                    "was damaged or changed."
                )
            for tensor, a in unpacked(tensors)[0].items():
                if "/" not in tensor and not np.isfinite(np.asarray(a, np.float64)).all():
                    raise GdnError(
                        f"{self.path}: {tensor} of case {case.name!r} holds values that are not finite; "
                        f"{self.backend!r} failed there when it was recorded, and nothing can be compared with that."
                    )

    def intact(self, case: Case) -> bool:
        """Return whether a case's tensors have the hash that was recorded."""
        return digest(self._tensors(case.name)) == self._entries[case.name][1]["sha256"]

    def outcome(self, case: Case) -> Outcome:
        """Return the recorded outcome of a case."""
        entry = self._entries[case.name][1]
        tensors, stages = unpacked(self._tensors(case.name))
        results = {name: a for name, a in tensors.items() if "/" not in name}
        rounding = self._roundings[case.name]
        status, why, seconds = (entry[name] for name in ("status", "why", "seconds"))
        known, served = entry.get("known", ""), tuple(entry.get("served", ()))
        return Outcome(case.name, status, why, results, stages, rounding, seconds, known, served)

    def inputs(self, case: Case) -> Inputs:
        """Return a case's inputs, stored or built again.

        Raises:
            GdnError: they differ from those that were recorded.
        """
        _, entry = self._entries[case.name]
        if entry["options"] is None:
            inputs = build(case)
        else:
            tensors = self._tensors(case.name)
            part = lambda kind: {n.removeprefix(kind): a for n, a in tensors.items() if n.startswith(kind)}  # noqa: E731
            inputs = Inputs(part("input/"), _options(entry["options"]), part("cotangent/"), {}, "")
        if inputs_digest(inputs) != entry["inputs"]:
            raise GdnError(
                f"{self.path}: this portable-gdn builds other inputs for case {case.name!r} than the recording was "
                "made from; record again with this version, or with --store-inputs."
            )
        return inputs

    @property
    def stage_chunk(self) -> int | None:
        """The chunk size of most of the recorded stages; None if there are none."""
        sizes = [shape[-2] for name, shape in self._file.shapes.items() if name.endswith("/stage/output/0")]
        return max(set(sizes), key=sizes.count) if sizes else None

    def recorded_inputs(self, case: Case) -> Inputs:
        """Return the inputs as the recorded backend got them, with the recording's settings applied."""
        return with_settings(self.inputs(case), self.settings)


def _options(found: Mapping[str, Any]) -> Options:
    gate, norm = found["gate"], found.get("norm")
    kinds = {"gate": None if gate is None else GateKind(*gate), "norm": None if norm is None else NormKind(*norm)}
    return Options(**{**found, **kinds})


def check_target(path: Path) -> None:
    """Check that a file can be written under this name.

    Raises:
        GdnError: it cannot.
    """
    if not path.parent.is_dir():
        raise bad("--output", f"in {path.parent}, which is no folder", "name a file in a folder that exists")
    if path.is_dir():
        raise bad("--output", f"{path}, a folder", "name a file")
