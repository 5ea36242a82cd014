"""Recordings of real layers: the command that makes them makes these very ones."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import numpy as np
import pytest

from portable_gdn.harness import recordings
from portable_gdn.harness.capture import MODELS
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
