"""A small engine for tests of updates: requests come, wait, are preempted, resumed, forked and finished, drafts are
rejected; and every output is held to the request alone, whole, over its accepted tokens, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from conftest import arguments, assert_close, make, oracle

import portable_gdn as pg

SIZES = {"H": 1, "HV": 2, "K": 8, "V": 16}
WIDTH = 4


def draw_tokens(variant: str, n: int, seed: int, *, mixer: bool = False, dtype: str = "float32", **sizes: int) -> dict:
    """Operands [n, ...] of some tokens; a mixer's in one array."""
    x = make(variant, seed=seed, dtype=dtype, B=1, T=max(n, 1), **{**SIZES, **sizes})
    x = {name: a[0, :n] for name, a in x.items()}
    if mixer:
        widths = {name: int(np.prod(x[name].shape[1:])) for name in "qkv"}
        flat = [x.pop(name).reshape(n, width) for name, width in widths.items()]
        x["qkv"] = np.concatenate(flat, -1)
    return x


def parameters(variant: str, mixer: bool, gate: bool = False) -> dict:
    """Operands without tokens."""
    rng = np.random.default_rng(99)
    x = {}
    if mixer:
        channels = 2 * SIZES["H"] * SIZES["K"] + SIZES["HV"] * SIZES["V"]
        x["conv_weight"] = rng.standard_normal((channels, WIDTH)).astype(np.float32) / 2
        x["conv_bias"] = rng.standard_normal(channels).astype(np.float32) / 4
    if gate:
        x["A_log"] = rng.uniform(-1, 1, SIZES["HV"]).astype(np.float32)
    return x


def joined(parts: list[dict]) -> dict:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


class Setting:
    """What all calls of one engine share: variant, library, backend, sizes of the batch, options."""

    def __init__(self, variant: str = "GDN", library: str = "jax", backend: str | None = None, **options: Any) -> None:
        self.variant, self.library, self.backend = variant, library, backend
        self.mixer = options.pop("mixer", False)
        self.dtype = options.pop("dtype", "float32")
        self.T, self.N, self.slots = options.pop("T", 16), options.pop("N", 4), options.pop("slots", 8)
        self.room, self.every = options.pop("room", 3), options.pop("every", None)
        self.window = options.pop("window", None)
        self.state_dtype = options.pop("state_dtype", "float32")
        self.layout, self.options = options.pop("state_layout", "kv"), options
        self.columns = 2

    @property
    def waits(self) -> int:
        """Rows of at most so many tokens wait."""
        return self.room if self.window is None else self.window

    def array(self, a: Any) -> Any:
        """An array of the library, which shares no memory with ``a``."""
        if self.library == "jax":
            import jax.numpy as jnp

            return jnp.array(a)
        if self.library == "torch":
            from portable_gdn.spec.torch_tensors import from_numpy

            return from_numpy({"a": a})["a"]
        return np.array(a)

    def pool(self) -> pg.StatePool:
        return pg.state_pool(
            self.slots,
            library=self.library,
            num_heads=SIZES["H"],
            num_value_heads=SIZES["HV"],
            key_dim=SIZES["K"],
            value_dim=SIZES["V"],
            dtype=self.dtype,
            state_dtype=self.state_dtype,
            state_layout=self.layout,
            conv_width=WIDTH if self.mixer else None,
            window=self.room,
            variant=self.variant,
            groups=2 if self.variant == "tile-grouped" else None,
        )

    def call(self, x: dict, pool: pg.StatePool, batch: pg.Batch, **options: Any) -> tuple[np.ndarray, pg.StatePool]:
        """The update; o as numpy."""
        x = {name: self.array(a) for name, a in x.items()}
        options = {**self.options, **options}
        given = {"pool": pool, "batch": batch, "state_layout": self.layout, "backend": self.backend}
        given |= {"window": self.window, "checkpoint_every": self.every, **options}
        if self.mixer:
            conv = pg.ShortConv(x.pop("conv_weight"), x.pop("conv_bias", None))
            heads = {"num_heads": SIZES["H"], "key_dim": SIZES["K"]}
            o, pool = pg.gated_delta_mixer_update(**arguments(x, **given), conv=conv, **heads)
        else:
            o, pool = pg.gated_delta_rule_update(**arguments(x, **given))
        return contents(o), pool

    def want(self, tokens: dict, last: int) -> tuple[np.ndarray, np.ndarray]:
        """The last outputs of a whole sequence alone, and the sizes of their summands."""
        x = {name: a[None] for name, a in tokens.items()} | parameters(self.variant, self.mixer, "gate" in self.options)
        options = {"num_heads": SIZES["H"], "key_dim": SIZES["K"]} if self.mixer else {}
        exact = oracle(x, kind="mixer" if self.mixer else "rule", **options, **self.options)
        return exact.o[0, -last:], exact.sizes["o"][0, -last:]


