"""Updates of a pool of states by drawn schedules, against every request alone, and to the bit where promised."""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from serving import Engine, Setting, arrays_of, draw_tokens, joined, one_request, parameters

import portable_gdn as pg

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

SHORT = (0, 1, 1, 2, 3, 5)
LONG = (0, 1, 2, 3, 127, 128, 129)
NEEDS_TORCH = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
TORCH = pytest.param("torch", marks=NEEDS_TORCH)
LIBRARIES = ("numpy", TORCH, "jax")
FIRST = ("numpy", TORCH, pytest.param("jax", marks=pytest.mark.slow))  # where jax compiles programs of its own
VARIANTS = ("DeltaNet", "GDN", "tile-grouped", "KDA", "GDN-2", "GLA")


def drawn(examples):
    """Schedules drawn by hypothesis, which shrinks those that fail."""
    quiet = settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    return lambda test: quiet(given(rng=st.randoms(use_true_random=False))(test))


def follow(setting, rng, pieces=SHORT, steps=5, poison=None):
    engine = Engine(setting, rng, pieces, poison)
    for _ in range(steps):
        engine.step()
    return engine


@pytest.mark.parametrize("mixer", [False, True], ids=["rule", "mixer"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_schedules(library, mixer):
    setting = Setting(library=library, mixer=mixer, every=4)

    @drawn(12)
    def schedules(rng):
        follow(setting, rng)

    schedules()


@NEEDS_TORCH
@pytest.mark.parametrize("variant", [v for v in VARIANTS if v != "GDN"])
def test_variants(variant):
    follow(Setting(variant, "torch", every=3), random.Random(1))
    follow(Setting(variant, "numpy", mixer=True, window=0), random.Random(2))


def test_long_pieces():
    setting = Setting("GDN", "jax", mixer=True, T=260, N=3, every=64, state_layout="vk")
    for seed in range(2):
        follow(setting, random.Random(seed), LONG)


# To the bit. ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", LIBRARIES)
def test_what_nobody_may_read_changes_nothing(library):
    setting = Setting(library=library, mixer=True, every=4)
    clean, *others = (follow(setting, random.Random(5), poison=value) for value in (None, np.nan, 2.0, 6.0))
    for other in others:
        for a, b in zip(clean.outputs, other.outputs, strict=True):
            assert a.tobytes() == b.tobytes()
        taken = {r.slot for r in clean.live}
        for name, a in arrays_of(clean.pool).items():
            if not name.startswith("pool.window."):
                for slot in taken:
                    assert a[slot].tobytes() == arrays_of(other.pool)[name][slot].tobytes()


@pytest.mark.parametrize("library", LIBRARIES)
def test_windows_equal_single_tokens_and_rejections_leave_no_trace(library):
    setting = Setting(library=library, mixer=True, room=4)
    tokens = draw_tokens("GDN", 14, 3, mixer=True)
    single, state = one_request(setting, tokens, [(1, 1)] * 12 + [(2, 2)])
    for windows in (
        [(4, 4), (4, 4), (4, 4), (2, 2)],
        [(4, 1), (4, 3), (3, 2), (4, 0), (4, 4), (2, 1), (1, 1), (2, 2)],
        [(2, 0), (3, 3), (1, 0), (4, 4), (4, 2), (3, 3), (2, 2)],
    ):
        outputs, after = one_request(setting, tokens, windows)
        assert outputs.tobytes() == single.tobytes()
        for name, a in after.items():
            assert a.tobytes() == state[name].tobytes() or windows[-1] != (2, 2), name


@pytest.mark.parametrize("library", LIBRARIES)
def test_alone_as_among_others(library):
    setting = Setting(library=library, mixer=True, room=4)
    rest = parameters("GDN", True)
    lengths = (2, 1, 7, 3)
    parts = [draw_tokens("GDN", n, seed, mixer=True) for seed, n in enumerate(lengths)]

    def outputs(order, which):
        pool, found = setting.pool(), {}
        for step in range(2):
            chosen = [n if n in which else None for n in order]
            filled = [parts[n] if n is not None else {a: b[:0] for a, b in parts[0].items()} for n in chosen]
            x = joined([*filled, {a: np.zeros((setting.T, *b.shape[1:]), b.dtype) for a, b in parts[0].items()}])
            x = {name: a[: setting.T] for name, a in x.items()}
            starts = np.cumsum([0, *(0 if n is None else lengths[n] for n in chosen)])
            slots = [0 if n is None else n + 1 for n in chosen]
            computed = [0 if n is None else step * lengths[n] for n in chosen]
            o, pool = setting.call({**x, **rest}, pool, pg.Batch(starts, slots, computed, [9] * setting.N))
            for row, n in enumerate(chosen):
                if n is not None:
                    found[step, n] = o[starts[row] : starts[row + 1]].tobytes()
        return found

    together = outputs((0, 1, 2, 3), {0, 1, 2, 3})
    assert outputs((3, 1, 0, 2), {0, 1, 2, 3}) == together
    for n in range(4):
        alone = outputs((0, 1, n, 3) if n not in (0, 1, 3) else (3, 0, 1, 2), {n})
        assert all(together[key] == value for key, value in alone.items())


# Corners. -------------------------------------------------------------------------------------------------------------


def call(setting, n=3, pool=None, **batch):
    x = {**draw_tokens(setting.variant, n, 0, mixer=setting.mixer), **parameters(setting.variant, setting.mixer)}
    options = {name: batch.pop(name) for name in list(batch) if name not in pg.Batch._fields}
    rows = {"query_start_loc": [0, n], "state_indices": [1], "num_computed_tokens": [0], **batch}
    return setting.call(x, setting.pool() if pool is None else pool, pg.Batch(**rows), **options)


@pytest.mark.parametrize("library", LIBRARIES)
def test_nothing_to_do(library):
    setting = Setting(library=library)
    for n, rows in ((0, 1), (3, 0), (0, 0)):
        rest = {"state_indices": [1] * rows, "num_computed_tokens": [0] * rows}
        o, pool = call(setting, n, query_start_loc=[0] * (rows + 1), **rest)
        assert o.shape == (n, 2, 16)
        assert not np.any(o)
        assert all(not np.any(a) for a in arrays_of(pool).values())


@pytest.mark.parametrize("library", LIBRARIES)
def test_slots_beyond_the_pool_are_null(library):
    setting = Setting(library=library)
    for slot in (8, 100, 2**31 - 1, -(2**31)):
        o, pool = call(setting, state_indices=np.array([slot]))
        assert not np.any(o)
        assert all(not np.any(a) for a in arrays_of(pool).values())
    if library != "torch":
        o, _ = call(setting, state_indices=np.array([2**32 + 1]))
        assert not np.any(o)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"state_indices": [8]}, "batch.state_indices names slots that the pool does not have"),
        ({"query_start_loc": [0, 2, 1, 3], "state_indices": [1, 2, 3], "num_computed_tokens": [0] * 3}, "decreas"),
        ({"query_start_loc": [1, 3]}, "starting at 1; it must start at 0"),
        ({"query_start_loc": [0, 4]}, "ending at 4; it must end at T = 3 or before"),
        ({"query_start_loc": [0, 1, 3], "state_indices": [2, 2], "num_computed_tokens": [0, 0]}, "one slot for two"),
        ({"num_computed_tokens": [-1]}, "batch.num_computed_tokens holds negative counts"),
        ({"num_computed_tokens": [4], "read_state_indices": [0]}, "batch.read_state_indices names no slot"),
        ({"state_indices": [1.0]}, "batch.state_indices is a list of float64; it must hold integers"),
        ({"state_indices": [1, 2]}, r"batch.state_indices is of shape \[2\]; it must have shape \[N\] = \[1\]"),
        ({"state_indices": None}, "batch.state_indices is None; it must be an array of integers"),
        ({"checkpoint_every": 4}, "batch.checkpoint_indices is None; it must name slots"),
        ({"checkpoint_indices": [[1, 2]]}, "checkpoint_every is None; it must be the tokens between checkpoints"),
        ({"window": 4}, "window is 4; it must be at most 3"),
        ({"window": -1}, "window is -1; it must be None or the number"),
        ({"checkpoint_every": 0}, "checkpoint_every is 0; it must be None or a positive integer"),
        ({"backend": "fla"}, "backend 'fla' cannot run this call"),
        ({"state_layout": "vk"}, r"pool.recurrent is of shape \[8, 2, 8, 16\] \(it looks like state_layout='kv'\)"),
    ],
)
def test_bad_batches_get_a_sentence(change, sentence):
    with pytest.raises(pg.GdnError, match=sentence):
        call(Setting(library="numpy"), check_values=True, **change)


