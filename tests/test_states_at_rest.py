"""States at rest: each dtype's error, each head's own dtype within a stated error, and slots that travel by file."""

from __future__ import annotations

import importlib.util
import json

import ml_dtypes
import numpy as np
import pytest
import serving
from serving import Setting

import portable_gdn as pg
from portable_gdn.harness.slot_file import load_slot, save_slot
from portable_gdn.serving.at_rest import DTYPES, choose_dtypes, pack, unpack

#: The largest error of a number over the largest of those that share its scale.
BOUND = {"float32": 0, "int16": 0.5 / 32767, "bfloat16": 2**-8, "int8": 0.5 / 127}


def states():
    rng = np.random.default_rng(0)
    found = rng.standard_normal((4, 8, 16)) * 10.0 ** rng.uniform(-6, 6, (4, 1, 1))
    return found.astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_dtype_keeps_what_it_says(dtype):
    S = states()
    packed = pack(S, dtype)
    assert packed.parts[dtype].dtype.itemsize == {"float32": 4, "int16": 2, "bfloat16": 2, "int8": 1}[dtype]
    most = np.abs(S).max((2,) if dtype == "int8" else (1, 2), keepdims=True)
    off = np.abs(unpack(packed).astype(np.float64) - S)
    assert (off <= 1.001 * BOUND[dtype] * most).all()
    assert (off.max() > 0) == (dtype != "float32")
    again = pack(unpack(packed), dtype)
    assert np.array_equal(again.parts[dtype], packed.parts[dtype])
    assert not np.any(unpack(pack(np.zeros((2, 3, 5), np.float32), dtype)))


def test_heads_have_their_own_dtypes_within_the_stated_error():
    errors = {
        "float32": [1e-7, 1e-7, 1e-7, 1e-7],
        "int16": [1e-5, 1e-4, 3e-3, 1e-1],
        "bfloat16": [1e-4, 9e-4, 2e-2, 1e-1],
        "int8": [9e-4, 1e-2, 1e-1, 1e0],
    }
    assert choose_dtypes(errors, 1e-3) == ["int8", "int16", "float32", "float32"]
    assert choose_dtypes(errors, 1e-3, ["float32", "bfloat16"]) == ["bfloat16", "bfloat16", "float32", "float32"]
    S, chosen = states(), choose_dtypes(errors, 1e-3)
    packed = pack(S, chosen)
    assert packed.nbytes == 8 * 16 * (1 + 2 + 4 + 4) + 4 * (8 + 1)
    assert unpack(packed)[2:].tobytes() == S[2:].tobytes()
    for head, dtype in enumerate(chosen):
        assert unpack(packed)[head].tobytes() == unpack(pack(S, dtype))[head].tobytes()


def test_bad_dtypes_and_states_get_a_sentence():
    S = states()
    for given, sentence in (
        ("int4", "dtypes is 'int4'; it must be one of float32, int16"),
        (["int8"], "dtypes is of 1 heads; it must name one dtype for each of the 4 heads"),
    ):
        with pytest.raises(pg.GdnError, match=sentence):
            pack(S, given)
    S[0, 0, 0] = np.inf
    with pytest.raises(pg.GdnError, match="states is not finite; it must be finite where a head is kept as int16"):
        pack(S, "int16")
    assert unpack(pack(S, "bfloat16"))[0, 0, 0] == np.inf
    for within, among, sentence in (
        (0, DTYPES, "within is 0; it must be a positive number"),
        (1e-3, ["int8"], "errors is without int8"),
        (1e-3, ["int4"], "among is 'int4'"),
    ):
        with pytest.raises(pg.GdnError, match=sentence):
            choose_dtypes({"float32": [0.0]}, within, among)


def step(setting, pool, slot, tokens, computed, accepted):
    x = {**tokens, **serving.parameters(setting.variant, setting.mixer)}
    n = len(tokens["qkv"])
    return setting.call(x, pool, pg.Batch([0, n], [slot], [computed], [accepted]))


def test_a_live_request_moves_by_file_with_its_drafts(tmp_path):
    """Begun with states [K, V], drafts waiting; continued in another library, with states [V, K]."""
    first = Setting(library="numpy", mixer=True)
    prompt, drafts, rest = (serving.draw_tokens("GDN", n, n, mixer=True) for n in (9, 3, 2))
    _, pool = step(first, first.pool(), 2, prompt, 0, 0)
    _, pool = step(first, pool, 2, drafts, 9, 0)
    want, _ = step(first, pool, 2, rest, 11, 2)
    path = tmp_path / "slot.safetensors"
    save_slot(path, pool.export(2), request={"num_computed_tokens": 9})
    states, request = load_slot(path)
    assert request == {"num_computed_tokens": 9}
    libraries = ["numpy", *(["torch"] if importlib.util.find_spec("torch") else [])]
    for library in libraries:
        other = Setting(library=library, mixer=True, state_layout="vk")
        o, _ = step(other, other.pool().import_(5, states, state_layout="vk"), 5, rest, 11, 2)
        np.testing.assert_allclose(o, want, rtol=2e-5, atol=2e-6)
    size = {}
    for dtype, tolerance in (("float32", 2e-6), ("int16", 2e-4), ("int8", 5e-2)):
        save_slot(path, pool.export(2), dtypes=dtype)
        size[dtype] = path.stat().st_size
        o, _ = step(first, first.pool().import_(1, load_slot(path)[0]), 1, rest, 11, 2)
        assert np.abs(o - want).max() <= tolerance * np.abs(want).max()
    assert size["int8"] < size["int16"] < size["float32"]


def test_files_of_slots_that_are_damaged_or_others_are_refused(tmp_path):
    path = tmp_path / "slot.safetensors"
    states = Setting(library="numpy", state_dtype="bfloat16").pool().export(1)
    save_slot(path, states)
    loaded, request = load_slot(path)
    assert loaded.recurrent.dtype == ml_dtypes.bfloat16
    assert not request
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(pg.GdnError, match="do not have the hash that was recorded"):
        load_slot(path)
    header = json.dumps({"__metadata__": {"format": "pt"}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(pg.GdnError, match="metadata format is 'pt'; it must be 'portable-gdn-slot'"):
        load_slot(path)
    with pytest.raises(pg.GdnError, match="request is given; it must be what JSON can hold"):
        save_slot(path, states, request={"a": np.zeros(1)})
