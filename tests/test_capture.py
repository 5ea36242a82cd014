"""Recordings of real layers: the command that makes them makes these very ones."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from types import ModuleType

import numpy as np
import pytest

from portable_gdn.harness import recordings, tensor_file
from portable_gdn.harness.capture import MODELS, _key_heads, capture
from portable_gdn.harness.tensor_file import TensorFile, TensorWriter
from portable_gdn.spec.errors import GdnError


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_capturing_again_gives_the_committed_recordings(tmp_path):
    command = [sys.executable, "-c", "from portable_gdn.cli.main import main; main()", "capture", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for path in recordings.bundled():
        old, new = recordings.load(path), recordings.load(tmp_path / path.name)
        assert set(old.arrays) == set(new.arrays)
        assert old.metadata["text_sha256"] == new.metadata["text_sha256"]
        for name, a in old.arrays.items():  # other versions and machines sum in another order
            assert np.abs(new.arrays[name] - a).max() <= 1e-4 * np.abs(a).max(), (path.name, name)


def test_what_cannot_be_captured_is_said(tmp_path, monkeypatch):
    with pytest.raises(GdnError, match="model is 'gpt2'; it must be one of qwen3_next"):
        capture("gpt2", tmp_path)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "fla", ModuleType("fla"))
        with pytest.raises(GdnError, match=r"fla is already imported, .* must run in a fresh process"):
            capture("qwen3_next", tmp_path)
    monkeypatch.setitem(sys.modules, "fla", None)  # another test may have loaded it
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(GdnError, match="needs torch and transformers; torch is missing"):
        capture("qwen3_next", tmp_path)
    assert sys.modules["fla"] is None  # as before
    assert list(tmp_path.iterdir()) == []


def test_heads_that_were_repeated_are_told_from_others():
    x = np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4)
    kept, repeated = _key_heads(np.repeat(x, 2, axis=2), 3)
    assert repeated
    np.testing.assert_array_equal(kept, x)
    assert _key_heads(x, 3) == (x, False)
    for tiled in (np.tile(x, (1, 1, 2, 1)), np.repeat(x, 2, axis=2)[:, :, :5]):
        with pytest.raises(GdnError, match="heads that do not repeat 3 key heads each in turn"):
            _key_heads(tiled, 3)


def test_every_model_has_a_recording():
    assert {path.stem for path in recordings.bundled()} == set(MODELS)


def test_a_recording_that_is_cut_short_or_changed_is_refused(tmp_path):
    whole = recordings.bundled()[0].read_bytes()
    for name, data in {
        "cut": whole[: len(whole) // 2],
        "empty": b"",
        "header": whole[:100],
        "other": b"not a safetensors file at all, but longer than eight bytes",
        "format": whole.replace(b"portable-gdn-activations", b"something-else-entirely!"),
    }.items():
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(data)
        with pytest.raises(GdnError, match=name):
            recordings.load(path)
    with pytest.raises(GdnError, match="missing"):
        recordings.load(tmp_path / "missing.safetensors")


# (tensors as they are changed, metadata as they are changed, words of the sentence)
UNSOUND = (
    ({}, {"version": "2"}, "metadata version is '2'; it must be '1'"),
    ({}, {"seed": None}, "the metadata lacks seed"),
    ({}, {"variant": "gla"}, "metadata variant is 'gla'"),
    ({}, {"qk_l2norm": "True"}, "metadata qk_l2norm is 'True'"),
    ({}, {"scale": "inf"}, "metadata scale is 'inf'; it must be a positive number"),
    ({}, {"tokens": "many"}, "metadata tokens is 'many'; it must be a positive number"),
    ({}, {"tokens": "3"}, "q has 150 tokens; the metadata says 3"),
    ({"step_beta": lambda a: None}, {}, "tensor step_beta is missing"),
    ({"k": lambda a: a[0]}, {}, r"tensor k has shape \(150, .*; it must be \[1 T H K\]"),
    ({"o": lambda a: a[:, 1:]}, {}, r"tensor o has shape \(1, 149, .*; it must be \[1 T HV V\] ="),
    ({"v": lambda a: a * np.float32("nan")}, {}, "tensor v has values that are not finite"),
    ({"g": lambda a: -a}, {}, "tensor g has positive values"),
    ({"q": lambda a: a.astype(np.float16)}, {}, "tensor q has dtype float16; it must be float32"),
    ({name: lambda a: a[:, :, :0] for name in ("q", "k")}, {}, "an axis of tensor q or v is empty"),
    ({name: lambda a: np.repeat(a, 5, 2) for name in ("q", "k")}, {}, "v has 4 heads; it must be a multiple of the 10"),
    ({f"step_{name}": lambda a: a[:, :, :1] for name in "qk"}, {}, "H is 2 in the first call and 1 in step_"),
)


@pytest.mark.parametrize(("tensors", "metadata", "words"), UNSOUND, ids=[case[-1][:30] for case in UNSOUND])
def test_a_recording_whose_parts_do_not_fit_is_refused(tmp_path, tensors, metadata, words):
    source = TensorFile(next(path for path in recordings.bundled() if path.stem == "qwen3_next"))
    path = tmp_path / "x.safetensors"
    with TensorWriter(path) as out:
        out.metadata = {name: said for name, said in {**source.metadata, **metadata}.items() if said is not None}
        for name in source.shapes:
            changed = tensors.get(name, lambda a: a)(source.read(name))
            if changed is not None:
                out.add(name, changed)
    with pytest.raises(GdnError, match=words):
        recordings.load(path)


def header(text):
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (header(b"{nonsense"), "the safetensors header is not valid"),
        (header(b'{"a": {"dtype": "F32"}}'), "the safetensors header is not valid"),
        (header(b'{"a": {"dtype": "F8", "shape": [0], "data_offsets": [0, 0]}}'), "tensor a has dtype F8"),
        (header(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'), "takes bytes 0 to 4 of 0"),
    ],
    ids=["no JSON", "no shape", "dtype", "beyond the end"],
)
def test_a_header_that_is_wrong_is_refused(tmp_path, data, words):
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(GdnError, match=words):
        TensorFile(path)


def test_a_writer_that_is_stopped_at_the_last_moment_leaves_the_old_file(tmp_path, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    path = tmp_path / "x.safetensors"
    path.write_bytes(b"old")
    monkeypatch.setattr(tensor_file.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt), TensorWriter(path) as out:
        out.add("a", np.zeros(3, np.float32))
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"old"