def test_more_accepted_than_wait():
    setting = Setting(library="numpy")
    _, pool = call(setting, 2)
    with pytest.raises(pg.GdnError, match="num_accepted_tokens is more than the tokens that wait"):
        call(setting, pool=pool, num_computed_tokens=[3], num_accepted_tokens=[3], check_values=True)


def test_bad_pools_get_a_sentence():
    setting = Setting(library="numpy")
    pool = setting.pool()
    for bad, sentence in (
        (
            pool._replace(recurrent=pool.recurrent.astype(np.float16)),
            "pool.recurrent is of dtype float16; it must be one",
        ),
        (pool._replace(recurrent=pool.recurrent[:, :1]), r"pool.recurrent is of shape \[8, 1, 8, 16\]"),
        (pool._replace(pending=None), "pool.pending is None; it must count"),
        (pool._replace(conv=np.zeros((8, 3, 4), "f")), "pool.conv is given; it must be None"),
        (Setting("KDA", "numpy").pool(), r"pool.window.g is of shape \[8, 3, 2, 8\]"),
        (Setting("GLA (scalar)", "numpy").pool(), "pool.window holds .* make the pool for this variant"),
        (Setting(library="numpy", dtype="float16").pool(), "pool.window.k is of dtype float16; it must be float32"),
        ((1, 2), "pool is a tuple; it must be a StatePool"),
        (Setting(library="numpy", mixer=True).pool(), "pool.conv is given"),
    ):
        with pytest.raises(pg.GdnError, match=sentence):
            call(setting, pool=bad)
    with pytest.raises(pg.GdnError, match=r"pool\.conv is None; it must hold the last inputs"):
        call(Setting(library="numpy", mixer=True), pool=pool)
    with pytest.raises(pg.GdnError, match=r"q is of shape .* dimensions, \[T, H, K\]"):
        pg.gated_delta_rule_update(*np.zeros((3, 1, 3, 1, 8), "f"), pool=pool, batch=pg.Batch([0], [], []))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"library": "cupy"}, "library is 'cupy'; it must be"),
        ({"variant": "RWKV"}, "variant is 'RWKV'; it must be one of"),
        ({"groups": 2}, "groups is 2; it must be given for 'tile-grouped'"),
        ({"num_slots": 0}, "num_slots is 0; it must be a positive integer"),
        ({"state_dtype": "int4"}, "state_dtype is 'int4'; it must be one of"),
        ({"num_value_heads": 3}, "num_value_heads is 3; it must be a multiple of num_heads = 2"),
    ],
)
def test_pools_that_cannot_be(change, sentence):
    with pytest.raises(pg.GdnError, match=sentence):
        pg.state_pool(**{"num_slots": 4, "library": "numpy", "num_heads": 2, "key_dim": 8, "window": 2, **change})


