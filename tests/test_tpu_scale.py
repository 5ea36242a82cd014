"""Programs for many TPU chips: the links between chips, collectives in a module's text, and reports."""

from __future__ import annotations

import importlib.util
import itertools

import pytest

from portable_gdn.harness.scale_report import ScaleReport, ScaleShape, scale_report
from portable_gdn.harness.shapes import Shape
from portable_gdn.spec.errors import GdnError
from portable_gdn.tpu.chips import CHIPS
from portable_gdn.tpu.scheduling.collectives import collectives
from portable_gdn.tpu.scheduling.hlo import parse
from portable_gdn.tpu.scheduling.report import OperationReport, Schedule
from portable_gdn.tpu.slices import HOP_SECONDS, slice_of

LINK = CHIPS["v6e"].ici_bytes_per_second

TEXT = """
HloModule jit_f, num_partitions=8

%wrapped (p: f32[8,4]) -> f32[8,4] {
  %p = f32[8,4]{1,0} parameter(0)
  ROOT %all-to-all.3 = f32[8,4]{1,0} all-to-all(%p), channel_id=3, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}
}

%body (t: (s32[], f32[128])) -> (s32[], f32[128]) {
  %t = (s32[], f32[128]{0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[128]{0} get-tuple-element(%t), index=1
  %add.1 = f32[128]{0} add(%x, %x)
  %shift = f32[128]{0} collective-permute(%add.1), channel_id=1, source_target_pairs={{0,1},{1,2}}
  ROOT %tuple.1 = (s32[], f32[128]{0}) tuple(%i, %shift)
}

ENTRY %main (a: f32[8,4], b: f32[16], c: (s32[], f32[128])) -> f32[32] {
  %a = f32[8,4]{1,0} parameter(0)
  %b = f32[16]{0} parameter(1)
  %c = (s32[], f32[128]{0}) parameter(2)
  %start = ((f32[8,4]), f32[8,4]{1,0}) async-start(%a), calls=%wrapped
  %done = f32[8,4]{1,0} async-done(%start)
  %loop = (s32[], f32[128]{0}) while(%c), condition=%cond, body=%body
  %alone = f32[16]{0} all-reduce(%b), channel_id=5, replica_groups={{0},{1}}, to_apply=%sum
  ROOT %gather = f32[32]{0} all-gather(%b), channel_id=2, replica_groups=mesh['a'=4,'b'=2] {'b'}, dimensions={0}
}
"""


def test_collectives_are_found_wherever_they_stand():
    found = {c.name: c for c in collectives(TEXT, parse(TEXT), {"add.1": 5}, 8)}
    assert set(found) == {"all-to-all.3", "shift", "gather"}  # "alone" is of groups of one device
    assert found["all-to-all.3"].groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert (found["shift"].times, found["shift"].bytes, found["shift"].groups) == (5, 512, ((0, 1), (1, 2)))
    assert found["gather"].groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert found["gather"].arrays == ("f32[32]",)


def test_links_decide_the_time():
    line = slice_of(CHIPS["v6e"], 8)  # 2 x 4 chips, no ring
    assert line.topology == "v6e:2x4"
    places = [line.place(d) for d in range(8)]
    assert sorted(places) == [(a, b) for a in range(2) for b in range(4)]
    for a, b in itertools.pairwise(places):
        assert sum(abs(p - q) for p, q in zip(a, b, strict=True)) == 1
    everyone = [tuple(range(8))]
    # Through the middle 2 links carry what 4 chips send 4 others, an eighth of it each: all that one chip has.
    assert line.seconds("all-to-all", LINK, everyone) == pytest.approx(1 + 4 * HOP_SECONDS)
    # A corner gets seven eighths of the whole over two links, and a sum goes there and back.
    assert line.seconds("all-gather", LINK, everyone) == pytest.approx(7 / 16 + 4 * HOP_SECONDS)
    assert line.seconds("all-reduce", LINK, everyone) == pytest.approx(7 / 8 + 8 * HOP_SECONDS)
    assert line.seconds("collective-permute", LINK, [(0, 1), (1, 2)]) == pytest.approx(1 + HOP_SECONDS)
    ring = slice_of(CHIPS["v7x"], 64)  # 4 x 4 x 4 closed to rings, two devices a chip
    assert (ring.topology, ring.devices) == ("tpu7x:4x4x4", 128)
    assert ring.seconds("all-gather", 1e9, [(0, 1)]) == 0  # on one chip
    ends = next(d for d in range(128) if ring.place(d) == (3, 0, 0))
    assert ring.seconds("collective-permute", LINK, [(0, ends)]) == pytest.approx(1 + HOP_SECONDS)
    with pytest.raises(GdnError, match="chips is 12; it must be 1, 2, 4 or another power of two"):
        slice_of(CHIPS["v6e"], 12)


def test_order_puts_devices_where_they_lie():
    where = slice_of(CHIPS["v7x"], 4)
    there = [((x, y, 0), core) for x in (1, 0) for y in (0, 1) for core in (1, 0)]
    order = where.order(there)
    assert [there[i][0] for i in order] == [where.place(d) for d in range(8)]
    assert [there[i][1] for i in order] == [0, 1] * 4


def test_efficiency_is_that_of_the_share():
    def schedule(cycles, **more):
        kernel = OperationReport(
            "rule", "custom-call", "", True, 1, cycles, cycles, None, None, None, 0, {"MXU": 1.0}, {}, 0, 0, 0, {}, (),
            0, 0, 0, (),
        )  # fmt: skip
        return Schedule("v6e", (kernel,), (), {}, {}, **more)

    of = ScaleShape("rule", "gdn", "forward", Shape(), "heads", 8)
    assert ScaleReport(of, schedule(200, chips=(2, 4)), schedule(800), 8).efficiency == pytest.approx(0.5)
    of = of._replace(split="tokens", shape=Shape(seqlen=80))
    assert of.share(8).shape.seqlen == 10
    assert ScaleReport(of, schedule(200, chips=(2, 4)), schedule(160), 8).efficiency == pytest.approx(0.8)
    with pytest.raises(GdnError, match="--batch is 3; it must be a multiple of the 8 devices of 8 chips"):
        of._replace(split="rows", shape=Shape(batch=3)).share(8)


@pytest.mark.slow
def test_a_split_call_is_compiled_and_its_collectives_are_told():
    if any(importlib.util.find_spec(module) is None for module in ("jax", "libtpu", "flatbuffers")):
        pytest.skip("no compiler for TPUs; `pip install 'portable-gdn[tpu]'` brings it")
    of = ScaleShape("rule", "gdn", "forward", Shape(seqlen=256, heads=4, value_heads=4), "heads", 4, "fast")
    found = scale_report(of, "v6e")
    assert (found.devices, found.schedule.collectives, found.schedule.chips) == (4, (), (2, 2))
    assert found.efficiency > 0
