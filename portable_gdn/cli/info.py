"""``portable-gdn info``: show what is installed, which backend a call would run on, and why."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Annotated, Any

import typer
from rich.table import Table

from .. import __version__, dispatch
from ..spec.problem import Meta, Options
from ..spec.rules import make_signature
from .output import console, print_json, say

__all__ = ["info"]

PACKAGES = {  # distribution: the extra that brings it
    "numpy": None,
    "array-api-compat": None,
    "ml-dtypes": None,
    "jax": "cpu",
    "jaxlib": "cpu",
    "libtpu": "tpu",
    "torch": "cpu",
    "triton": "gpu",
    "flash-linear-attention": "gpu",
    "transformers": "checkpoints",
    "safetensors": "checkpoints",
    "flax": "nnx",
    "orbax-checkpoint": "nnx",
}


def info(as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False) -> None:
    """Show versions, devices and backends, and which backend a call would run on."""
    facts = _facts()
    if as_json:
        print_json(facts)
        return
    say(f"portable-gdn {facts['version']}, Python {facts['python']}, {facts['machine']}")
    table = _table("Packages", "package", "version")
    for name, version in facts["packages"].items():
        table.add_row(name, version or f"missing; {_install(PACKAGES[name])} brings it")
    console.print(table)
    table = _table("Devices", "library", "devices")
    for name, devices in facts["devices"].items():
        table.add_row(name, devices)
    console.print(table)
    table = _table("Backends, in the order tried", "backend", "takes", "by itself", "here")
    for item in facts["backends"]:
        takes, auto = ", ".join(item["takes"]), "yes" if item["auto"] else "by name only"
        table.add_row(item["name"], takes, auto, item["unavailable"] or "runs")
    console.print(table)
    say(facts["sentence"])


def _table(title: str, *columns: str) -> Table:
    """Return an empty table in which only the last column may wrap its lines."""
    table = Table(title=title, title_justify="left")
    for i, name in enumerate(columns):
        table.add_column(name, no_wrap=i + 1 < len(columns))
    return table


def _install(extra: str | None) -> str:
    return f"pip install 'portable-gdn{f'[{extra}]' if extra else ''}'"


def _sentence(places: list[dict[str, Any]], packages: dict[str, str | None]) -> str:
    """Return a sentence on what would run here and what to install for more."""
    runs: dict[str, list[str]] = {}
    for item in places:
        runs.setdefault(item["backend"] or "nothing", []).append(f"{item['library']} arrays on {item['device']}")
    said = "Here a call with " + "; with ".join(f"{' or '.join(what)} runs on {name}" for name, what in runs.items())
    extras: dict[str, list[str]] = {}
    for name, version in packages.items():
        if version is None:
            extras.setdefault(_install(PACKAGES[name]), []).append(name)
    more = "; ".join(f"{command} ({', '.join(names)})" for command, names in extras.items())
    return f"{said}. For more: {more}." if more else f"{said}."


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _facts() -> dict[str, Any]:
    devices, places = _devices()
    packages = {name: _version(name) for name in PACKAGES}
    would_run = [_would_run(library, device) for library, device in places]
    return {
        "version": __version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "packages": packages,
        "devices": devices,
        "backends": [
            *(
                {"name": b.name, "takes": list(b.libraries), "auto": b.auto, "unavailable": b.unavailable()}
                for b in dispatch.backends()
            ),
            *(
                {"name": name, "takes": [], "auto": False, "unavailable": why}
                for name, why in dispatch.broken().items()
            ),
        ],
        "would_run": would_run,
        "sentence": _sentence(would_run, packages),
    }


def _devices() -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Return the devices that each library sees, as text, and the possible pairs (library, device) of a call."""
    text, places = {"numpy": "cpu"}, [("numpy", "cpu")]
    for name, look in (("jax", _jax_devices), ("torch", _torch_devices)):
        if importlib.util.find_spec(name) is None:
            text[name] = f"{name} is not installed"
            continue
        try:
            with _quiet():
                found = look()
        except Exception as error:  # a broken installation is what this command is for
            text[name] = f"{name} does not start: {type(error).__name__}: {error}"
            continue
        text[name] = ", ".join(f"{platform} ({what})" for platform, what in found.items())
        places += [(name, platform) for platform in found]
    return text, places


@contextmanager
def _quiet() -> Iterator[None]:
    """Drop what a driver writes to standard error while it looks for its device; exceptions still pass."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)


def _jax_devices() -> dict[str, str]:
    jax = importlib.import_module("jax")
    found: dict[str, str] = {}
    for device in jax.devices():
        found[device.platform] = f"{len(jax.devices(device.platform))} x {device.device_kind}"
    return found


def _torch_devices() -> dict[str, str]:
    torch = importlib.import_module("torch")
    found = {"cpu": f"{torch.get_num_threads()} threads"}
    if torch.cuda.is_available():
        # ROCm devices call themselves cuda too.
        found["cuda"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        found["xpu"] = f"{torch.xpu.device_count()} x {torch.xpu.get_device_name(0)}"
    return found


def _would_run(library: str, device: str) -> dict[str, Any]:
    shapes = {
        "q": (1, 128, 2, 128),
        "k": (1, 128, 2, 128),
        "v": (1, 128, 4, 128),
        "g": (1, 128, 4),
        "beta": (1, 128, 4),
    }
    meta = {name: Meta(shape, "bfloat16" if name in "qkv" else "float32", device) for name, shape in shapes.items()}
    choice = dispatch.explain(make_signature(library, device, meta, Options()))
    return {"library": library, "device": device, "backend": choice.backend, "passed_over": dict(choice.passed_over)}