@pytest.mark.parametrize("library", FIRST)
def test_slots_travel(library):
    setting = Setting(library=library, mixer=True)
    _, pool = call(setting, 9)
    _, pool = call(setting, 2, pool=pool, num_computed_tokens=[9])
    pool = pool.copy([1, 1, 9], [4, 0, 2])
    there = arrays_of(pool)
    for name, a in there.items():
        assert a[1].tobytes() == a[4].tobytes(), name
        assert not np.any(a[[0, 2]])
    go_on = {"num_computed_tokens": [10], "num_accepted_tokens": [1]}
    there = [] if importlib.util.find_spec("torch") is None else [("torch", "kv")]
    for other, layout in (("numpy", "vk"), *there, (library, "vk")):
        target = Setting(library=other, mixer=True, state_layout=layout)
        moved = target.pool().import_(6, pool.export(4), state_layout=layout)
        assert moved.export(6, state_layout=layout).recurrent.tobytes() == pool.export(4).recurrent.tobytes()
        o, _ = call(target, 3, pool=moved, state_indices=[6], **go_on)
        plain = Setting(library="numpy", mixer=True)
        want, _ = call(plain, 3, pool=plain.pool().import_(1, pool.export(1)), **go_on)
        np.testing.assert_allclose(o, want, rtol=1e-5, atol=1e-6)
    with pytest.raises(pg.GdnError, match="slot is 8; it must be one of 1 to 7"):
        pool.export(8)
    with pytest.raises(pg.GdnError, match=r"states\.conv is given; it must be as the pool has it"):
        Setting(library=library).pool().import_(1, pool.export(1)._replace(window={}))


