"""Train one Gated DeltaNet layer to recall: a token repeats what was bound to its key earlier in the sequence.

python examples/train_layer.py              # a minute on a CPU
python examples/train_layer.py --steps 5    # a look
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from rich.progress import track

from portable_gdn.layers import GatedDeltaNet

KEYS, VALUES, PAIRS = 16, 16, 12


class Recall(nnx.Module):
    """An embedding, one layer of the mixer with a residual connection, and a head over the values."""

    def __init__(self, rngs: nnx.Rngs, hidden: int = 64) -> None:
        self.embed = nnx.Embed(KEYS + VALUES, hidden, rngs=rngs)
        self.mixer = GatedDeltaNet(hidden, num_heads=2, key_dim=32, rngs=rngs)
        self.head = nnx.Linear(hidden, VALUES, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        mixed, _ = self.mixer(x)  # and the state behind the last token
        return self.head(x + mixed)


def batch(key: jax.Array, size: int = 32) -> tuple[jax.Array, jax.Array]:
    """Tokens [size, 2 PAIRS + 1], pairs of a key and its value and then one of the keys; and the value asked for."""
    keys, values, asked = jax.random.split(key, 3)
    k = jax.vmap(lambda key: jax.random.permutation(key, KEYS)[:PAIRS])(jax.random.split(keys, size))
    v = jax.random.randint(values, (size, PAIRS), 0, VALUES)
    which = jax.random.randint(asked, (size, 1), 0, PAIRS)
    pairs = jnp.stack([k, KEYS + v], -1).reshape(size, -1)
    tokens = jnp.concatenate([pairs, jnp.take_along_axis(k, which, 1)], 1)
    return tokens, jnp.take_along_axis(v, which, 1)[:, 0]


@nnx.jit
def train_step(model: Recall, optimizer: nnx.Optimizer, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One step of AdamW; the loss, and how many of the batch were right."""
    tokens, wanted = batch(key)

    def loss(model: Recall) -> tuple[jax.Array, jax.Array]:
        logits = model(tokens)[:, -1]
        right = jnp.mean(jnp.argmax(logits, -1) == wanted)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, wanted)), right

    (value, right), grads = nnx.value_and_grad(loss, has_aux=True)(model)
    optimizer.update(model, grads)
    return value, right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    steps = parser.parse_args().steps
    model = Recall(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
    for i in track(range(steps), "training"):
        value, right = train_step(model, optimizer, jax.random.key(i))
        if i % 50 == 0 or i == steps - 1:
            print(f"step {i:4}: loss {value:.3f}, {right:.0%} right")


if __name__ == "__main__":
    main()
