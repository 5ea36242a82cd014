"""One decoder for all families: embedding, layers of attention and MLP between norms, head."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from ..api import MixerState
from ..layers.axes import named, partition_specs
from ..layers.kinds import layer_of_kind
from ..parallel.axes import AxisRules, call_sharding
from ..spec.errors import GdnError, bad
from .attention import Attention
from .blocks import MLP, MoE, Norm
from .cache import KV, Cache, Latents
from .latent_attention import LatentAttention
from .numerics import Numerics
from .period import bodies
from .settings import DecoderSettings, LatentSettings, MixerSettings

__all__ = ["Decoder"]

Array = Any


def _mixer(hidden_size: int, settings: MixerSettings, options: dict[str, Any], rngs: nnx.Rngs) -> Any:
    layer, asked = layer_of_kind(settings.kind, vars(settings))
    return layer(hidden_size, rngs=rngs, **asked, **options)


class DecoderLayer(nnx.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x)).

    The attention is ``mixer`` (linear) or ``attention``. If norms come after, the layer is x + norm(attention(x)), then
    x + norm(mlp(x)).
    """

    def __init__(
        self,
        s: DecoderSettings,
        number: int,
        options: dict[str, Any],
        numerics: Numerics,
        rngs: nnx.Rngs,
        rules: AxisRules | None = None,
    ) -> None:
        self.linear = s.linear[number]
        self.post_norm = s.post_norm and not self.linear
        first, second = (Norm(s.hidden_size, s.norm_eps, s.zero_centred, numerics) for _ in range(2))
        if self.post_norm:
            self.mixer_post_norm, self.mlp_post_norm = first, second
        else:
            self.input_norm, self.mlp_norm = first, second
        if self.linear:
            assert s.mixer is not None
            self.mixer = _mixer(s.hidden_size, s.mixer, options, rngs)
        else:
            assert s.attention is not None
            self.attention: Attention | LatentAttention
            if isinstance(s.attention, LatentSettings):
                self.attention = LatentAttention(s.hidden_size, s.attention, numerics, rngs)
            else:
                self.attention = Attention(s.hidden_size, s.attention, s.zero_centred, numerics, rngs)
        self.mlp: MLP | MoE
        if s.dense[number]:
            self.mlp = MLP(s.hidden_size, s.intermediate_size, numerics, rngs)
        else:
            assert s.experts is not None
            self.mlp = MoE(s.hidden_size, s.experts, numerics, rngs, getattr(options["sharding"], "mesh", None), rules)

    def __call__(
        self, x: Array, positions: Array, mask: Array | None, seen: Array, past: Any, start: Array | int
    ) -> tuple[Array, Any]:
        """Apply the layer to x [B, T, E]; return the result, and this layer's cache (None if ``past`` is None)."""
        h = x if self.post_norm else self.input_norm(x)
        if not self.linear:
            y, past = self.attention(h, positions, seen, past, start)
        elif past is not None and mask is None and h.shape[1] == 1:
            y, past = self.mixer.step(h[:, 0], past)
            y = y[:, None]
        else:
            y, past = self.mixer(h, state=past, output_final_state=past is not None, mask=mask)
        if self.post_norm:
            x = x + self.mixer_post_norm(y)
            return x + self.mlp_post_norm(self.mlp(x)), past
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), past


def _stacked(make: Callable[[nnx.Rngs], DecoderLayer], count: int, rngs: nnx.Rngs) -> DecoderLayer:
    """Make a layer with the parameters of several layers, initialised independently and stacked on the first axis."""
    graph, _ = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    keys = jax.random.split(rngs.params(), count)
    states = jax.vmap(lambda key: nnx.split(make(nnx.Rngs(params=key)))[1])(keys)
    layer: DecoderLayer = nnx.merge(graph, states)
    return layer


