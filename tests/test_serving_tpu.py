"""The TPU's window kernel, interpreted: drawn schedules against every request alone, and bits."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import serving
from serving import Engine, Setting

import portable_gdn as pg

pytest.importorskip("jax")

ROOT = Path(__file__).parents[1]
PIECES = (0, 1, 1, 2, 3, 5)


@pytest.fixture(autouse=True)
def whole_lanes(monkeypatch):
    """Heads as the kernel takes them."""
    for name, size in {"H": 1, "HV": 2, "K": 128, "V": 128}.items():
        monkeypatch.setitem(serving.SIZES, name, size)


def follow(setting, seed, steps=4, poison=None):
    engine = Engine(setting, random.Random(seed), PIECES, poison)
    for _ in range(steps):
        engine.step()
    return engine


@pytest.mark.parametrize(
    ("variant", "options"),
    [
        ("GDN", {"mixer": True, "every": 4, "room": 2, "precision": "default"}),
        ("GDN", {"room": 0}),
        pytest.param("GDN-2", {"room": 2}, marks=pytest.mark.slow),
        pytest.param("KDA", {"mixer": True, "every": 2, "room": 3, "precision": "default"}, marks=pytest.mark.slow),
        pytest.param("GDN-2", {"window": 1, "every": 3, "precision": "default"}, marks=pytest.mark.slow),
        pytest.param("GLA (scalar)", {"mixer": True, "every": 3, "precision": "default"}, marks=pytest.mark.slow),
    ],
)
def test_schedules(variant, options):
    setting = Setting(variant, "jax", "pallas-interpret", N=3, T=12, **options)
    clean = follow(setting, 3)
    poisoned = follow(setting, 3, poison=np.nan)
    for a, b in zip(clean.outputs, poisoned.outputs, strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["GDN", "KDA"])
def test_token_by_token_windows_equal_single_tokens_and_rejections_leave_no_trace(variant):
    setting = Setting(variant, "jax", "pallas-interpret", mixer=True, room=4, precision="highest")
    tokens = serving.draw_tokens(variant, 14, 3, mixer=True)
    single, _ = serving.one_request(setting, tokens, [(1, 1)] * 12 + [(2, 2)])
    for windows in ([(4, 4)] * 3 + [(2, 2)], [(4, 1), (4, 3), (3, 2), (4, 0), (4, 4), (2, 1), (1, 1), (2, 2)]):
        outputs, _ = serving.one_request(setting, tokens, windows)
        assert outputs.tobytes() == single.tobytes()


WINDOWS = [(4, 1), (3, 3), (4, 2), (2, 0), (4, 4)]


@pytest.mark.slow
def test_chunks_see_nothing_of_rejected_drafts_and_agree_with_single_tokens():
    """Drafts that are no numbers change no bit of what is accepted, and partitions differ by float32's rounding."""
    variant = "GDN"
    setting = Setting(variant, "jax", "pallas-interpret", mixer=True, room=4, N=2, T=6, precision="default")
    accepted = sum(number for _, number in WINDOWS)
    tokens = serving.draw_tokens(variant, accepted, 3, mixer=True)
    single, _ = serving.one_request(setting, tokens, [(1, 1)] * accepted)
    found = []
    for draft in (np.nan, 3.0):
        given = {name: np.empty((0, *a.shape[1:]), a.dtype) for name, a in tokens.items()}
        at = 0
        for length, number in WINDOWS:
            for name, a in tokens.items():
                rejected = np.full((length - number, *a.shape[1:]), draft, a.dtype)
                given[name] = np.concatenate([given[name], a[at : at + number], rejected])
            at += number
        outputs, states = serving.one_request(setting, given, WINDOWS, skipping=True)
        found.append((outputs, states))
    (outputs, states), (others, other_states) = found
    assert outputs.tobytes() == others.tobytes()
    assert all(a.tobytes() == other_states[name].tobytes() for name, a in states.items())
    scale = np.abs(single).max()
    assert np.abs(outputs - single).max() <= 2e-6 * scale


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["DeltaNet", "GDN", "tile-grouped", "KDA", "GDN-2", "GLA"])
def test_more_schedules(variant):
    for options in ({"mixer": True, "room": 3, "every": 2}, {"room": 4, "window": 1, "every": 3}):
        for seed in range(2):
            follow(Setting(variant, "jax", "pallas-interpret", N=3, T=12, **options), seed, steps=6)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["highest", "default"], ids=["token by token", "chunk"])
