"""What a finer decay can express: a small recall task, trained on this CPU with one decay a head, two, four, or K.

    python benchmarks/recall.py            # docs/tile-grouped.md has the table that this prints
    python benchmarks/recall.py --only symbols --sizes 16 --steps 200

A token writes a value under a key, tells to forget a class of keys, or asks for a key's value, which is nothing after
its class was forgotten. All keys lie in one head's state, so one class must go and the others stay. The model is one
layer of the rule with one head on the tokens' embeddings, and a linear read-out, either of symbols (one of 16, or none)
or of the value itself, a vector, which is zero where nothing is left. All seeds are trained side by side.
"""

from __future__ import annotations

import argparse
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import portable_gdn as pg

T, LONGER, ROWS, WIDTH, VALUES = 64, 8, 32, 64, 16
WRITE, FORGET, ASK = range(3)
RATE, WARM = 5e-3, 50
Array = Any


class Task(NamedTuple):
    """So many keys in so many classes; whether the answer is a vector."""

    vectors: bool
    classes: int
    keys: int = 8


TASKS = {"symbols": Task(False, 2), "vectors": Task(True, 2), "vectors, 4 classes": Task(True, 4)}


class Tokens(NamedTuple):
    """int32 [rows, T] each; answer is a value, VALUES for none, or -1 where nothing is asked."""

    kind: Array
    key: Array  # of a token that forgets: its class
    value: Array
    answer: Array


def tokens(task: Task, rng: np.random.Generator, rows: int, length: int = T) -> Tokens:
    """Random rows: half of the tokens write, a twelfth forget, the rest ask for a key that was written before."""
    kind, key, value = (np.zeros((rows, length), np.int32) for _ in range(3))
    answer = np.full((rows, length), -1, np.int32)
    held = np.full((rows, task.keys), -1, np.int32)  # -1: never written
    row = np.arange(rows)
    for t in range(length):
        draw, written = rng.random(rows), held >= 0
        forget, ask = (chosen & written.any(1) for chosen in (draw < 1 / 12, draw >= 7 / 12))
        write = ~forget & ~ask
        group = rng.integers(task.classes, size=rows)
        known = np.where(written, rng.random(held.shape), -1.0).argmax(1)
        kind[:, t] = np.where(write, WRITE, np.where(forget, FORGET, ASK))
        key[:, t] = np.where(write, rng.integers(task.keys, size=rows), np.where(forget, group, known))
        value[:, t] = np.where(write, rng.integers(VALUES, size=rows), 0)
        answer[ask, t] = held[row, key[:, t]][ask]
        held[row[write], key[write, t]] = value[write, t]
        held[forget[:, None] & (np.arange(task.keys) % task.classes == group[:, None]) & written] = VALUES
    return Tokens(kind, key, value, answer)


def vectors(size: int) -> np.ndarray:
    """What is to come back for each value, of length about 1, and for none. [VALUES + 1, size]."""
    rows = np.random.default_rng(7).standard_normal((VALUES + 1, size)) / np.sqrt(size)
    rows[VALUES] = 0
    return rows.astype(np.float32)


def initial(task: Task, rng: np.random.Generator, K: int, n: int) -> dict[str, Array]:
    """Parameters; n: decays of the head."""
    normal = lambda *s: rng.standard_normal(s).astype(np.float32) * s[0] ** -0.5  # noqa: E731
    out = K if task.vectors else VALUES + 1
    return {
        "kind": normal(3, WIDTH), "key": normal(task.keys, WIDTH), "value": normal(VALUES, WIDTH),
        "class": normal(task.classes, WIDTH), "q": normal(WIDTH, K), "k": normal(WIDTH, K), "v": normal(WIDTH, K),
        "g": normal(WIDTH, n), "beta": normal(WIDTH, 1), "out": normal(K, out), "bias": np.zeros(out, np.float32),
        "A_log": np.zeros(1, np.float32), "dt_bias": np.full((1, n), -4, np.float32),
    }  # fmt: skip


def answers(p: dict[str, Array], x: Tokens) -> Array:
    """The model: logits [rows, T, VALUES + 1], or vectors [rows, T, K]."""
    kind = x.kind[..., None]
    classes = p["class"].shape[0]
    e = p["kind"][x.kind] + jnp.where(kind == FORGET, p["class"][x.key % classes], p["key"][x.key])
    e += jnp.where(kind == WRITE, p["value"][x.value], 0.0)
    head = lambda name: (e @ p[name])[:, :, None]  # noqa: E731
    o, _ = pg.gated_delta_rule(
        head("q"), head("k"), head("v"), head("g"),
        beta=jax.nn.sigmoid(head("beta")[..., 0]), gate=pg.SoftplusGate(p["A_log"], p["dt_bias"]), qk_l2norm=True,
        scale=1.0, chunk_size=16, backend="xla",
    )  # fmt: skip
    return o[:, :, 0] @ p["out"] + p["bias"]


