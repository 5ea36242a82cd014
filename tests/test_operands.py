"""The one table of operands, what is derived from it, and that no second list of them is written down."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
from conftest import make

import portable_gdn
from portable_gdn.spec import operands as table
from portable_gdn.spec.operands import OPERANDS

PACKAGE = Path(portable_gdn.__file__).parent


def second_lists(code: str) -> list[list[str]]:
    """Tuples, lists and sets of names of operands in a text: three or more, gates among them."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            names = [e.value for e in node.elts if isinstance(e, ast.Constant) and isinstance(e.value, str)]
            if len([n for n in names if n in OPERANDS]) >= 3 and {"g", "beta", "erase", "write"} & {*names}:
                found.append(names)
    return found


def test_no_second_list_is_written_down():
    written = {
        str(path.relative_to(PACKAGE)): lists
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name != "operands.py" and "checkpoint" not in path.parts  # which has tensors of files, not operands
        if (lists := second_lists(path.read_text()))
    }
    assert written == {}


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ('NAMES = ("q", "k", "v", "beta")', 1),
        ('for name in ["beta", "erase", "write"]: pass', 1),
        ('x = {"g", "beta", "conv_state", "other"}', 1),
        ('x = ("q", "k", "v")', 0),
        ('x = ("erase", "write")', 0),
    ],
)
def test_the_search_finds_what_it_is_for(code, found):
    assert len(second_lists(code)) == found


def test_axes_say_what_shapes_are():
    sizes = {"B": 2, "T": 40, "H": 2, "HV": 4, "K": 16, "V": 24, "N": 2, "n": 16}
    for variant in ("GDN", "KDA", "GDN-2"):
        for name, a in make(variant, state=True).items():
            axes = [
                axis for axis in OPERANDS[name].axes if not axis.startswith("[") or len(OPERANDS[name].axes) == a.ndim
            ]
            assert a.shape == tuple(sizes[axis.strip("[]")] for axis in axes), name


def test_what_is_derived():
    assert set(table.DIFFERENTIABLE) == set(OPERANDS) - {"cu_seqlens", "segment_ids", "mask"}
    assert set(table.WITH_TOKENS) == {*table.PER_TOKEN, "mask", "segment_ids"}
    assert set(table.PER_TOKEN) == {*table.INPUTS, *table.GATES, "z"}
    assert {name for name, operand in OPERANDS.items() if operand.output} == {"z", "norm_weight"}
    assert set(table.GATES) == {"g", *table.WRITE_GATES}
    assert set(table.along("N")) == {"initial_state", "conv_state"}
    assert set(table.along("C")) == {"qkv", "conv_weight", "conv_bias", "conv_state"}
    x = make("GDN-2", state=True)
    part = table.at_tokens(x, slice(3, 7))
    assert {name: a.shape[1] for name, a in part.items() if name != "initial_state"} == dict.fromkeys(table.at_tokens(
        {n: a for n, a in x.items() if n != "initial_state"}, slice(0)), 4)  # fmt: skip
    assert part["initial_state"] is x["initial_state"]
    step = table.without_tokens(table.at_tokens(x, slice(5, 6)))
    for name, a in table.one_token(step).items():
        want = x[name] if name == "initial_state" else x[name][:, 5:6]
        assert np.array_equal(a, want)
