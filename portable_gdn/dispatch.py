"""The registry of backends, the choice of one for a call, and the reasons for it."""

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
generation = 0  # counts changes of the registry, so that caches of choices can tell that they are stale


def register_backend(backend: Backend) -> None:
    """Add a backend for this process, or replace the one with its name.

    A package adds a backend for every process with an entry point in the group ``portable_gdn.backends``.

    Raises:
        GdnError: ``backend`` is not an instance of a subclass of ``Backend``, or lacks a name or libraries.
    """
    global generation
    _load()
    _check(backend)
    _registry[backend.name] = backend
    _broken.pop(backend.name, None)
    generation += 1


def _check(backend: Backend) -> None:
    """Check that an object is a backend; for entry points, the error is reported when their backend is requested.

    Raises:
        GdnError: The object is not an instance of ``Backend``, or lacks a name or libraries.
    """
    if not isinstance(backend, Backend):
        what = backend.__name__ if isinstance(backend, type) else type(backend).__name__
        was = f"the class {what}" if isinstance(backend, type) else f"of type {what}"
        raise GdnError(f"backend is {was}; it must be an instance of a subclass of portable_gdn.Backend.")
    missing = [name for name in ("name", "libraries") if not hasattr(backend, name)]
    if missing:
        raise GdnError(f"backend is a {type(backend).__name__} without {' and '.join(missing)}; it must have them.")


def unregister_backend(name: str) -> None:
    """Remove a backend from the registry of this process; an unknown name is ignored."""
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
        except Exception as error:  # an error in one package must not make the others unusable
            _broken[entry.name] = f"its entry point {entry.value} fails to load: {type(error).__name__}: {error}"
        else:
            _registry[entry.name] = backend


def backends() -> list[Backend]:
    """Return all backends, in the order in which they are tried."""
    _load()
    return sorted(_registry.values(), key=lambda b: (b.priority, b.name))


def broken() -> dict[str, str]:
    """Return the names of entry points that could not be loaded, with the reasons."""
    _load()
    return dict(_broken)


def get(name: str) -> Backend:
    """Return the backend with this name, whether or not it can run here.

    Raises:
        GdnError: No backend has this name, or its entry point could not be loaded.
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
    """Return why this backend cannot run this call, or None if it can."""
    if signature.library not in backend.libraries:
        takes = " or ".join(_ARRAYS.get(name, name) for name in backend.libraries)
        return f"it takes {takes}, and these are {_ARRAYS[signature.library]}"
    refuses = backend.refuses if signature.update is None else backend.refuses_update
    return backend.unavailable() or refuses(signature)


_ARRAYS = {"torch": "torch tensors", "jax": "JAX arrays", "numpy": "numpy arrays"}


def choose(signature: Signature, name: str | None) -> Backend:
    """Return the backend for a call: the named one, the one that PORTABLE_GDN_BACKEND names, or the first that can.

    A backend that was named is returned in its ``alone`` form: if a traced call is then compiled for another platform,
    compilation fails instead of leaving the call to another backend.

    Raises:
        GdnError: The named backend cannot run the call (it never falls back to another), or no backend can.
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
    """Return what computes a call on this backend: its name, or both names if the compiler chooses between two."""
    if backend.elsewhere is None or not signature.traced:
        return backend.name
    platform, other = backend.elsewhere
    return f"{backend.name} if compiled for a {platform.upper()}, {other} elsewhere"


class Explanation(NamedTuple):
    """The backend that a call would run on, and the reason why each of the others was passed over.

    Attributes:
        backend: The name of the backend, or None if none can run the call.
        signature: The metadata of the call.
        passed_over: Pairs (name, reason) of the other backends.
        named: Whether the caller or PORTABLE_GDN_BACKEND named a backend.
    """

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
    """Return the description of the pool that a call updates, or "" if it updates none."""
    if s.update is None:
        return ""
    states = f"{s.update.slots} slots of {s.update.state_dtype} states"
    return f", updating {states}, window {s.update.window}"


def explain(signature: Signature, name: str | None = None) -> Explanation:
    """Return the choice of a backend for a call, with reasons; a call that no backend can run is no error."""
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
