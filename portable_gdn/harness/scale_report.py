"""What a call or a layer costs on many TPU chips: compiled for all of them, with its collectives, beside one chip.

The same work is compiled twice: split over the chips, and the share of one chip by itself. How near their times are is
the efficiency. Nothing is computed: the arguments are shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..spec.errors import GdnError, bad
from .layer_report import DIRECTIONS, LayerShape, layer_call
from .shapes import Shape
from .tpu_report import call

__all__ = ["SPLITS", "ScaleReport", "ScaleShape", "scale_report"]

#: What is split, and the part of a ``Sharding`` that says so.
SPLITS = {"rows": "batch", "heads": "heads", "tokens": "sequence"}


class ScaleShape(NamedTuple):
    """A call of the rule, or a layer, on many chips.

    Attributes:
        what: "rule" or "layer".
        variant: as of the reports of one chip.
        direction: "forward", or "train" for the output and all gradients.
        shape: of the whole call.
        split: a key of ``SPLITS``.
        chips: a power of two.
        precision: as in ``gated_delta_rule``.
        hidden: channels of a layer's input.
        forgets: of tokens, whether the gates are such that a piece forgets the state that enters it
            (``portable_gdn/parallel/maps.py``): which of the two ways to find its map is timed.
    """

    what: str
    variant: str
    direction: str
    shape: Shape
    split: str
    chips: int
    precision: str | None = None
    hidden: int = 2048
    forgets: bool = False

    def check(self) -> None:
        """Refuse what there is not.

        Raises:
            GdnError: in a sentence.
        """
        for name, value, known in (
            ("--op", self.what, ("rule", "layer")),
            ("--direction", self.direction, DIRECTIONS),
            ("--split", self.split, tuple(SPLITS)),
        ):
            if value not in known:
                raise bad(name, repr(value), f"be one of {', '.join(known)}")
        if self.shape.sequences:
            raise bad("--sequences", self.shape.sequences, "be 0 with --chips")

    def share(self, devices: int) -> ScaleShape:
        """What one device computes of it: its own rows or tokens. Of heads, which need not cost a part what it is of
        the whole, all.

        Raises:
            GdnError: they do not divide by the devices.
        """
        s = self.shape
        if self.split == "rows" and s.batch % devices:
            raise bad("--batch", s.batch, f"be a multiple of the {devices} devices of {self.chips} chips")
        if self.split == "tokens":
            return self._replace(shape=s._replace(seqlen=-(-s.seqlen // devices)))
        return self._replace(shape=s._replace(batch=s.batch // devices)) if self.split == "rows" else self


class ScaleReport(NamedTuple):
    """A call on many chips of a kind.

    Attributes:
        of: the call.
        schedule: of one of the devices, with the collectives.
        alone: of its share of the work on a device by itself (for heads: of all the work).
        devices: of all chips.
    """

    of: ScaleShape
    schedule: Any
    alone: Any
    devices: int

    def _share(self, seconds: float | None) -> float | None:
        return seconds if seconds is None or self.of.split != "heads" else seconds / self.devices

    @property
    def seconds(self) -> float | None:
        """Predicted time: kernels, what XLA runs around them and collectives, one after the other."""
        return self.schedule.together_seconds

    @property
    def ideal_seconds(self) -> float | None:
        """The time if nothing were lost by splitting."""
        return self._share(self.alone.together_seconds)

    @property
    def floor_seconds(self) -> float | None:
        """What no order of the share's instructions can beat: the kernels' floors, without anything around them."""
        return self._share(self.alone.floor_seconds)

    @property
    def efficiency(self) -> float | None:
        """Ideal over predicted time."""
        ideal, found = self.ideal_seconds, self.seconds
        return None if ideal is None or not found else ideal / found

    @property
    def kernel_efficiency(self) -> float | None:
        """Ideal over predicted time of the kernels alone."""
        ideal, found = self._share(self.alone.seconds), self.schedule.seconds
        return None if ideal is None or not found else ideal / found

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **self.of._asdict(),
            "shape": self.of.shape._asdict(),
            "chip": self.schedule.chip,
            "devices": self.devices,
            "seconds": self.seconds,
            "ideal_seconds": self.ideal_seconds,
            "floor_seconds": self.floor_seconds,
            "efficiency": self.efficiency,
            "kernel_efficiency": self.kernel_efficiency,
            "schedule": self.schedule.as_dict(),
            "alone": self.alone.as_dict(),
        }


def _call(of: ScaleShape, sharding: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The call, and the shapes of its arguments, with their places on the mesh of a sharding."""
    if of.what == "rule":
        op = "forward" if of.direction == "forward" else "backward"
        return call(op, of.variant, of.shape, precision=of.precision, sharding=sharding)
    layer = LayerShape("layer", of.variant, of.direction, of.hidden, of.shape, of.precision)
    return layer_call(layer, sharding)


def scale_report(
    of: ScaleShape,
    chip: str,
    *,
    use_cache: bool = True,
    progress: Callable[[str, int, int], None] | None = None,
) -> ScaleReport:
    """The report of a call on many chips of one kind.

    Args:
        of: the call.
        chip: a name.
        use_cache: as ``portable_gdn.tpu.schedule`` takes it.
        progress: called with what was compiled, how many programs are done and of how many.

    Raises:
        GdnError: an argument is wrong, the call cannot be split so, or it cannot be compiled.
    """
    from ..parallel.maps import taking
    from ..parallel.sharding import Sharding
    from ..tpu.chips import chip_named
    from ..tpu.scheduling.build import missing, schedule
    from ..tpu.scheduling.compile import chip_mesh, on
    from ..tpu.slices import slice_of

    of.check()
    kind = chip_named(chip)
    where = slice_of(kind, of.chips)
    why = missing()
    if why is not None:
        raise GdnError(why)
    alone = of.share(where.devices)
    steps: Sequence[tuple[str, ScaleShape, Any]] = [(f"{chip} alone", alone, None)]
    if where.devices > 1:
        sharding = Sharding(**{SPLITS[of.split]: "devices"}, mesh=chip_mesh(kind, of.chips))
        steps = [*steps, (f"{of.chips} {chip}", of, sharding)]
    found = []
    for done, (name, one, sharding) in enumerate(steps):
        with on(kind):
            function, args = _call(one, sharding)
        with taking(of.forgets):
            found.append(schedule(function, *args, chip=chip, use_cache=use_cache, timeout=1800.0))
        if progress is not None:
            progress(name, done + 1, len(steps))
    return ScaleReport(of, found[-1], found[0], where.devices)
