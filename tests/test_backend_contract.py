"""The contract of a backend: its defaults, what is no backend, and the example of docs/architecture.md in the proof."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from conftest import make

import portable_gdn as pg
from portable_gdn import dispatch, door
from portable_gdn.spec.problem import Options

PAGE = Path(__file__).parent.parent / "docs" / "architecture.md"


def example() -> str:
    """The backend that docs/architecture.md shows."""
    (code,) = re.findall(r"```python\n(import array_api_compat.*?)```", PAGE.read_text(), re.S)
    return code


@pytest.fixture
def registered():
    def register(backend):
        pg.register_backend(backend)
        names.append(backend.name)
        return backend

    names: list[str] = []
    yield register
    for name in names:
        dispatch.unregister_backend(name)


class Least(pg.Backend):
    """No more than what must be there."""

    name, libraries = "least", ("numpy",)

    def run(self, problem):
        return dispatch.get("numpy").run(problem)


def test_what_a_backend_has_without_saying_so(registered):
    backend = registered(Least())
    x = make(B=1)
    problem, chosen = door.normalise(x, Options(), "least")
    assert chosen is backend
    s = problem.signature
    assert (backend.unavailable(), backend.not_here(), backend.refuses(s), backend.emulating()) == (None,) * 4
    assert (backend.serves(s), backend.has_stages, backend.alone) == ("", False, backend)
    assert backend.rounding(s) == pg.Rounding()
    assert "  by " not in str(pg.explain(**x, backend="least"))
    for call, words in ((backend.probe, "no stages to show"), (lambda p: backend.gradients(p, {}), "has no gradients")):
        with pytest.raises(pg.GdnError, match=words):
            call(problem)
    _, states = pg.gated_delta_rule(**x, output_states_every=7, backend="least")
    exact = pg.gated_delta_rule(**x, output_states_every=7, backend="numpy")[1].every
    np.testing.assert_allclose(states.every, exact, atol=1e-6)


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_numbers_travel_and_gradients_come_by_themselves(library, registered):
    pytest.importorskip(library)

    class Other(Least):
        name, libraries = "other", (library,)

        def run(self, problem):
            return dispatch.get({"torch": "torch", "jax": "xla"}[library]).run(problem)

    backend = registered(Other())
    own = dispatch.get({"torch": "torch", "jax": "xla"}[library])
    x = make(state=True)
    operands = backend.from_numpy(x)
    for name, a in x.items():
        given = operands[name]
        assert backend.to_numpy(given).dtype == a.dtype
        a += 1  # it is a copy
        assert not np.array_equal(backend.to_numpy(given), a)
    problem, _ = door.normalise(operands, Options(output_final_state=True), "other")
    ones = {"o": operands["v"] * 0 + 1}
    result, found = backend.gradients(problem, ones)
    want, expected = own.gradients(problem, ones)
    np.testing.assert_allclose(backend.to_numpy(result.o), own.to_numpy(want.o), atol=1e-5)
    assert found.keys() == expected.keys() == x.keys()
    for name in found:
        np.testing.assert_allclose(backend.to_numpy(found[name]), own.to_numpy(expected[name]), atol=2e-5)


class Nameless(pg.Backend):
    libraries = ("numpy",)

    def run(self, problem):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        (object(), "backend is of type object; it must be an instance of a subclass of portable_gdn.Backend"),
        (Least, "backend is the class Least; it must be an instance"),
        ("numpy", "backend is of type str; it must be an instance"),
        (Nameless(), "backend is a Nameless without name; it must have them"),
    ],
)
def test_what_is_no_backend_is_refused(what, sentence):
    with pytest.raises(pg.GdnError, match=sentence):
        pg.register_backend(what)


@pytest.mark.slow
def test_the_example_is_short_and_holds_in_the_proof():
    pytest.importorskip("torch")
    from portable_gdn.harness.verify import verify

    code = example()
    assert len(code.splitlines()) < 40
    found: dict = {}
    exec(code, found)
    pg.register_backend(found["BACKEND"])
    try:
        results = verify(["mine"])
        assert results.ok, results
        assert len(results.rows) > 100
    finally:
        dispatch.unregister_backend("mine")
