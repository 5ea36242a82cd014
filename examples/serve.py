"""Serve a tiny model: requests arrive, are preempted, fork and finish, and drafts are tried and mostly rejected.

    python examples/serve.py

Every request's logits are compared with those of one whole-sequence call over the tokens that it ended with.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.progress import Progress

import portable_gdn as pg
from portable_gdn.layers import GatedDeltaNet

WORDS, GOAL = 8, 40  # words of the language, tokens of a finished request
ROWS, TOKENS, SLOTS, DRAFTS = 6, 32, 9, 3


class Model(nnx.Module):
    """Two layers of the mixer between an embedding and a head."""

    def __init__(self, rngs: nnx.Rngs, hidden: int = 32) -> None:
        self.embed = nnx.Embed(WORDS, hidden, rngs=rngs)
        self.mixers = nnx.List([GatedDeltaNet(hidden, num_heads=2, key_dim=16, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(hidden, WORDS, rngs=rngs)

    def __call__(self, tokens: jax.Array, pools: list | None = None, batch: pg.Batch | None = None) -> tuple:
        """Logits of ragged tokens [T], with the states of their requests in pools; or of whole sequences [B, T]."""
        x, after = self.embed(tokens), []
        for mixer, pool in zip(self.mixers, pools or [None] * len(self.mixers), strict=True):
            y, pool = mixer(x) if pool is None else mixer.update(x, pool, batch)
            x, after = x + y, [*after, pool]
        return self.head(x), after


@dataclass
class Request:
    """tokens: known so far; computed: those that states have seen; accepted: of those that wait in the slot."""

    tokens: list[int]
    slot: int = 0
    computed: int = 0
    accepted: int = 0
    logits: list[np.ndarray] = field(default_factory=list)

    def take(self, row: list[int], logits: np.ndarray) -> None:
        """What the model says of a row: known tokens, and drafts behind them as long as they are what it says."""
        known = len(self.tokens) - self.computed
        self.accepted = min(len(row), known)
        if len(row) >= known:
            self.tokens.append(int(np.argmax(logits[known - 1])))
            while self.accepted < len(row) and row[self.accepted] == self.tokens[-1]:
                self.accepted += 1
                self.tokens.append(int(np.argmax(logits[self.accepted - 1])))
        self.logits += list(logits[: self.accepted])
        self.computed += self.accepted


def serve(model: Model, requests: int, rng: random.Random) -> float:
    """The largest difference of any request's logits from those of the whole sequence alone."""
    step, whole = nnx.jit(lambda m, *a: m(*a)), nnx.jit(lambda m, tokens: m(tokens)[0])
    pools = [mixer.init_pool(SLOTS, window=DRAFTS + 1) for mixer in model.mixers]
    waiting = [Request(rng.choices(range(WORDS), k=rng.randint(3, 20))) for _ in range(requests)]
    live, free, worst = [], list(range(1, SLOTS)), 0.0
    with Progress() as bar:
        task = bar.add_task("serving", total=requests)
        while waiting or live:
            rows, room, reads = [], TOKENS, {}
            if live and rng.random() < 0.05:  # preempted: its slot is anyone's, and it begins anew
                gone = live.pop(rng.randrange(len(live)))
                free.append(gone.slot)
                waiting.append(Request(gone.tokens))
            while waiting and free and len(live) < ROWS - 1 and rng.random() < 0.7:
                live.append(waiting.pop(0))
                live[-1].slot = free.pop(0)
            parent = rng.choice(live) if live and free and rng.random() < 0.1 else None
            if parent and len(live) < ROWS and parent.computed == len(parent.tokens) - 1:  # goes on with another word
                tokens = [*parent.tokens[:-1], rng.randrange(WORDS)]
                live.insert(0, Request(tokens, free.pop(0), parent.computed, parent.accepted, parent.logits[:]))
                reads[live[0].slot] = parent.slot  # its first row reads there, and so must have tokens
                bar.update(task, total=(requests := requests + 1))
            for r in live:
                row = r.tokens[r.computed : r.computed + room]
                row += rng.choices(range(WORDS), k=DRAFTS) if len(row) == 1 and room > DRAFTS else []
                rows.append(row)
                room -= len(row)
            fill = lambda a, n=ROWS: np.pad(np.asarray(a, np.int32), (0, n - len(a)))  # noqa: E731
            starts = np.pad(np.cumsum([0, *map(len, rows)]), (0, ROWS - len(rows)), mode="edge").astype(np.int32)
            columns = zip(*((r.slot, r.computed, r.accepted, reads.get(r.slot, r.slot)) for r in live), strict=True)
            if not live:
                continue
            tokens = jnp.asarray(fill([token for row in rows for token in row], TOKENS))
            logits, pools = step(model, tokens, pools, pg.Batch(starts, *map(fill, columns)))
            for r, row, end in zip(list(live), rows, np.cumsum([len(row) for row in rows]), strict=True):
                if row:
                    r.take(row, np.asarray(logits[end - len(row) : end]))
                if len(r.tokens) >= GOAL:
                    live.remove(r)
                    free.append(r.slot)
                    want = whole(model, jnp.asarray(fill(r.tokens, 2 * GOAL))[None])[0, : r.computed]
                    worst = max(worst, float(jnp.max(jnp.abs(want - np.stack(r.logits)))))
                    bar.advance(task)
    return worst


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=40)
    worst = serve(Model(nnx.Rngs(0)), parser.parse_args().requests, random.Random(0))
    print(f"logits differ from those of whole sequences by {worst:.1e} at most")
    assert worst < 1e-4
