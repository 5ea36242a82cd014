"""Functions that a reader can hold in mind: few parameters everywhere, and few lines in kernels."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_PARAMETERS = 8
MOST_LINES = 80  # of a function of tpu/kernels, less one

#: What users call, and what others call with arguments of their choice: commands, FLA's names, layers, and operations
#: of torch.compile, which take every tensor as a parameter of its own.
PUBLIC = {
    "portable_gdn/api.py": {
        "explain",
        "gated_delta_mixer",
        "gated_delta_mixer_step",
        "gated_delta_rule",
        "gated_delta_rule_step",
    },
    "portable_gdn/serving/calls.py": {"gated_delta_mixer_update", "gated_delta_rule_update"},
    "portable_gdn/serving/pool.py": {"state_pool"},
    "portable_gdn/ops.py": None,  # all of it
    "portable_gdn/cli": None,
    "portable_gdn/layers": {"__init__"},
    "portable_gdn/checkpoint/porting.py": {"port"},
    "portable_gdn/models/generation.py": {"generate"},
    "portable_gdn/models/streaming.py": {"stream"},
    "portable_gdn/models/loading.py": {"load_model"},
    "portable_gdn/integrations/transformers.py": {"rule"},
    "portable_gdn/backends/torch_chunks.py": {"_operation", "_operation_backward"},
    "gpu/compiled.py": {"_rule", "_backward"},
}


def functions():
    for folder in ("portable_gdn", "gpu", "tpu"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if name.startswith(("portable_gdn/gpu", "portable_gdn/tpu")):  # links
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield name, node


def is_public(name, node):
    for place, names in PUBLIC.items():
        if name == place or name.startswith(place + "/"):
            return names is None or node.name in names
    return False


def test_no_function_takes_more_than_eight_parameters():
    found = []
    for name, node in functions():
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        number = len([a for a in every if a.arg not in ("self", "cls")])
        if number > MOST_PARAMETERS and not is_public(name, node):
            found.append(f"{name}:{node.lineno}: {node.name} takes {number}")
    assert not found, "\n".join(found)


def test_no_function_of_a_kernel_is_long():
    lengths = {
        f"{name}:{node.lineno}: {node.name}": node.end_lineno - node.lineno + 1
        for name, node in functions()
        if name.startswith("tpu/kernels")
    }
    assert max(lengths.values()) < MOST_LINES, max(lengths, key=lengths.get)
    assert len(lengths) > 100  # it found them
