"""numpy arrays to torch tensors and back; bfloat16 travels by its bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["from_numpy", "to_numpy"]


def from_numpy(operands: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors on the CPU with the arrays' dtypes; copies."""

    def convert(a: Any) -> Tensor:
        a = np.array(a, order="C")
        if a.dtype.name == "bfloat16":
            return torch.from_numpy(a.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(a)

    return {name: convert(a) for name, a in operands.items()}


def to_numpy(array: Tensor) -> np.ndarray:
    """The contents of a tensor."""
    array = array.detach().cpu()
    if array.dtype != torch.bfloat16:
        return array.numpy()
    import ml_dtypes

    return array.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
