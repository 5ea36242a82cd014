"""Bad input is refused with one exception type, in a sentence: the argument's name, what it was, what it must be."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint

import numpy as np
import pytest
from conftest import make

import portable_gdn as pg
from portable_gdn import dispatch

NAN = np.float32("nan")


def zeros(*shape, dtype="float32"):
    return np.zeros(shape, dtype)


def refusal(function, *args, **kwargs):
    with pytest.raises(pg.GdnError) as error:
        function(*args, **kwargs)
    assert isinstance(error.value, ValueError)
    sentence = str(error.value)
    assert sentence.endswith(".")
    return sentence


def without(x, *names):
    return {name: a for name, a in x.items() if name not in names}


# (what is changed in a good call of B=2 T=40 H=2 HV=4 K=16 V=24, words that the sentence must have: name, was, must)
WRONG = {
    "rank of q": ({"q": zeros(2, 40, 16)}, ["q is of shape [2, 40, 16]", "4 dimensions", "[B, T, H, K]"]),
    "rank of v": ({"v": zeros(2, 40, 4)}, ["v is of shape [2, 40, 4]", "[B, T, HV, V]"]),
    "k not like q": ({"k": zeros(2, 40, 2, 8)}, ["k is of shape [2, 40, 2, 8]", "[2, 40, 2, 16]"]),
    "T of k": ({"k": zeros(2, 39, 2, 16)}, ["k is of shape [2, 39, 2, 16]", "[2, 40, 2, 16]"]),
    "T of v": ({"v": zeros(2, 39, 4, 24)}, ["v is of shape [2, 39, 4, 24]", "[2, 40, HV, V]"]),
    "B of v": ({"v": zeros(3, 40, 4, 24)}, ["v is of shape [3, 40, 4, 24]", "[2, 40, HV, V]"]),
    "HV not a multiple of H": ({"v": zeros(2, 40, 5, 24)}, ["v is of 5 heads", "multiple of the 2 heads"]),
    "no channels": ({"q": zeros(2, 40, 2, 0), "k": zeros(2, 40, 2, 0), "g": zeros(2, 40, 4)}, ["K = 0", "at least 1"]),
    "heads of g": ({"g": zeros(2, 40, 2)}, ["g is of shape [2, 40, 2]", "[2, 40, 4]"]),
    "rank of g": ({"g": zeros(2, 40)}, ["g is of shape [2, 40]", "[B, T, HV]", "[B, T, HV, K]"]),
    "groups of g": ({"g": zeros(2, 40, 4, 5)}, ["g is of 5 decays", "divides K = 16"]),
    "heads of beta": ({"beta": zeros(2, 40, 2)}, ["beta is of shape [2, 40, 2]", "[2, 40, 4]"]),
    "rank of beta": ({"beta": zeros(2, 40, 4, 1)}, ["beta is of shape [2, 40, 4, 1]", "[2, 40, 4]"]),
    "beta with erase": ({"erase": zeros(2, 40, 4, 16)}, ["beta and erase are both given", "give"]),
    "beta with write": ({"write": zeros(2, 40, 4, 24)}, ["beta and write are both given", "give"]),
    "channels of erase": (
        {"beta": None, "erase": zeros(2, 40, 4, 24)},
        ["erase is of shape [2, 40, 4, 24]", "[2, 40, 4, 16]"],
    ),
    "channels of write": (
        {"beta": None, "write": zeros(2, 40, 4, 16)},
        ["write is of shape [2, 40, 4, 16]", "[2, 40, 4, 24]"],
    ),
    "float64": (
        {
            n: zeros(*s, dtype="float64")
            for n, s in (("q", (2, 40, 2, 16)), ("k", (2, 40, 2, 16)), ("v", (2, 40, 4, 24)))
        },
        ["q is of dtype float64", "float32, bfloat16, float16"],
    ),
    "int32": ({"q": zeros(2, 40, 2, 16, dtype="int32")}, ["q is of dtype int32", "float32, bfloat16, float16"]),
    "mixed dtypes": ({"k": zeros(2, 40, 2, 16, dtype="float16")}, ["k is of dtype float16", "dtype of q, float32"]),
    "dtype of g": ({"g": zeros(2, 40, 4, dtype="int32")}, ["g is of dtype int32", "float32"]),
    "dtype of beta": ({"beta": zeros(2, 40, 4, dtype="bool")}, ["beta is of dtype bool", "float32"]),
    "dtype of the state": (
        {"initial_state": zeros(2, 4, 16, 24, dtype="float16")},
        ["initial_state is of dtype float16", "float32"],
    ),
    "layout of the state": (
        {"initial_state": zeros(2, 4, 24, 16)},
        ["initial_state is of shape [2, 4, 24, 16]", "[2, 4, 16, 24]", "state_layout='vk'"],
    ),
    "the other layout": (
        {"initial_state": zeros(2, 4, 16, 24), "state_layout": "vk"},
        ["initial_state is of shape [2, 4, 16, 24]", "[2, 4, 24, 16]", "state_layout='kv'"],
    ),
    "number of states": (
        {"initial_state": zeros(3, 4, 16, 24)},
        ["initial_state is of shape [3, 4, 16, 24]", "[2, 4, 16, 24]"],
    ),
    "cu_seqlens of rows": ({"cu_seqlens": [0, 40]}, ["cu_seqlens is given for B = 2", "B = 1"]),
    "shape of segment_ids": (
        {"segment_ids": zeros(2, 39, dtype="int32")},
        ["segment_ids is of shape [2, 39]", "[2, 40]"],
    ),
    "dtype of segment_ids": ({"segment_ids": zeros(2, 40)}, ["segment_ids is of dtype float32", "int32"]),
    "shape of mask": ({"mask": zeros(40, dtype="bool")}, ["mask is of shape [40]", "[2, 40]"]),
    "dtype of mask": ({"mask": zeros(2, 40, dtype="int32")}, ["mask is of dtype int32", "bool"]),
    "None": ({"k": None}, ["k is", "None", "must be"]),
    "a list": ({"k": [1.0]}, ["k is a builtins.list", "torch tensor, a JAX array or a numpy array"]),
    "a number": ({"beta": 1.0}, ["beta is a builtins.float", "numpy array"]),
    "scale": ({"scale": float("nan")}, ["scale is nan", "finite"]),
    "scale that is an array": ({"scale": zeros()}, ["scale is", "finite number"]),
    "scale that is a word": ({"scale": "big"}, ["scale is 'big'", "finite number"]),
    "chunk_size": ({"chunk_size": 48}, ["chunk_size is 48", "power of two from 16 to 256"]),
    "chunk_size that is a list": ({"chunk_size": [64]}, ["chunk_size is [64]", "power of two"]),
    "precision": ({"precision": "exact"}, ["precision is 'exact'", "'highest', 'default', 'fast'"]),
    "state_layout": ({"state_layout": "VK"}, ["state_layout is 'VK'", "'kv'", "'vk'"]),
    "gate": ({"gate": "softplus"}, ["gate is a str", "SoftplusGate"]),
    "gate without g": ({"g": None, "gate": pg.SoftplusGate(zeros(4))}, ["g is None", "raw projection"]),
    "A_log": ({"gate": pg.SoftplusGate(zeros(2))}, ["A_log is of shape [2]", "[HV] = [4]"]),
    "no A_log": ({"gate": pg.SoftplusGate(None)}, ["A_log is None", "[HV]"]),
    "dt_bias": ({"gate": pg.SoftplusGate(zeros(4), zeros(4, 16))}, ["dt_bias is of shape [4, 16]", "[4]"]),
    "lower_bound": ({"gate": pg.BoundedGate(zeros(4), None, -6.0)}, ["lower_bound is -6.0", "[-5, 0)"]),
    "lower_bound None": ({"gate": pg.BoundedGate(zeros(4), None, None)}, ["lower_bound is None", "[-5, 0)"]),
    "lower_bound a word": ({"gate": pg.BoundedGate(zeros(4), None, "low")}, ["lower_bound is 'low'", "[-5, 0)"]),
    "backend": ({"backend": "trition"}, ["backend is 'trition'", "'numpy'"]),
    "backend that is a list": ({"backend": ["numpy"]}, ["backend is ['numpy']", "'numpy'"]),
}


@pytest.mark.parametrize("change", list(WRONG))
def test_a_wrong_argument_is_named(library, change):
    changes, words = WRONG[change]
    if library.name == "jax" and change == "float64":
        pytest.skip("JAX has no float64 by default")
    convert = lambda a: library.array(a) if isinstance(a, np.ndarray) else a  # noqa: E731
    x = library.arrays(make()) | {
        name: type(a)(*map(convert, vars(a).values()))
        if isinstance(a, (pg.SoftplusGate, pg.BoundedGate))
        else convert(a)
        for name, a in changes.items()
    }
    sentence = refusal(pg.gated_delta_rule, **x)
    for word in words:
        assert word in sentence
    assert refusal(pg.explain, **x) == sentence


@pytest.mark.parametrize("change", ["k not like q", "HV not a multiple of H", "dtype of the state", "backend"])
def test_a_refusal_repeats_itself(change):
    x = make() | WRONG[change][0]
    assert refusal(pg.gated_delta_rule, **x) == refusal(pg.gated_delta_rule, **x)


BOUNDARIES = {
    "start": ([1, 40], ["starting at 1", "start at 0"]),
    "decreasing": ([0, 30, 20, 40], ["decreasing from 30 to 20", "never decrease"]),
    "short": ([0, 39], ["ending at 39", "end at T = 40"]),
    "long": ([0, 41], ["ending at 41", "end at T = 40"]),
    "beyond int32": ([0, 2**32 + 40], [f"ending at {2**32 + 40}", "end at T = 40"]),
    "one entry": ([0], ["of shape [1]", "N + 1 >= 2"]),
    "nothing": ([], ["nothing", "integers"]),
    "floats": ([0.0, 40.0], ["float", "int"]),
    "nested": ([[0, 40]], ["of shape [1, 2]", "[N + 1]"]),
    "ragged": ([0, [40]], ["[0, [40]]", "integers"]),
}


@pytest.mark.parametrize("fault", list(BOUNDARIES))
def test_boundaries_on_the_host_are_checked(library, fault):
    values, words = BOUNDARIES[fault]
    x = library.arrays(make(B=1))
    forms = [values]
    if fault not in ("nothing", "ragged"):
        forms.append(np.array(values))
        if library.name == "torch":
            forms.append(library.array(np.array(values)))
    for bounds in forms:
        sentence = refusal(pg.gated_delta_rule, **x, cu_seqlens=bounds)
        assert sentence.startswith("cu_seqlens is ")
        for word in words:
            assert word in sentence


def test_boundaries_are_checked_again_when_only_their_values_change(library):
    x = library.arrays(make(B=1))
    for bounds in ([0, 10, 40], np.array([0, 10, 40])):
        pg.gated_delta_rule(**x, cu_seqlens=bounds)
        refusal(
            pg.gated_delta_rule,
            **x,
            cu_seqlens=type(bounds)([0, 50, 40]) if isinstance(bounds, list) else np.array([0, 50, 40]),
        )


def test_boundaries_and_segments_exclude_each_other(library):
    x = library.arrays(make(B=1) | {"segment_ids": zeros(1, 40, dtype="int32")})
    sentence = refusal(pg.gated_delta_rule, **x, cu_seqlens=[0, 40])
    assert "cu_seqlens and segment_ids are both given" in sentence


# Libraries and devices -----------------------------------------------------------------------------------------------


def test_torch_and_jax_arrays_do_not_mix(torch_library, jax_library):
    x, y = torch_library.arrays(make()), jax_library.arrays(make())
    for mixed in ({**x, "k": y["k"]}, {**x, "beta": y["beta"]}, {**y, "g": x["g"]}):
        sentence = refusal(pg.gated_delta_rule, **mixed)
        assert "torch tensor" in sentence
        assert "JAX array" in sentence
        assert "one library" in sentence
    one = {name: a[:1] for name, a in x.items()}
    sentence = refusal(pg.gated_delta_rule, **one, cu_seqlens=jax_library.array(np.array([0, 40])))
    assert "cu_seqlens" in sentence
    assert "JAX array" in sentence


def test_torch_and_numpy_arrays_do_not_mix(torch_library):
    x = torch_library.arrays(make()) | {"beta": make()["beta"]}
    sentence = refusal(pg.gated_delta_rule, **x)
    assert sentence.startswith("beta is a numpy array; it must be a torch tensor")


def test_devices_do_not_mix(torch_library):
    x = torch_library.arrays(make(state=True))
    for name in ("k", "beta", "initial_state"):
        sentence = refusal(pg.gated_delta_rule, **{**x, name: x[name].to("meta")})
        assert sentence == f"{name} is on meta; it must be on cpu, where q is."


# The step and the mixer ----------------------------------------------------------------------------------------------


def test_the_step_names_its_own_arguments(library):
    x = library.arrays({name: a[:, 0] for name, a in make().items()})
    step = pg.gated_delta_rule_step
    assert "state is of shape [2, 4, 24, 16]" in refusal(step, **x, state=library.array(zeros(2, 4, 24, 16)))
    assert "state is of dtype float16" in refusal(step, **x, state=library.array(zeros(2, 4, 16, 24, dtype="float16")))
    assert "[B, H, K]" in refusal(step, **{**x, "q": library.array(zeros(2, 1, 2, 16))})
    assert "[B, HV]" in refusal(step, **{**x, "beta": library.array(zeros(2, 4, 1))})
    assert "g is of shape [2, 1, 4]" in refusal(step, **{**x, "g": library.array(zeros(2, 1, 4))})


CHANNELS = 2 * 2 * 16 + 4 * 24
MIXER = {
    "conv": ({"conv": zeros(CHANNELS, 4)}, ["conv is a ", "ShortConv"]),
    "no weight": ({"conv": pg.ShortConv(None)}, ["conv.weight is None", "[channels, W]"]),
    "weight": ({"conv": pg.ShortConv(zeros(CHANNELS - 1, 4))}, ["conv.weight is of shape [159, 4]", "[160, W]"]),
    "weight [W, channels]": (
        {"conv": pg.ShortConv(zeros(4, CHANNELS))},
        ["conv.weight is of shape [4, 160]", "[160, W]"],
    ),
    "weight [C, 2, W]": (
        {"conv": pg.ShortConv(zeros(CHANNELS, 2, 4))},
        ["conv.weight is of shape [160, 2, 4]", "[channels, 1, W]"],
    ),
    "bias": ({"conv": pg.ShortConv(zeros(CHANNELS, 4), zeros(3))}, ["bias is of shape [3]", "[160]"]),
    "activation": ({"conv": pg.ShortConv(zeros(CHANNELS, 4), None, "gelu")}, ["conv.activation is 'gelu'", "'silu'"]),
    "qkv of two": ({"qkv": (zeros(2, 40, 32), zeros(2, 40, 32))}, ["qkv is a sequence of 2", "three"]),
    "qkv None": ({"qkv": None}, ["qkv is", "None", "numpy array"]),
    "rank of qkv": ({"qkv": zeros(2, 40, 4, 40)}, ["qkv is of shape [2, 40, 4, 40]", "[B, T, channels]"]),
    "channels of qkv": ({"qkv": zeros(2, 40, 66)}, ["qkv is of 66 channels", "2 num_heads key_dim + HV V"]),
    "k not like q": (
        {"qkv": (zeros(2, 40, 32), zeros(2, 40, 16), zeros(2, 40, 96))},
        ["k is of shape [2, 40, 16]", "[2, 40, 32]"],
    ),
    "q None": ({"qkv": (None, zeros(2, 40, 32), zeros(2, 40, 96))}, ["q is a builtins.NoneType", "numpy array"]),
    "T of v": (
        {"qkv": (zeros(2, 40, 32), zeros(2, 40, 32), zeros(2, 39, 96))},
        ["v is of shape [2, 39, 96]", "[2, 40, HV * V]"],
    ),
    "channels of q": (
        {"qkv": (zeros(2, 40, 33), zeros(2, 40, 33), zeros(2, 40, 96))},
        ["q has 33 and v 96 channels", "multiples of num_heads = 2 and HV = 4"],
    ),
    "key_dim of three": (
        {"qkv": (zeros(2, 40, 32), zeros(2, 40, 32), zeros(2, 40, 96)), "key_dim": 8},
        ["key_dim is 8", "None or 16"],
    ),
    "rank of g": ({"g": zeros(2, 40)}, ["g is of shape [2, 40]", "at least 3 dimensions, [B, T, HV]"]),
    "l2norm a number": ({"qk_l2norm": 1}, ["qk_l2norm is 1", "True or False"]),
    "no gates": ({"g": None, "beta": None}, ["g, beta, erase and write are all None", "needs one"]),
    "num_heads": ({"num_heads": 0}, ["num_heads is 0", "positive integer"]),
    "num_heads a word": ({"num_heads": "2"}, ["num_heads is '2'", "positive integer"]),
    "num_heads a fraction": ({"num_heads": 2.0}, ["num_heads is 2.0", "positive integer"]),
    "num_heads and HV": ({"num_heads": 3}, ["num_heads = 3", "multiple"]),
    "key_dim": ({"key_dim": None}, ["key_dim is None", "positive integer"]),
    "state, an array": ({"state": zeros(2, 4, 16, 24)}, ["state is a ", "MixerState"]),
    "state, a number": ({"state": 0}, ["state is a int", "MixerState"]),
    "recurrent state": (
        {"state": pg.MixerState(zeros(2, 4, 24, 16))},
        ["state is of shape [2, 4, 24, 16]", "[2, 4, 16, 24]"],
    ),
    "conv state": (
        {"state": pg.MixerState(None, zeros(2, 4, 160))},
        ["conv_state is of shape [2, 4, 160]", "[2, 3, 160]"],
    ),
}


@pytest.mark.parametrize("change", list(MIXER))
def test_a_wrong_argument_of_the_mixer_is_named(library, change):
    changes, words = MIXER[change]

    def convert(a):
        if isinstance(a, np.ndarray):
            return library.array(a)
        if isinstance(a, pg.ShortConv):
            return pg.ShortConv(convert(a.weight), convert(a.bias), a.activation)
        if isinstance(a, pg.MixerState):
            return pg.MixerState(*map(convert, a))
        return tuple(map(convert, a)) if isinstance(a, tuple) else a

    good = make()
    call = {
        "qkv": zeros(2, 40, CHANNELS),
        "g": good["g"],
        "beta": good["beta"],
        "conv": pg.ShortConv(zeros(CHANNELS, 4)),
        "num_heads": 2,
        "key_dim": 16,
        **changes,
    }
    sentence = refusal(pg.gated_delta_mixer, **{name: convert(a) for name, a in call.items()})
    for word in words:
        assert word in sentence


# Backends ------------------------------------------------------------------------------------------------------------


class Dummy(pg.Backend):
    """A backend that answers zeros, or refuses."""

    name, libraries, priority = "dummy", ("numpy", "torch", "jax"), 0

    def __init__(self, unavailable=None, refuses=None, **fields):
        self.reasons = (unavailable, refuses)
        self.__dict__.update(fields)

    def unavailable(self):
        return self.reasons[0]

    def refuses(self, signature):
        return self.reasons[1]

    def run(self, problem):
        return pg.Result(0 * problem.operands["v"])


@pytest.fixture
def register():
    yield pg.register_backend
    dispatch.unregister_backend("dummy")


def test_a_registered_backend_runs_by_name_and_only_then(library, register):
    x = library.arrays(make())
    before = pg.explain(**x).backend
    assert not np.all(library.numpy(pg.gated_delta_rule(**x)[0]) == 0)
    register(Dummy())
    assert np.all(library.numpy(pg.gated_delta_rule(**x, backend="dummy")[0]) == 0)
    assert pg.explain(**x).backend == before
    assert ("dummy", "it runs only when asked for by name") in pg.explain(**x).passed_over
    assert pg.explain(**x, backend="dummy").backend == "dummy"
    register(Dummy(auto=True))  # and the cached choice is forgotten
    assert pg.explain(**x).backend == "dummy"
    assert np.all(library.numpy(pg.gated_delta_rule(**x)[0]) == 0)
    dispatch.unregister_backend("dummy")
    assert not np.all(library.numpy(pg.gated_delta_rule(**x)[0]) == 0)
    assert "backend is 'dummy'" in refusal(pg.gated_delta_rule, **x, backend="dummy")


def test_a_backend_that_cannot_run_says_why_and_nothing_else_steps_in(library, register, monkeypatch):
    x = library.arrays(make())
    for reason in ({"unavailable": "it needs a device of cheese."}, {"refuses": "K = 16 is too few."}):
        register(Dummy(auto=True, **reason))
        why = next(iter(reason.values()))
        sentence = refusal(pg.gated_delta_rule, **x, backend="dummy")
        assert sentence == f"backend 'dummy' cannot run this call: {why}"
        assert dict(pg.explain(**x).passed_over)["dummy"] == why
        assert why in str(pg.explain(**x, backend="dummy"))
        assert pg.explain(**x, backend="dummy").backend is None
        assert pg.explain(**x).backend != "dummy"
        pg.gated_delta_rule(**x)  # unnamed, the next one serves
        monkeypatch.setenv("PORTABLE_GDN_BACKEND", "dummy")
        assert refusal(pg.gated_delta_rule, **x) == f"PORTABLE_GDN_BACKEND 'dummy' cannot run this call: {why}"
        monkeypatch.delenv("PORTABLE_GDN_BACKEND")


def test_a_combination_without_a_name_is_told_by_its_gates():
    x = make("GDN-2")
    x = {name: x[name] for name in ("q", "k", "v", "erase")} | {"g": x["g"][..., 0]}
    assert str(pg.explain(**x)).startswith("decay=head, erase=channel, write=none, float32")


def test_where_no_backend_can_the_reasons_of_all_are_given(register, monkeypatch):
    monkeypatch.setattr(dispatch, "_registry", {})
    register(Dummy(auto=True, refuses="K = 16 is too few."))
    sentence = refusal(pg.gated_delta_rule, **make())
    assert sentence.startswith("no backend can run this call:\n")
    assert sentence.endswith("runs on no backend\n  not dummy: K = 16 is too few.")


def test_a_package_whose_entry_point_breaks_takes_no_other_down(register, monkeypatch):
    entries = [
        EntryPoint("cheese", "portable_gdn_of_cheese:BACKEND", dispatch.GROUP),
        EntryPoint("numpy", "portable_gdn.backends.numpy_oracle:BACKEND", dispatch.GROUP),
    ]
    for name, value in {"_registry": {}, "_broken": {}, "_loaded": False}.items():
        monkeypatch.setattr(dispatch, name, value)
    monkeypatch.setattr(dispatch.metadata, "entry_points", lambda group: entries)
    assert [backend.name for backend in dispatch.backends()] == ["numpy"]
    sentence = refusal(pg.gated_delta_rule, **make(), backend="cheese")
    assert sentence.startswith("backend 'cheese' cannot be used: its entry point portable_gdn_of_cheese:BACKEND fails")
    assert (
        "No module named 'portable_gdn_of_cheese'" in dict(pg.explain(**make(), backend="cheese").passed_over)["cheese"]
    )
    register(Dummy(name="cheese"))  # which mends it
    assert np.all(pg.gated_delta_rule(**make(), backend="cheese")[0] == 0)


def test_the_environment_names_a_backend(library, monkeypatch):
    x = library.arrays(make())
    own = {"numpy": "numpy", "torch": "torch", "jax": "xla"}[library.name]
    other = "torch" if own == "numpy" else "numpy"
    pg.gated_delta_rule(**x)  # a choice made before is not kept
    monkeypatch.setenv("PORTABLE_GDN_BACKEND", other)
    sentence = refusal(pg.gated_delta_rule, **x)
    assert sentence.startswith(f"PORTABLE_GDN_BACKEND '{other}' cannot run this call: it takes")
    assert pg.explain(**x).backend is None
    pg.gated_delta_rule(**x, backend=own)  # an argument is nearer
    monkeypatch.setenv("PORTABLE_GDN_BACKEND", "nonsense")
    sentence = refusal(pg.gated_delta_rule, **x)
    assert "PORTABLE_GDN_BACKEND" in sentence
    assert "'nonsense'" in sentence
    monkeypatch.setenv("PORTABLE_GDN_BACKEND", "")
    pg.gated_delta_rule(**x)


@pytest.mark.parametrize("name", ["xla", "torch", "numpy"])
def test_a_backend_for_other_arrays_never_converts_them(library, name):
    if name == {"numpy": "numpy", "torch": "torch", "jax": "xla"}[library.name]:
        return
    sentence = refusal(pg.gated_delta_rule, **library.arrays(make()), backend=name)
    assert re.match(rf"backend '{name}' cannot run this call: it takes \w+ \w+, and these are ", sentence)


def test_explain_says_why_each_other_backend_is_passed_over(library):
    found = pg.explain(**library.arrays(make()))
    assert found.backend == {"numpy": "numpy", "torch": "torch", "jax": "xla"}[library.name]
    assert {name for name, _ in found.passed_over} >= {b.name for b in dispatch.backends()} - {found.backend}
    assert all(why for _, why in found.passed_over)
    assert f"runs on  {found.backend}" in str(found)


# Contents ------------------------------------------------------------------------------------------------------------


def _contents():
    x = make(state=True)
    for name in ("q", "k", "v", "beta", "initial_state"):
        for value in (np.nan, np.inf):
            y = {**x, name: x[name].copy()}
            y[name].flat[5] = value
            yield f"{name} {value}", y, [name, "not finite"]
    for value in (0.5, np.inf, np.nan):
        y = {**x, "g": x["g"].copy()}
        y["g"].flat[5] = value
        yield f"g {value}", y, ["g holds", "<= 0"]
    for value in (-0.1, 2.1):
        y = {**x, "beta": x["beta"].copy()}
        y["beta"].flat[5] = value
        yield f"beta {value}", y, ["beta holds", "[0, 2]"]
    x = make("GDN-2")
    for name in ("erase", "write"):
        y = {**x, name: x[name] + 2}
        yield f"{name} above 2", y, [f"{name} holds", "[0, 2]"]


CONTENTS = {name: (x, words) for name, x, words in _contents()}


@pytest.mark.parametrize("fault", list(CONTENTS))
def test_contents_are_checked_when_asked(library, fault):
    x, words = CONTENTS[fault]
    sentence = refusal(pg.gated_delta_rule, **library.arrays(x), check_values=True)
    for word in words:
        assert word in sentence


def test_contents_that_are_right_pass(library):
    x = make(state=True)
    x["g"][:, 3], x["g"][:, 4], x["beta"][:, 3] = -np.inf, 0, 2
    mask = np.ones((2, 40), bool)
    mask[0, 7:9] = False
    for name in ("q", "k", "v", "g", "beta"):
        x[name][~mask] = np.nan  # masked tokens may hold anything
    x = library.arrays({**x, "mask": mask})
    with_check = pg.gated_delta_rule(**x, check_values=True)[0]
    np.testing.assert_array_equal(library.numpy(with_check), library.numpy(pg.gated_delta_rule(**x)[0]))


def test_contents_of_gates_and_convolution_are_checked(library):
    rule = make()
    for A, bias in ((np.nan, 0), (0, np.inf)):
        gate = pg.SoftplusGate(library.array(np.full(4, A, np.float32)), library.array(np.full(4, bias, np.float32)))
        assert "not finite" in refusal(pg.gated_delta_rule, **library.arrays(rule), gate=gate, check_values=True)
    raw = library.arrays({**rule, "g": rule["g"] + 3})  # a raw projection may be positive
    gate = pg.SoftplusGate(library.array(zeros(4)))
    pg.gated_delta_rule(**raw, gate=gate, check_values=True)
    weight = np.ones((CHANNELS, 4), np.float32)
    weight[3, 2] = np.inf
    arguments = {"g": library.array(rule["g"]), "num_heads": 2, "key_dim": 16, "check_values": True}
    sentence = refusal(
        pg.gated_delta_mixer,
        library.array(zeros(2, 40, CHANNELS)),
        conv=pg.ShortConv(library.array(weight)),
        **arguments,
    )
    assert "weight" in sentence
    assert "finite" in sentence


def test_without_the_option_contents_are_not_looked_at(library):
    x = make()
    x["g"] = 0.01 + 0 * x["g"]
    assert np.isfinite(library.rule(x)[0]).all()  # positive gates compute


@pytest.mark.parametrize("bounds", [[1, 40], [0, 30, 20, 40], [0, 30]], ids=str)
def test_boundaries_on_a_device_are_checked_when_asked(jax_library, bounds):
    x = jax_library.arrays(make(B=1))
    cu = jax_library.array(np.array(bounds, np.int32))
    assert "cu_seqlens" in refusal(pg.gated_delta_rule, **x, cu_seqlens=cu, check_values=True)


def test_contents_under_jit_are_checked_by_checkify(jax_library):
    import jax
    from jax.experimental import checkify

    x = jax_library.arrays(make(B=1))
    call = checkify.checkify(jax.jit(lambda x, cu: pg.gated_delta_rule(**x, cu_seqlens=cu, check_values=True)[0]))
    cu = jax_library.array(np.array([0, 10, 40], np.int32))
    error, o = call(x, cu)
    error.throw()
    np.testing.assert_array_equal(
        np.asarray(o), np.asarray(jax.jit(lambda x: pg.gated_delta_rule(**x, cu_seqlens=cu)[0])(x))
    )
    for bad, word in (
        ({**x, "g": -x["g"]}, "g holds positive"),
        ({**x, "beta": 3 + x["beta"]}, "beta holds"),
        ({**x, "q": x["q"] * NAN}, "q holds"),
    ):
        with pytest.raises(checkify.JaxRuntimeError, match=word):
            call(bad, cu)[0].throw()
    with pytest.raises(checkify.JaxRuntimeError, match="cu_seqlens"):
        call(x, cu - 1)[0].throw()


def test_contents_under_jit_without_checkify_are_an_error_not_silence(jax_library):
    import jax

    x = jax_library.arrays(make())
    with pytest.raises(ValueError, match="checkify"):
        jax.jit(lambda x: pg.gated_delta_rule(**x, check_values=True)[0])(x)


def test_the_oracle_is_refused_under_a_trace(jax_library):
    import jax

    x = jax_library.arrays(make())
    with pytest.raises(pg.GdnError, match="backend 'numpy' cannot run this call"):
        jax.jit(lambda x: pg.gated_delta_rule(**x, backend="numpy")[0])(x)


def test_shapes_are_checked_under_jit(jax_library):
    import jax

    x = jax_library.arrays(make() | {"beta": zeros(2, 40, 2)})
    with pytest.raises(pg.GdnError, match="beta is of shape"):
        jax.jit(lambda x: pg.gated_delta_rule(**x)[0])(x)
    one = jax_library.arrays(make(B=1))
    with pytest.raises(pg.GdnError, match="cu_seqlens is ending at 39"):  # boundaries of the host are known there too
        jax.jit(lambda x: pg.gated_delta_rule(**x, cu_seqlens=[0, 39])[0])(one)
