"""The rule on whatever is installed here: the same call with numpy arrays, torch tensors and JAX arrays.

python examples/first_call.py
"""

from __future__ import annotations

import importlib
import importlib.util

import numpy as np

import portable_gdn as pg


def operands(B: int = 1, T: int = 200, H: int = 2, HV: int = 4, K: int = 32, V: int = 48) -> dict[str, np.ndarray]:
    """Random operands of Gated DeltaNet: keys and queries of H heads, values, decays and beta of HV."""
    rng = np.random.default_rng(0)
    return {
        "q": rng.standard_normal((B, T, H, K), np.float32),
        "k": rng.standard_normal((B, T, H, K), np.float32),
        "v": rng.standard_normal((B, T, HV, V), np.float32),
        "g": -rng.exponential(0.1, (B, T, HV)).astype(np.float32),  # log decay
        "beta": rng.random((B, T, HV), np.float32),
    }


def main() -> None:
    x = operands()
    exact, _ = pg.gated_delta_rule(**x, qk_l2norm=True)  # numpy arrays go to the float64 oracle
    libraries = {"numpy": np.asarray}
    for name, convert in (("torch", "from_numpy"), ("jax.numpy", "asarray")):
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            libraries[name] = getattr(importlib.import_module(name), convert)
    for name, convert in libraries.items():
        arrays = {operand: convert(a) for operand, a in x.items()}
        o, state = pg.gated_delta_rule(**arrays, qk_l2norm=True, output_final_state=True)
        error = np.linalg.norm(np.asarray(o) - exact) / np.linalg.norm(exact)
        print(f"{name}: o {tuple(o.shape)}, state {tuple(state.shape)}, relative error {error:.1e}")
        print(pg.explain(**arrays, qk_l2norm=True), end="\n\n")


if __name__ == "__main__":
    main()
