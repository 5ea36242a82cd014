"""Backends that split every call of another backend over several devices, by rows, heads or tokens.

``portable-gdn verify --devices`` uses them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .. import dispatch
from ..parallel.calls import run_split
from ..parallel.placement import split_of
from ..parallel.sharding import Sharding
from ..spec.backend import Backend
from ..spec.errors import GdnError, bad
from ..spec.precision import Rounding
from ..spec.problem import Options, Problem, Result, Signature

__all__ = ["WAYS", "SplitBackend", "environment_of", "register_split", "split_name"]

#: The ways to split a call: the name of each, the part of a ``Sharding`` and the dimension that is split.
WAYS = {"rows": ("batch", "B"), "heads": ("heads", "HV"), "tokens": ("sequence", "T")}


def split_name(backend: str, way: str) -> str:
    """Return the name of a backend's split form in reports."""
    return f"{backend} split by {way}"


def environment_of(devices: int) -> dict[str, str]:
    """Return the environment variables that make the CPU of a process appear to JAX as this many devices.

    Raises:
        GdnError: a call cannot be split over that number of devices.
    """
    if devices < 2:
        raise bad("devices", devices, "be at least 2")
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in f]
    flags.append(f"--xla_force_host_platform_device_count={devices}")
    return {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}


def register_split(backend: str, devices: int) -> None:
    """Register the split forms of a backend for JAX arrays, in a process that has that many devices."""
    for way in WAYS:
        dispatch.register_backend(SplitBackend(dispatch.get(backend), way, devices))


def options_of(s: Signature) -> Options:
    """Return the options from which a signature was made."""
    conv = s.conv
    return Options(
        s.scale, s.output_final_state, s.qk_l2norm, s.gate, s.chunk_size, s.precision, s.state_layout, s.deterministic,
        s.step, None if conv is None else conv.activation, None if conv is None else s.H, None if conv is None else s.K,
        s.norm,
    )  # fmt: skip


class SplitBackend(Backend):
    """A backend that splits each call of another one over as many of the devices as divide the dimension evenly."""

    libraries = ("jax",)
    slow = True

    def __init__(self, inner: Backend, way: str, devices: int) -> None:
        """Args:
        inner: the backend that computes on each device.
        way: a key of ``WAYS``.
        devices: the largest number of devices to split a call over.
        """
        self.inner, self.way, self.devices = inner, way, devices
        self.name = split_name(inner.name, way)

    def _parts(self, s: Signature) -> int:
        size = getattr(s, WAYS[self.way][1])
        if self.way == "tokens":
            return min(self.devices, size)
        return max(n for n in range(1, self.devices + 1) if size % n == 0)

    def unavailable(self) -> str | None:
        """Return the reason why the inner backend cannot run here, or None."""
        return self.inner.not_here()

    def refuses(self, signature: Signature) -> str | None:
        """Return the reason why the inner backend cannot compute this call, or the call cannot be split; or None."""
        s = signature
        if s.B * s.T == 0:
            return "a call without tokens is not split"
        if self.way == "tokens" and s.step:
            return "a step is of one token"
        if self._parts(s) == 1:
            return f"it has {getattr(s, WAYS[self.way][1])} of its {self.way}, which cannot be split"
        if self.way == "tokens":
            from ..parallel.tokens import tokens_each

            try:
                tokens_each(s, self._parts(s))
            except GdnError as error:
                return str(error)
        return self.inner.refuses(s)

    def run(self, problem: Problem) -> Result:
        """Compute a call; the result is differentiable if that of the inner backend is."""
        import jax
        import numpy as np

        s = replace(problem.signature, device="traced")  # as when gradients are taken
        mesh = jax.sharding.Mesh(np.array(jax.devices()[: self._parts(s)]), ("devices",))
        split = split_of(s, problem.operands, Sharding(**{WAYS[self.way][0]: "devices"}, mesh=mesh))
        assert split is not None
        return run_split(Problem(s, problem.operands), options_of(s), self.inner, self.inner.name, split)[0]

    def from_numpy(self, operands: Mapping[str, Any]) -> dict[str, Any]:
        """Convert numpy arrays to arrays of the inner backend's library."""
        return self.inner.from_numpy(operands)

    def rounding(self, signature: Signature) -> Rounding:
        """Return the rounding of the inner backend, since the maps of pieces are multiplied in float32."""
        return self.inner.rounding(signature)
