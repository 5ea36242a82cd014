"""The kernel compiled for each TPU by the real compiler, on a CPU.

Each chip in a process of its own: a failure there may end the process instead of raising.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("libtpu") is None or importlib.util.find_spec("jax") is None:
    pytest.skip("libtpu is not installed; `pip install 'portable-gdn[tpu]'` brings it", allow_module_level=True)

from portable_gdn.tpu.chips import CHIPS
from portable_gdn.tpu.scheduling.compile import environment

CHILD = """
import json, os, sys
from portable_gdn.tpu.chips import chip_named
from portable_gdn.tpu.scheduling.compile import compile_for, environment
environment(os.environ)
import jax, jax.numpy as jnp
import portable_gdn as pg
from portable_gdn import dispatch
from portable_gdn.tpu.backend import PALLAS
dispatch.register_backend(PALLAS)
chip, calls = sys.argv[1], json.loads(sys.argv[2])
for call in calls:
    B, T, H, HV, K, V, N, dtype = (call[name] for name in ("B", "T", "H", "HV", "K", "V", "N", "dtype"))
    shape = lambda *dims, dtype=jnp.float32: jax.ShapeDtypeStruct(dims, dtype)
    half = getattr(jnp, dtype)
    x = {
        "q": shape(B, T, H, K, dtype=half), "k": shape(B, T, H, K, dtype=half), "v": shape(B, T, HV, V, dtype=half),
        "g": shape(B, T, HV), "beta": shape(B, T, HV), "initial_state": shape(N or B, HV, K, V),
    }
    variant = call.get("variant", "GDN")
    if variant in ("KDA", "GDN-2", "GLA"):
        x["g"] = shape(B, T, HV, K)
    if variant == "grouped":
        x["g"] = shape(B, T, HV, 2)
    if variant in ("GDN-2", "GLA"):
        del x["beta"]
    if variant == "GDN-2":
        x |= {"erase": shape(B, T, HV, K), "write": shape(B, T, HV, V)}
    if variant == "DeltaNet":
        del x["g"]
    if N:
        x["cu_seqlens"] = shape(N + 1, dtype=jnp.int32)
    if call.get("segments"):
        x["segment_ids"] = shape(B, T, dtype=jnp.int32)
    rule = lambda x: pg.gated_delta_rule(
        **x, output_final_state=True, chunk_size=call.get("chunk_size"), precision=call.get("precision"))
    function = rule
    if call.get("grad"):
        function = lambda x: jax.vjp(lambda x: rule(x), x)[1]((x["v"], x["initial_state"]))
    compiled = compile_for(chip_named(chip), function, x)
    print(json.dumps({"kernels": compiled.as_text().count("tpu_custom_call"), "call": call}), flush=True)
"""

PLAIN = {"B": 1, "T": 512, "H": 2, "HV": 4, "K": 128, "V": 128, "N": 0, "dtype": "bfloat16"}
SIZES = (64, 96, 128, 192, 256)
CALLS = [
    PLAIN,
    {**PLAIN, "N": 5, "T": 500},
    {**PLAIN, "K": 100, "V": 48, "T": 130},
    {**PLAIN, "dtype": "float32", "B": 2},
    {**PLAIN, "precision": "fast"},
    {**PLAIN, "variant": "DeltaNet"},
    {**PLAIN, "H": 16, "HV": 32, "T": 2048},
    *({**PLAIN, "H": 1, "HV": 2, "K": size, "V": size, "T": 256} for size in SIZES if size != 128),
    {**PLAIN, "H": 1, "HV": 2, "K": 256, "V": 192, "T": 65},
    {**PLAIN, "K": 16, "V": 24, "HV": 6, "T": 37, "N": 3, "dtype": "float32"},
    {**PLAIN, "T": 1},
    {**PLAIN, "variant": "KDA"},
    {**PLAIN, "variant": "GDN-2", "N": 3, "T": 500},
    {**PLAIN, "variant": "KDA", "K": 100, "V": 48, "T": 130},
    {**PLAIN, "variant": "GDN-2", "K": 16, "V": 24, "HV": 6, "T": 37, "dtype": "float32"},
    {**PLAIN, "variant": "grouped", "H": 1, "HV": 2, "K": 256, "V": 256, "T": 256},
    {**PLAIN, "variant": "grouped", "K": 24, "V": 16, "T": 130},
    {**PLAIN, "variant": "GLA", "T": 64, "precision": "fast"},
    *(
        {**call, "grad": True}
        for call in (
            PLAIN, {**PLAIN, "N": 5, "T": 500}, {**PLAIN, "K": 100, "V": 48, "T": 130, "dtype": "float32"},
            {**PLAIN, "H": 1, "HV": 2, "K": 256, "V": 192, "T": 65}, {**PLAIN, "segments": True},
            {**PLAIN, "variant": "KDA", "precision": "fast"},
            {**PLAIN, "variant": "GDN-2", "N": 3, "T": 500},
            {**PLAIN, "variant": "KDA", "K": 100, "V": 48, "T": 130, "dtype": "float32"},
            {**PLAIN, "variant": "grouped", "H": 1, "HV": 2, "K": 256, "V": 256, "T": 256},
            {**PLAIN, "variant": "GLA", "K": 64, "V": 64, "T": 64},
        )
    ),
    {**PLAIN, "H": 1, "HV": 8, "chunk_size": 256},
]  # fmt: skip


def compile_in_a_child(chip, calls):
    """How many kernels each call's program holds."""
    env = dict(os.environ)
    environment(env)
    command = [sys.executable, "-c", CHILD, chip, json.dumps(calls)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    at = calls[len(lines)] if len(lines) < len(calls) else "the end"
    assert done.returncode == 0, f"{chip}: ended with {done.returncode} at {at}: {done.stderr[-2000:]}"
    return [line["kernels"] for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_compiles_for(chip):
    *short, last = CALLS
    if chip in ("v4", "v5p"):  # the older generation's compilers: of each kernel some shapes
        short = short[::3]
    *found, long = compile_in_a_child(chip, [*short, last])
    assert all(n >= 1 for n in found)
    assert long == (chip != "v4")  # chunks of 256 tokens need 22 MiB of VMEM, a v4 has 16, and xla takes them


def test_compiles_for_one_chip():
    """Every kernel."""
    calls = [*CALLS[:2], {**PLAIN, "N": 5, "T": 500, "grad": True}]
    assert compile_in_a_child("v6e", calls) == [1, 1, 2]


@pytest.mark.slow
def test_layers_keep_less_where_more_is_computed_again():
    code = """
import tpu_memory as m
shapes = (4, 3, 128), (1, 8192, 16, 128)
print(*(m.temporaries("v6e", m.program("gdn", "fast", again), *shapes) for again in m.WAYS))
"""
    where = Path(__file__).parents[1] / "benchmarks"
    done = subprocess.run([sys.executable, "-c", code], cwd=where, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    nothing, all_but_the_rule, layer = map(int, done.stdout.split()[-3:])
    # Three layers at least wait for the fourth: M, u and S of a chunk and head are 128 KiB.
    assert all_but_the_rule - layer > 3 * 64 * 16 * 128 * 2**10
    assert nothing > all_but_the_rule
