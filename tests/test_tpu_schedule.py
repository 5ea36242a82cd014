"""Reading a compiled kernel's schedule: the parser, the machine that counts, and kernels whose counts are known."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from xml.etree import ElementTree

import numpy as np
import pytest

from portable_gdn.harness.tpu_report import Shape, call
from portable_gdn.spec.errors import GdnError
from portable_gdn.tpu.chips import CHIPS, chip_named
from portable_gdn.tpu.scheduling import cache, hlo
from portable_gdn.tpu.scheduling.listing import DELAY, parse
from portable_gdn.tpu.scheduling.machine import run
from portable_gdn.tpu.scheduling.picture import picture
from portable_gdn.tpu.scheduling.report import Schedule

COMPILER = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("jax", "libtpu", "flatbuffers")),
    reason="no compiler for TPUs; `pip install 'portable-gdn[tpu]'` brings it",
)


# The parser


def bundles(*bodies):
    return "= control target key start\n" + "\n".join(f" {i:#x} : {body}" for i, body in enumerate(bodies))


def test_a_listing_with_comments_over_several_lines_and_in_each_other():
    text = bundles(
        "{ %6 = vsyncpa [#allocation3], 0  ;;  %s1_s0 = inlined_call_operand.hbm [shape: f32[8], index: 0, kind: x] }",
        "{}",
        "{ %342 = shalt.err (!%p3_p1) /* BoundsCheck 0 for %9 = dma.hbm_to_vmem (!%p2), /*hbm=*/%s9, /* \nbounds: (1)\n"
        "factor: 1 */\nhlo: x\n */  ;;  %s2_s1 = smov 4 /* constant */ } /* Start region 7 :: Start region 8 */",
        "> { %v1_v0 = vld [vmem:[%s1_s0] sm:$0xff]  ;;  %s3_s2 = sadd.s32 (!%p3_p1), 1, %s2_s1 }",
        "{} /* Start/End empty region 9 */",
    )
    found = parse(text)
    assert [b.empty for b in found] == [False, True, False, False, True]
    assert found[2].regions == (7, 8)
    assert found[4].regions == (9,)
    assert [i.op for i in found[2].instructions] == ["shalt.err", "smov"]
    (add,) = found[3].instructions
    assert (add.result, add.op, add.guard, add.inverted, add.args) == (
        "%s3_s2", "sadd.s32", "%p3_p1", True, ("1", "%s2_s1"),
    )  # fmt: skip


def test_a_listing_that_lacks_a_bundle_is_refused():
    with pytest.raises(ValueError, match="bundle 1 is missing"):
        parse(" 0x0 : {}\n 0x2 : {}\n")


# The machine


def loop(turns, *body):
    """A loop of some bundles, as the compiler writes one; with its delay."""
    begin = 1
    return [
        "{ %s0_s0 = smov 0 }",
        "{ %s1_s1 = sphi %s0_s0, %s2_s1  ;;  %s2_s1 = sadd.s32 1, %s1_s1 }",
        *body,
        f"{{ %p9_p9 = scmp.ge.s32.totalorder %s2_s1, {turns} }}",
        f"{{ %1 = sbr.rel (!%p9_p9) target bundleno = {begin} (0x1), region = 2 }}",
        *["{}"] * DELAY,
    ]


@pytest.mark.parametrize("turns", [1, 2, 7])
def test_turns_of_a_loop(turns):
    found = run(parse(bundles(*loop(turns, "{ %v = vadd.f32 %a, %b }"), "{}")))
    assert found.exact
    assert [(x.begin, x.end, x.level, x.turns) for x in found.loops] == [(1, 9, 1, turns)]
    assert found.counts.tolist() == [1, *[turns] * (4 + DELAY), 1]


def test_loops_in_loops():
    inner = [
        line.replace("s1_", "s5_").replace("s2_", "s6_").replace("s0_", "s4_").replace("p9", "p8") for line in loop(3)
    ]
    inner = [line.replace("target bundleno = 1", "target bundleno = 3") for line in inner]
    found = run(parse(bundles(*loop(4, *inner))))
    assert [(x.level, x.turns) for x in found.loops] == [(1, 4), (2, 12)]
    assert found.exact


def skip(guard, *body):
    """A part that a branch skips where the guard holds."""
    return lambda at: [
        f"{{ %1 = sbr.rel ({guard}) target bundleno = {at + 1 + DELAY + len(body)} (0x0), region = 3 }}",
        *["{}"] * DELAY,
        *body,
    ]


@pytest.mark.parametrize(("first", "runs"), [(0, 1), (1, 4)])
def test_a_part_that_runs_in_the_first_turn_only(first, runs):
    guard = "%p3_p3" if first == 0 else "!%p3_p3"
    test = "{ %p3_p3 = scmp.ne.s32.totalorder %s1_s1, 0 }"
    found = run(parse(bundles(*loop(5, test, *skip(guard, "{ %v = vadd.f32 %a, %b }", "{ %w = vadd.f32 %a, %b }")(3)))))
    assert found.exact
    part = 3 + 1 + DELAY
    assert found.counts[part : part + 2].tolist() == [runs, runs]
    assert found.counts[part + 2] == found.counts[part - 1] == 5


def test_what_hangs_on_a_vector_is_not_guessed():
    lines = ["{ %s9_s9 = spop %3 }", "{ %p3_p3 = scmp.ne.s32.totalorder %s9_s9, 0 }"]
    found = run(parse(bundles(*lines, *skip("%p3_p3", "{ %s8_s8 = smov 1 }", "{}")(2), "{}")))
    assert not found.exact
    assert found.counts.tolist() == [1] * (6 + DELAY)
    assert found.least.tolist() == [1, 1, 1, *[1] * DELAY, 0, 0, 1]
    unknown = [line.replace("%s2_s1, 6", "%s9_s9, 6") for line in loop(6)]
    found = run(parse(bundles(*unknown)))
    assert [x.turns for x in found.loops] == [None]
    assert not found.exact


def test_a_value_that_may_not_have_been_computed_is_not_used():
    lines = [
        "{ %s9_s9 = spop %3  ;;  %s8_s8 = smov 0 }",
        "{ %p3_p3 = scmp.ne.s32.totalorder %s9_s9, 0 }",
        *skip("%p3_p3", "{ %7 = sst [smem:[#allocation5_spill]] %s8_s8 }")(2),
        "{ %s7_s7 = sld [smem:[#allocation5_spill]] }",
        "{ %p4_p4 = scmp.ne.s32.totalorder %s7_s7, 0 }",
        *skip("%p4_p4", "{}")(6 + DELAY),
        "{}",
    ]
    found = run(parse(bundles(*lines)))
    assert found.least[-2] == 0
    assert found.counts[-2] == 1


def test_a_table_in_scalar_memory_steers():
    lines = [
        "{ %s20_s5 = inlined_call_operand.vmem [shape: s32[4], index: 1, kind: input]  ;;  "
        "%s21_s6 = smov [#allocation4] }",
        "{ %s22_s5 = int_to_ptr.vmem [resolvable:$true] %s20_s5 }",
        "{ %17 = dma.vmem_to_smem /*vmem=*/%s22_s5, /*size_in_granules=*/16, /*smem=*/%s21_s6, /*flag=*/[#allocation3]"
        " }",
        *loop(
            4,
            "{ %s30_s7 = sld [smem:[#allocation4 + %s1_s1]] }",
            "{ %p3_p3 = scmp.ne.s32.totalorder %s30_s7, 5 }",
            "{ %18 = dma.hbm_to_vmem [thread:$0]  (!%p3_p3), /*hbm=*/%s1_s1, /*size_in_granules=*/%s30_s7, "
            "/*vmem=*/%s2_s1 }",
        ),
    ]
    text = bundles(*lines).replace("target bundleno = 1", "target bundleno = 4")
    known = run(parse(text), {1: np.array([5, 3, 5, 5])})
    assert known.exact
    assert [(c.source, c.target, c.number, c.granules, c.perhaps) for c in known.copies if c.source == "hbm"] == [
        ("hbm", "vmem", 3, 15, 0)
    ]
    unknown = run(parse(text))
    assert [(c.number, c.perhaps) for c in unknown.copies if c.source == "hbm"] == [(0, 4)]


@pytest.mark.parametrize(
    ("op", "args", "value"),
    [
        ("sadd.s32", ("4294967295", "1"), 0),
        ("ssub.s32", ("0", "7"), -7),
        ("sshrl.u32", ("4294967288", "1"), 2147483644),
        ("sshra.s32", ("4294967288", "1"), -4),
        ("sshll.u32", ("1", "31"), -(2**31)),
        ("smin.u32", ("4294967295", "3"), 3),
        ("scmp.lt.s32.totalorder", ("4294967295", "3"), 1),
        ("scmp.lt.u32.totalorder", ("4294967295", "3"), 0),
        ("sand.u32", ("255", "16"), 16),
        ("scalar_select", ("1", "8", "9"), 8),
        ("pnand", ("1", "0"), 1),
        ("por", ("%unknown", "1"), 1),
        ("pnand", ("%unknown", "0"), 1),
    ],
)
def test_scalar_arithmetic(op, args, value):
    lines = [
        f"{{ %s1_s1 = {op} {', '.join(args)} }}",
        f"{{ %p1_p1 = scmp.eq.s32.totalorder %s1_s1, {value} }}",
        *skip("%p1_p1", "{}")(2),
    ]
    found = run(parse(bundles(*lines)))
    assert found.exact
    assert found.counts[-1] == 0


# The module's text


def test_operations_of_a_module():
    text = """HloModule jit_f, is_scheduled=true
