"""What the tests of the public call share: libraries, random operands, calls and gradients by name, the oracle.

Operands are numpy arrays by name everywhere; each library converts them, makes the call and hands numpy arrays back.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

# Before JAX and rich are imported. Most of these tests' time is XLA compiling small programs that run once: it need not
# optimise them. And pytest-xdist tells its workers that the terminal has 80 columns, where users' pipes have no end.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()
os.environ.pop("COLUMNS", None)

import ml_dtypes
import numpy as np
import pytest
from threadpoolctl import threadpool_limits

import portable_gdn as pg
from portable_gdn import door
from portable_gdn.harness.compute import forget_programs
from portable_gdn.spec.evaluate import Evaluation, evaluate
from portable_gdn.spec.operands import DIFFERENTIABLE
from portable_gdn.spec.problem import GateKind, Options

threadpool_limits(1, user_api="blas")  # of numpy: the other core has the other worker

EPS = float(np.finfo(np.float32).eps)
UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
SIZES = {"B": 2, "T": 40, "H": 2, "HV": 4, "K": 16, "V": 24}  # with chunks of 16: two whole ones and a short one
SMALL = {"chunk_size": 16}
DECAYS = {"DeltaNet": 0, "GDN": 1, "tile-grouped": 2, "KDA": -1, "GDN-2": -1, "GLA": -1, "GLA (scalar)": 1}


#: Node ids, without the folder, of slow tests that continuous integration leaves out: it would take hours with them.
EXHAUSTIVE = frozenset(
    line for line in Path(__file__).with_name("exhaustive.txt").read_text().splitlines() if not line.startswith("#")
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.removeprefix("tests/") in EXHAUSTIVE:
            item.add_marker(pytest.mark.exhaustive)


PLAIN = 7.0  # microseconds


def _plain_python() -> int:
    """What took 7 microseconds where the limits of the tests were set: calls, tuples, dictionaries, attributes."""
    seen: dict[tuple[str, int], Any] = {}
    for i in range(54):
        key = ("a", i & 7)
        if key not in seen and isinstance(i, int):
            seen[key] = {"name": key, "index": i}
        seen.get(key)
    return len(seen)


def _took(call: Callable[[], Any]) -> int:
    start = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - start


def quiet_microseconds(call: Callable[[], Any], times: int = 3000) -> float:
    """The time of a short call on a quiet machine, in microseconds: measured in turn with plain Python, whose time
    there is known. Others may be at work on the same cores, and a core halves and doubles its speed within a test."""
    return PLAIN * statistics.median(_took(call) / _took(_plain_python) for _ in range(times))


def slowness() -> float:
    """How many times longer plain Python takes now than on the quiet machine where limits were set; at least 1."""
    return max(1.0, statistics.median(_took(_plain_python) for _ in range(1000)) / 1e3 / PLAIN)


def make(
    variant: str = "GDN",
    *,
    seed: int = 0,
    dtype: str = "float32",
    state: bool = False,
    N: int | None = None,
    **sizes: int,
) -> dict[str, np.ndarray]:
    """Random operands of a call: unit keys, mild decays, gates in (0, 1), states far from zero if asked for."""
    B, T, H, HV, K, V = ({**SIZES, **sizes}[name] for name in ("B", "T", "H", "HV", "K", "V"))
    rng = np.random.default_rng(seed)
    k = rng.standard_normal((B, T, H, K))
    x = {
        "q": rng.standard_normal((B, T, H, K)),
        "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
        "v": rng.standard_normal((B, T, HV, V)),
    }
    x = {name: a.astype(DTYPES[dtype]) for name, a in x.items()}
    n = DECAYS[variant]
    if n:
        shape = (B, T, HV) if n == 1 else (B, T, HV, K if n < 0 else n)
        x["g"] = -rng.exponential(0.3, shape).astype(np.float32)
    if variant == "GDN-2":
        x["erase"] = rng.uniform(0, 1, (B, T, HV, K)).astype(np.float32)
        x["write"] = rng.uniform(0, 1, (B, T, HV, V)).astype(np.float32)
    elif not variant.startswith("GLA"):
        x["beta"] = rng.uniform(0, 1, (B, T, HV)).astype(np.float32)
    if state:
        x["initial_state"] = rng.standard_normal((N or B, HV, K, V)).astype(np.float32)
    return x


def cotangents(x: dict[str, np.ndarray], seed: int = 1, **shapes: Any) -> dict[str, np.ndarray]:
    """Random cotangents of o, and of the state where there is an initial one."""
    rng = np.random.default_rng(seed)
    d = {"o": rng.standard_normal(shapes.get("o", x["v"].shape)).astype(x.get("v", x.get("qkv")).dtype)}
    if "initial_state" in x:
        d["state"] = rng.standard_normal(x["initial_state"].shape).astype(np.float32)
    return d


def tokens(x: dict[str, np.ndarray], row: int, where: Any) -> dict[str, np.ndarray]:
    """The operands of some tokens of one row; states are left out."""
    return {name: a[row : row + 1, where] for name, a in x.items() if name not in ("initial_state", "A_log", "dt_bias")}


def arguments(x: dict[str, Any], gate: str | float | None = None, **options: Any) -> dict[str, Any]:
    """Keyword arguments of ``gated_delta_rule``; ``gate`` is "softplus" or a lower bound."""
    x = dict(x)
    A_log, dt_bias = x.pop("A_log", None), x.pop("dt_bias", None)
    if gate is not None:
        options["gate"] = (
            pg.SoftplusGate(A_log, dt_bias) if gate == "softplus" else pg.BoundedGate(A_log, dt_bias, gate)
        )
    return {**x, **options}


def mixer_arguments(x: dict[str, Any], activation: str | None = "silu", **options: Any) -> dict[str, Any]:
    """Keyword arguments of ``gated_delta_mixer`` from operands by name (qkv, or q, k, v); ``norm`` is a NormKind."""
    x = dict(x)
    qkv = x.pop("qkv") if "qkv" in x else (x.pop("q"), x.pop("k"), x.pop("v"))
    conv = pg.ShortConv(x.pop("conv_weight"), x.pop("conv_bias", None), activation)
    state = pg.MixerState(x.pop("initial_state", None), x.pop("conv_state", None))
    norm = options.pop("norm", None)
    if norm is not None:
        options["output_norm"] = pg.GatedRMSNorm(x.pop("norm_weight", None), *norm)
    return {"qkv": qkv, "conv": conv, "state": state, **arguments(x, **options)}


def call(kind: str, x: dict[str, Any], **options: Any) -> tuple[Any, ...]:
    """o and state of the public call; of the mixer o, recurrent and convolution state. ``kind``: rule, step, mixer,
    mixer step."""
    if kind == "mixer":
        o, state = pg.gated_delta_mixer(**mixer_arguments(x, **options))
        return (o, *(state if state is not None else (None, None)))
    if kind == "mixer step":
        o, state = pg.gated_delta_mixer_step(**mixer_arguments(x, **options))
        return o, *state
    if kind == "step":
        x = dict(x)
        return pg.gated_delta_rule_step(state=x.pop("initial_state", None), **arguments(x, **options))
    return pg.gated_delta_rule(**arguments(x, **options))


def oracle(
    x: dict[str, np.ndarray], d: dict[str, np.ndarray] | None = None, kind: str = "rule", **options: Any
) -> Evaluation:
    """The call in float64, unrounded, with the sizes of what each result sums up (and gradients if d is given)."""
    options.setdefault("output_final_state", True)
    gate = options.pop("gate", None)
    if gate is not None:
        options["gate"] = GateKind(None if gate == "softplus" else gate)
    if kind.startswith("mixer"):
        options = {"conv_activation": "silu", "qk_l2norm": True, **options}
        options["conv_activation"] = options.pop("activation", options["conv_activation"])
    problem, _ = door.normalise(dict(x), Options(step=kind.endswith("step"), **options), "numpy")
    return evaluate(problem, d)


def assert_close(
    got: np.ndarray, want: np.ndarray, size: np.ndarray | None = None, *, eps: float = 8, dtype: str = "float32"
) -> None:
    """The error's L2 norm is at most ``eps`` float32 eps times that of the summands, plus the result's own rounding."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    error = np.linalg.norm(got - want)
    rounding = 0.0 if dtype == "float32" else UNIT[dtype] * np.linalg.norm(want)
    budget = eps * EPS * np.linalg.norm(np.asarray(want if size is None else size, np.float64)) + rounding
    assert error <= budget, f"error {error:.3g}, allowed {budget:.3g}"  # NaN fails too


