"""Faults planted into split calls, and what the proof of ``verify --devices`` says; run by test_verify_split.py."""

from __future__ import annotations

import json

import jax
from jax import lax

from portable_gdn.harness.devices import register_split, split_name
from portable_gdn.harness.verify import cases_for, verify
from portable_gdn.parallel import maps, shards, tokens
from portable_gdn.spec.transition import apart

DEVICES = 4
register_split("xla", DEVICES)
CASES = {case.name: case for case in cases_for(False)}
found = {}


def proof(name, way, case):
    jax.clear_caches()
    report = verify([split_name("xla", way)], full=True, cases=[CASES[case]], in_process=True)
    found[name] = sorted({row.tensor for row in report.rows if not row.ok})
    assert any(row.judged for row in report.rows), (name, report.not_run)


def transposed_map(state, V):
    t = apart(state, V)
    return t._replace(A=t.A.swapaxes(-1, -2))


class Backwards:
    """jax.lax whose messages to the next device go to the one before it."""

    def __getattr__(self, name):
        return getattr(lax, name)

    @staticmethod
    def ppermute(x, axes, perm):
        return lax.ppermute(x, axes, [(b, a) for a, b in perm])


def own_gradient_alone(call, name, a, heads):
    """The key heads of a device, of which only the first device's gradient counts."""
    taken = keys_of(call, name, a, heads)
    if name not in ("q", "k"):
        return taken
    first = lax.axis_index(call.split.heads) == 0
    return jax.numpy.where(first, taken, lax.stop_gradient(taken))


proof("tokens, no fault", "tokens", "mixer")
proof("heads, no fault", "heads", "a chunk")
maps.apart = transposed_map
proof("a map transposed", "tokens", "mixer")
maps.apart = apart
tokens.lax = Backwards()
proof("a halo of the wrong neighbour", "tokens", "mixer")
tokens.lax = lax
keys_of = shards._keys_of
shards._keys_of = own_gradient_alone
proof("a gradient not summed", "heads", "a chunk")
print(json.dumps(found))
