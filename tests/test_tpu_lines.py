"""The script that counts a kernel's instructions by the source line they come from."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("jax")

ONE, TWO = '/* loc("/a/one.py":7:3 to :9) */', '/* loc("/a/two.py":5:3 to :9) */'
LISTING = f"""
 0x0 LH: > {{ %v1_v2 = vld [vmem:[#allocation3 + $0x8] sm:$0xff] {ONE}  ;;  %s3_s1 = sadd.s32 1, %s2 }}
 0x1 : > {{ %v4_v5 = vmul.f32 %v1_v2, %v1_v2 {ONE.replace("7:", "8:")}  ;;  %v6 = vpop.f32.mrf.mxu0 {TWO} }}
 0x2 : > {{ %77 = vst [vmem:[#allocation9_spill] sm:$0xff] /*vst_source=*/%v4_v5  ;;  %v8_v2 = vadd.f32 %v6, %v6 }}
 0x3 : > {{ %v9_v7 = vld [vmem:[#allocation9_spill] sm:$0xff] {TWO} }}
 0x4 : {{ %78 = vst [vmem:[#allocation4] sm:$0xff] /*vst_source=*/%v9_v7 {TWO} }}
"""


@pytest.fixture(scope="module")
def script():
    path = Path(__file__).parents[1] / "benchmarks" / "tpu_lines.py"
    spec = importlib.util.spec_from_file_location("tpu_lines", path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:  # it sets what the compiler needs when it is imported
        patch.setattr("portable_gdn.tpu.scheduling.compile.environment", lambda env: None)
        spec.loader.exec_module(module)
    return module


def test_spills_count_where_their_value_was_made(script):
    found = script.by_line(LISTING, [3, 3, 3, 3, 1])
    assert found == {
        "/a/one.py:7": Counter(load=3),
        "/a/one.py:8": Counter(vector=3, spill=3, fill=3),
        "?": Counter(vector=3),
        "/a/two.py:5": Counter(store=1),
    }


def test_what_other_units_do_is_no_vector_work(script):
    names = [
        "vmatmul.mubr.bf16.mxu0",
        "vperm.lane.xlu1",
        "vadd.xlane.f32.xlu0",
        "vtanh.f32",
        "vpop.eup",
        "vsel",
        "vsub.f32",
    ]
    bundle = "  ;;  ".join(f"%v{n}_v{n} = {name} %v9" for n, name in enumerate(names))
    assert script.by_line(f" 0x0 : > {{ {bundle} }}", [2]) == {"?": Counter(vector=4)}
