"""Stream generated text: an iterator over tokens, each from one compiled step."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..spec.errors import suggests_keywords
from .decoder import Decoder
from .request import Request, requested
from .stepping import begin, follow, prefill

__all__ = ["Stream", "stream"]

Array = Any


class Stream:
    """An iterator over new tokens, [B] int32 each.

    A row that has stopped repeats its stop token. The iterator ends when every row has stopped, or after
    ``max_new_tokens``.
    """

    compiling: float
    """Seconds that compiling took until now."""
    reading: float
    """Seconds from the prompt to its first token, without compiling."""
    writing: float
    """Seconds that the tokens after the first took until now, without compiling and without what was done between."""
    written: int
    """Tokens a row until now."""

    def __init__(self, model: Decoder, asked: Request) -> None:
        self.compiling, self.reading, self.writing, self.written = 0.0, 0.0, 0.0, 0
        self._asked = asked
        self._graph, self._weights = nnx.split(model)
        self._tokens = self._run()

    def __iter__(self) -> Iterator[np.ndarray]:
        return self

    def __next__(self) -> np.ndarray:
        return next(self._tokens)

    def _run(self) -> Iterator[np.ndarray]:
        asked, chosen = self._asked, (self._asked.greedy, self._asked.top_k)
        of_prompt = (self._graph, self._weights, asked.ids, asked.mask, asked.room)
        self._compiled(prefill, of_prompt)
        started = time.perf_counter()
        logits, cache = prefill(*of_prompt)
        jax.block_until_ready(logits)
        self.reading = time.perf_counter() - started
        self._compiled(begin, (logits, asked.drawing, *chosen))
        started = time.perf_counter()
        token, done = begin(logits, asked.drawing, *chosen)
        now, over = np.asarray(token), bool(np.all(done))
        self.reading += time.perf_counter() - started
        self.written = 1
        yield now
        for n in range(1, asked.count):
            if over:
                return
            step = (self._graph, self._weights, (jnp.int32(n), token, done), cache, asked.drawing, *chosen)
            if n == 1:
                self._compiled(follow, step)
            started = time.perf_counter()
            token, done, cache = follow(*step)
            now, over = np.asarray(token), bool(np.all(done))
            self.writing += time.perf_counter() - started
            self.written = n + 1
            yield now

    def _compiled(self, function: Any, arguments: tuple[Any, ...]) -> None:
        """Compile for a call that follows, which finds the program, so that calls are timed without it."""
        started = time.perf_counter()
        function.lower(*arguments).compile()
        self.compiling += time.perf_counter() - started


@suggests_keywords
def stream(
    model: Decoder,
    ids: Array,
    max_new_tokens: int,
    *,
    mask: Array | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: int | Iterable[int] | None = None,
    rng: int | Array | None = None,
    cache_length: int | None = None,
) -> Stream:
    """Continue prompts token by token, with the arguments of ``generate`` and the same tokens.

        for tokens in stream(model, ids, 64):  # [B]
            print(tokens)

    Nothing is computed before the first token is requested; each token after it is one call of a compiled step.

    Raises:
        GdnError: An argument is wrong, as in ``generate``.
    """
    return Stream(
        model, requested(model, ids, max_new_tokens, mask, (temperature, top_k, top_p, rng), stop, cache_length)
    )
