"""How finely the gates of a call are given, as kernels see it. It does not import jax."""

from __future__ import annotations

from typing import NamedTuple

from ....spec.problem import Signature
from ....spec.variants import Granularity

__all__ = ["ONE_GATE", "Widths", "widths"]

#: Groups of channels up to which each has a matrix of decays of its own; more are computed channel by channel.
GROUPS = 4


class Widths(NamedTuple):
    """How finely gates are given: decays a value head (1, a few groups, or K), erase gates (0, 1 or K), write gates (0,
    1 or V); shared: both are one gate, beta."""

    decay: int
    erase: int
    write: int
    shared: bool

    @property
    def given(self) -> tuple[int, ...]:
        """The widths of the operands in order: decay, and erase and write where they are operands of their own."""
        return (self.decay, *(n for n in (self.erase, 0 if self.shared else self.write) if n))


#: One decay and one gate a head.
ONE_GATE = Widths(1, 1, 1, True)


def widths(s: Signature) -> Widths:
    """The widths of a call's gates."""
    decay = max(s.groups, 1)
    erase, write = (
        {Granularity.NONE: 0, Granularity.HEAD: 1}.get(gate, channels)
        for gate, channels in ((s.variant.erase, s.K), (s.variant.write, s.V))
    )
    return Widths(decay if decay <= GROUPS else s.K, erase, write, s.has("beta"))
