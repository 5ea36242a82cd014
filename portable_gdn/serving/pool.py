"""The pool of states: make one, copy its slots, export a request's states and import them into another pool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..door import library_of
from ..spec.errors import bad
from ..spec.operands import GATES, INPUT_DTYPES, PER_TOKEN, POOL_OPERANDS
from ..spec.slots import RECURRENT
from ..spec.variants import VARIANTS, Granularity

__all__ = ["SlotStates", "StatePool", "state_pool"]

Array = Any
_STATE_DTYPES = POOL_OPERANDS[RECURRENT].dtypes


class SlotStates(NamedTuple):
    """The contents of one slot on the host: numpy arrays, whatever the pool's library and layout.

    Attributes:
        recurrent: [HV, K, V].
        conv: [W - 1, channels], or None.
        window: The tokens that wait, [pending, ...] by name.
    """

    recurrent: np.ndarray
    conv: np.ndarray | None
    window: dict[str, np.ndarray]


class StatePool(NamedTuple):
    """The states of many requests, one slot each. Slot 0 is the null slot, which is never read or written.

    Make one with ``state_pool``. It is a pytree for JAX. A free slot may hold any values: a request starts from zeros
    when its first token is computed.

    Attributes:
        recurrent: [S, HV, K, V] (or [S, HV, V, K] with state_layout "vk"), the states after all committed tokens.
        conv: [S, W - 1, channels], the last committed inputs of the convolution q | k | v; None without convolution.
        window: The inputs and gates [S, R, ...], by name, of tokens that wait until they are accepted; None if the pool
            has no room for any.
        pending: int32 [S], the number of tokens that wait in each slot; None if the pool has no room for any.
    """

    recurrent: Array
    conv: Array | None = None
    window: dict[str, Array] | None = None
    pending: Array | None = None

    def operands(self) -> dict[str, Array]:
        """Return the arrays that the pool has, by their names in error messages."""
        named = {"recurrent": self.recurrent, "conv": self.conv, "pending": self.pending}
        found = {f"pool.{name}": a for name, a in named.items() if a is not None}
        return found | {f"pool.window.{name}": a for name, a in (self.window or {}).items()}

    def replaced(self, arrays: Mapping[str, Array]) -> StatePool:
        """Return this pool with other arrays, which have the names of ``operands``."""
        window = None if self.window is None else {name: arrays[f"pool.window.{name}"] for name in self.window}
        return StatePool(arrays["pool.recurrent"], arrays.get("pool.conv"), window, arrays.get("pool.pending"))

    def copy(self, source: int | Array, destination: int | Array) -> StatePool:
        """Copy the contents of slots, including waiting tokens, to other slots.

        Args:
            source, destination: Slots, as numbers or as integer arrays of one length. Nothing is copied if the
                destination is 0 or less, or if either is not a slot of the pool.

        Returns:
            The pool; with torch tensors it is this one, updated in place. All sources are read before any slot is
            written.
        """
        return self.replaced(_copy(self.operands(), source, destination))

    def export(self, slot: int, *, state_layout: str = "kv") -> SlotStates:
        """Return the contents of a slot on the host; recurrent states are [HV, K, V] whatever the pool's layout.

        Args:
            slot: The number of the slot, at least 1.
            state_layout: The layout of this pool.

        Raises:
            GdnError: The pool has no such slot.
        """
        _check_slot(slot, self.recurrent.shape[0])
        _check_layout(state_layout)
        held = {name: _to_numpy(a[slot]) for name, a in self.operands().items()}
        count = int(held.get("pool.pending", 0))
        window = {name.rpartition(".")[2]: a[:count] for name, a in held.items() if name.startswith("pool.window.")}
        recurrent = held["pool.recurrent"]
        if state_layout == "vk":
            recurrent = np.ascontiguousarray(np.swapaxes(recurrent, -1, -2))
        return SlotStates(recurrent, held.get("pool.conv"), window)

    def import_(self, slot: int, states: SlotStates, *, state_layout: str = "kv") -> StatePool:
        """Return the pool with a slot's contents replaced by what ``export`` returned, for this or another pool.

        Args:
            slot: The number of the slot, at least 1.
            states: From a pool with the same sizes; its library, layout and dtypes may differ.
            state_layout: The layout of this pool.

        Raises:
            GdnError: The pool has no such slot, or the states do not fit it.
        """
        _check_slot(slot, self.recurrent.shape[0])
        _check_layout(state_layout)
        mine = self.operands()
        room = 0 if self.pending is None else next(iter((self.window or {}).values())).shape[1]
        waits = len(next(iter(states.window.values()))) if states.window else 0
        if waits > room:
            raise bad("states.window", f"of {waits} tokens", f"have at most {room}, as many as can wait in this pool")
        recurrent = np.swapaxes(states.recurrent, -1, -2) if state_layout == "vk" else states.recurrent
        new = {"pool.recurrent": recurrent, "pool.conv": states.conv}
        new |= {f"pool.window.{name}": a for name, a in states.window.items()} if waits else {}
        for name, given in new.items():
            label = name.replace("pool.", "states.", 1)
            if (given is None) != (name not in mine):
                raise bad(label, "given" if given is not None else "None", "be as the pool has it, or left out with it")
            if given is None:
                continue
            lead = (waits,) if name.startswith("pool.window.") else ()
            want = (*lead, *mine[name].shape[1 + len(lead) :])
            if given.shape != want:
                raise bad(label, f"of shape {list(given.shape)}", f"have shape {list(want)}, as this pool's slots")
            mine[name] = _put(mine[name], (slot, slice(waits)) if lead else slot, given)
        missing = [name for name in mine if name.startswith("pool.window.") and waits and name not in new]
        if missing:
            raise bad("states.window", f"of {', '.join(states.window)}", f"hold {missing[0].rpartition('.')[2]}, too")
        if self.pending is not None:
            mine["pool.pending"] = _put(mine["pool.pending"], slot, np.asarray(waits, np.int32))
        return self.replaced(mine)


def state_pool(
    num_slots: int,
    *,
    library: str,
    num_heads: int,
    key_dim: int,
    num_value_heads: int | None = None,
    value_dim: int | None = None,
    dtype: str = "float32",
    state_dtype: str = "float32",
    state_layout: str = "kv",
    conv_width: int | None = None,
    window: int = 0,
    variant: str = "GDN",
    groups: int | None = None,
    device: Any = None,
) -> StatePool:
    """Make a pool of zero states.

    Args:
        num_slots: S, the number of requests that the pool can hold plus 1, because slot 0 is the null slot.
        library: "jax", "torch" or "numpy".
        num_heads, key_dim: H and K.
        num_value_heads, value_dim: HV and V; None means H and K.
        dtype: The dtype of q, k and v, in which waiting inputs and those of the convolution are stored.
        state_dtype: The dtype in which recurrent states are stored: float32 or bfloat16.
        state_layout: "kv", or "vk" for states [S, HV, V, K].
        conv_width: W of the mixer's convolution; None makes a pool for the rule without a convolution.
        window: R, the number of tokens that can wait in a slot until they are accepted: the drafts of a step plus 1, or
            0 for serving without drafts.
        variant: The variant of the rule, a name of ``portable_gdn.spec.variants``. It determines which gates wait with
            the tokens. For "tile-grouped", ``groups`` is the number of decays per head.
        device: A torch device, or a JAX device or sharding; None is the library's default.

    Raises:
        GdnError: An argument is wrong.
    """
    _check_sizes(
        num_slots=num_slots,
        num_heads=num_heads,
        key_dim=key_dim,
        num_value_heads=num_value_heads,
        value_dim=value_dim,
        conv_width=conv_width,
    )
    if isinstance(window, bool) or not isinstance(window, int) or window < 0:
        raise bad("window", repr(window), "be the number of tokens that can wait in a slot, 0 or more")
    H, K = num_heads, key_dim
    HV, V = num_value_heads or H, value_dim or K
    if HV % H:
        raise bad("num_value_heads", HV, f"be a multiple of num_heads = {H}")
    if dtype not in INPUT_DTYPES:
        raise bad("dtype", repr(dtype), f"be one of {', '.join(INPUT_DTYPES)}")
    if state_dtype not in _STATE_DTYPES:
        raise bad("state_dtype", repr(state_dtype), f"be one of {', '.join(_STATE_DTYPES)}")
    _check_layout(state_layout)
    inner = (K, V) if state_layout == "kv" else (V, K)
    shapes: dict[str, tuple[tuple[int, ...], str]] = {"pool.recurrent": ((num_slots, HV, *inner), state_dtype)}
    channels = 2 * H * K + HV * V
    if conv_width is not None:
        shapes["pool.conv"] = ((num_slots, conv_width - 1, channels), dtype)
    if window:
        inputs: dict[str, tuple[int, ...]] = {"k": (H, K), "v": (HV, V)} if conv_width is None else {"qkv": (channels,)}
        for name, shape in inputs.items():
            shapes[f"pool.window.{name}"] = ((num_slots, window, *shape), dtype)
        for name, shape in _gates(variant, groups, K, V).items():
            shapes[f"pool.window.{name}"] = ((num_slots, window, HV, *shape), "float32")
        shapes["pool.pending"] = ((num_slots,), "int32")
    arrays = _zeros(library, shapes, device)
    names = [name.rpartition(".")[2] for name in arrays if name.startswith("pool.window.")]
    return StatePool(
        arrays["pool.recurrent"],
        arrays.get("pool.conv"),
        {name: arrays[f"pool.window.{name}"] for name in names} if window else None,
        arrays.get("pool.pending"),
    )


def _gates(variant: str, groups: int | None, K: int, V: int) -> dict[str, tuple[int, ...]]:
    """Return the gates of a variant, and the axes that follow the heads in each."""
    if variant not in VARIANTS:
        raise bad("variant", repr(variant), f"be one of {', '.join(VARIANTS)}")
    decay, erase, write = VARIANTS[variant]
    if (decay is Granularity.GROUP) != (groups is not None):
        must = "be given for 'tile-grouped', and for no other variant"
        raise bad("groups", repr(groups), must)
    if groups is not None and (groups < 2 or K % groups):
        raise bad("groups", repr(groups), f"be at least 2 and divide key_dim = {K}")
    fine = {"g": (decay, K), "erase": (erase, K), "write": (write, V)}
    found: dict[str, tuple[int, ...]] = {}
    for name in (name for name in PER_TOKEN if name in GATES):
        if name == "beta" and erase is Granularity.HEAD and write is Granularity.HEAD:
            return {**found, "beta": ()}
        granularity, many = fine.get(name, (Granularity.NONE, 0))
        if granularity is Granularity.HEAD:
            found[name] = ()
        elif granularity is not Granularity.NONE:
            found[name] = (groups or many,) if granularity is Granularity.GROUP else (many,)
    return found


def _check_sizes(**sizes: int | None) -> None:
    for name, size in sizes.items():
        if size is not None and (isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1):
            raise bad(name, repr(size), "be a positive integer")


def _check_layout(state_layout: str) -> None:
    if state_layout not in ("kv", "vk"):
        raise bad("state_layout", repr(state_layout), "be 'kv' ([S, HV, K, V]) or 'vk' ([S, HV, V, K])")


def _check_slot(slot: int, slots: int) -> None:
    if isinstance(slot, bool) or not isinstance(slot, (int, np.integer)) or not 1 <= slot < slots:
        raise bad("slot", repr(slot), f"be one of 1 to {slots - 1}")


# Arrays of each library. ----------------------------------------------------------------------------------------------


def _zeros(library: str, shapes: Mapping[str, tuple[tuple[int, ...], str]], device: Any) -> dict[str, Array]:
    if library == "torch":
        import torch

        return {
            name: torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
            for name, (shape, dtype) in shapes.items()
        }
    if library == "jax":
        import jax.numpy as jnp

        return {name: jnp.zeros(shape, dtype, device=device) for name, (shape, dtype) in shapes.items()}
    if library == "numpy":
        import ml_dtypes

        own = {"bfloat16": ml_dtypes.bfloat16}
        return {name: np.zeros(shape, own.get(dtype, dtype)) for name, (shape, dtype) in shapes.items()}
    raise bad("library", repr(library), "be 'jax', 'torch' or 'numpy'")


def _copy(arrays: dict[str, Array], source: Any, destination: Any) -> dict[str, Array]:
    slots = arrays["pool.recurrent"].shape[0]
    if library_of(arrays["pool.recurrent"]) == "jax":
        return _jax_copy(arrays, source, destination)
    to: Any
    of: Any
    to, of = np.broadcast_arrays(*(np.atleast_1d(_to_numpy(a)) for a in (destination, source)))
    there = (to > 0) & (to < slots) & (of > 0) & (of < slots)
    to, of = to[there].astype(np.int64), of[there].astype(np.int64)
    if library_of(arrays["pool.recurrent"]) == "torch":
        import torch

        where = arrays["pool.recurrent"].device
        to, of = torch.as_tensor(to, device=where), torch.as_tensor(of, device=where)
    else:
        arrays = {name: a.copy() for name, a in arrays.items()}
    for a in arrays.values():
        a[to] = a[of]
    return arrays


def _jax_copy(arrays: dict[str, Array], source: Any, destination: Any) -> dict[str, Array]:
    import jax.numpy as jnp

    slots = arrays["pool.recurrent"].shape[0]
    of, to = jnp.broadcast_arrays(jnp.atleast_1d(jnp.asarray(source)), jnp.atleast_1d(jnp.asarray(destination)))
    to = jnp.where((to > 0) & (of > 0) & (of < slots), to, slots)
    of = jnp.where((of > 0) & (of < slots), of, 0)
    return {name: a.at[to].set(a[of], mode="drop") for name, a in arrays.items()}


def _put(into: Array, slot: Any, part: np.ndarray) -> Array:
    library = library_of(into)
    if library == "torch":
        from ..spec.torch_tensors import from_numpy

        into[slot] = from_numpy({"part": part})["part"].to(into)
        return into
    if library == "jax":
        return into.at[slot].set(part.astype(into.dtype))
    into = into.copy()
    into[slot] = part.astype(into.dtype)
    return into


def _to_numpy(a: Any) -> np.ndarray:
    if library_of(a) == "torch":
        from ..spec.torch_tensors import to_numpy

        return to_numpy(a).copy()
    return np.array(a)