def assert_all_close(got: dict[str, np.ndarray], want: Evaluation, **options: Any) -> None:
    """Every gradient, by name."""
    assert set(got) == set(want.gradients)
    for name, value in got.items():
        assert_close(value, want.gradients[name], want.sizes[name], **options)


class Library:
    """numpy itself, and what the others share."""

    name = "numpy"

    def array(self, a: Any) -> Any:
        return a

    def numpy(self, a: Any) -> Any:
        return None if a is None else np.asarray(a)

    def arrays(self, x: dict[str, np.ndarray]) -> dict[str, Any]:
        return {name: self.array(a) for name, a in x.items()}

    def run(self, kind: str, x: dict[str, np.ndarray], **options: Any) -> tuple[Any, ...]:
        """The public call on this library's arrays; results as numpy."""
        return tuple(self.numpy(a) for a in call(kind, self.arrays(x), **options))

    def rule(self, x: dict[str, np.ndarray], **options: Any) -> tuple[Any, ...]:
        return self.run("rule", x, **{"output_final_state": True, **options})

    def both(
        self, x: dict[str, np.ndarray], d: dict[str, np.ndarray], kind: str = "rule", **options: Any
    ) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        """o, the final state, and the operands' cotangents from those of both, as the library derives them."""
        o, state, *_ = self.run(kind, x, **_with_state(kind, options))
        return o, state, oracle(x, d, kind, **options).gradients

    def gradients(self, *args: Any, **options: Any) -> dict[str, np.ndarray]:
        """The cotangents alone."""
        return self.both(*args, **options)[2]


