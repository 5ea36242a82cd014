"""What all commands share: brackets stay, names are whole, progress is seen, an interruption ends in one sentence."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from rich.table import Table
from typer.testing import CliRunner

from portable_gdn.cli import interruption, output, platforms
from portable_gdn.cli.main import app
from portable_gdn.harness.tensor_file import TensorWriter
from portable_gdn.spec.errors import GdnError

COMMANDS = (
    "info", "verify", "record", "compare", "bisect", "check", "handover", "doctor", "capture", "port", "inspect",
    "generate", "tpu-report", "gpu-report",
)  # fmt: skip


def child(*arguments, code="", **environment):
    """The command in a process of its own, after some lines of Python."""
    lines = f"import sys; sys.argv = {['portable-gdn', *arguments]!r}\n{code}\n"
    lines += "from portable_gdn.cli.main import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", lines], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, **environment},
    )  # fmt: skip


FOREIGN = [
    "`pip install 'portable-gdn[gpu]'` brings it",
    "states [V, K] of [B, T, HV]",
    "/tmp/[/]/[bold]/[red]x[/red].safetensors",
    "[link=file:///x]a[/link] :warning: [/]",
    r"\[escaped] and \\[more]",
    "layers.[0-3].mixer[green",
]


@pytest.mark.parametrize("text", FOREIGN)
def test_brackets_of_others_are_text_in_lines_and_in_tables(text, capsys):
    table = Table("name", title=text)
    table.add_row(text)
    output.say(text)
    output.say_verdict(True, text)
    output.console.print(f"[green]holds[/]: {text}", soft_wrap=True)
    output.show(table)
    found = capsys.readouterr().out
    wanted = text.replace(r"\[", "[") if text.startswith("\\") else text
    assert found.splitlines()[:2] == [text, f"holds: {text}"]
    assert found.splitlines()[2] == f"holds: {wanted}" or text.startswith("\\")
    assert found.count(text) >= (2 if text.startswith("\\") else 5)


def test_extras_are_named_where_something_is_missing():
    blocked = "sys.modules.update(dict.fromkeys(('torch', 'triton', 'fla')))"
    done = child("info", code=blocked)
    said, _ = done.communicate()
    assert re.search(r"portable-gdn\[(torch|cpu|gpu)\]", said)
    done = child("verify", "--case", "one token", "-b", "numpy", "-b", "torch", code=blocked)
    assert "portable-gdn[" in done.communicate()[1]


def test_info_says_once_what_would_run():
    done = child("info", "--json")
    facts = json.loads(done.communicate()[0])
    assert facts["sentence"].startswith("Here a call with numpy arrays on cpu runs on numpy")
    done = child("info")
    said, errors = done.communicate()
    assert facts["sentence"] in said
    assert "and these are" not in said
    assert errors == ""


def test_names_stay_whole_where_there_is_no_terminal(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(output.console, "_width", None)  # a worker of pytest-xdist has COLUMNS when it starts
    names = ["layers.*.mixer.q_conv1d.kernel" + "x" * n for n in (0, 90, 300)]
    table = Table("tensor", "case")
    for name in names:
        table.add_row(name, "another column " * 20)
        output.say(name + " " + name)
    output.console.print(table)
    found = capsys.readouterr().out
    assert all(found.count(name) >= 3 for name in names)
    monkeypatch.setenv("COLUMNS", "80")
    output.show(table)
    found = capsys.readouterr().out
    assert all(name in found for name in names)


def test_progress_is_told_now_and_then_where_there_is_no_terminal(capsys):
    with output.plain_progress("record", every=0.1) as update:
        update("packed [1]", 3, 8)
        time.sleep(0.35)
        update("KDA", 4, 8)
        time.sleep(0.15)
    lines = capsys.readouterr().err.splitlines()
    assert 3 <= len(lines) <= 6
    assert re.fullmatch(r"record: 3 of 8 done after \d+ s: packed \[1\]", lines[0])
    assert "4 of 8 done" in lines[-1]


@pytest.mark.parametrize(
    "arguments",
    [
        ("verify", "-b", "numpy", "--case", "a chunk"),
        ("record", "-b", "numpy", "--suite", "quick", "-o", "{}/x.safetensors"),
        ("check", "-b", "numpy", "--cases", "60"),
        ("bisect", "-b", "numpy", "-b", "numpy", "--case", "KDA"),
        ("handover", "-b", "numpy", "-b", "numpy"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_commands_tell_their_progress(arguments, tmp_path, monkeypatch):
    monkeypatch.setattr(output, "EVERY", 0.05)
    found = CliRunner().invoke(app, [a.format(tmp_path) for a in arguments])
    assert re.search(rf"{arguments[0]}: \d+ of \d+ done after \d+ s", found.stderr)
    assert "done after" not in found.stdout


@pytest.mark.parametrize("title", ["port", "back"])
def test_a_port_tells_how_many_bytes_are_done(title, monkeypatch, capsys):
    monkeypatch.setattr(output, "EVERY", 0.05)
    with output.bytes_bar(title) as update:
        update("model-00001-of-00002.safetensors", 3 << 20, 8 << 20)
        time.sleep(0.3)
    first, *_ = capsys.readouterr().err.splitlines()
    assert re.fullmatch(rf"{title}: 3.0 MiB of 8.0 MiB done after \d+ s: model-00001-of-00002.safetensors", first)


@pytest.mark.parametrize(
    ("vendors", "given", "then"),
    [(["0x8086"], {}, "cpu"), (["0x8086", "0x1ae0"], {}, None), (["0x8086"], {"JAX_PLATFORMS": "tpu"}, "tpu")],
)
def test_libtpu_is_not_asked_where_there_is_no_tpu(vendors, given, then, tmp_path, monkeypatch):
    for i, vendor in enumerate(vendors):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / "vendor").write_text(f"{vendor}\n")
    monkeypatch.setattr(platforms.importlib.util, "find_spec", lambda name: object() if name == "libtpu" else None)
    environment = dict(given)
    platforms.settle(environment, tmp_path)
    assert environment.get("JAX_PLATFORMS") == then


def test_help_and_version():
    for name in COMMANDS:
        found = CliRunner().invoke(app, [name, "-h"])
        assert found.exit_code == 0
        if name not in ("port", "inspect", "tpu-report", "gpu-report"):
            assert not re.search(r"list\[|\.\.\.\.", found.stdout), found.stdout
    assert CliRunner().invoke(app, ["--version"]).stdout.startswith("portable-gdn ")
    assert "--install-completion" in CliRunner().invoke(app, ["-h"]).stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("verify", "--ful"), "--full"), (("record", "--bakend", "x"), "--backend"), (("verfy",), "'verify'")],
)
def test_options_and_commands_that_are_misspelt_get_a_guess(arguments, words):
    found = CliRunner().invoke(app, list(arguments))
    assert found.exit_code == 2
    assert words in found.stderr


# full disks


def test_a_full_disk_is_named_with_what_is_needed(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "x.safetensors"

    def write(when):
        with monkeypatch.context() as patch, TensorWriter(path) as file:
            if when == "adding":
                file._data.close()
                file._data = type("Full", (), {"tell": lambda _: 0, "write": full, "close": lambda _: None})()
            else:
                patch.setattr("portable_gdn.harness.tensor_file.shutil.copyfileobj", full)
            file.add("o", np.zeros(2**20, np.float32))

    for when in ("adding", "finishing"):
        with pytest.raises(GdnError, match=r"x.safetensors: the file cannot be written \(No .* more than 4.0 MiB"):
            write(when)
    with monkeypatch.context() as patch:
        patch.setattr(output.os, "fsync", full)
        with pytest.raises(GdnError, match=r"report.json: the file cannot be written .* MiB are free"):
            output.write_whole(tmp_path / "report.json", "{}")
    assert list(tmp_path.iterdir()) == []


# interruptions

SENTENCE = "portable-gdn: interrupted; nothing was concluded, and nothing was written.\n"


def interrupted(process, after):
    time.sleep(after)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)
    return process.returncode, out, err


SLOW_CASE = """
import portable_gdn.harness.compute as compute, time
before = compute.one
compute.one = lambda *a: time.sleep(60)
import portable_gdn.harness.verify
portable_gdn.harness.verify.one = compute.one
print("ready", flush=True)
"""


@pytest.mark.parametrize("arguments", [("verify", "-b", "numpy"), ("record", "-b", "numpy", "-o", "{}/x.safetensors")])
def test_an_interruption_is_one_true_sentence(arguments, tmp_path):
    process = child(*(a.format(tmp_path) for a in arguments), code=SLOW_CASE)
    process.stdout.readline()
    code, _, err = interrupted(process, 1.5)
    assert code == 130
    assert err == SENTENCE
    assert list(tmp_path.iterdir()) == []


def test_check_says_what_it_found_before_an_interruption_and_no_more():
    code = "import portable_gdn.harness.fuzz as fuzz, time\nbefore = fuzz.attempt\n"
    code += "fuzz.attempt = lambda *a: (before(*a), time.sleep(0.2))\nprint('ready', flush=True)"
    process = child("check", "-b", "numpy", "--cases", "1000", code=code)
    process.stdout.readline()
    code, out, err = interrupted(process, 4)
    assert code == 130
    assert re.search(r"holds: \d+ cases? on numpy .*; interrupted", out)
    assert "not drawn, and so not checked: " in out
    assert "interrupted" not in err


@pytest.mark.parametrize("library", ["numpy", "rich.console", "portable_gdn.harness.cases"])
def test_an_interruption_while_modules_are_imported(library):
    """Each import takes long here, as on a cold disk."""
    code = f"""
