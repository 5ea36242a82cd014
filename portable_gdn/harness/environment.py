"""The environment on which the results of a run depend: versions, device, driver, and switches that change numbers."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import __version__
from ..spec.backend import Backend

__all__ = ["environment"]

PACKAGES = (
    "numpy", "ml-dtypes", "jax", "jaxlib", "libtpu", "torch", "triton", "flash-linear-attention", "fla-core",
    "transformers",
)  # fmt: skip

#: Prefixes of environment variables that change the results, or the code that computes them.
SWITCHES = (
    "FLA_", "TRITON_", "XLA_", "JAX_", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE", "CUBLAS_", "TORCH_ALLOW_TF32",
    "CUDA_VISIBLE_DEVICES", "PORTABLE_GDN_",
)  # fmt: skip

#: Packages to which FLA delegates calls as soon as they are installed, unless the variable is 0.
FLA_HANDS_OVER = {"flash_qla": "FLA_FLASH_QLA", "flash_kda": "FLA_FLASH_KDA", "tilelang": "FLA_TILELANG"}


def environment(backend: Backend) -> dict[str, Any]:
    """Return the facts about this process that matter to a run on a backend, as a dictionary for JSON."""
    facts: dict[str, Any] = {
        "portable-gdn": __version__,
        "revision": _revision(),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "switches": {name: value for name, value in sorted(os.environ.items()) if name.startswith(SWITCHES)},
        "device": platform.processor() or platform.machine(),
    }
    if "torch" in backend.libraries and importlib.util.find_spec("torch") is not None:
        facts |= _torch(backend)
    if "jax" in backend.libraries and importlib.util.find_spec("jax") is not None:
        facts |= _jax()
    return facts


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _revision() -> str | None:
    """Return the git revision of the checkout that this package runs from, with a + if files were changed, or None."""
    here = Path(__file__).resolve()

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=here.parent, capture_output=True, text=True, timeout=10)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        if not git("ls-files", here.name):  # installed inside another repository
            return None
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.TimeoutExpired):
        return None


def _torch(backend: Backend) -> dict[str, Any]:
    import torch

    facts: dict[str, Any] = {"torch.float32_matmul_precision": _products_of_float32(torch)}
    if torch.cuda.is_available() and getattr(backend, "devices", ("cuda",)) != ("cpu",):
        driver = Path("/proc/driver/nvidia/version")
        facts |= {
            "device": f"{torch.cuda.get_device_name()}, compute capability {torch.cuda.get_device_capability()}",
            "driver": driver.read_text().splitlines()[0] if driver.is_file() else f"HIP {torch.version.hip}",
            "cuda": torch.version.cuda,
            "torch.backends.cuda.matmul.allow_tf32": _allows_tf32(torch),
        }
    if backend.name.startswith("fla"):
        facts["fla hands over to"] = [
            name
            for name, switch in FLA_HANDS_OVER.items()
            if importlib.util.find_spec(name) is not None and os.environ.get(switch) != "0"
        ]
    return facts


def _products_of_float32(torch: Any) -> str:
    """Return torch's setting for products of float32 or, if it was set for one library only, that library's setting."""
    try:
        return str(torch.get_float32_matmul_precision())
    except RuntimeError:
        libraries = {name: getattr(torch.backends, name).matmul.fp32_precision for name in ("cuda", "mkldnn")}
        return ", ".join(f"{name} {kept}" for name, kept in libraries.items())


def _allows_tf32(torch: Any) -> bool:
    try:
        return bool(torch.backends.cuda.matmul.allow_tf32)
    except RuntimeError:  # set under its newer name, it must be read under that name
        return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def _jax() -> dict[str, Any]:
    jax: Any = importlib.import_module("jax")
    device = jax.devices()[0]
    return {
        "device": f"{len(jax.devices())} x {device.device_kind}",
        "driver": str(getattr(device.client, "platform_version", "")).replace("\n", " "),
        "jax_default_matmul_precision": str(jax.config.jax_default_matmul_precision),
        "jax_enable_x64": bool(jax.config.jax_enable_x64),
    }
