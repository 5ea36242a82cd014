"""torch tensors on the meta device: shapes and dtypes of results, and a graph, without a single number."""

from __future__ import annotations

import pytest

import portable_gdn as pg

torch = pytest.importorskip("torch")


def _empty(*shape, dtype=torch.float32, grad=False):
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=grad)


@pytest.mark.parametrize("T", [0, 1, 20])
@pytest.mark.parametrize("layout", ["rows", "mask", "segments", "boundaries", "boundaries on the host", "list"])
def test_a_call_and_its_gradient_have_shapes(T, layout):
    more = {
        "rows": {},
        "mask": {"mask": _empty(1, T, dtype=torch.bool)},
        "segments": {"segment_ids": _empty(1, T, dtype=torch.int32)},
        "boundaries": {"cu_seqlens": _empty(3, dtype=torch.int32)},
        "boundaries on the host": {"cu_seqlens": torch.tensor([0, 0, T])},
        "list": {"cu_seqlens": [0, 0, T]},
    }[layout]
    q, k, v, g, beta = (
        _empty(1, T, *s, dtype=torch.bfloat16, grad=True) for s in ((1, 16), (1, 16), (2, 24), (2,), (2,))
    )
    o, state = pg.gated_delta_rule(q, k, v, g, beta=beta, output_final_state=True, qk_l2norm=True, **more)
    assert (o.device.type, o.shape, o.dtype) == ("meta", (1, T, 2, 24), torch.bfloat16)
    assert (state.shape, state.dtype) == ((2 if "cu_seqlens" in more else 1, 2, 16, 24), torch.float32)
    o.sum().backward()
    assert all(a.grad.shape == a.shape for a in (q, k, v, g, beta))


def test_steps_mixers_and_states_on_the_way():
    o, state = pg.gated_delta_rule_step(*(_empty(2, 1, 16),) * 3, _empty(2, 1), beta=_empty(2, 1))
    assert (o.shape, state.shape) == ((2, 1, 16), (2, 1, 16, 16))
    conv = pg.ShortConv(_empty(64, 4))
    o, state = pg.gated_delta_mixer(
        _empty(2, 9, 64), _empty(2, 9, 2), beta=_empty(2, 9, 2), conv=conv, num_heads=1, key_dim=16,
        output_final_state=True,
    )  # fmt: skip
    assert (o.shape, state.recurrent.shape, state.conv.shape) == ((2, 9, 2, 16), (2, 2, 16, 16), (2, 3, 64))
    _, states = pg.gated_delta_rule(*(_empty(1, 9, 1, 16),) * 3, output_states_every=4)
    assert states.every.shape == (1, 2, 1, 16, 16)


def test_there_are_no_values_to_check():
    with pytest.raises(pg.GdnError, match="check_values is True; it must be False for tensors on the meta device"):
        pg.gated_delta_rule(*(_empty(1, 9, 1, 16),) * 3, check_values=True)
