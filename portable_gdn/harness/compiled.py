"""A function compiled for several TPU chips, with the plans that the calls in it chose."""

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
    """Compile a function for each of several chips.

    Args:
        chips: the names of the chips.
        make: returns the function of JAX arrays, and the shapes of its arguments.
        use_cache, progress: as in ``portable_gdn.tpu.schedules``.

    Returns:
        For each chip the function's schedule, or the error that prevented it, and the plan of its first call.

    Raises:
        GdnError: a chip does not exist, nothing can be compiled on this machine, or ``make`` refuses.
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

    def told(*args: Any) -> Any:  # traced for one chip after another
        with watch() as calls:
            out = function(*args)
        plans[target().name] = calls[0].by if calls else ""
        return out

    found = schedules(told, *args, chips=chips, use_cache=use_cache, progress=progress)
    return [(schedule, plans.get(name, "")) for name, schedule in zip(chips, found, strict=True)]
