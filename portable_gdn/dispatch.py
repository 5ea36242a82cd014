"""The registry of backends, the choice among them, and its reasons."""

from __future__ import annotations

import os
from difflib import get_close_matches
from importlib import metadata
from typing import NamedTuple

from .spec.backend import Backend
from .spec.errors import GdnError
from .spec.problem import Signature

__all__ = ["ENVIRONMENT", "Explanation", "backends", "choose", "explain", "get", "register_backend"]

GROUP = "portable_gdn.backends"
ENVIRONMENT = "PORTABLE_GDN_BACKEND"

_registry: dict[str, Backend] = {}
_broken: dict[str, str] = {}
_loaded = False
generation = 0  # counts changes, so that whoever caches a choice can see that it is stale


def register_backend(backend: Backend) -> None:
    """Add a backend for this process, or replace the one of the same name.

    A package adds one for every process by an entry point of the group ``portable_gdn.backends``.
    """
    global generation
    _load()
    _check(backend)
    _registry[backend.name] = backend
    _broken.pop(backend.name, None)
    generation += 1


def _check(backend: Backend) -> None:
    """Refuse what is no backend; an entry point's fault is told where its backend is asked for.

    Raises:
        GdnError: it is no instance of ``Backend``, or lacks a name or libraries.
    """
    if not isinstance(backend, Backend):
        what = backend.__name__ if isinstance(backend, type) else type(backend).__name__
        was = f"the class {what}" if isinstance(backend, type) else f"of type {what}"
        raise GdnError(f"backend is {was}; it must be an instance of a subclass of portable_gdn.Backend.")
    missing = [name for name in ("name", "libraries") if not hasattr(backend, name)]
    if missing:
        raise GdnError(f"backend is a {type(backend).__name__} without {' and '.join(missing)}; it must have them.")


def unregister_backend(name: str) -> None:
    """Take a backend out again, for this process."""
    global generation
    _registry.pop(name, None)
    generation += 1


def _load() -> None:
    global _loaded
    if _loaded:
        return
    _loaded = True
    for entry in metadata.entry_points(group=GROUP):
        try:
            backend = entry.load()
            _check(backend)
        except Exception as error:  # another package's fault must not take the others down
            _broken[entry.name] = f"its entry point {entry.value} fails to load: {type(error).__name__}: {error}"
        else:
            _registry[entry.name] = backend


def backends() -> list[Backend]:
    """All backends, in the order in which they are tried."""
    _load()
    return sorted(_registry.values(), key=lambda b: (b.priority, b.name))


def broken() -> dict[str, str]:
    """Entry points that could not be loaded, and why."""
    _load()
    return dict(_broken)


def get(name: str) -> Backend:
    """The backend of this name, whether or not it can run here.

    Raises:
        GdnError: there is none.
    """
    _load()
    if isinstance(name, str) and name in _broken:
        raise GdnError(f"backend {name!r} cannot be used: {_broken[name]}.")
    if not isinstance(name, str) or name not in _registry:
        names = [b.name for b in backends()]
        near = get_close_matches(name.lower(), names, 1) if isinstance(name, str) else []
        guess = f" (did you mean {near[0]!r}?)" if near else ""
        raise GdnError(f"backend is {name!r}; it must be one of {', '.join(map(repr, names))}{guess}.")
    return _registry[name]


def _reason(backend: Backend, signature: Signature) -> str | None:
    """Why this backend cannot take this call, or None."""
    if signature.library not in backend.libraries:
        takes = " or ".join(_ARRAYS.get(name, name) for name in backend.libraries)
        return f"it takes {takes}, and these are {_ARRAYS[signature.library]}"
    refuses = backend.refuses if signature.update is None else backend.refuses_update
    return backend.unavailable() or refuses(signature)


_ARRAYS = {"torch": "torch tensors", "jax": "JAX arrays", "numpy": "numpy arrays"}


def choose(signature: Signature, name: str | None) -> Backend:
    """The backend for a call: the one named, or named by PORTABLE_GDN_BACKEND, or the first that can.

    One that is named comes in the form that it calls ``alone``, if it has one: where a traced call is compiled for
    another platform, it fails instead of leaving the call to another backend.

    Raises:
        GdnError: the one named cannot, or none can; a named one never falls back.
    """
    source = "backend"
    if name is None:
        name, source = os.environ.get(ENVIRONMENT) or None, ENVIRONMENT
    if name is not None:
        try:
            backend = get(name)
        except GdnError as error:
            raise error if source == "backend" else GdnError(f"{ENVIRONMENT}: {error}") from None
        reason = _reason(backend, signature)
        if reason is not None:
            raise GdnError(f"{source} {name!r} cannot run this call: {reason.rstrip('.')}.")
        return backend.alone
    explanation = explain(signature)
    if explanation.backend is None:
        raise GdnError(f"no backend can run this call:\n{explanation}")
    return get(explanation.backend)


def where(backend: Backend, signature: Signature) -> str:
    """What computes a call that was given to this backend: its name, and where that is the compiler's choice, both."""
    if backend.elsewhere is None or not signature.traced:
        return backend.name
    platform, other = backend.elsewhere
    return f"{backend.name} if compiled for a {platform.upper()}, {other} elsewhere"


class Explanation(NamedTuple):
    """Which backend a call would run on, and why each other one was passed over."""

    backend: str | None
    signature: Signature
    passed_over: tuple[tuple[str, str], ...]
    named: bool = False

    def __str__(self) -> str:
        s = self.signature
        variant = s.variant.name
        if not s.has("beta") and not s.has("erase") and not s.has("write"):
            variant += " (without beta, erase or write: gated linear attention, which is no delta rule)"
        lines = [
            f"{variant}, {s.dtype}, precision {s.precision}, {_ARRAYS[s.library]} on {s.device}, "
            f"B={s.B} T={s.T} N={s.N} H={s.H} HV={s.HV} K={s.K} V={s.V}{_pool(s)}",
            f"  runs on  {self._where()}" if self.backend else "  runs on no backend",
        ]
        backend = _registry.get(self.backend or "")
        by = backend.serves(s) if backend is not None else ""
        if by:
            lines.append(f"  by       {by}")
        lines += [f"  not {name}: {why}" for name, why in self.passed_over]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)

    def _where(self) -> str:
        backend = _registry.get(self.backend or "")
        return str(self.backend) if backend is None or self.named else where(backend, self.signature)


def _pool(s: Signature) -> str:
    """What an explanation says of the pool that a call updates."""
    if s.update is None:
        return ""
    states = f"{s.update.slots} slots of {s.update.state_dtype} states"
    return f", updating {states}, window {s.update.window}"


def explain(signature: Signature, name: str | None = None) -> Explanation:
    """The choice for a call and its reasons; never raises for a call that nothing can run."""
    name = name or os.environ.get(ENVIRONMENT) or None
    if name is not None and name not in tuple(_broken):  # which need not be hashable
        get(name)  # an unknown name is a wrong call
    chosen, passed = None, []
    for backend in backends():
        reason = _reason(backend, signature)
        if reason is None and name is not None and backend.name != name:
            reason = f"{name!r} was asked for by name"
        if reason is None and name is None and not backend.auto:
            reason = "it runs only when asked for by name"
        if reason is None and chosen is not None:
            reason = f"{chosen} comes first"
        if reason is None:
            chosen = backend.name
        else:
            passed.append((backend.name, reason))
    passed += list(_broken.items())
    return Explanation(chosen, signature, tuple(passed), name is not None)
