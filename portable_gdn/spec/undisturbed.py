"""A context in which the caller's global modes do not affect self-tests, probes and proofs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from .torch_tensors import set_back

__all__ = ["undisturbed"]


@contextmanager
def undisturbed(products: bool = False) -> Iterator[None]:
    """Set the caller's modes aside within the block, or within the function that this decorates.

    For torch, if it is imported, these are autocast, no_grad and inference mode, anomaly detection, the default dtype
    and the default device. For JAX, if it is imported, they are ``jax_debug_nans``, ``jax_debug_infs``, leak checking,
    transfer guards, the default device, and strict promotion of dtypes and ranks. For numpy they are the settings for
    overflow and similar errors.

    Switches that choose how products are computed (TF32 and bfloat16 for float32, ``jax_default_matmul_precision``,
    ``jax_enable_x64``, torch's deterministic mode) stay as they are when a backend is judged, since they are part of
    its behaviour, and recordings name them.

    Args:
        products: whether to set aside torch's switches for products, too: products of float32 are then IEEE products,
            and operations that are not deterministic raise no error. Self-tests need this, and so do recordings with
            which other machines are compared.
    """
    with ExitStack() as stack:
        stack.enter_context(np.errstate(all="ignore"))
        _torch(stack, products)
        _jax(stack)
        yield


def _torch(stack: ExitStack, products: bool) -> None:
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "autograd"):  # not imported, or being imported now
        return
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.enable_grad())
    stack.enter_context(torch.autograd.set_detect_anomaly(False))
    for device in ("cpu", "cuda", "xpu"):
        if torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))
    stack.callback(torch.set_default_dtype, torch.get_default_dtype())
    torch.set_default_dtype(torch.float32)
    stack.enter_context(torch.device("cpu"))
    if products:
        _products(stack, torch)


def _products(stack: ExitStack, torch: Any) -> None:
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    stack.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled(), warn_only=warns)
    torch.use_deterministic_algorithms(False)
    backends = torch.backends
    switches = [backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv]
    if not all(hasattr(switch, "fp32_precision") for switch in switches):  # before torch 2.9
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision("highest")
        return
    for switch in switches:
        stack.callback(set_back, switch, switch.fp32_precision)
        switch.fp32_precision = "ieee"


def _jax(stack: ExitStack) -> None:
    jax = sys.modules.get("jax")
    if jax is None or not hasattr(jax, "transfer_guard"):
        return
    stack.enter_context(jax.debug_nans(False))
    stack.enter_context(jax.debug_infs(False))
    stack.enter_context(jax.check_tracer_leaks(False))
    stack.enter_context(jax.transfer_guard("allow"))
    stack.enter_context(jax.default_device(None))
    stack.enter_context(jax.numpy_dtype_promotion("standard"))
    stack.enter_context(jax.numpy_rank_promotion("allow"))