%fused (p: f32[4]) -> f32[4] {
  ROOT %add.1 = f32[4]{0:T(128)} add(%p, %p)
}
%body (a: (s32[], f32[4])) -> (s32[], f32[4]) {
  %x = f32[16,100]{1,0:T(8,128)} get-tuple-element(%a), index=1
  %k.2 = (bf16[3,100]{1,0:T(8,128)(2,1)S(1)}, /*index=1*/f32[16,100]{1,0:T(8,128)}) custom-call(%c, %x), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/kern/pallas_call"}, backend_config={"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"4096"}]}
}
ENTRY %main (t: s32[3], y: f32[16,100]) -> f32[4] {
  %t = s32[3]{0:T(128)} parameter(0)
  %c.1 = s32[3]{0:T(128)} constant({1, -2, 3})
  %c = s32[3]{0:T(128)S(1)} copy(%c.1)
  %k.1 = f32[16,100]{1,0:T(8,128)} custom-call(%t), custom_call_target="tpu_custom_call"
  %w = (s32[], f32[4]) while(%k.1), condition=%cond, body=%body
  ROOT %f = f32[4]{0:T(128)} fusion(%w), kind=kLoop, calls=%fused
}
"""  # noqa: E501
    module = hlo.parse(text, {0: np.array([7, 8, 9])})
    found = {o.name: o for o in module.operations}
    assert "add.1" not in found
    kernel = found["k.2"]
    assert kernel.kernel
    assert kernel.source == "jit(f)/kern/pallas_call"
    assert kernel.vmem == 4096
    assert [(a.memory, a.bytes) for a in kernel.results] == [("vmem", 8 * 128 * 2), ("hbm", 16 * 128 * 4)]
    assert module.constants["k.2", 0].tolist() == [1, -2, 3]
    assert module.constants["k.1", 0].tolist() == [7, 8, 9]


# Chips and the cache


def test_chips():
    assert {"v4", "v5e", "v5p", "v6e", "v7x"} <= set(CHIPS)
    assert chip_named("v6e").clock_hz == pytest.approx(1.75e9, rel=0.01)
    assert chip_named("v5e").clock_hz == pytest.approx(1.5e9, rel=0.01)
    with pytest.raises(GdnError, match="chip is 'v9'; it must be one of v4, v5e, v5p, v6e, v7x"):
        chip_named("v9")


def test_a_cache_that_fails_is_no_error(tmp_path, monkeypatch):
    report = Schedule("v6e", (), (), {}, {"jax": "0"})
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path))
    assert cache.load("k") is None
    cache.store("k", report)
    assert cache.load("k") == report
    (tmp_path / "schedules" / "k.json").write_text('{"chip": "v6e", "ker')
    assert cache.load("k") is None
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path / "schedules" / "k.json"))  # a file where a folder should be
    cache.store("k", report)
    assert cache.load("k") is None
    monkeypatch.setenv(cache.ENVIRONMENT, "0")
    cache.store("k", report)
    assert cache.load("k") is None
    keys = {cache.key("a", chip, {}, {}, {"jax": v}) for chip in ("v5e", "v6e") for v in ("1", "2")}
    assert len(keys) == 4


def test_what_is_missing_is_named(monkeypatch):
    from portable_gdn.tpu.scheduling import build

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "libtpu" else real(name))
    with pytest.raises(GdnError, match=r"libtpu is not installed.*pip install 'portable-gdn\[tpu\]'"):
        build.schedule(lambda x: x)


# Kernels whose counts are known by construction


@pytest.fixture(scope="module")
def kernels():
    if importlib.util.find_spec("jax") is None:
        pytest.skip("jax is not installed")
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    shape = jax.ShapeDtypeStruct

    def call(kernel, n, name, blocks=(64, 256), **more):
        spec = pl.BlockSpec(blocks, lambda i: (i, 0))
        return pl.pallas_call(
            kernel, name=name, grid=(n,), out_shape=shape((n * blocks[0], blocks[1]), jnp.float32),
            in_specs=[spec], out_specs=spec, **more,
        )  # fmt: skip

    class Kernels:
        @staticmethod
        def copies(n):
            """n blocks of 256 registers."""

            def kernel(a, o):
                o[...] = a[...]

            # An array that does not fit into VMEM stays in HBM, and blocks are copied by the kernel.
            return call(kernel, n, "copies", (256, 1024)), (shape((n * 256, 1024), jnp.float32),)

        @staticmethod
        def products(n):
            """n products of one block with itself."""

            def kernel(a, o):
                o[...] = jnp.dot(a[...], a[...], preferred_element_type=jnp.float32)

            return call(kernel, n, "products", (256, 256)), (shape((n * 256, 256), jnp.bfloat16),)

        @staticmethod
        def turns(n):
            """A loop of n turns in each of 4 steps."""

            def kernel(a, o):
                o[...] = lax.fori_loop(0, n, lambda i, x: x * 1.5 + 1.0, a[...])

            return call(kernel, 4, "turns"), (shape((256, 256), jnp.float32),)

        @staticmethod
        def once(n):
            """A part of many bundles that runs in the first of n steps."""

            def kernel(a, o):
                o[...] = a[...]

                @pl.when(pl.program_id(0) == 0)
                def _():
                    o[...] = jnp.sin(a[...])

            return call(kernel, n, "once"), (shape((n * 64, 256), jnp.float32),)

        @staticmethod
        def chosen(n):
            """Blocks that a table chooses, in n steps; and a part that runs where it says 0."""

            def kernel(table, a, o):
                o[...] = a[...]

                @pl.when(table[pl.program_id(0)] == 0)
                def _():
                    o[...] = jnp.sin(a[...])

            block = (64, 1024)
            function = pl.pallas_call(
                kernel, name="chosen", out_shape=shape((n * block[0], block[1]), jnp.float32),
                grid_spec=pltpu.PrefetchScalarGridSpec(
                    num_scalar_prefetch=1, grid=(n,),
                    in_specs=[pl.BlockSpec(block, lambda i, t: (t[i], 0))],
                    out_specs=pl.BlockSpec(block, lambda i, t: (i, 0)),
                ),
            )  # fmt: skip
            return function, (shape((n,), jnp.int32), shape((1024 * block[0], block[1]), jnp.float32))

        @staticmethod
        def until(n):
            """A loop whose turns depend on a value."""

            def kernel(a, o):
                o[...] = lax.while_loop(lambda x: jnp.sum(x) < 1e6, lambda x: x * 1.5 + 1.0, a[...])

            return call(kernel, n, "until"), (shape((n * 64, 256), jnp.float32),)

    return Kernels


def scheduled(made, chip="v6e"):
    from portable_gdn.tpu import schedule

    function, args = made
    return schedule(function, *args, chip=chip, use_cache=False)


BLOCK = 256 * 1024 * 4


@COMPILER
@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_a_grid_of_copies(kernels, chip):
    few, many = (scheduled(kernels.copies(n), chip).kernels[0] for n in (200, 310))
    assert (few.steps, many.steps) == (200, 310)
    assert few.bundles_per_step == many.bundles_per_step
    assert many.cycles - few.cycles == 110 * many.bundles_per_step  # all else is the same
    assert [k.hbm_bytes for k in (few, many)] == [2 * 200 * BLOCK, 2 * 310 * BLOCK]
    # A register is 4 KiB; three can be loaded and one or two stored in a cycle, and each is loaded and stored once.
    for k in (few, many):
        stores = 1 if chip == "v5e" else 2
        assert 0 <= k.units["VSTORE"] * stores / k.steps - BLOCK / 4096 < 8  # synchronisation takes these slots too
        assert 0 <= k.units["VLOAD"] * 3 / k.steps - BLOCK / 4096 < 8
    assert many.bound(chip_named(chip)) == "memory"


@COMPILER
def test_a_grid_of_products(kernels):
    schedules = [scheduled(kernels.products(n)) for n in (8, 13)]
    few, many = (schedule.kernels[0] for schedule in schedules)
    assert (few.steps, many.steps) == (8, 13)
    assert many.cycles - few.cycles == 5 * many.bundles_per_step
    assert few.units["MXU"] / 8 == many.units["MXU"] / 13 > 0
    assert few.parts["MXU"] / 8 == many.parts["MXU"] / 13

    # What is drawn of a step is what a step takes of the unit.
    shares = np.array(few.timeline["MXU"])
    assert 0 < shares.max() <= 1
    assert shares.mean() * few.bundles_per_step == pytest.approx(few.units["MXU"] / 8, rel=0.05)
    drawing = ElementTree.fromstring(picture(schedules[0]))
    words = " ".join(drawing.itertext())
    assert all(word in words for word in (few.name, "MXU", f"{few.bundles_per_step:,} cycles"))


@COMPILER
@pytest.mark.parametrize(("chip", "cycles"), [("v6e", 16), ("v5e", 8)])
def test_products_of_few_rows_wait_for_the_other_operand(chip, cycles):
    """Each loads 128 rows for 32 that it multiplies: that is what it costs."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl

    def call(n):
        def kernel(a, b, o):
            for i in range(n):
                o[i] = jnp.dot(a[i], b[i], preferred_element_type=jnp.float32).astype(jnp.bfloat16)

        specs = [pl.BlockSpec((n, rows, 128), lambda i: (i, 0, 0)) for rows in (32, 128, 32)]
        shapes = [jax.ShapeDtypeStruct((4 * n, rows, 128), jnp.bfloat16) for rows in (32, 128, 32)]
        call = pl.pallas_call(
            kernel, name="few_rows", grid=(4,), out_shape=shapes[2], in_specs=specs[:2], out_specs=specs[2]
        )
        return scheduled((call, tuple(shapes[:2])), chip).kernels[0]

    few, many = call(16), call(32)
    assert (many.bundles_per_step - few.bundles_per_step) / 16 == pytest.approx(cycles, rel=0.05)
    for k, n in ((few, 16), (many, 32)):
        assert k.units["MXU load"] / k.steps / n == pytest.approx(cycles, rel=0.05)
        assert k.units["MXU"] / k.steps / n <= cycles