def contents(a: Any) -> np.ndarray:
    if hasattr(a, "detach"):
        from portable_gdn.spec.torch_tensors import to_numpy

        return to_numpy(a).copy()
    return np.array(a)


def arrays_of(pool: pg.StatePool) -> dict[str, np.ndarray]:
    return {name: contents(a) for name, a in pool.operands().items()}


class Request:
    """tokens: all accepted ones, in parts; drafts: those that wait; count: accepted ones."""

    def __init__(self, slot: int, parts: list[dict] | None = None, drafts: dict | None = None) -> None:
        self.slot, self.parts, self.drafts = slot, list(parts or []), drafts
        self.checkpoints: dict[int, int] = {}

    @property
    def count(self) -> int:
        return sum(len(part["v" if "v" in part else "qkv"]) for part in self.parts)


def length_of(part: dict | None) -> int:
    return 0 if part is None else len(next(iter(part.values())))


def some(part: dict, stop: int) -> dict:
    return {name: a[:stop] for name, a in part.items()}


class Engine:
    """Steps drawn by a ``random.Random``. ``poison`` fills what nobody may read; ``pieces`` are lengths of rows."""

    def __init__(self, setting: Setting, rng: Any, pieces: tuple[int, ...], poison: float | None = None) -> None:
        self.setting, self.rng, self.pieces, self.poison = setting, rng, pieces, poison
        self.pool = setting.pool()
        self.live: list[Request] = []
        self.kept: list[tuple[int, list[dict]]] = []  # slots of checkpoints, and the tokens they are of
        self.outputs: list[np.ndarray] = []
        if poison is not None:
            fill = {n: np.full_like(a, poison if a.dtype.kind != "i" else 3) for n, a in arrays_of(self.pool).items()}
            self.pool = self.pool.replaced({name: setting.array(a) for name, a in fill.items()})

    def free(self) -> list[int]:
        taken = {r.slot for r in self.live} | {slot for slot, _ in self.kept}
        return [slot for slot in range(1, self.setting.slots) if slot not in taken]

    def step(self) -> None:
        st, rng = self.setting, self.rng
        rows: list[tuple[Request | None, int, dict, int, int]] = []  # request, read slot, tokens, computed, accepted
        for request in list(self.live):
            if rng.random() < 0.15:  # finished, or preempted: its slot is anyone's
                self.live.remove(request)
        if self.kept and rng.random() < 0.3:
            self.kept.pop(rng.randrange(len(self.kept)))
        room, taken = st.T, []
        order = list(self.live)
        rng.shuffle(order)
        for _ in range(st.N):
            free = [slot for slot in self.free() if slot not in taken]
            kind = rng.choice(["go on", "go on", "go on", "new", "fork", "resume", "nothing"])
            length = rng.choice([n for n in self.pieces if n <= room])
            tokens = draw_tokens(st.variant, length, rng.randrange(10**6), mixer=st.mixer, dtype=st.dtype)
            if kind == "go on" and order:
                request = order.pop()
                accepted = rng.randint(0, length_of(request.drafts))
                rows.append((request, request.slot, tokens, accepted, 0))
            elif kind == "fork" and self.live and free:
                parent = rng.choice(self.live)
                child = Request(free[0], parent.parts, parent.drafts)
                accepted = rng.randint(0, length_of(parent.drafts))
                rows.append((child, parent.slot, tokens, accepted, 1))
                taken.append(free[0])
            elif kind == "resume" and self.kept and free:
                slot, parts = rng.choice(self.kept)
                rows.append((Request(free[0], parts), slot, tokens, 0, 1))
                taken.append(free[0])
            elif kind == "new" and free and length:
                rows.append((Request(free[0]), rng.choice([0, -1, free[0]]), tokens, 0, 1))
                taken.append(free[0])
            else:
                rows.append((None, rng.choice([0, -1, -7]), tokens, 0, 0))
            room -= length
        self.run(rows, [slot for slot in self.free() if slot not in taken])

    def run(self, rows: list, free: list[int]) -> None:
        st, rng = self.setting, self.rng
        N, checkpoints = st.N, np.zeros((st.N, st.columns), np.int32)
        write, read, computed, accepted = (np.zeros(N, np.int32) for _ in range(4))
        starts, named = np.zeros(N + 1, np.int32), set()
        for n, (request, slot, tokens, number, _) in enumerate(rows):
            length = length_of(tokens)
            starts[n + 1] = starts[n] + length
            if request is None:
                write[n], read[n], computed[n] = slot, rng.choice([slot, 1]), rng.choice([0, 5])
                continue
            write[n], read[n], accepted[n] = request.slot, slot, number
            if length:
                if number:
                    request.parts.append(some(request.drafts, number))
                request.drafts = None
                named.add(request.slot)
            computed[n] = request.count
            if st.every and length:
                before = request.count - number
                after = request.count if length <= st.waits else request.count + length
                for column, multiple in enumerate(range(before // st.every + 1, after // st.every + 1)):
                    if column < st.columns and free and rng.random() < 0.7:
                        checkpoints[n, column] = free.pop()
                        named.add(int(checkpoints[n, column]))
                        parts = [*request.parts, tokens]
                        parts = [some(joined(parts), multiple * st.every)]
                        self.kept.append((int(checkpoints[n, column]), parts))
        x = joined([row[2] for row in rows])
        used = int(starts[-1])
        fill = 0.0 if self.poison is None else self.poison
        for name in x:
            full = np.full((st.T, *x[name].shape[1:]), fill, x[name].dtype)
            for n, row in enumerate(rows):
                if row[0] is not None:
                    full[starts[n] : starts[n + 1]] = row[2][name]
            x[name] = full
        before = arrays_of(self.pool)
        batch = pg.Batch(
            starts,
            write,
            computed,
            accepted if st.room else None,
            read,
            checkpoints if st.every else None,
        )
        o, self.pool = st.call({**x, **parameters(st.variant, st.mixer, "gate" in st.options)}, self.pool, batch)
        self.outputs.append(o)
        after = arrays_of(self.pool)
        for slot in set(range(st.slots)) - named:
            for name, a in after.items():
                assert a[slot].tobytes() == before[name][slot].tobytes(), (name, slot)
        assert o.shape[0] == st.T
        assert not np.any(o[used:])
        for n, (request, _, tokens, _, new) in enumerate(rows):
            out, length = o[starts[n] : starts[n + 1]], starts[n + 1] - starts[n]
            if request is None:
                assert not np.any(out)
            if request is None or not length:
                continue
            want, size = st.want(joined([*request.parts, tokens]), length)
            assert_close(out, want, size, eps=st.options.get("eps", 8), dtype=st.dtype)
            if length <= st.waits:
                request.drafts = tokens
                assert int(after["pool.pending"][request.slot]) == length
            else:
                request.parts.append(tokens)
            if new:
                self.live.append(request)


def one_request(setting, tokens, windows, batch_row=1, skipping=False):
    """One request's outputs, given its tokens in windows (length, how many of them are accepted), in a fixed batch.

    Rejected tokens come again as the next window's, or with ``skipping`` stand in ``tokens`` for themselves.
    """
    pool, at, skipped, waits, outputs = setting.pool(), 0, 0, 0, []
    rest = parameters(setting.variant, setting.mixer)
    for length, accepted in windows:
        x = {name: np.zeros((setting.T, *a.shape[1:]), a.dtype) for name, a in tokens.items()}
        for name, a in tokens.items():
            x[name][2 : 2 + length] = a[at + skipped : at + skipped + length]
        starts = np.zeros(setting.N + 1, np.int32)
        starts[batch_row:], starts[batch_row + 1 :] = 2, 2 + length
        write, computed, kept = (np.zeros(setting.N, np.int32) for _ in range(3))
        write[batch_row], computed[batch_row], kept[batch_row] = 3, at, waits
        o, pool = setting.call({**x, **rest}, pool, pg.Batch(starts, write, computed, kept))
        outputs.append(o[2 : 2 + accepted])
        at += accepted
        skipped += (length - accepted) * skipping
        waits = accepted
    return np.concatenate(outputs), {name: a[3] for name, a in arrays_of(pool).items() if "window" not in name}