@pytest.mark.parametrize("library", FIRST)
def test_the_output_norm_and_its_gate_are_in_the_call(library):
    setting = Setting(library=library, mixer=True)
    rng = np.random.default_rng(0)
    x, rest = draw_tokens("GDN", 9, 0, mixer=True), parameters("GDN", True)
    z, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((12, 32), (16,)))
    z[9:] = np.nan
    norm = pg.GatedRMSNorm(setting.array(weight))
    whole = pg.gated_delta_mixer(
        x["qkv"][None], x["g"][None], beta=x["beta"][None], z=z[None, :9], output_norm=pg.GatedRMSNorm(weight),
        conv=pg.ShortConv(rest["conv_weight"], rest["conv_bias"]), num_heads=1, key_dim=8,
    )[0][0]  # fmt: skip
    pool, outputs, at = setting.pool(), [], 0
    for n in (3, 1, 5):
        some = {name: np.full((12, *a.shape[1:]), np.nan, a.dtype) for name, a in (x | {"z": z[:9]}).items()}
        for name, a in (x | {"z": z[:9]}).items():
            some[name][:n] = a[at : at + n]
        o, pool = setting.call({**some, **rest}, pool, pg.Batch([0, n], [2], [at]), output_norm=norm)
        assert not np.any(o[n:])
        outputs.append(o[:n])
        at += n
    np.testing.assert_allclose(np.concatenate(outputs), whole, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GatedDeltaNet2", "KimiDeltaAttention"])
def test_layers_take_a_pool(name):
    nnx = pytest.importorskip("flax.nnx")
    import portable_gdn.layers as layers

    layer = getattr(layers, name)(
        16, num_heads=1, num_value_heads=2, key_dim=8, value_dim=16, decay_rank=4, gate_rank=4, rngs=nnx.Rngs(0)
    )
    x = np.random.default_rng(0).standard_normal((9, 16)).astype(np.float32)
    want = np.asarray(layer(x[None])[0][0])
    pool, outputs, at = layer.init_pool(3, window=2), [], 0
    for length in (6, 1, 2):
        padded = np.concatenate([x[at : at + length], np.zeros((6 - length, 16), np.float32)])
        y, pool = layer.update(padded, pool, pg.Batch([0, length], [1], [at]))
        outputs.append(np.asarray(y)[:length])
        at += length
    np.testing.assert_allclose(np.concatenate(outputs), want, rtol=2e-4, atol=2e-5)
    with pytest.raises(pg.GdnError, match="an update takes ragged tokens"):
        layer.update(x[None], pool, pg.Batch([0, 9], [1], [0]))


@NEEDS_TORCH
def test_torch_writes_the_pool_in_place_and_others_do_not():
    for library in ("torch", "numpy"):
        setting = Setting(library=library, mixer=True)
        pool = setting.pool()
        before = {name: id(a) for name, a in pool.operands().items()}
        held = arrays_of(pool)
        _, after = call(setting, 2, pool=pool)
        same = {name: id(a) for name, a in after.operands().items()} == before
        assert same == (library == "torch")
        changed = any(a.tobytes() != held[name].tobytes() for name, a in arrays_of(pool).items())
        assert changed == (library == "torch")


@pytest.mark.parametrize("library", FIRST)
def test_states_in_bfloat16_round_once_a_step(library):
    tokens = draw_tokens("GDN", 13, 0, mixer=True)
    windows = [(4, 4), (1, 1), (4, 3), (2, 2), (3, 3)]
    exact, state = one_request(Setting(library=library, mixer=True, room=4), tokens, windows)
    rounded = Setting(library=library, mixer=True, room=4, state_dtype="bfloat16")
    o, held = one_request(rounded, tokens, windows)
    assert held["pool.recurrent"].dtype.name == "bfloat16"
    for got, want in ((o, exact), (held["pool.recurrent"].astype(np.float32), state["pool.recurrent"])):
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        assert 1e-5 < error < len(windows) * 2.0**-9


def test_explain_says_which_backend_serves():
    setting = Setting()
    x = {name: setting.array(a) for name, a in draw_tokens("GDN", 3, 0).items()}
    text = str(pg.explain(**x, pool=setting.pool(), batch=pg.Batch([0, 3], [1], [0])))
    assert "runs on  xla" in text
    assert "updating 8 slots of float32 states, window 3" in text


def test_a_traced_update_is_one_program_and_checks_its_values():
    import jax
    from jax.experimental import checkify

    setting = Setting()
    x = {name: setting.array(a) for name, a in draw_tokens("GDN", 16, 0).items()}
    traces = []

    @jax.jit
    def step(x, pool, batch):
        traces.append(1)
        return pg.gated_delta_rule_update(**x, pool=pool, batch=batch)

    pool = setting.pool()
    for at, lengths in ((0, (9, 0)), (9, (3, 5)), (10, (0, 2))):
        starts = jax.numpy.asarray([0, lengths[0], sum(lengths)])
        o, pool = step(x, pool, pg.Batch(starts, jax.numpy.asarray([2, 5]), jax.numpy.asarray([at, 0])))
        assert np.isfinite(o).all()
    assert len(traces) == 1
    update = jax.jit(lambda b: pg.gated_delta_rule_update(**x, pool=pool, batch=b, check_values=True)[0])
    checked = checkify.checkify(update)
    error, _ = checked(pg.Batch(*(jax.numpy.asarray(a) for a in ([0, 2, 3], [2, 2], [0, 0]))))
    assert "one slot for two to write" in error.get()


def test_slots_beyond_two_gigas_of_elements():
    """The program is made for pools of more elements than 32 bits count, and no index in it counts elements."""
    import jax
    import jax.numpy as jnp

    shape = lambda *dims, dtype=jnp.float32: jax.ShapeDtypeStruct(dims, dtype)  # noqa: E731
    pool = pg.StatePool(shape(40000, 32, 128, 128))
    x = [shape(4, 16, 128), shape(4, 16, 128), shape(4, 32, 128), shape(4, 32)]
    batch = pg.Batch(*(shape(n, dtype=jnp.int32) for n in (5, 4, 4)))
    lowered = jax.jit(
        lambda x, beta, pool, batch: pg.gated_delta_rule_update(*x, beta=beta, pool=pool, batch=batch, backend="xla"),
        donate_argnums=2,
    ).lower(x, x[3], pool, batch)
    text = lowered.as_text()
    assert "40000x32x128x128" in text
    assert "20971520000" not in text


# Many more. -----------------------------------------------------------------------------------------------------------


#: Schedules of each kind; ``SCHEDULES=200 pytest -m slow tests/test_serving.py`` draws more of them.
MANY = int(os.environ.get("SCHEDULES", "3"))


@pytest.mark.slow
@pytest.mark.parametrize("mixer", [False, True], ids=["rule", "mixer"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_many_schedules(library, variant, mixer):
    for options in ({"room": 8, "T": 24, "every": 5}, {"room": 0}, {"room": 4, "window": 1, "dtype": "bfloat16"}):

        @drawn(MANY)
        def schedules(rng):
            follow(Setting(variant, library, mixer=mixer, **options), rng, (0, 1, 2, 3, 4, 5, 7, 8, 9), steps=6)  # noqa: B023

        schedules()


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["GDN", "KDA"])
def test_kernels_of_fla_by_gather_and_scatter(variant):
    if importlib.util.find_spec("fla") is None:
        pytest.skip("flash-linear-attention is not installed")
    # In a process of its own: in this one Triton may have been imported without its interpreter.
    program = (
        "import random\nfrom test_serving import Setting, follow\n"
        f"setting = Setting({variant!r}, 'torch', 'fla-interpret', N=2, T=8, every=2, room=2)\n"
        "follow(setting, random.Random(1), (0, 1, 2, 4), 3)\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parent, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("mixer", [False, True], ids=["rule", "mixer"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_many_long_schedules(library, mixer):
    setting = Setting("KDA", library, mixer=mixer, T=400, every=128)

    @drawn(MANY)
    def schedules(rng):
        follow(setting, rng, LONG, steps=6)

    schedules()