def test_the_interpreter_of_tpu_memory_finds_no_race(monkeypatch, precision):
    monkeypatch.setenv("PORTABLE_GDN_PALLAS_INTERPRET", "tpu")
    mixer = precision == "default"
    setting = Setting("GDN", "jax", "pallas-interpret", N=3, T=12, room=2, every=2, mixer=mixer, precision=precision)
    follow(setting, 4)


def test_what_the_kernel_leaves_to_others_is_told():
    setting = Setting("GDN", "jax", "pallas-interpret", state_layout="vk")
    x = {name: setting.array(a) for name, a in serving.draw_tokens("GDN", 2, 0).items()}
    with pytest.raises(pg.GdnError, match="state_layout 'kv'; 'xla' takes both"):
        setting.call(x, setting.pool(), pg.Batch([0, 2], [1], [0]))


@pytest.mark.slow
def test_a_step_costs_no_more_than_reading_and_writing_its_states():
    """One token of each of 64 rows, compiled for each chip: traffic, and code or traffic beside the floor; and four
    drafts behind four accepted ones cost at most 1.1 such steps on a v6e."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed; `pip install 'portable-gdn[tpu]'` brings it")
    spec = importlib.util.spec_from_file_location("tpu_decode", ROOT / "benchmarks" / "tpu_decode.py")
    benchmark = importlib.util.module_from_spec(spec)
    sys.modules["tpu_decode"] = benchmark
    spec.loader.exec_module(benchmark)
    step = benchmark.measure(benchmark.Entry("GDN", 64, 0, 1, 0))
    for mixer in (False, True):  # the convolution, norm and scale inside cost nothing that memory does not hide
        verify = benchmark.measure(benchmark.Entry("GDN", 64, 4, 4, 4, mixer=mixer), ["v6e"])["v6e"]
        assert max(verify["code"], verify["traffic"]) <= 1.1 * max(step["v6e"]["code"], step["v6e"]["traffic"])
    for chip, row in step.items():
        assert isinstance(row, dict), (chip, row)
        assert row["KiB"] <= 134
        assert row["of floor"] <= 1.15, chip


COMPILED = """
import json, os, sys
from portable_gdn.tpu.chips import chip_named
from portable_gdn.tpu.scheduling.compile import compile_for, environment
environment(os.environ)
import jax, jax.numpy as jnp
import portable_gdn as pg
from portable_gdn import dispatch
from portable_gdn.tpu.backend import PALLAS
dispatch.register_backend(PALLAS)
shape = lambda *dims, dtype=jnp.float32: jax.ShapeDtypeStruct(dims, dtype)
N, T, S, H, HV, K, V, R, C = 4, 8, 1025, 2, 4, 128, 128, 2, 2 * 2 * 128 + 4 * 128
for fine in (False, True):
    g = (HV, K) if fine else (HV,)
    x = {"qkv": shape(T, C, dtype=jnp.bfloat16), "g": shape(T, *g), "beta": shape(T, HV)}
    window = {"qkv": shape(S, R, C, dtype=jnp.bfloat16), "g": shape(S, R, *g), "beta": shape(S, R, HV)}
    pool = pg.StatePool(shape(S, HV, K, V), shape(S, 3, C, dtype=jnp.bfloat16), window, shape(S, dtype=jnp.int32))
    batch = pg.Batch(*(shape(n, dtype=jnp.int32) for n in (N + 1, N, N)))
    step = lambda x, weight, pool, batch: pg.gated_delta_mixer_update(
        **x, conv=pg.ShortConv(weight), num_heads=H, key_dim=K, pool=pool, batch=batch, backend="pallas")
    compiled = compile_for(chip_named(sys.argv[1]), step, x, shape(C, 4), pool, batch, donated=(2,))
    memory = compiled.memory_analysis()
    pooled = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(pool))
    print(json.dumps({"kernels": compiled.as_text().count("tpu_custom_call"), "alias": memory.alias_size_in_bytes,
                      "pool": pooled, "temporaries": memory.temp_size_in_bytes}), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e", "v7x"])
def test_updates_compile_for_tpus_and_take_the_pools_memory(chip):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed; `pip install 'portable-gdn[tpu]'` brings it")
    done = subprocess.run([sys.executable, "-c", COMPILED, chip], capture_output=True, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(lines) == 2
    for line in lines:
        assert line["kernels"] == 1
        assert line["alias"] >= line["pool"]
        assert line["temporaries"] < line["pool"] / 50  # a copy of none of the pool's arrays, or of a part of one
