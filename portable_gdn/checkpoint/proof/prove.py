"""Prove a port: every byte by the way back, and every linear-attention layer against the original implementation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...spec.errors import GdnError
from .. import provenance
from ..families.family import MIXER_PIECES
from ..porting import digests_back
from ..reader import Checkpoint
from ..run import digest
from ..source import Read, read
from ..targets import TREES
from .limits import LIMIT, LOGITS_LIMIT

__all__ = ["LIMIT", "Finding", "Report", "check", "compare_ports"]

DECODER = "portable_gdn.models.proving"
"""The module whose ``whole_logits`` computes a port's whole model; it is above this package, and imported by name in
the process of the proof."""

MEMORY = 0.7
"""Share of the free memory that a whole model in float32 may take; a larger one is run layer by layer."""

WITHOUT_CODE = ("gated_deltanet", "kda", "gated_deltanet2")  # transformers has no models of these


@dataclass(frozen=True)
class Finding:
    """One comparison: relative error and whether it is small enough."""

    backend: str
    layer: int | None
    what: str
    error: float
    code: str
    bound: float | None = None
    """What the error must be below, where the model itself says it."""

    @property
    def limit(self) -> float:
        """What the error must be below."""
        return self.bound if self.bound is not None else LOGITS_LIMIT if self.layer is None else LIMIT

    @property
    def ok(self) -> bool:
        """Whether it agrees; NaN does not."""
        return self.error < self.limit


@dataclass
class Report:
    """tensors: each source tensor and how it was checked. wrong: sentences on tensors that did not come back.
    findings: layers and logits. unrun: why the original implementation was not run, if it was not. not_whole: why our
    whole model was not compared with the original's, if it was not."""

    port: str
    source: str | None
    tensors: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    unrun: str | None = None
    not_whole: str | None = None

    @property
    def ok(self) -> bool:
        """Whether everything agrees and layers of ours were compared at all."""
        ran = any(f.layer is not None for f in self.findings)
        return not self.wrong and self.unrun is None and ran and all(f.ok for f in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; an error that is not finite becomes null."""
        return {
            "port": self.port,
            "source": self.source,
            "ok": self.ok,
            "limit": LIMIT,
            "logits_limit": LOGITS_LIMIT,
            "tensors": self.tensors,
            "wrong": self.wrong,
            "unrun": self.unrun,
            "not_whole": self.not_whole,
            "findings": [
                {
                    "backend": f.backend, "layer": f.layer, "what": f.what,
                    "error": f.error if f.error < float("inf") else None, "limit": f.limit, "ok": f.ok,
                    "original": f.code,
                }
                for f in self.findings
            ],
        }  # fmt: skip


def _quiet(what: str, done: int, of: int) -> None:
    pass


def check(
    port: str | Path,
    source: str | Path | None = None,
    *,
    backends: Sequence[str] = ("xla",),
    progress: Callable[[str, int, int], None] = _quiet,
) -> Report:
    """Prove a port in our tree against the checkpoint it was made of.

    First every tensor: the way back is computed without being written, and hash and dtype of each are compared with the
    source's. Then the layers: the original implementation runs on the source's files, in a process where FLA is hidden.

    Args:
        port: what ``portable-gdn port --to jax`` wrote.
        source: the checkpoint; None is where it was when it was ported.
        backends: of ours that are compared.

    Raises:
        GdnError: the port or the source cannot be read.
    """
    port = Path(port)
    record, facts = provenance.read_record(port)
    source = Path(facts["source"]["path"] if source is None else source)
    report = Report(str(port), str(source))
    _check_bytes(report, port, source, progress)
    if facts["target"] not in TREES:
        report.unrun = f"layers of a port to {facts['target']} are not run; port to jax and check that"
    elif not source.exists():
        report.unrun = f"the source is no longer at {source}; name it with --source"
    elif record.block is not None:
        report.unrun = "the original implementation is not run on eight bits; port and check a bfloat16 release"
    else:
        original = read(Checkpoint(source), facts["family"])
        try:
            reasons: dict[str, str] = {}
            found = compare_ports([(original, [port])], backends, progress, reasons)
        except GdnError as error:
            report.unrun = str(error)
        else:
            report.findings, report.not_whole = found[str(port)], reasons.get(str(port))
            for key, place in original.places.items():
                if key.layer in original.linear_layers and place.bound.entry.when != "full":
                    name = place.bound.name
                    if report.tensors.get(name) == "bytes" and key.piece in MIXER_PIECES:
                        report.tensors[name] = "bytes, and run"
    return report


def _check_bytes(report: Report, port: Path, source: Path, progress: Callable[[str, int, int], None]) -> None:
    """Hash and dtype of every tensor of the source, as the port would give it back."""
    expected, found, cast, recast = digests_back(port, progress)
    files = Checkpoint(source) if source.exists() else None
    if files is not None:
        if set(files.where) != set(expected):
            odd = sorted(set(files.where) ^ set(expected))[0]
            report.wrong.append(f"{odd} is in the port's record or in {source}, and not in both")
        expected = {name: digest(files.chunks(name)) for name in files.where}
    for name, want in expected.items():
        if name in recast:
            report.tensors[name] = "another dtype"
            report.wrong.append(f"{name} has another dtype in the port than in the source, and no cast was asked for")
        elif name in cast:
            report.tensors[name] = "cast, as was asked for"
        elif found.get(name) != want:
            report.tensors[name] = "differs"
            report.wrong.append(f"{name} does not come back from the port as the source has it")
        else:
            report.tensors[name] = "bytes"


def compare_ports(
    jobs: Sequence[tuple[Read, Sequence[Path]]],
    backends: Sequence[str] = ("xla",),
    progress: Callable[[str, int, int], None] = _quiet,
    not_whole: dict[str, str] | None = None,
) -> dict[str, list[Finding]]:
    """Run each original once and its ports against it, in a process of its own; findings by port. Where our whole model
    was not compared, ``not_whole`` is given the reason, by port.

    Raises:
        GdnError: an original cannot be run here.
    """
    order = {
        "jobs": [_job(original, ports) for original, ports in jobs], "backends": list(backends), "decoder": DECODER,
    }  # fmt: skip
    found: dict[str, list[Finding]] = {str(port): [] for _, ports in jobs for port in ports}
    of = sum((4 * len(original.linear_layers) + 3) * len(ports) for original, ports in jobs) * len(backends)
    progress("the original implementation", 0, of)
    for answer in _run(order):
        if "refused" in answer:
            raise GdnError(answer["refused"])
        if "not_whole" in answer and not_whole is not None:
            not_whole[answer["port"]] = answer["not_whole"]
        if "error" in answer:
            what = answer["what"] if answer["layer"] is None else f"layer {answer['layer']}: {answer['what']}"
            keys = ("backend", "layer", "what", "error", "code")
            found[answer["port"]].append(Finding(**{key: answer[key] for key in keys}, bound=answer.get("limit")))
            progress(what, sum(map(len, found.values())), of)
    return found


def _job(original: Read, ports: Sequence[Path]) -> dict[str, Any]:
    if original.family.name in WITHOUT_CODE:
        how = "alone"
    else:
        # transformers finds tensors by their names; layer by layer they are given to it under those it knows
        fits = original.published and 4 * _parameters(original) <= MEMORY * _memory()
        how = "whole" if fits else "layer by layer"
    return {
        "source": str(original.checkpoint.path),
        "family": original.family.name,
        "how": how,
        "ports": [str(port) for port in ports],
    }


def _parameters(original: Read) -> int:
    from math import prod

    return sum(prod(tensor.shape) for _, tensor in original.checkpoint.where.values())


def _memory() -> int:
    """Bytes of memory that are free for a process, as far as the system says."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _run(order: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The child's answers; an error if it ends without its last one."""
    import tempfile

    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "portable_gdn.checkpoint.proof.child"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
        )  # fmt: skip
        assert child.stdin is not None
        assert child.stdout is not None
        last: dict[str, Any] = {}
        try:
            with child.stdin:
                child.stdin.write(json.dumps(order))
            for line in child.stdout:
                last = json.loads(line)
                yield last
            code = child.wait()
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()
            child.stdout.close()
        if "done" not in last and "refused" not in last:
            errors.seek(0)
            lines = [line for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
            raise GdnError(
                f"the process of the original implementation ended with {code}: {lines[-1] if lines else 'no word'}"
            )