import builtins, time
before = builtins.__import__
def slow(name, globals=None, locals=None, fromlist=(), level=0):
    if globals is not None and str(globals.get('__package__', '')).startswith('portable_gdn.cli') and {library!r}:
        if sys.modules.get('portable_gdn.cli.main') and name not in ('sys', 'typing'):
            print('importing', flush=True)
            time.sleep(30)
    return before(name, globals, locals, fromlist, level)
import portable_gdn.cli.main
builtins.__import__ = slow
"""
    process = child("verify", code=code)
    assert process.stdout.readline() == "importing\n"
    code, _, err = interrupted(process, 0.2)
    assert code == 130
    assert err == SENTENCE


@pytest.mark.parametrize("where", ["a callback of the garbage collector", "a destructor", "a piece of work"])
def test_an_interruption_that_a_library_swallows_is_not_lost(where):
    """What is raised there is dropped, or taken for a failure of one case."""
    swallow = {
        "a callback of the garbage collector": "gc.callbacks.append(callback); gc.collect()",
        "a destructor": "Slow()",
        "a piece of work": "work()",
    }[where]
    code = f"""
import gc, time
import portable_gdn.harness.verify as verify
class Slow:
    def __del__(self):
        time.sleep(2)
def work():
    try:
        time.sleep(2)
    except BaseException:
        pass
def callback(*a):
    gc.callbacks.clear()
    time.sleep(2)
before = verify.one
def one(*a):
    print('at work', flush=True)
    {swallow}
    return before(*a)
verify.one = one
"""
    process = child("verify", "-b", "numpy", code=code)
    assert process.stdout.readline() == "at work\n"
    code, out, err = interrupted(process, 0.5)
    assert code == 130
    assert err == SENTENCE
    assert out.count("at work") <= 2


def test_what_is_left_is_said_by_the_command(monkeypatch, capsys):
    monkeypatch.setattr(interruption, "_leaves", "")
    before = signal.getsignal(signal.SIGINT)
    try:
        interruption.leaves("two files are whole")
        interruption.over()
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "portable-gdn: interrupted; two files are whole.\n"


def test_every_command_shows_an_example_that_it_takes():
    import shlex

    import typer

    from portable_gdn.cli.app import COMMANDS, app

    commands = typer.main.get_command(app).commands
    assert set(commands) == set(COMMANDS)
    for name, command in commands.items():
        context = typer.Context(command, info_name=name)
        assert f"Example: portable-gdn {name}" in command.get_help(context), name
        command.make_parser(context).parse_args(shlex.split(COMMANDS[name][1]))
