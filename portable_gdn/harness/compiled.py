"""A function compiled for several TPU chips, beside what the calls in it said of the plans that they chose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..spec.errors import GdnError
from ..watching import watch

__all__ = ["compiled_for"]


def compiled_for(
    chips: Sequence[str],
    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]],
    *,
    use_cache: bool = True,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[tuple[Any, str]]:
    """For each chip the schedule of a function (or the error that there is instead), and the plan of its first call.

    Args:
        chips: names.
        make: gives the function of JAX arrays and the shapes of its arguments.
        use_cache, progress: as ``portable_gdn.tpu.schedules`` takes them.

    Raises:
        GdnError: there is no such chip, nothing can be compiled here, or ``make`` refuses.
    """
    from ..tpu.chips import chip_named, target
    from ..tpu.scheduling.build import missing, schedules

    for name in chips:
        chip_named(name)
    why = missing()
    if why is not None:
        raise GdnError(why)
    function, args = make()
    plans: dict[str, str] = {}

    def told(*args: Any) -> Any:  # traced for one chip after the other
        with watch() as calls:
            out = function(*args)
        plans[target().name] = calls[0].by if calls else ""
        return out

    found = schedules(told, *args, chips=chips, use_cache=use_cache, progress=progress)
    return [(schedule, plans.get(name, "")) for name, schedule in zip(chips, found, strict=True)]