@COMPILER
def test_a_loop_of_n_turns(kernels):
    few, many = (scheduled(kernels.turns(n)).kernels[0] for n in (100, 160))
    for k, n in ((few, 100), (many, 160)):
        assert k.steps == 4
        inner = k.loops[1]
        assert (inner.level, 4 * n % inner.turns) == (2, 0)  # the compiler may have unrolled it
        assert inner.cycles % inner.turns == 0
    per_turn = few.loops[1].cycles / (4 * 100)
    assert many.cycles - few.cycles == pytest.approx(4 * 60 * per_turn)


@COMPILER
def test_a_part_that_runs_once(kernels):
    few, many = (scheduled(kernels.once(n)).kernels[0] for n in (8, 13))
    assert (few.steps, many.steps) == (8, 13)
    assert many.cycles - few.cycles == 5 * many.bundles_per_step
    assert few.units["EUP"] == many.units["EUP"] or few.parts["vector"] == many.parts["vector"] > 100
    assert few.code_bundles > few.bundles_per_step + 100  # the part that runs once is no part of a step
    assert few.least_cycles == few.cycles


@COMPILER
@pytest.mark.parametrize("n", [6, 9])
def test_scalar_prefetch(kernels, n):
    function, (_, array) = kernels.chosen(n)
    block = 64 * 1024 * 4
    table = np.arange(1, n + 1, dtype=np.int32) // 2  # 0, 1, 1, 2, 2, ...: each block but the first is fetched once
    known = scheduled((function, (table, array))).kernels[0]
    assert known.steps == n
    fetched = len(set(table.tolist()))
    assert known.hbm_bytes == (fetched + n) * block + 512  # and the table, a row of lanes
    assert known.least_cycles == known.cycles
    unknown = scheduled((function, (_, array))).kernels[0]
    assert unknown.least_cycles < known.cycles < unknown.cycles
    assert any("depends on values" in note for note in unknown.notes)