def errors(task: Task, found: Array, answer: Array) -> Array:
    """Of each answer: whether it is wrong, or the square of the distance from what it should be. [rows, T]."""
    if not task.vectors:
        return (found.argmax(-1) != answer) * 1.0
    return ((found - jnp.asarray(vectors(found.shape[-1]))[answer]) ** 2).sum(-1)


def loss(task: Task, p: dict[str, Array], x: Tokens) -> Array:
    """Mean of the answers' cross entropy, or of their squared distance."""
    found, answer = answers(p, x), jnp.maximum(x.answer, 0)
    if task.vectors:
        each = errors(task, found, answer)
    else:
        each = -jnp.take_along_axis(jax.nn.log_softmax(found), answer[..., None], -1)[..., 0]
    return (each * (x.answer >= 0)).sum() / (x.answer >= 0).sum()


def train(task: Task, p: dict[str, Array], batches: Tokens) -> dict[str, Array]:
    """The parameters after a step of Adam for each batch, [steps, rows, T]."""
    steps = batches.kind.shape[0]

    def step(state: Any, item: tuple[Tokens, Array]) -> tuple[Any, None]:
        (p, m, s, n), (x, rate) = state, item
        d, n = jax.grad(loss, argnums=1)(task, p, x), n + 1
        m = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, m, d)
        s = jax.tree.map(lambda a, b: 0.98 * a + 0.02 * b * b, s, d)
        move = lambda a, b, c: a - rate * (b / (1 - 0.9**n)) / (jnp.sqrt(c / (1 - 0.98**n)) + 1e-8)  # noqa: E731
        return (jax.tree.map(move, p, m, s), m, s, n), None

    zeros, i = jax.tree.map(jnp.zeros_like, p), jnp.arange(steps)
    rates = RATE * jnp.minimum(1.0, (i + 1) / WARM) * (1 - i / steps)
    return jax.lax.scan(step, (p, zeros, zeros, jnp.zeros(())), (batches, rates))[0][0]


def stacked(trees: list[Any]) -> Any:
    """One tree of arrays with a leading axis."""
    return jax.tree.map(lambda *a: jnp.asarray(np.stack(a)), *trees)


def measure(task: Task, K: int, n: int, steps: int, seeds: int) -> list[np.ndarray]:
    """Errors [seeds] on rows not trained on, as long as those trained on and longer: the mean of what they are where a
    value is left and where nothing is."""
    rngs = [np.random.default_rng((seed, K)) for seed in range(seeds)]
    p = stacked([initial(task, rng, K, n) for rng in rngs])
    rows = stacked([tokens(task, rng, steps * ROWS) for rng in rngs])
    batches = jax.tree.map(lambda a: jnp.reshape(a, (seeds, steps, ROWS, T)), rows)
    p = jax.jit(jax.vmap(lambda p, x: train(task, p, x)))(p, batches)
    found = []
    for length in (T, LONGER * T):
        x = tokens(task, np.random.default_rng(99), 512 * T // length, length)
        each = jax.vmap(lambda p, x=x: errors(task, answers(p, x), x.answer))
        wrong = np.asarray(jax.jit(each)(p))
        value, none = (x.answer >= 0) & (x.answer < VALUES), x.answer == VALUES
        found.append((wrong[:, value].mean(1) + wrong[:, none].mean(1)) / 2)
    return found


def main() -> None:
    """Train all and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 32], help="K = V")
    parser.add_argument("--decays", type=int, nargs="+", default=[1, 2, 4, 0], help="a head; 0: one a channel")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="tasks whose name contains this")
    options = parser.parse_args()
    print(f"| answers | K = V | decays per head | error, %, at {T} tokens | at {LONGER * T} tokens | s |")
    print("|---|---|---|---|---|---|")
    for name, task in TASKS.items():
        for K in options.sizes[: None if task.vectors else 1] if options.only in name else []:
            for n in options.decays:
                begin = time.perf_counter()
                found = measure(task, K, n or K, options.steps, options.seeds)
                cells = [", ".join(f"{100 * error:.1f}" for error in each) for each in found]
                seconds = time.perf_counter() - begin
                print(f"| {name} | {K} | {n or K} | {' | '.join(cells)} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
