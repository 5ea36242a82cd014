"""The process that compiles a call's kernels: it reads an order as JSON, and writes one JSON object per kernel.

``gpu.adapter`` makes the call on CPU tensors whose contents nothing reads. The kernels compiled are therefore those
that a GPU would get, chosen by FLA and specialised by Triton.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any

__all__: list[str] = []


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    order = json.loads(sys.stdin.read())
    warnings.simplefilter("ignore")
    from .targets import target_named

    target = target_named(order["arch"])
    from .machine import compile_launches, pretend

    pretend(target)
    import torch

    from .. import adapter
    from ..launching import without_other_libraries
    from .kernel import failure
    from .report import KernelReport
    from .usage import usage

    torch.set_num_threads(1)
    where = {"phase": ""}
    known: dict[str, KernelReport] = {}
    said: set[tuple[str, str, str]] = set()

    def found(name: str, config: dict[str, Any], compiled: Any, log: str) -> None:
        report = KernelReport(name, config, limit=target.shared)
        if isinstance(compiled, Exception):
            report, key = report._replace(failed=failure(compiled)), f"{config}"
        else:
            key = compiled.hash
            if key not in known:
                known[key] = report._replace(**usage(compiled, log))
            report = known[key]
        if (where["phase"], name, key) not in said:
            said.add((where["phase"], name, key))
            print(json.dumps(report._replace(phase=where["phase"]).as_dict()), file=answers, flush=True)

    without_other_libraries()
    with compile_launches(found, order["all_configs"]):
        for call in order["calls"]:
            _call(call, where, adapter.run)
    print(json.dumps({"done": True}), file=answers, flush=True)


def _call(call: dict[str, Any], where: dict[str, str], run: Any) -> None:
    """Make a call, forward and, if it asks for that, backward."""
    import torch

    from ...spec.problem import GateKind, Meta, Options, Problem
    from ...spec.rules import make_signature

    options = Options(**{**call["options"], "gate": None if call["gate"] is None else GateKind(*call["gate"])})
    meta = {name: Meta(tuple(shape), dtype, "cuda") for name, (shape, dtype) in call["operands"].items()}
    signature = make_signature("torch", "cuda", meta, options)
    backward = call["backward"]
    x = {name: torch.zeros(m.shape, dtype=getattr(torch, m.dtype)) for name, m in meta.items()}
    if "cu_seqlens" in x:
        x["cu_seqlens"][-1] = signature.T
    x = {name: a.requires_grad_(backward and a.is_floating_point()) for name, a in x.items()}
    where["phase"] = f"{call['name']} forward"
    o, state, _ = run(Problem(signature, x))
    if backward:
        where["phase"] = f"{call['name']} backward"
        outputs = [a for a in (o, state) if a is not None]
        inputs = [a for a in x.values() if a.requires_grad]
        torch.autograd.grad(outputs, inputs, [torch.zeros_like(a) for a in outputs], allow_unused=True)


if __name__ == "__main__":
    _serve()