@COMPILER
def test_a_loop_without_a_known_end(kernels):
    report = scheduled(kernels.until(4))
    (k,) = report.kernels
    assert k.cycles is None
    assert any(inner.turns is None and inner.cycles > 0 for inner in k.loops)
    assert any("turns depends on values" in note for note in k.notes)
    assert "unknown turns" in str(report)
    assert report.as_dict()["total"]["cycles"] is None
    json.dumps(report.as_dict(), allow_nan=False)


@COMPILER
def test_loops_around_kernels_and_a_function_without_any(kernels):
    import jax
    import jax.numpy as jnp
    from jax import lax

    from portable_gdn.tpu import schedule

    function, args = kernels.turns(3)
    report = schedule(lambda a: lax.fori_loop(0, 5, lambda i, x: function(x) + 1, a), *args, use_cache=False)
    assert [k.times for k in report.kernels] == [5]
    assert report.cycles == 5 * report.kernels[0].cycles
    twice = schedule(lambda a: function(function(a)), *args, use_cache=False)  # which share their code
    assert [k.times for k in twice.kernels] == [1, 1]
    plain = schedule(lambda a: jnp.sin(a) @ a.T, jax.ShapeDtypeStruct((512, 512), jnp.float32), use_cache=False)
    assert not plain.kernels
    assert sum(k.units["MXU"] for k in plain.others) > 0
    assert "XLA runs" in str(plain)


# What goes wrong


