"""Settings for the launches of FLA's kernels in a call, and a record of the launches.

By default FLA chooses tiles by timing them and delegates calls to other libraries if they are installed, and Triton
computes float32 products as TF32 on NVIDIA's GPUs. ``Settings`` change that for the launches within ``launching``, and
``serving`` records the launches. Both use private names of Triton (3.7 to 3.9) and FLA (0.6.0), and are installed when
they are first needed.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

__all__ = [
    "OTHER_LIBRARIES",
    "Launch",
    "Settings",
    "launch_config",
    "launching",
    "others_installed",
    "serving",
    "without_other_libraries",
]

#: Libraries to which FLA silently delegates calls if they are installed, and the variable that turns each off.
OTHER_LIBRARIES = {"flash_qla": "FLA_FLASH_QLA", "flash_kda": "FLA_FLASH_KDA", "tilelang": "FLA_TILELANG"}


class Settings(NamedTuple):
    """The settings for launches.

    Attributes:
        pinned: whether to use only FLA's own kernels, each in its first configuration that fits, so that the results do
            not change between runs by a bit.
        ieee: whether to compute float32 products in float32, unless a kernel specifies another precision itself.
    """

    pinned: bool = False
    ieee: bool = False


class Launch(NamedTuple):
    """One launch, or one call that another library computed: library, kernel or function, tiles, warps and stages."""

    library: str
    name: str
    config: Mapping[str, Any]

    def __str__(self) -> str:
        config = " ".join(f"{name}={value}" for name, value in self.config.items())
        return f"{self.library}: {self.name}" + (f" ({config})" if config else "")


_here = threading.local()
_recorders: list[list[Launch]] = []


def _settings() -> Settings:
    return getattr(_here, "settings", Settings())


@contextmanager
def launching(settings: Settings) -> Iterator[None]:
    """Apply these settings to the launches of this thread within the block."""
    if settings != Settings():
        _install()
    before, _here.settings = _settings(), settings
    try:
        yield
    finally:
        _here.settings = before


@contextmanager
def serving() -> Iterator[list[Launch]]:
    """Record the launches and delegated calls of all threads within the block, in a list with each entry once."""
    _install()
    found: list[Launch] = []
    _recorders.append(found)
    try:
        yield found
    finally:
        _recorders[:] = [recorder for recorder in _recorders if recorder is not found]


def _record(served: Launch) -> None:
    for recorder in _recorders:
        if served not in recorder:
            recorder.append(served)


def others_installed() -> list[str]:
    """Return the installed libraries to which FLA may delegate a call."""
    on = (name for name, switch in OTHER_LIBRARIES.items() if os.environ.get(switch, "1") != "0")
    return [name for name in on if importlib.util.find_spec(name) is not None]


def without_other_libraries() -> None:
    """Keep FLA to its own Triton kernels, in this process; before it is imported."""
    os.environ["FLA_DISABLE_BACKEND_DISPATCH"] = "1"
    for name in (*OTHER_LIBRARIES.values(), "FLA_INTRACARD_CP"):
        os.environ[name] = "0"


def launch_config(arg_names: Sequence[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """Tiles (constants named BT, BK, BLOCK_M, ...), warps and stages of a launch."""
    tiles = [name for name in arg_names if len(name) > 1 and name.startswith("B") and name.isupper()]
    return {name: options[name] for name in (*tiles, "num_warps", "num_stages") if name in options}


@cache
def _install() -> None:
    from fla.backends import BackendRegistry, BaseBackend
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    _install_tuning(Autotuner)
    _install_launches(JITFunction, InterpretedFunction)
    candidates, implementation = BackendRegistry._get_sorted_backends, BaseBackend.get_implementation

    def sorted_backends(self: Any) -> list[Any]:
        return [] if _settings().pinned else candidates(self)

    def get_implementation(self: Any, name: str) -> Any:
        found = implementation(self, name)
        if found is not None:
            _record(Launch(self.backend_type, name, {}))
        return found

    BackendRegistry._get_sorted_backends, BaseBackend.get_implementation = sorted_backends, get_implementation


def _install_tuning(Autotuner: Any) -> None:
    from triton.runtime.errors import OutOfResources

    tuned = Autotuner.run

    def run(self: Any, *args: Any, **options: Any) -> Any:
        if not _settings().pinned:
            return tuned(self, *args, **options)
        why = None
        for config in self.configs:
            try:
                if config.pre_hook is not None:
                    config.pre_hook({**dict(zip(self.arg_names, args, strict=False)), **options, **config.all_kwargs()})
                return self.fn.run(*args, **options, **config.all_kwargs())
            except OutOfResources as error:  # raised before anything is launched
                why = error
        assert why is not None
        raise why

    Autotuner.run = run


def _install_launches(JITFunction: Any, InterpretedFunction: Any) -> None:
    from triton import knobs

    compiled, interpreted = JITFunction.run, InterpretedFunction.run

    def run(self: Any, *args: Any, **options: Any) -> Any:
        if _recorders:
            _record(Launch("fla", self.fn.__name__, launch_config(self.arg_names, options)))
        if not _settings().ieee:
            return compiled(self, *args, **options)
        with knobs.language.scope():  # the option only distinguishes this kernel from the other in Triton's caches
            knobs.language.fp32_default = "ieee"
            return compiled(self, *args, **{**options, "default_dot_input_precision": "ieee"})

    def interpret(self: Any, *args: Any, **options: Any) -> Any:
        if _recorders:
            _record(Launch("fla", self.fn.__name__, launch_config(self.arg_names, options)))
        return interpreted(self, *args, **options)

    JITFunction.run, InterpretedFunction.run = run, interpret
