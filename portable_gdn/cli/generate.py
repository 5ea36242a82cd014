"""``portable-gdn generate``: generate text with a ported checkpoint."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..spec.errors import GdnError, bad
from . import interruption
from .output import bytes_bar, messages

if TYPE_CHECKING:
    from ..models import Stream

__all__ = ["generate"]


def generate(
    port: Annotated[Path, typer.Argument(help="The folder that `portable-gdn port SOURCE PORT --to jax` wrote.")],
    prompt: Annotated[
        str | None, typer.Option(help="The text to continue, encoded with the port's tokenizer.json.")
    ] = None,
    ids: Annotated[
        str | None, typer.Option(help="Token ids to continue instead of a prompt; ids are printed too.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Largest number of tokens to generate.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token; 1 samples from the model.")] = 0,
    top_k: Annotated[int | None, typer.Option(help="Sample from this number of most likely tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the most likely tokens whose probabilities add up to this.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed; equal seeds sample equal tokens.")] = 0,
    dtype: Annotated[
        str | None,
        typer.Option(help="Dtype of the computation: bfloat16, float32 or float16; by default that of the weights."),
    ] = None,
    backend: Annotated[
        str | None, typer.Option("--backend", "-b", help="Backend of the linear-attention layers.")
    ] = None,
    cache_length: Annotated[
        int | None,
        typer.Option(
            help="Number of tokens that the cache can hold, including the prompt; as many as needed by default."
        ),
    ] = None,
) -> None:
    """Continue a prompt with the whole model of a port, token by token.

    Generation ends at an end-of-text token of generation_config.json or config.json. New text goes to standard output,
    everything else to standard error. No chat template is applied.
    """
    if (prompt is None) == (ids is None):
        raise bad("--prompt", "given together with --ids" if ids else "not given", "be given, or --ids instead of it")
    if dtype not in (None, "bfloat16", "float32", "float16"):
        raise bad("--dtype", repr(dtype), "be bfloat16, float32 or float16")
    tokenizer: Any = None
    if prompt is not None:
        tokenizer = _tokenizer(port)
    tokens = _numbers(ids or "") if prompt is None else list(tokenizer.encode(prompt).ids)
    if not tokens:
        raise bad("--prompt" if ids is None else "--ids", "empty", "hold a token at least")
    if importlib.util.find_spec("flax") is None:
        raise GdnError("flax is not installed, in which whole models are written: `pip install 'portable-gdn[nnx]'`.")
    from ..models import end_tokens, load_model, stream

    interruption.leaves("what was written until then stands above")
    with bytes_bar("load") as update:
        model = load_model(port, dtype=dtype, backend=backend, progress=update)
    found = stream(
        model, [tokens], max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, rng=seed,
        stop=[token for token in end_tokens(port) if token < model.settings.vocabulary], cache_length=cache_length,
    )  # fmt: skip
    new = (int(token[0]) for token in found)
    for piece in _numbered(new) if tokenizer is None else _worded(new, tokenizer, tokens[-4:]):
        interruption.obey()
        print(piece, end="", flush=True)
    print(flush=True)
    messages.print(_figures(len(tokens), found), markup=False, soft_wrap=True)


def _numbers(text: str) -> list[int]:
    words = re.split(r"[\s,]+", text.strip("[]() \n\t"))
    for word in words:
        if word and not re.fullmatch(r"\d{1,9}", word):
            raise bad("--ids", f"with {word[:40]!r}", "be whole numbers between spaces or commas, such as '3 14 15'")
    return [int(word) for word in words if word]


def _tokenizer(port: Path) -> Any:
    """Return the port's tokenizer.

    Raises:
        GdnError: There is none, or it cannot be read.
    """
    file = port / "tokenizer.json"
    if port.is_dir() and not file.is_file():
        raise GdnError(f"{port} carries no tokenizer.json; give tokens with --ids in place of --prompt.")
    if not file.is_file():
        raise bad(str(port), "no folder", "be what `portable-gdn port` wrote")
    if importlib.util.find_spec("tokenizers") is None:
        raise GdnError(
            "tokenizers is not installed, by which --prompt becomes tokens: `pip install tokenizers`, or give tokens "
            "with --ids."
        )
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises nothing narrower
        raise GdnError(f"{file} cannot be read as a tokenizer: {str(error).splitlines()[0]}") from error


def _numbered(tokens: Iterator[int]) -> Iterator[str]:
    for number, token in enumerate(tokens):
        yield f"{' ' if number else ''}{token}"


def _worded(tokens: Iterator[int], tokenizer: Any, last: list[int]) -> Iterator[str]:
    """Yield the text of the tokens after ``last`` as it grows, holding back incomplete characters.

    Some tokenizers drop a space at the start of their input. New tokens are therefore decoded together with those of
    the last piece, whose text is removed again.
    """
    waiting: list[int] = []
    for token in tokens:
        waiting.append(token)
        before, both = tokenizer.decode(last), tokenizer.decode(last + waiting)
        if both.endswith("\ufffd") and len(waiting) < 8:
            continue
        yield both[len(before) :]
        last, waiting = waiting, []
    if waiting:
        yield tokenizer.decode(last + waiting)[len(tokenizer.decode(last)) :]


def _figures(prompt: int, found: Stream) -> str:
    parts = [f"prompt: {prompt} tokens, {_rate(prompt, found.reading)}"]
    if found.written > 1:
        parts.append(f"new: {found.written} tokens, {_rate(found.written - 1, found.writing)} after the first")
    return "; ".join([*parts, f"compiling: {found.compiling:.1f} s"])


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / max(seconds, 1e-9):.{0 if tokens > 10 * seconds else 1}f} a second"
