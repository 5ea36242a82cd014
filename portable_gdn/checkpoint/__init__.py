"""Port checkpoints between GPU and TPU formats, and back, byte for byte.

from portable_gdn.checkpoint import port, back
port(Path("Qwen3-Next-80B-A3B-Instruct"), Path("out"), "jax")
"""

from __future__ import annotations

from .loading import load_layer, load_tree
from .porting import Outcome, back, plan_of, port

__all__ = ["Outcome", "back", "load_layer", "load_tree", "plan_of", "port"]
