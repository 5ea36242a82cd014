"""Make this process act as if it had a GPU of some architecture, for choosing and compiling kernels.

Nothing can be launched: the driver only knows its target. FLA asks torch and the driver for the device when it is
imported, so this must happen first, in a process that does nothing else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from ..launching import launch_config
from .targets import Target

__all__ = ["compile_launches", "pretend"]


class _Utilities:
    def __init__(self, target: Target) -> None:
        self._target = target

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": self._target.shared, "multiprocessor_count": self._target.processors,
            "max_num_regs": 65536, "warpSize": self._target.warp,
        }  # fmt: skip


class _Driver:
    """A driver for Triton of a device that does not exist."""

    launcher_cls = None

    def __init__(self, target: Target) -> None:
        self._target = target.triton()
        self.utils = _Utilities(target)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        import torch

        return torch.cuda

    def get_benchmarker(self) -> Callable[..., list[float]]:
        return lambda *args, **options: [0.0] * 3


def pretend(target: Target) -> None:
    """Install a driver of such a device in Triton, and its properties in torch."""
    import torch
    from triton.runtime import driver

    driver.set_active(_Driver(target))
    cuda: Any = torch.cuda
    cuda.get_device_capability = lambda *device: target.capability
    cuda.get_device_name = lambda *device: target.device
    cuda.device_count = lambda: 1
    if target.backend == "hip":
        torch.version.hip = "6"


@contextlib.contextmanager
def compile_launches(found: Callable[[str, dict[str, Any], Any, str], None], all_configs: bool) -> Iterator[None]:
    """Compile the kernels that would be launched within the block, and launch nothing.

    Args:
        found: called for each launch with the kernel, its configuration, the compiled kernel or the exception, and the
            assembler's output, which is empty for a kernel that was compiled before.
        all_configs: whether to compile all configurations of an autotuned kernel, not only the first.
    """
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    from .usage import assembler_log

    launch, time_config, on_disk = JITFunction.run, Autotuner._bench, Autotuner.check_disk_cache

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        config = launch_config(self.arg_names, options)
        try:
            with assembler_log() as log:
                compiled = launch(self, *args, grid=grid, warmup=True, **options)
        except Exception as error:
            found(self.fn.__name__, config, error, "")
            raise
        found(self.fn.__name__, config, compiled, log.text)
        return compiled

    def try_config(self: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
        if all_configs:
            try:
                self.fn.run(*args, **meta, **config.all_kwargs())
            except Exception:  # reported above; autotuning also skips such a configuration
                return [float("inf")] * 3
        return [0.0] * 3

    JITFunction.run, Autotuner._bench = compile_only, try_config
    Autotuner.check_disk_cache = lambda self, key, configs, bench: (bench(), False)[1]
    try:
        yield
    finally:
        JITFunction.run, Autotuner._bench, Autotuner.check_disk_cache = launch, time_config, on_disk
