"""Text from whole models: tokens as they come, and the command that prints them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time

import numpy as np
import pytest

pytest.importorskip("safetensors")
pytest.importorskip("jax")
pytest.importorskip("flax.nnx")

from checkpoints import checkpoint, facts, save
from conftest import slowness
from typer.testing import CliRunner
from whole import lively, prompts

from portable_gdn.checkpoint import port
from portable_gdn.cli.generate import _worded
from portable_gdn.cli.main import app
from portable_gdn.models import end_tokens, generate, load_model, stepping, stream

NAME = "qwen3_5_text"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A port with a tokenizer of single bytes, whose texts end with token 0."""
    tokenizers = pytest.importorskip("tokenizers")
    base = tmp_path_factory.mktemp("text")
    source = save(base / "src", lively(NAME), facts(NAME)["config"])
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    of_bytes = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    of_bytes.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    of_bytes.decoder = tokenizers.decoders.ByteLevel()
    of_bytes.save(str(source / "tokenizer.json"))
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 300]}))
    port(source, base / "out", "jax")
    return base / "out"


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)


def command(*words: object):
    return CliRunner().invoke(app, ["generate", *map(str, words)])


@pytest.mark.slow
def test_the_command_continues_a_prompt(folder, model):
    """Text in and text out, ids in and ids out, of the same tokens; what is no text is on standard error."""
    from tokenizers import Tokenizer

    told = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = told.encode("four score").ids
    assert end_tokens(folder) == (0, 300)
    want = np.asarray(generate(model, [tokens], 12, stop=0).tokens)[0].tolist()
    said = command(folder, "--prompt", "four score", "--max-new-tokens", 12)
    assert said.exit_code == 0, said.output
    assert said.stdout == told.decode(want) + "\n"
    assert re.search(
        r"prompt: 10 tokens, \S+ a second; new: 12 tokens, \S+ a second after the first; compiling", said.stderr
    )
    said = command(folder, "--ids", " ".join(map(str, tokens)), "--max-new-tokens", 12)
    assert said.stdout == " ".join(map(str, want)) + "\n"


def test_what_cannot_be_continued_gets_a_sentence(folder, tmp_path):
    from portable_gdn.spec.errors import GdnError

    bare = checkpoint(tmp_path / "bare", NAME)
    port(bare, tmp_path / "bare-jax", "jax")
    port(checkpoint(tmp_path / "ling", "bailing_hybrid"), tmp_path / "ling-jax", "jax")
    cases = [
        ((folder,), "--prompt is not given; it must be given, or --ids instead"),
        ((folder, "--prompt", "x", "--ids", "1"), "--prompt is given together with --ids"),
        ((folder, "--ids", "1 x 3"), "--ids is with 'x'; it must be whole numbers between spaces or commas"),
        ((folder, "--ids", ""), "--ids is empty; it must hold a token at least"),
        ((folder, "--ids", "1 256"), "ids is from 1 to 256; it must be from 0 to 255, the vocabulary's last"),
        (
            (folder, "--ids", "1 2 3", "--cache-length", 66),
            "cache_length is 66, and the prompt has 3 .* least 67",
        ),
        ((folder, "--ids", "1", "--dtype", "int8"), "--dtype is 'int8'; it must be bfloat16, float32 or float16"),
        ((folder, "--ids", "1", "--top-k", 3), "top_k is 3; it must be None where temperature is 0"),
        ((folder, "--ids", "1", "--backend", "pallsa"), "pallsa"),
        ((tmp_path / "bare-jax", "--prompt", "x"), "carries no tokenizer.json; give tokens with --ids"),
        ((tmp_path / "no", "--prompt", "x"), "no is no folder; it must be what `portable-gdn port` wrote"),
        ((bare, "--ids", "1"), "it must be what `portable-gdn port` wrote"),
        ((tmp_path / "ling-jax", "--ids", "1"), "the port is of Ling.*, of which no whole model is computed here"),
    ]
    for words, says in cases:
        said = command(*words)
        assert isinstance(said.exception, GdnError), (words, said.output, said.exception)
        assert re.search(says, str(said.exception)), (says, said.exception)
    assert "Example: portable-gdn generate" in command("--help").stdout


def test_characters_wait_until_they_are_whole():
    class Bytes:
        def decode(self, ids):
            return bytes(ids).decode(errors="replace").lstrip(" ")  # as decoders that drop a first space

    text = " né中 🙂 x"
    pieces = list(_worded(iter(text.encode()), Bytes(), list(b"was")))
    assert "".join(pieces) == text
    assert pieces[:4] == [" ", "n", "é", "中"]
    assert "".join(_worded(iter(b"ab\xe4"), Bytes(), [])) == "ab\ufffd"  # ends within a character


@pytest.mark.slow
def test_a_stream_is_what_generate_writes(model):
    ids, mask = prompts(length=11)
    for asked in ({}, {"temperature": 2.0, "rng": 3, "top_k": 40, "top_p": 0.9}):
        want = np.asarray(generate(model, ids, 8, mask=mask, **asked).tokens)
        found = stream(model, ids, 8, mask=mask, **asked)
        assert (np.stack(list(found), 1) == want).all()
        assert found.written == 8
        assert min(found.compiling, found.reading, found.writing) > 0
    stop = want[:, 2].tolist()
    first = max(min(row.index(s) for s in stop if s in row) for row in want.tolist())
    assert len(list(stream(model, ids, 8, mask=mask, stop=stop, **asked))) == first + 1


@pytest.mark.slow
def test_a_stream_compiles_one_step(model):
    before = stepping.follow._cache_size()
    ids, mask = prompts(length=13)
    list(stream(model, ids, 30, mask=mask, cache_length=77))
    list(stream(model, ids[:, 5:], 9, cache_length=77))
    assert stepping.follow._cache_size() == before + 1


@pytest.mark.slow
def test_the_first_token_comes_soon(folder):
    """From a cold start, in a process of its own."""
    started = time.perf_counter()
    words = [sys.executable, "-m", "portable_gdn.cli.main", "generate", str(folder), "--ids", "5 6 7"]
    with subprocess.Popen(
        [*words, "--max-new-tokens", "500"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=os.environ
    ) as child:
        assert child.stdout.read(1).isdigit()
        took = time.perf_counter() - started
        child.terminate()
    assert took < 20 * slowness()