@COMPILER
def test_refusals_are_sentences():
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl

    from portable_gdn.tpu import schedule

    def kernel(work):
        def run(a, o):
            o[...] = work(a[...])

        return run

    def call(work, shape, dtype=jnp.float32, name="kernel_of_mine", **more):
        s = jax.ShapeDtypeStruct(shape, dtype)
        return lambda: schedule(pl.pallas_call(kernel(work), name=name, out_shape=s, **more), s, use_cache=False)

    block = pl.BlockSpec((32768, 1024), lambda i: (i, 0))
    too_big = call(lambda a: a * 2, (65536, 1024), grid=(2,), in_specs=[block], out_specs=block)
    with pytest.raises(
        GdnError, match=r"kernel kernel_of_mine: .*256 MiB of VMEM .*may use 128, 128 MiB too much.*32768x1024"
    ):
        too_big()
    with pytest.raises(GdnError, match=r"refuses: kernel kernel_of_mine: .*Mosaic failed"):
        call(lambda a: a * 2, (256, 256), jnp.float16)()
    with pytest.raises(GdnError, match=r"kernel kernel_of_mine cannot be lowered for v6e: .*sort"):
        call(lambda a: jnp.sort(a, 0), (256, 256))()
    s = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    with pytest.raises(GdnError, match="must be one of v4, v5e"):
        schedule(lambda a: a, s, chip="tpu")
    with pytest.raises(GdnError, match=r"took longer than 0\.\d* s|took longer than 0 s"):
        schedule(lambda a: a + 1, s, use_cache=False, timeout=0.01)
    with pytest.raises(GdnError, match="timeout is -1"):
        schedule(lambda a: a + 1, s, timeout=-1)


@COMPILER
def test_nothing_is_left_and_what_is_known_is_not_compiled_again(tmp_path, monkeypatch):
    import tempfile

    import jax
    import jax.numpy as jnp

    from portable_gdn.tpu import schedule
    from portable_gdn.tpu.scheduling import build

    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path / "cache"))
    (tmp_path / "work").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "work"))
    s = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    first = schedule(lambda a: a + 1, s)
    assert not list((tmp_path / "work").iterdir())
    monkeypatch.setattr(build.subprocess, "Popen", None)
    assert schedule(lambda a: a + 1, s) == first
    with pytest.raises(TypeError):  # another function is compiled
        schedule(lambda a: a + 2, s)
    assert not list((tmp_path / "work").iterdir())


@COMPILER
def test_an_interrupt_ends_the_compiler_and_leaves_nothing(tmp_path):
    code = """
import signal, threading, os, time
import jax, jax.numpy as jnp
from portable_gdn.harness.tpu_report import Shape, call
from portable_gdn.tpu import schedule
function, args = call("forward", "gdn", Shape())
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background inherit that it is ignored
def interrupt():
    while not os.listdir(os.environ["TMPDIR"]):  # the compiler's folder
        time.sleep(0.05)
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt, daemon=True).start()
try:
    schedule(function, *args, use_cache=False)
except KeyboardInterrupt:
    print("interrupted")
"""
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "interrupted", done.stderr
    assert not list(tmp_path.iterdir())


# Our kernels


@COMPILER
@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_our_kernel_counts_what_a_count_by_hand_of_the_listing_gives(tmp_path, chip):
    """By hand: lines of the grid's loop from its label to its branch, delay included, less what is skipped."""
    from portable_gdn.harness.tpu_report import Shape, call
    from portable_gdn.tpu.scheduling import build

    function, args = call("forward", "gdn", Shape(seqlen=512, heads=2, value_heads=4, key_dim=120), precision="highest")
    job = build._Job.of(chip, build.lower(chip_named(chip), function, args))
    with build._Running(job, 300) as running:
        running.process.wait()
        report = Schedule.from_json(json.loads((running.folder / "schedule.json").read_text()))
        (path,) = running.folder.glob("dump/*gated_delta_rule_forward*-packed-bundles-post-ra.txt")
        listing = path.read_text() if "schedule-analysis" not in path.name else ""
    lines = re.findall(r"^ *(0x[0-9a-f]+|0) +(\w\w)?.*$", listing, re.M)
    (begin,) = [int(a, 0) for a, mark in lines if mark == "LB"]
    branches = [
        (int(m[1], 0), int(m[2])) for m in re.finditer(r"^ *(0x[0-9a-f]+) .*sbr.rel .*bundleno = (\d+)", listing, re.M)
    ]
    ((back, _),) = [b for b in branches if b[1] == begin]
    whole, *inner = sorted((b for b in branches if b[0] >= begin and b[1] > b[0]), key=lambda b: b[0] - b[1])
    parts = sorted(target - at - 1 - DELAY for at, target in inner)
    step = back + DELAY + 1 - begin - sum(parts[:3])  # first state in, output cleared, last state out: not in each step
    (k,) = report.kernels
    blocks = 512 // 128
    assert k.grid == (1, blocks)
    assert k.steps == blocks
    assert k.bundles_per_step == pytest.approx(step + sum(p for p in parts[:3] if p == min(parts[:3])), abs=step * 0.02)
    pipeline = back + DELAY + 1 - begin - (whole[1] - whole[0] - 1 - DELAY)
    chunk = parts[-1]
    assert blocks * chunk < k.cycles < blocks * (step + sum(parts[:3])) + 2 * pipeline + 400
    assert k.least_cycles == k.cycles  # the table of chunks is known: nothing is guessed


