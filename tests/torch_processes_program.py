"""One of two processes that share DTensors, and a model that FSDP2 shards; run by test_torch_processes.py."""

from __future__ import annotations

import json
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import portable_gdn as pg
from portable_gdn import ops

rank, where = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{where}", rank=rank, world_size=2)
mesh = dist.init_device_mesh("cpu", (2,))
torch.manual_seed(0)
B, T, H, HV, K, V = 2, 40, 2, 4, 8, 12
found = {}


def whole(a):
    return a.full_tensor() if isinstance(a, DTensor) else a


def error(want, got):
    return max(float((a - whole(b)).detach().norm() / a.detach().norm()) for a, b in zip(want, got, strict=True))


def run(call, x, places):
    """Outputs and gradients of a call, of operands placed so."""
    leaves = {n: distribute_tensor(a, mesh, [places[n]]) if places else a.clone() for n, a in x.items()}
    out = [a for a in call({n: a.requires_grad_() for n, a in leaves.items()}) if a is not None]
    weights = [torch.cos(torch.arange(a.numel(), dtype=torch.float32)).reshape(a.shape) for a in out]
    sum((whole(a) * w).sum() for a, w in zip(out, weights, strict=True)).backward()
    return out, [a.grad for a in leaves.values()]


def compared(name, call, x, places, of):
    (want, dwant), (got, dgot) = run(call, x, None), run(call, x, places)
    assert all(isinstance(a, DTensor) and a.placements[0] == Shard(d) for a, d in zip(got, of, strict=True)), got
    found[name] = {"forward": error(want, got), "gradient": error(dwant, dgot)}


x = {
    "q": torch.randn(B, T, H, K), "k": torch.nn.functional.normalize(torch.randn(B, T, H, K), dim=-1),
    "v": torch.randn(B, T, HV, V), "g": -torch.rand(B, T, HV), "beta": torch.rand(B, T, HV),
    "initial_state": torch.randn(B, HV, K, V),
}  # fmt: skip


def rule(x):
    return pg.gated_delta_rule(**x, output_final_state=True)


def mixer(x):
    o, state = pg.gated_delta_mixer(
        x["qkv"], x["g"], beta=x["beta"], conv=pg.ShortConv(x["weight"]), num_heads=H, key_dim=K, qk_l2norm=True,
        gate=pg.SoftplusGate(x["A_log"]), output_final_state=True,
    )  # fmt: skip
    return o, *state


rows = dict.fromkeys(x, Shard(0))
compared("rows", rule, x, rows, (0, 0))
compared("rows, some whole", rule, x, rows | {"g": Replicate(), "initial_state": Replicate()}, (0, 0))
compared("heads", rule, x, dict.fromkeys(x, Shard(2)) | {"initial_state": Shard(1)}, (2, 1))
C = 2 * H * K + HV * V
mixing = {
    "qkv": torch.randn(B, T, C), "g": torch.randn(B, T, HV), "beta": torch.rand(B, T, HV),
    "weight": torch.randn(C, 4), "A_log": torch.zeros(HV),
}  # fmt: skip
places = dict.fromkeys(mixing, Shard(0)) | {"weight": Replicate(), "A_log": Replicate()}
compared("a mixer's rows", mixer, mixing, places, (0, 0, 0))
for name, dim, words in (
    ("q", 1, "q is a DTensor sharded over its tokens"),
    ("v", 3, "v is a DTensor sharded along dimension 3, and that dimension cannot be split"),
):
    with pytest.raises(pg.GdnError, match=words):
        rule({n: distribute_tensor(a, mesh, [Shard(dim) if n == name else Replicate()]) for n, a in x.items()})


def pieces(name, operation, x, bounds):
    """FLA's call with a context, of this process's tokens, against that of all of them."""
    local = lambda a: a[:, rank * T // 2 : (rank + 1) * T // 2]  # noqa: E731
    place = [0, *(b - rank * T // 2 for b in bounds if rank * T // 2 < b < (rank + 1) * T // 2), T // 2]
    context = SimpleNamespace(
        group=dist.group.WORLD, cu_seqlens=torch.tensor(place), is_first_rank=rank == 0 or T // 2 in bounds,
        is_last_rank=rank == 1 or T // 2 in bounds,
    )  # fmt: skip
    want, got = ({n: a.clone().requires_grad_() for n, a in x.items()} for _ in range(2))
    o = operation(**want, cu_seqlens=torch.tensor(bounds))[0]
    own = operation(**{n: local(a) for n, a in got.items()}, cp_context=context)[0]
    weights = torch.cos(torch.arange(o.numel(), dtype=torch.float32)).reshape(o.shape)
    (o * weights).sum().backward()
    (own * local(weights)).sum().backward()
    gradients = [(local(a.grad), local(b.grad)) for a, b in zip(want.values(), got.values(), strict=True)]
    found[name] = {"forward": error([local(o)], [own]), "gradient": error(*zip(*gradients, strict=True))}


row = {n: a[:1] for n, a in x.items() if n != "initial_state"}
gdn, kda = ops.chunk_gated_delta_rule, ops.chunk_kda
channels = row | {n: row[n].repeat_interleave(2, 2) for n in "qk"} | {"g": -torch.rand(1, T, HV, K)}
pieces("one sequence", gdn, row, [0, T])
pieces("packed", kda, channels, [0, 7, 33, T])
pieces("a border between", gdn, row, [0, 3, T // 2, T])

if sys.argv[3:] == ["model"]:
    warnings.simplefilter("ignore")
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    from portable_gdn.harness.capture import _MODELS
    from portable_gdn.integrations import patch_transformers

    patch_transformers()
    kind = "qwen3_5_text"
    config = AutoConfig.for_model(kind, **_MODELS[kind].config)

    def gradients(sharded):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        if sharded:
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        ids = torch.randint(3, 200, (2, 70), generator=torch.Generator().manual_seed(1))
        with pg.watch() as calls:
            logits = model(ids[rank : rank + 1] if sharded else ids).logits
        (logits.float() ** 2).mean().backward()
        return {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}, len(calls)

    (want, calls), (got, _) = gradients(False), gradients(True)
    assert calls
    assert set(want) == set(got)
    found["FSDP2"] = {"gradient": max(float((want[n] - got[n]).norm() / (want[n].norm() + 1e-12)) for n in want)}
dist.barrier()
dist.destroy_process_group()
print(json.dumps(found))