def _repeated(
    period: list[DecoderLayer],
    times: int,
    x: Array,
    pasts: list[Any],
    call: Callable[[DecoderLayer, Array, Any], tuple[Array, Any]],
) -> tuple[Array, list[Any]]:
    """Apply a period of stacked layers ``times`` times in a loop that is compiled once.

    Caches are part of the loop's carry, so that only the places of new tokens are written.

    Args:
        period: The layers of the period.
        times: The number of repetitions.
        x: [B, T, E].
        pasts: The stacked cache for each layer of the period; None returns no cache.
        call: The function that applies one layer to x and its cache, and returns both.
    """
    graphs, states = zip(*(nnx.split(layer) for layer in period), strict=True)

    def once(carry: Any, given: Any) -> tuple[Any, None]:
        x, pasts = carry
        states, number = given
        new = []
        for graph, state, past in zip(graphs, states, pasts, strict=True):
            layer = nnx.merge(graph, state)
            if isinstance(past, KV | Latents):
                x, past = call(layer, x, past._replace(number=number))
                past = past._replace(number=None)
            elif past is not None:
                x, one = call(layer, x, jax.tree.map(lambda a: a[number], past))
                put = lambda a, b: jax.lax.dynamic_update_index_in_dim(a, b, number, 0)  # noqa: E731
                past = jax.tree.map(put, past, one)
            else:
                x, _ = call(layer, x, None)
            new.append(past)
        return (x, new), None

    (x, pasts), _ = jax.lax.scan(once, (x, pasts), (states, jnp.arange(times)))
    return x, pasts