class Torch(Library):
    name = "torch"

    def array(self, a: Any) -> Any:
        import torch

        a = np.array(a)
        return (
            torch.from_numpy(a.view(np.int16)).view(torch.bfloat16)
            if a.dtype.name == "bfloat16"
            else torch.from_numpy(a)
        )

    def numpy(self, a: Any) -> Any:
        import torch

        if a is None:
            return None
        a = a.detach()
        return a.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if a.dtype == torch.bfloat16 else a.numpy()

    def both(self, x: Any, d: Any, kind: str = "rule", **options: Any) -> Any:
        import torch

        x, d = self.arrays(x), self.arrays(d)
        leaves = {name: a.requires_grad_() for name, a in x.items() if name in DIFFERENTIABLE}
        o, state, *_ = call(kind, x, **_with_state(kind, options))
        pairs = [(value, d[name]) for name, value in (("o", o), ("state", state)) if name in d]
        found = torch.autograd.grad(
            [value for value, _ in pairs], list(leaves.values()), [c for _, c in pairs], allow_unused=True
        )
        grads = {
            name: torch.zeros_like(a) if g is None else g for (name, a), g in zip(leaves.items(), found, strict=True)
        }
        return self.numpy(o), self.numpy(state), {name: self.numpy(g) for name, g in grads.items()}


class Jax(Library):
    name = "jax"

    def array(self, a: Any) -> Any:
        import jax.numpy as jnp

        return jnp.asarray(a)

    def both(self, x: Any, d: Any, kind: str = "rule", **options: Any) -> Any:
        o, state, grads = _jax_both()(kind, tuple(sorted(options.items())), self.arrays(x), self.arrays(d))
        return self.numpy(o), self.numpy(state), {name: np.asarray(a) for name, a in grads.items()}


@cache
def _jax_both() -> Any:
    """One compiled program a signature, whoever asks: compiling is most of what these tests cost."""
    from functools import partial

    import jax

    @partial(jax.jit, static_argnums=(0, 1))
    def both(kind: str, options: Any, x: Any, d: Any) -> Any:
        smooth = {name: a for name, a in x.items() if name in DIFFERENTIABLE}

        def outputs(smooth: Any) -> Any:
            o, state, *_ = call(kind, {**x, **smooth}, **_with_state(kind, dict(options)))
            return {name: value for name, value in (("o", o), ("state", state)) if name in d}, (o, state)

        _, pull, (o, state) = jax.vjp(outputs, smooth, has_aux=True)
        return o, state, pull(d)[0]

    return both


def _with_state(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    return options if kind == "step" else {"output_final_state": True, **options}


def _library(name: str) -> Library:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    if name == "torch":
        import torch

        torch.set_num_threads(2)
    return {"numpy": Library, "torch": Torch, "jax": Jax}[name]()


@pytest.fixture(params=["numpy", "torch", "jax"])
def library(request: pytest.FixtureRequest) -> Library:
    """Every library, numpy (the oracle as a backend) among them."""
    return _library(request.param)


@pytest.fixture(params=["torch", "jax"])
def framework(request: pytest.FixtureRequest) -> Library:
    """The libraries that differentiate by themselves."""
    return _library(request.param)


@pytest.fixture
def torch_library() -> Library:
    return _library("torch")


@pytest.fixture
def jax_library() -> Library:
    return _library("jax")


@pytest.fixture(autouse=True, scope="module")
def few_programs():
    """A worker runs thousands of tests, and the operating system allows only so many compiled programs at a time."""
    yield
    forget_programs()


@pytest.fixture
def tpu_backends():
    """Both backends, whatever is installed; and the registry as it was, afterwards."""
    from portable_gdn import dispatch
    from portable_gdn.tpu.backend import PALLAS, PALLAS_INTERPRET

    before = {b.name: b for b in dispatch.backends()}
    for backend in (PALLAS, PALLAS_INTERPRET):
        dispatch.register_backend(backend)
    yield
    for backend in dispatch.backends():
        dispatch.unregister_backend(backend.name)
    for backend in before.values():
        dispatch.register_backend(backend)
