"""What the kernels of a call have at every stage of every chunk, for whoever asks where two computations part."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ..spec.errors import bad
from ..spec.prologue import prepare, swap_state
from ..spec.stages import STAGES
from .calls import by_plain_kernel
from .execution import Execution
from .kernels.pipelined.backward_plan import reverse_plan
from .kernels.pipelined.geometry import Pipeline
from .kernels.plain.forward import PROBED
from .kernels.plain.plan import plan
from .pipelined import by_pipeline

__all__ = ["probe"]

Array = Any
Stages = dict[str, tuple[Any, ...]]


def probe(e: Execution, operands: dict[str, Array]) -> Stages:
    """The stages of every chunk of a call without packed sequences, under the names of ``spec.stages.STAGES``.

    All are the plain kernel's, made of the very functions that it is made of. A call that the pipelined kernel computes
    has that one's states and output, and what it writes (delta) where its backward pass keeps it; before those, the
    pipelined kernel has other quantities, and the stages shown, which no state enters, are still the plain kernel's.

    Returns:
        What ``spec.chunkwise.stage_chunk`` returns of one chunk, with [B, chunks a row, HV] before it, float32; the
        pipelined kernel's output in its own dtype. ``wy`` is derived, since neither kernel forms it. A row's last chunk
        is filled up with zeros to the chunk size.

    Raises:
        GdnError: sequences are packed.
    """
    if e.signature.packed:
        raise bad("cu_seqlens", "given", "be None where stages are probed: chunks of packed sequences differ in length")
    found = _plain(e, operands)
    if isinstance(e.forward, Pipeline):
        found |= _pipelined(e, operands)
    return {name: found[name] for name in STAGES}


@partial(jax.jit, static_argnums=0)
def _plain(e: Execution, operands: dict[str, Array]) -> Stages:
    s = e.signature
    found = by_plain_kernel(e, plan(s, e.chip), operands, PROBED)[1]
    x = {name: jnp.reshape(a, (s.B, -1, *a.shape[1:])) for name, a in found.items()}
    return {
        "decay": tuple(x[name][..., :: max(x[name].shape[-1] // max(s.groups, 1), 1)] for name in ("G", "count")),
        "scores": (x.get("Akk"), x["Aqk"]),
        "inverse": (x.get("T"),),
        "wy": (x["U"], x.get("W")),
        "state": (x["S"], x["after"]),
        "delta": (x["Vn"],),
        "output": (x["o"],),
    }


@partial(jax.jit, static_argnums=0)
def _pipelined(e: Execution, operands: dict[str, Array]) -> Stages:
    """State and output, and delta where the pipeline keeps u: what the inverse solves, before it is scaled by b."""
    s = e.signature
    pair = reverse_plan(s, e.chip)
    p = pair[0] if pair is not None else e.with_states
    assert p is not None
    (o, state, _), kept = by_pipeline(replace(s, output_final_state=True), p, e.interpret, operands)
    before = jnp.reshape(kept["S"], (s.B, -1, s.HV, s.K, s.V))[:, : p.blocks]
    after = jnp.concatenate([before[:, 1:], swap_state(jnp, s, state)[:, None]], 1)
    found: Stages = {"state": (before, after), "output": (_by_chunk(p, o),)}
    if "u" in kept:
        b = prepare(jnp, s, operands).b
        u = jnp.sum(kept["u"][:, : p.blocks].astype(jnp.float32), 3)
        found["delta"] = (_by_chunk(p, b) * u,)
    return found


def _by_chunk(p: Pipeline, a: Array) -> Array:
    """[B, T, HV, D] as [B, chunks, HV, C, D], filled up with zeros."""
    a = jnp.pad(a, ((0, 0), (0, p.blocks * p.C - p.T), (0, 0), (0, 0)))
    return jnp.moveaxis(jnp.reshape(a, (p.B, p.blocks, p.C, *a.shape[2:])), 2, 3)