@COMPILER
@pytest.mark.slow
def test_the_command_line(tmp_path):
    env = {**os.environ, cache.ENVIRONMENT: str(tmp_path)}
    command = [
        os.path.join(os.path.dirname(sys.executable), "portable-gdn"),
        "tpu-report",
        "--seqlen",
        "512",
        "--heads",
        "2",
        "--json",
    ]
    done = subprocess.run([*command, "--chip", "v6e"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"chip", "op", "variant", "fused", "shape", "kernels", "total", "other_device_ops"} <= set(found)
    assert found["plan"].startswith("pipelined kernel, 2 value heads")
    wanted = {
        "name",
        "cycles",
        "bundles_per_step",
        "steps",
        "mxu_utilization",
        "spills",
        "vmem_bytes",
        "hbm_bytes",
        "bound",
    }
    assert wanted <= set(found["kernels"][0])
    assert {"cycles", "cycles_per_head_128", "seconds", "floor_seconds"} <= set(found["total"])
    done = subprocess.run([*command, "--chip", "all"], env=env, capture_output=True, text=True)
    assert [r["chip"] for r in json.loads(done.stdout)["reports"]] == list(CHIPS)
    for more, words in (
        (["--op", "step"], "'xla' runs a step"),
        (["--op", "backward", "--dtype", "float16"], "cannot load float16"),
        (["--fused", "--variant", "delta"], "--fused is for --op forward or backward of variants with a decay"),
        (["--chip", "v9"], "must be one of v4"),
        (["--heads", "0"], "--heads is 0; it must be at least 1"),
        (["--heads", "3", "--value-heads", "4"], "multiple"),
    ):
        done = subprocess.run([*command, *more], env=env, capture_output=True, text=True)
        assert done.returncode == 2, (more, done.stderr)
        assert words in done.stderr, done.stderr


# What the command compiles, by shapes alone


SMALL = Shape(seqlen=128, heads=1, value_heads=2, key_dim=64, value_dim=32)


@pytest.mark.parametrize(
    ("op", "variant", "fused", "sequences"),
    [("forward", "grouped", False, 3), ("backward", "gdn2", False, 3), ("forward", "gdn", True, 3)],
)
def test_a_call_is_built_from_its_dimensions(op, variant, fused, sequences):
    jax = pytest.importorskip("jax")
    function, arguments = call(op, variant, SMALL._replace(sequences=sequences), fused=fused)
    found = [tuple(a.shape) for a in jax.tree.leaves(jax.eval_shape(function, *arguments))]
    if op == "backward":  # o, and a gradient each of what has one
        bounds = (sequences + 1,)
        shapes = [tuple(a.shape) for a in jax.tree.leaves(arguments[0]) if tuple(a.shape) != bounds]
        assert sorted(found) == sorted([(1, 128, 2, 32), *shapes])
    else:  # o, the states, those of the convolution
        assert found == [(1, 128, 2, 32), (3, 2, 64, 32), (3, 3, 192)][: 3 if fused else 2]


@pytest.mark.parametrize(
    ("op", "variant", "fused", "change", "words"),
    [
        ("sideways", "gdn", False, {}, "--op is 'sideways'; it must be one of forward, backward, step"),
        ("forward", "mamba", False, {}, "--variant is 'mamba'"),
        ("forward", "gdn", False, {"dtype": "int8"}, "--dtype is 'int8'"),
        ("forward", "gdn", False, {"key_dim": 0}, "--key-dim is 0; it must be at least 1"),
        ("forward", "gdn", False, {"sequences": -1}, "--sequences is -1; it must be at least 0"),
        ("forward", "gdn", False, {"sequences": 2, "batch": 2}, "sequences are packed in one row"),
        ("forward", "grouped", False, {"groups": 3}, "--groups is 3; it must divide --key-dim, which is 64"),
        ("step", "gdn", True, {}, "--fused is for --op forward or backward"),
        ("forward", "delta", True, {}, "--fused is for --op forward or backward of variants with a decay"),
    ],
)
def test_what_there_is_no_call_of_is_refused(op, variant, fused, change, words):
    pytest.importorskip("jax")
    with pytest.raises(GdnError, match=re.escape(words)):
        call(op, variant, SMALL._replace(**change), fused=fused)


def test_a_step_has_no_kernel_to_report_on():
    jax = pytest.importorskip("jax")
    function, arguments = call("step", "gdn", SMALL)
    with pytest.raises(GdnError, match="'xla' runs a step"):
        jax.eval_shape(function, *arguments)


# Traffic that XLA's own copies carry, names, grids with steps that are skipped, donation


MODULE = """HloModule jit_f, is_scheduled=true
%body (a: (s32[], f32[16,128])) -> (s32[], f32[16,128]) {
  %x = f32[16,128]{1,0:T(8,128)} get-tuple-element(%a), index=1
  %s.3 = (f32[16,128]{1,0:T(8,128)S(1)}, f32[16,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%x)
  %d.3 = f32[16,128]{1,0:T(8,128)S(1)} copy-done(%s.3)
  %inside = f32[16,128]{1,0:T(8,128)} fusion(%d.3), kind=kLoop, calls=%fused
}
ENTRY %main (p: f32[16,128], y: f32[16,128]) -> f32[16,128] {
  %p = f32[16,128]{1,0:T(8,128)} parameter(0)
  %s.1 = (f32[16,128]{1,0:T(8,128)S(1)}, f32[16,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%p), cross_program_prefetch_index=0
  %b.1 = s8[8192]{0:T(1024)} bitcast(%p)
  %s.2 = ((s8[8192]{0:T(1024)}), s8[4096]{0:T(1024)S(1)}, s32[]{:S(2)}) slice-start(%b.1), slice={[0:4096]}
  %s.4 = ((s8[8192]{0:T(1024)}), s8[4096]{0:T(1024)S(1)}, s32[]{:S(2)}) slice-start(%b.1), slice={[4096:8192]}
  %d.1 = f32[16,128]{1,0:T(8,128)S(1)} copy-done(%s.1)
  %first = f32[16,128]{1,0:T(8,128)S(1)} fusion(%d.1), kind=kLoop, calls=%fused
  %d.2 = s8[4096]{0:T(1024)S(1)} slice-done(%s.2)
  %d.4 = s8[4096]{0:T(1024)S(1)} slice-done(%s.4)
  %c.1 = f32[16,128]{1,0:T(8,128)S(1)} custom-call(%d.2, %d.4), custom_call_target="ConcatBitcast"
  %second = f32[16,128]{1,0:T(8,128)S(1)} fusion(%c.1, %d.1, %first), kind=kLoop, calls=%fused
  %s.5 = (f32[16,128]{1,0:T(8,128)}, f32[16,128]{1,0:T(8,128)S(1)}, u32[]{:S(2)}) copy-start(%second)
  %d.5 = f32[16,128]{1,0:T(8,128)} copy-done(%s.5)
  %s.6 = (f32[16,128]{1,0:T(8,128)S(1)}, f32[16,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%d.5)
  %d.6 = f32[16,128]{1,0:T(8,128)S(1)} copy-done(%s.6)
  %t = (s32[], f32[16,128]) tuple(%c, %d.6)
  ROOT %w = (s32[], f32[16,128]) while(%t), condition=%cond, body=%body
}
"""  # noqa: E501


def test_what_copies_move_belongs_to_who_takes_or_made_it():
    found, left = hlo.moves(hlo.parse(MODULE))
    whole = 16 * 128 * 4
    assert found["first"] == (whole, whole)  # across programs
    assert found["second"] == (2 * 4096 + whole, 0)  # two slices of one array, and its own result on the way out
    assert found["inside"] == (whole, 0)
    assert left == {"s.6": (whole, 0)}  # which a loop takes: no one operation is seen to


@pytest.mark.parametrize(
    ("makes", "memory"),
    [
        (["{ %s5_s5 = scalar_lea.hbm %s1_s1, %s2_s2 }"], "hbm"),
        (["{ %s6_s6 = int_to_ptr.hbm [resolvable:$true] %s1_s1 }", "{ %s5_s5 = smov %s6_s6 }"], "hbm"),
        (
            [
                "{ %s6_s6 = inlined_call_operand.hbm [shape: f32[8], index: 0, kind: x] }",
                "{ %7 = sst [smem:[#allocation5_spill]] %s6_s6 }",
                "{ %s5_s5 = sld [smem:[#allocation5_spill]] }",
            ],
            "hbm",
        ),
        (["{ %s5_s5 = smov 3 }"], "?"),
    ],
)
def test_copies_along_a_table_of_strides(makes, memory):
    lines = [
        *makes,
        "{ %s8_s8 = int_to_ptr.vmem [resolvable:$true] %s9_s9 }",
        "{ %1 = dma.general /*src=*/%s5_s5, /*size_in_granules=*/96, /*dst=*/%s8_s8, /*dst_syncflagno=*/%s3 }",
    ]
    (copy,) = run(parse(bundles(*lines))).copies
    assert (copy.source, copy.target, copy.number, copy.granules) == (memory, "vmem", 1, 96)


def shapes(*dims, dtype="bfloat16"):
    import jax

    return jax.ShapeDtypeStruct(dims, dtype)


@COMPILER
@pytest.mark.slow
@pytest.mark.parametrize(("n", "chip"), [(1024, "v6e"), (4096, "v6e"), (2048, "v5e"), (1024, "v7x")])
def test_the_traffic_of_a_product_is_what_goes_in_and_out(n, chip):
    report = scheduled((lambda x, y: x @ y, (shapes(n, n), shapes(n, n))), chip)
    least, figures = 3 * n * n * 2, report.others
    assert least <= sum(k.hbm_bytes for k in figures) <= 1.5 * least
    if chip == "v6e":
        assert sum(k.hbm_bytes for k in figures) == least
        assert sum(k.across_bytes for k in figures) == n * n * 2
        assert f"{n * n * 2 / 2**20:.1f} MiB of it prefetched beside the program before" in str(report)
    line = next(line for line in str(report).splitlines() if "dot_general" in line)
    assert re.search(r"MXU \d\d %", line)


@COMPILER
@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v5e", "v6e", "v7x"])
def test_the_traffic_of_a_step_is_its_state_read_twice_and_written(chip):
    import portable_gdn as pg

    B, H, K = 64, 16, 128
    x = {name: shapes(B, H, K) for name in "qkv"}
    x |= {name: shapes(B, H, dtype="float32") for name in ("g", "beta")}
    S = shapes(B, H, K, K, dtype="float32")
    report = scheduled((lambda x, S: pg.gated_delta_rule_step(**x, state=S, backend="xla"), (x, S)), chip)
    state, moved = B * H * K * K * 4, sum(k.hbm_bytes for k in report.others)
    assert 3 * state <= moved < 3.1 * state  # what it reads of the memory first, then what it adds to it


@COMPILER
@pytest.mark.slow
def test_the_traffic_of_elementwise_work_and_of_what_never_leaves_vmem(kernels):
    report = scheduled((lambda x: x * 2 + 1, (shapes(8192, 4096),)))
    assert sum(k.hbm_bytes for k in report.others) == 2 * 8192 * 4096 * 2
    function, args = kernels.products(8)
    import jax.numpy as jnp

    report = scheduled((lambda x: function(function(x).astype(jnp.bfloat16)), args))
    moved = sum(k.hbm_bytes for k in (*report.kernels, *report.others))
    block = 256 * 256
    assert moved == 8 * block * (2 + 4)  # in, and the last result out; what is between stays in VMEM


@COMPILER
@pytest.mark.slow
def test_kernels_without_names_have_their_functions_and_grids_their_dimensions():
    from functools import partial

    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.experimental import pallas as pl

    def half_of_it(factor, a, o):
        @pl.when(pl.program_id(1) >= pl.program_id(0))
        def _():
            o[...] = jnp.sin(a[...] * factor)

    def call(rows, columns, kernel):
        block = pl.BlockSpec((256, 256), lambda i, j: (i, j))
        shape = jax.ShapeDtypeStruct((256 * rows, 256 * columns), jnp.float32)
        return pl.pallas_call(kernel, grid=(rows, columns), in_specs=[block], out_specs=block, out_shape=shape)

    large = shapes(256 * 8, 256 * 8, dtype="float32")
    triangle = call(8, 8, partial(half_of_it, 2.0))
    report = scheduled((lambda a: lax.fori_loop(0, 3, lambda i, x: triangle(x), a), (large,)))
    (k,) = report.kernels
    assert k.name.startswith("half_of_it")
    assert (k.grid, k.grid_steps, k.steps, k.times) == ((8, 8), 64, 36, 3)
    assert "grid 8 x 8: 36 of 64 steps" in str(report)
    assert re.search(
        r"half_of_it[.\d]*, 3 times: code [\d,]+ cycles \([\d.]+ us\), traffic [\d.]+ us: bound by", str(report)
    )

    def broken(a, o):
        o[...] = jnp.sort(a[...], 0)

    with pytest.raises(GdnError, match="kernel broken cannot be lowered for v6e"):
        scheduled((call(1, 1, broken), (shapes(256, 256, dtype="float32"),)))
    two = scheduled((lambda a: call(4, 16, partial(half_of_it, 1.0))(jnp.reshape(triangle(a), (1024, 4096))), (large,)))
    assert sorted(k.grid for k in two.kernels) == [(4, 16), (8, 8)]


@COMPILER
@pytest.mark.slow
def test_arguments_that_are_donated_are_given_away():
    import jax
    import jax.numpy as jnp

    def update(x, y):
        return x.at[:8].add(y)

    x, y = shapes(4096, 4096), shapes(8, 4096)
    state = 4096 * 4096 * 2
    moved = lambda report: sum(k.hbm_bytes for k in report.others)  # noqa: E731
    kept = scheduled((jax.jit(update), (x, y)))
    assert moved(kept) >= 2 * state
    assert kept.memory["donated"] == 0
    tree = jax.jit(lambda d: {"x": update(d["x"], d["y"])}, donate_argnums=0)
    given = [
        ((jax.jit(update, donate_argnums=0)), (x, y)),
        ((jax.jit(update, donate_argnames="x")), (x, y)),
        ((jax.jit(lambda y, x: update(x, y), donate_argnums=(1,))), (y, x)),
        (tree, ({"x": x, "y": y},)),
    ]
    for function, args in given:
        report = scheduled((function, args))
        assert moved(report) < state / 16
        assert report.memory["donated"] == state
    inner = jax.jit(update, donate_argnums=0)
    assert scheduled((lambda x, y: jnp.negative(inner(x, y)), (x, y))).memory["donated"] == 0  # nobody gave that away


LOST = """
import gc, os, signal, threading, time, weakref, sys
from portable_gdn.tpu.scheduling.interrupts import interruptible
signal.signal(signal.SIGINT, signal.default_int_handler)
busy = []

def slow(*_):
    if not busy:
        busy.append(True)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        end = time.monotonic() + 0.6
        while time.monotonic() < end:
            pass

class Thing:
    pass

class Ending:
    __del__ = slow

def collected():
    gc.callbacks.append(slow)
    gc.collect()

def dropped():
    Ending()

def referred():
    thing = Thing()
    kept = weakref.ref(thing, slow)
    del thing

try:
    with interruptible():
        globals()[sys.argv[1]]()
        for _ in range(200):
            time.sleep(0.01)
    print("went on")
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("where", ["collected", "dropped", "referred"])
def test_an_interrupt_where_python_drops_it_is_not_lost(where):
    done = subprocess.run([sys.executable, "-c", LOST, where], capture_output=True, text=True)
    assert done.stdout.strip() == "interrupted", done.stderr
    assert "Exception ignored" not in done.stderr


@COMPILER
@pytest.mark.slow
@pytest.mark.parametrize("after", [1.0, 3.0, 5.0])
def test_the_first_interrupt_ends_the_command(after, tmp_path):
    """Counted from where tracing begins; imports before that are another matter."""
    code = """
import gc, os, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)
import jax
from portable_gdn.cli.main import main
gc.set_threshold(50)  # JAX's callback runs often
threading.Timer(float(sys.argv.pop()), os.kill, (os.getpid(), signal.SIGINT)).start()
main()
"""
    words = ["tpu-report", "--chip", "all", "--no-cache", "--seqlen", "512", str(after)]
    env = {**os.environ, "TMPDIR": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 130, done.stderr
    assert not done.stdout
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("portable-gdn-")]


@pytest.mark.parametrize("absent", ["jax", "libtpu", "flatbuffers"])
def test_the_command_without_what_compiles_says_what_to_install(absent):
    if absent == "flatbuffers":  # which is looked for where the compiler is
        pytest.importorskip("libtpu")
    code = f"import sys; sys.modules[{absent!r}] = None\nfrom portable_gdn.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "tpu-report"], capture_output=True, text=True)
    assert done.returncode == 2
    assert f"{absent} is not installed" in done.stderr
    assert "pip install 'portable-gdn[tpu]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("version", "chips", "waits"),
    [
        ("0.0.42.1", ["v7x"], True),
        ("0.0.42.1", ["v5e", "v6e", "v7x"], True),
        ("0.0.42.1", ["v6e"], False),
        ("0.0.50.1", ["v7x"], False),
        ("0.1", ["v7x"], False),
    ],
)
def test_a_long_wait_is_announced(version, chips, waits, monkeypatch):
    from portable_gdn.tpu.scheduling import build

    monkeypatch.setattr(build.metadata, "version", lambda name: version)
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: object())
    assert (build.expected_wait(chips) is not None) == waits
