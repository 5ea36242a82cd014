"""States at rest: each dtype's error, each head's own dtype within a stated error, and slots that travel by file."""

from __future__ import annotations

import importlib.util
import json
import xml.etree.ElementTree

import ml_dtypes
import numpy as np
import pytest
import serving
from serving import Setting
from typer.testing import CliRunner

import portable_gdn as pg
from portable_gdn.cli.main import app
from portable_gdn.harness import recordings
from portable_gdn.harness.doctor import Call
from portable_gdn.harness.slot_file import load_slot, save_slot
from portable_gdn.harness.state_errors import of_call
from portable_gdn.harness.tensor_file import TensorWriter
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


# What it costs. -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["GDN", "GDN-2"])
def test_the_error_measured_is_that_of_a_pool_in_that_dtype(variant):
    """A bfloat16 pool, token by token, against a float32 one: what the doctor tells of the same operands."""
    n = 48
    x = serving.draw_tokens(variant, n, 7)
    outputs = {}
    for dtype in ("float32", "bfloat16"):
        setting = Setting(variant, "numpy", state_dtype=dtype, room=0)
        pool, found = setting.pool(), []
        for t in range(n):
            token = {name: a[t : t + 1] for name, a in x.items()}
            o, pool = setting.call(token, pool, pg.Batch([0, 1], [1], [t]))
            found.append(o[0])
        outputs[dtype] = np.stack(found).astype(np.float64)
    off = outputs["bfloat16"] - outputs["float32"]
    want = np.sqrt(np.square(off).sum((0, 2)) / np.square(outputs["float32"]).sum((0, 2)))
    heads = of_call(Call("a", {name: a[None] for name, a in x.items()}, False, False, None), n)
    assert len(heads) == len(want) == 2
    for head, error in zip(heads, want, strict=True):
        assert head.errors["bfloat16"] == pytest.approx(error, rel=0.02)
        assert head.errors["float32"] < 1e-6
        assert head.errors["int16"] < head.errors["bfloat16"] / 5
        assert head.errors["int8"] > head.errors["bfloat16"]
        assert head.decay == pytest.approx(np.mean(x["g"][:, head.head]), rel=1e-6)


def run(*arguments):
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


def test_doctor_tells_of_a_recording_by_head_with_a_picture(tmp_path):
    path = next(path for path in recordings.bundled() if path.stem == "qwen3_next")
    picture = tmp_path / "states.svg"
    done = run("--states", path, "--tokens", 150, "--within", 2e-3, "--picture", picture)
    assert done.exit_code == 0, done.output
    assert "a pool of bfloat16 states is" in done.output
    assert picture.name in done.output
    told = json.loads(run("--states", path, "--tokens", 150, "--within", 2e-3, "--json").output)
    assert 0.25 <= told["share"] < 1
    for head in told["heads"]:
        assert head["errors"][head["dtype"]] <= 2e-3
    root = xml.etree.ElementTree.fromstring(picture.read_text())
    dots = [e for e in root.iter() if e.tag.endswith("circle") and len(e)]
    assert len(dots) == 4 * len(told["heads"])


def test_doctor_tells_of_a_port_from_its_parameters(tmp_path):
    rates = np.array([1e-4, 0.01, 0.3], np.float32)
    with TensorWriter(tmp_path / "model.safetensors") as file:
        file.add("layers.1.attention.A_log", np.log(rates))
        file.add("layers.1.attention.dt_bias", np.full(3, np.log(np.e - 1), np.float32))  # softplus of it is 1
    told = json.loads(run("--states", tmp_path, "--tokens", 200, "--json").output)
    heads = told["heads"]
    assert [head["call"] for head in heads] == ["layers.1.attention"] * 3
    np.testing.assert_allclose([head["decay"] for head in heads], -rates, rtol=1e-5)
    np.testing.assert_allclose([head["memory"] for head in heads], 1 / rates, rtol=1e-5)
    for dtype in ("bfloat16", "int8"):  # an error lives as long as the state does
        errors = [head["errors"][dtype] for head in heads]
        assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--within", "0"], "within is 0.0; it must be a positive number"),
        (["--tokens", "0"], "--tokens is 0; it must be a positive number"),
        ([], "there are no operands q, k, v and g, and no parameters A_log"),
    ],
)
def test_doctor_of_states_says_what_is_wrong(tmp_path, arguments, sentence):
    with TensorWriter(tmp_path / "a.safetensors") as file:
        file.add("w", np.zeros(2, np.float32))
    done = run("--states", tmp_path / "a.safetensors", *arguments)
    assert done.exit_code != 0
    said = done.output if done.exception is None or isinstance(done.exception, SystemExit) else str(done.exception)
    assert sentence in " ".join(said.split())


def test_options_of_states_need_states(tmp_path):
    done = run(tmp_path / "a.safetensors", "--within", 1e-3)
    assert "give --states with them" in (str(done.exception) + done.output)
