"""A whole model trained by one step, beside the same step in torch, and the way back to transformers."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("safetensors")
pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")
optax = pytest.importorskip("optax")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from whole import LIMIT, error, original, plain_transformers, ported  # noqa: E402

from portable_gdn.checkpoint import back, port  # noqa: E402
from portable_gdn.checkpoint.loading import load_tree  # noqa: E402
from portable_gdn.models import load_model, save_model, saving  # noqa: E402
from portable_gdn.spec.errors import GdnError  # noqa: E402

RATE, EPS = 1e-2, 1e-3
"""Of Adam. So large an eps lets a step follow the gradient, and not the sign of its rounding where it is nearly 0."""


@pytest.fixture(scope="module")
def transformers():
    yield from plain_transformers()


def leaves_of(model, folder: Path) -> dict[str, np.ndarray]:
    """The parameters of transformers' model under our names, by a port of what it saves."""
    model.save_pretrained(folder / "saved")
    port(folder / "saved", folder / "ported", "jax")
    tree = jax.tree_util.tree_leaves_with_path(load_tree(folder / "ported"))
    return {".".join(key.key for key in path): np.asarray(leaf) for path, leaf in tree}


def logits_of(model, ids: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(ids), use_cache=False).logits.numpy()


@partial(jax.jit, static_argnames="graph", compiler_options={"xla_backend_optimization_level": 0})  # runs twice
def step(graph, weights, others, ids):
    """Logits, the gradients of all parameters, and the parameters that Adam makes of them."""

    def loss(weights):
        logits = nnx.merge(graph, weights, others)(ids)[0]
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:]).mean(), logits

    gradients, logits = jax.grad(loss, has_aux=True)(weights)
    adam = optax.adam(RATE, eps=EPS)
    updates, _ = adam.update(gradients, adam.init(weights), weights)
    return logits, gradients, optax.apply_updates(weights, updates)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text", "kimi_linear", "olmo_hybrid"])
def test_a_step_of_training_is_that_of_torch_and_goes_back(transformers, name, tmp_path):
    """Gradients of all parameters, what Adam makes of them, and transformers' logits of what came back."""
    import torch

    folder = ported(tmp_path, name)
    ids = np.random.default_rng(0).integers(3, 256, (2, 24))  # none that transformers' embedding takes for padding
    theirs = original(folder.parent / "src")
    optimizer = torch.optim.Adam(theirs.parameters(), RATE, eps=EPS)
    logits = theirs(torch.from_numpy(ids), use_cache=False).logits[:, :-1]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(ids)[:, 1:].flatten()).backward()
    optimizer.step()
    stepped, want = leaves_of(theirs, tmp_path / "stepped"), logits_of(theirs, ids)
    with torch.no_grad():
        for p in theirs.parameters():
            p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
    slopes = leaves_of(theirs, tmp_path / "slopes")

    model = load_model(folder, precision="highest", backend="xla")
    start = {leaf: np.asarray(a) for leaf, a in model.leaves().items()}
    graph, weights, others = nnx.split(model, nnx.Param, ...)
    before, gradients, new = step(graph, weights, others, jnp.asarray(ids))
    after, _, _ = step(graph, new, others, jnp.asarray(ids))
    found, got = (nnx.merge(graph, values, others).leaves() for values in (gradients, new))
    trained = {leaf for path, _ in nnx.to_flat_state(weights) for leaf in model.names(path)}
    still = start.keys() - trained
    assert all(leaf.endswith("router.bias") for leaf in still)  # it has no gradient in transformers either
    assert start.keys() == stepped.keys() == slopes.keys()
    off = {leaf: e for leaf in trained if not (e := error(found[leaf], slopes[leaf])) < 1e-3}
    assert off == {}
    off = {leaf: e for leaf in trained if not (e := error(got[leaf] - start[leaf], stepped[leaf] - start[leaf])) < 1e-3}
    assert off == {}
    assert all(np.array_equal(got[leaf], stepped[leaf]) for leaf in still)

    tuned = tmp_path / "tuned"
    shutil.copytree(folder, tuned)
    save_model(nnx.merge(graph, new, others), tuned)
    assert {path.name for path in tuned.iterdir()} == {path.name for path in folder.iterdir()}
    assert all(np.array_equal(a, got[leaf]) for leaf, a in load_model(tuned).leaves().items())
    back(tuned, tmp_path / "back")
    assert error(before, want) > 1e-2
    assert error(after - before, want - before) < 1e-3  # what the step did to the logits
    assert error(logits_of(original(tmp_path / "back"), ids), after) < LIMIT


@pytest.mark.slow
def test_weights_are_saved_whole_or_not_at_all(tmp_path, monkeypatch):
    folder, other = ported(tmp_path, "olmo_hybrid"), ported(tmp_path, "qwen3_5_text")
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    with pytest.raises(GdnError, match="must be one that was loaded from this port"):
        save_model(load_model(other), folder)
    model = load_model(folder)
    monkeypatch.setattr(saving, "_tensors", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        save_model(model, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
    monkeypatch.undo()
    save_model(model, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