class Decoder(nnx.Module):
    """A causal language model.

    Parameters have the names of a port's leaves: embed.embedding [V, E], layers.{i}.mixer (a layer of
    ``portable_gdn.layers``) or layers.{i}.attention, layers.{i}.mlp, norm.scale, and lm_head.kernel [E, V] unless the
    head is the embedding. Layers that repeat are compiled once: their weights are stacked on the first axis, and
    ``layers`` has one module for them; ``leaves`` returns them one by one.

    Shapes: B rows, T tokens, a vocabulary of V, L places in the cache.
    """

    def __init__(
        self,
        settings: DecoderSettings,
        *,
        rngs: nnx.Rngs,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        backend: str | None = None,
        precision: str | None = None,
        scan: bool = True,
        spread: tuple[Any, AxisRules | None] | None = None,
    ) -> None:
        """Args:
        settings: The settings of the model.
        rngs: Random numbers for the initial weights.
        dtype: The dtype of the computation; None is that of the weights. Norms, softmax, the router's weights, the
            gates of the rule and its states are always in float32.
        param_dtype: The dtype of the weights.
        backend: The backend of the mixers, as in ``gated_delta_rule``.
        precision: The precision of the mixers, as in ``gated_delta_rule``. "highest" applies to all products, instead
            of JAX's default, which on a TPU rounds float32 to bfloat16.
        scan: Whether layers that repeat are compiled once, so that a model of 48 layers compiles as quickly as one
            period. False makes a module for each layer.
        spread: A mesh, and rules for its axes or None, as in ``load_model``; they split the calls of the mixers and the
            work of the experts. None is one device.
        """
        mesh, rules = spread or (None, None)
        highest = jax.lax.Precision.HIGHEST if precision == "highest" else None
        numerics = Numerics(dtype, highest, param_dtype)
        options = {
            "dtype": dtype, "param_dtype": param_dtype, "projection_precision": highest, "precision": precision,
            "backend": backend, "sharding": None if mesh is None else call_sharding(mesh, rules),
        }  # fmt: skip
        self.settings, self.numerics = settings, numerics
        self.embed = nnx.Embed(
            settings.vocabulary, settings.hidden_size, dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )
        words, rows = ("vocabulary", settings.vocabulary), ("embed", settings.hidden_size)
        named(self.embed.embedding, words, rows)
        self.bodies = bodies(tuple(zip(settings.linear, settings.dense, strict=True)), scan)
        make = lambda number, rngs: DecoderLayer(settings, number, options, numerics, rngs, rules)  # noqa: E731
        self.layers = nnx.List(
            [
                make(numbers[0], rngs) if len(numbers) == 1 else _stacked(partial(make, numbers[0]), len(numbers), rngs)
                for numbers in self.bodies
            ]
        )
        self.norm = Norm(settings.hidden_size, settings.norm_eps, settings.zero_centred, numerics)
        if not settings.tied:
            self.lm_head = numerics.linear(settings.hidden_size, settings.vocabulary, rngs, (rows, words))

    @property
    def dtype(self) -> Any:
        """The dtype of the computation."""
        return self.embed.embedding[...].dtype if self.numerics.dtype is None else jnp.dtype(self.numerics.dtype)

    def __call__(self, ids: Array, mask: Array | None = None, cache: Cache | None = None) -> tuple[Array, Cache | None]:
        """Compute the logits of the token that follows each token.

        Args:
            ids: [B, T], integers below V.
            mask: [B, T] bool; False marks padding, which must come before the first token of a row. No other token
                attends to it, and positions do not count it. None is no padding.
            cache: The cache from ``init_cache`` or an earlier call; None starts from nothing and returns no cache.

        Returns:
            Logits [B, T, V] in the dtype of the computation (meaningless at padding), and the cache with these tokens
            added, or None. In a compiled function, where values cannot be checked, ids outside the vocabulary make the
            logits of their rows NaN.

        Raises:
            GdnError: The ids or the mask have another shape or dtype, ids are outside the vocabulary, or the cache has
                another number of rows or too little room.
        """
        x, cache = self.hidden(ids, mask, cache)
        return self.logits(x), cache

    def hidden(self, ids: Array, mask: Array | None = None, cache: Cache | None = None) -> tuple[Array, Cache | None]:
        """Return the head's input [B, T, E] and the cache; arguments and errors are those of a call."""
        ids, mask = self._checked(ids, mask, cache)
        B, T = ids.shape
        start: Array | int = 0
        before: Array | int = 0
        seen = valid = jnp.ones((B, T), bool) if mask is None else mask
        if cache is not None:
            start, before = cache.used, cache.positions()[:, None]
            seen = jax.lax.dynamic_update_slice(cache.seen, valid, (0, start))
        positions = jnp.maximum(before + jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1, 0)
        table = self.embed.embedding[...].astype(self.dtype)
        x = table.at[ids].get(mode="fill", fill_value=jnp.nan)
        pasts: list[Any] = [None] * len(self.bodies) if cache is None else list(cache.layers)
        inside = [body for body, numbers in enumerate(self.bodies) if len(numbers) > 1]
        for body, layer in enumerate(self.layers):
            if body not in inside:
                x, pasts[body] = layer(x, positions, mask, seen, pasts[body], start)
            elif body == inside[0]:
                period = [self.layers[body] for body in inside]
                x, new = _repeated(
                    period, len(self.bodies[body]), x, [pasts[body] for body in inside],
                    lambda layer, x, past: layer(x, positions, mask, seen, past, start),
                )  # fmt: skip
                pasts[body : body + len(inside)] = new
        x = self.norm(x)
        return x, None if cache is None else Cache(tuple(pasts), seen, cache.used + T)

    def leaves(self) -> dict[str, Array]:
        """Return the parameters by their names in a port, with stacked layers one by one.

        ``safetensors.flax.save_file`` can write them, as an input of the way back.
        """
        found = {}
        for path, leaf in nnx.to_flat_state(nnx.state(self)):
            for number, name in enumerate(self.names(path)):
                found[name] = leaf[...] if len(self.names(path)) == 1 else leaf[...][number]
        return found

    def partition_specs(self, mesh: Any, rules: AxisRules | None = None) -> dict[tuple[Any, ...], Any]:
        """Return a ``PartitionSpec`` for each parameter by its path in the state.

        See ``portable_gdn.layers.partition_specs``; the axis of stacked layers is never split.
        """
        found = {}
        for path, spec in nnx.to_flat_state(partition_specs(nnx.state(self), mesh, rules)):
            stacked = len(self.names(path)) > 1
            found[path] = PartitionSpec(None, *spec.get_value()) if stacked else spec.get_value()
        return found

    def names(self, path: tuple[Any, ...]) -> tuple[str, ...]:
        """Return the port's leaves for each parameter, by its path in the state: several if layers are stacked."""
        if path[0] != "layers":
            return (".".join(map(str, path)),)
        return tuple(".".join(map(str, ("layers", number, *path[2:]))) for number in self.bodies[path[1]])

    def logits(self, x: Array) -> Array:
        """Apply the head to x [..., E], as ``hidden`` returns it; the result is the logits [..., V]."""
        if not self.settings.tied:
            return self.lm_head(x)
        table = self.embed.embedding[...].astype(self.dtype)
        return jnp.einsum("...e,ve->...v", x.astype(self.dtype), table, precision=self.numerics.precision)

    def init_cache(self, batch: int, length: int) -> Cache:
        """Return an empty cache of ``batch`` rows with room for ``length`` tokens, including padding.

        Raises:
            GdnError: One of them is not a positive integer.
        """
        for name, value in (("batch", batch), ("length", length)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise bad(name, repr(value), "be a positive whole number")
        layers: list[KV | Latents | MixerState] = []
        for numbers, layer in zip(self.bodies, self.layers, strict=True):
            if layer.linear:
                empty = layer.mixer.init_state(batch)
            else:
                empty = layer.attention.init_cache(batch, length, self.dtype)
            lead = (len(numbers),) if len(numbers) > 1 else ()
            layers.append(jax.tree.map(lambda a: jnp.zeros((*lead, *a.shape), a.dtype), empty))  # noqa: B023
        return Cache(tuple(layers), jnp.zeros((batch, length), bool), jnp.zeros((), jnp.int32))

    def _checked(self, ids: Array, mask: Array | None, cache: Cache | None) -> tuple[Array, Array | None]:
        ids = checked_ids(ids, self.settings.vocabulary)
        if mask is not None:
            mask = checked_mask(mask, ids.shape)
        if cache is None:
            return ids, mask
        if not isinstance(cache, Cache):
            raise bad("cache", f"a {type(cache).__name__}", "be None or what init_cache or a call returned")
        B, T = ids.shape
        if cache.seen.shape[0] != B:
            raise bad("cache", f"of {cache.seen.shape[0]} rows", f"have as many as ids, {B}")
        used = 0 if isinstance(cache.used, jax.core.Tracer) else int(cache.used)
        if used + T > cache.length:
            held = f" beside the {used} that it holds" if used else ""
            raise GdnError(
                f"ids have {T} tokens a row, and the cache has room for {cache.length - used}{held}; it must be made "
                f"for at least {used + T}: init_cache({B}, {used + T})."
            )
        return ids, mask


def checked_ids(ids: Array, vocabulary: int) -> Array:
    """Return ids as an int32 array [B, T]; their values are checked only outside of compiled functions.

    Raises:
        GdnError: They have another shape or dtype, or are outside the vocabulary.
    """
    if not isinstance(ids, jax.Array):
        try:
            ids = np.array(ids)
        except ValueError as error:  # rows of different lengths
            raise bad("ids", "rows of different lengths", "be [B, T]; pad on the left, with a mask") from error
    if ids.ndim != 2 or not ids.size:
        raise bad("ids", f"of shape {list(ids.shape)}", "have shape [B, T], one row a prompt, and hold a token")
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise bad("ids", f"of dtype {ids.dtype}", "be whole numbers")
    if not isinstance(ids, jax.core.Tracer):
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocabulary:
            raise bad("ids", f"from {low} to {high}", f"be from 0 to {vocabulary - 1}, the vocabulary's last")
    return jnp.asarray(ids, jnp.int32)


def checked_mask(mask: Array, shape: tuple[int, ...]) -> Array:
    """Return a mask as a bool array with the shape of the ids; 0 and 1 are False and True.

    Raises:
        GdnError: It has another shape.
    """
    mask = mask if isinstance(mask, jax.Array) else np.array(mask)
    if mask.shape != shape:
        raise bad("mask", f"of shape {list(mask.shape)}", f"have that of ids, {list(shape)}")
    return jnp.asarray(mask).astype(bool)
