"""Train one layer on many devices, then run one sequence that is split over all of them.

python examples/many_chips.py                      # eight devices that XLA makes of this CPU
python examples/many_chips.py --real --hidden 2048 --tokens 8192 --heads 16     # the accelerators of this machine
"""

from __future__ import annotations

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from rich.progress import track

import portable_gdn as pg
from portable_gdn.layers import GatedDeltaNet, partition_specs
from portable_gdn.parallel import call_sharding


def train(mesh: jax.sharding.Mesh, options: argparse.Namespace) -> list[float]:
    """The layer learns to say the token before last; returns the losses."""
    layer = GatedDeltaNet(
        options.hidden, num_heads=options.heads, key_dim=options.hidden // options.heads, rngs=nnx.Rngs(0),
        sharding=call_sharding(mesh),  # the call splits its rows over `data`, its heads over `tensor`
    )  # fmt: skip
    graph, weights = nnx.split(layer, nnx.Param)
    places = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), partition_specs(layer, mesh))
    weights = jax.device_put(weights, places)
    optimizer = optax.adamw(1e-2)
    moments = jax.jit(optimizer.init)(weights)
    rows = jax.NamedSharding(mesh, jax.P("data"))

    @jax.jit
    def step(weights: nnx.State, moments: optax.OptState, x: jax.Array) -> tuple[nnx.State, optax.OptState, jax.Array]:
        def loss(weights: nnx.State) -> jax.Array:
            y, _ = nnx.merge(graph, weights)(x)
            return jnp.mean((y[:, 2:] - x[:, :-2]) ** 2)

        value, gradients = jax.value_and_grad(loss)(weights)
        updates, moments = optimizer.update(gradients, moments, weights)
        return optax.apply_updates(weights, updates), moments, value

    losses = []
    for i in track(range(options.steps), f"training on {mesh.size}"):
        x = jax.random.normal(jax.random.key(i), (len(jax.devices()), options.tokens, options.hidden))
        weights, moments, value = step(weights, moments, jax.device_put(x, rows))
        losses.append(float(value))
    kernel = weights.q_proj.kernel[...]
    print(f"{mesh.size} devices: loss {losses[0]:.4f} to {losses[-1]:.4f}; q_proj {kernel.shape}, "
          f"{kernel.addressable_shards[0].data.shape} per device")  # fmt: skip
    return losses


def one_long_sequence(devices: int, options: argparse.Namespace) -> None:
    """Each device holds its own piece of one sequence; states travel as affine maps, whatever the length."""
    mesh = jax.make_mesh((devices,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
    T, H, K = devices * options.tokens, options.heads, options.hidden // options.heads
    keys = jax.random.split(jax.random.key(0), 5)
    q, k, v = (jax.random.normal(key, (1, T, H, K)) for key in keys[:3])
    g, beta = (jax.random.uniform(key, (1, T, H)) for key in keys[3:])
    rule = lambda sharding: jax.jit(  # noqa: E731
        lambda q, k, v, g, beta: pg.gated_delta_rule(q, k, v, g, beta=beta, qk_l2norm=True, sharding=sharding)[0]
    )(q, k, v, -g, beta)
    split, whole = rule(pg.Sharding(sequence="context", mesh=mesh)), rule(None)
    error = jnp.linalg.norm(jax.device_get(split) - jax.device_get(whole)) / jnp.linalg.norm(whole)
    print(f"a sequence of {T} tokens, {split.addressable_shards[0].data.shape[1]} per device: differs by {error:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", action="store_true", help="take the accelerators that JAX finds")
    parser.add_argument("--devices", type=int, default=8, help="how many devices to make of the CPU")
    for name, number in (("steps", 20), ("hidden", 64), ("tokens", 64), ("heads", 4)):
        parser.add_argument(f"--{name}", type=int, default=number)
    options = parser.parse_args()
    if not options.real:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.devices)
    devices = jax.devices()
    if len(devices) % 2:
        raise SystemExit(f"This example needs an even number of devices, and JAX has {len(devices)} here.")
    mesh = partial(jax.make_mesh, axis_names=("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    many = train(mesh((len(devices) // 2, 2)), options)
    one = train(mesh((1, 1), devices=devices[:1]), options)
    print(f"losses differ by at most {max(abs(a - b) for a, b in zip(many, one, strict=True)):.1e}")
    one_long_sequence(len(devices), options)


if __name__ == "__main__":
    main()
