"""Every Python block of the README and the pages runs, and every link of theirs leads somewhere.

The blocks of a page run one after the other in a process of their own, in a folder that holds what the page speaks of.
"""

from __future__ import annotations

import doctest
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from portable_gdn import api

ROOT = Path(__file__).parents[1]
PAGES = sorted(str(p.relative_to(ROOT)) for p in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def ported(folder: Path) -> None:
    from checkpoints import checkpoint

    from portable_gdn.checkpoint import port

    source = checkpoint(folder / "my-model", "fla_gated_deltanet")
    port(source, folder / "out", "nnx")
    port(source, folder / "out-orbax", "orbax")


def transformers_model(folder: Path) -> None:
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(0)
    linear = {f"linear_{what}": size for what, size in (
        ("num_key_heads", 2), ("num_value_heads", 4), ("key_head_dim", 16), ("value_head_dim", 16),
    )}  # fmt: skip
    config = Qwen3NextConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        intermediate_size=32, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, **linear,
    )  # fmt: skip
    Qwen3NextForCausalLM(config).save_pretrained(folder / "my-model")


def triton_kernel(folder: Path) -> None:
    (folder / "my_kernels.py").write_text("import triton\nimport triton.language as tl\n" + MATMUL)
    transformers_model(folder)


MATMUL = """

@triton.jit
def matmul(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    i, j = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        at = k + tl.arange(0, BK)
        total += tl.dot(tl.load(a + i[:, None] * K + at[None]), tl.load(b + at[:, None] * N + j[None]))
    tl.store(c + i[:, None] * N + j[None], total.to(tl.bfloat16))
"""


class Page(NamedTuple):
    """What the blocks of a page need: modules, what its folder holds, and a text that stands in for another."""

    needs: tuple[str, ...] = ()
    prepare: Callable[[Path], None] | None = None
    replaced: tuple[str, str] = ("", "")


RUN = {
    "README.md": Page(),
    "docs/index.md": Page(),
    "docs/tile-grouped.md": Page(),
    "docs/tpu-backward.md": Page(("jax",)),
    "docs/checkpoints.md": Page(("flax", "orbax.checkpoint"), ported),
    "docs/reference/layers.md": Page(("flax",)),
    "docs/cross-hardware.md": Page(("hypothesis",), replaced=('check("mine")', 'check("numpy", examples=1)')),
    "docs/gpu-kernels.md": Page(("torch", "transformers", "fla", "triton"), triton_kernel),
    "docs/serving.md": Page(("jax", "torch")),
    "docs/tpu-schedule.md": Page(("libtpu",)),
    "docs/gpu-to-tpu.md": Page(("flax", "optax", "torch", "transformers"), transformers_model),
    "docs/tutorials/train-a-layer.md": Page(("flax", "optax", "orbax.checkpoint")),
}

#: Pages whose blocks run in tests that look at what they give.
ELSEWHERE = {
    "docs/architecture.md": "test_backend_contract.py",
    "docs/from-fla.md": "test_ops.py",
    "docs/one-layer.md": "test_pages_on_devices.py",
    "docs/many-chips.md": "test_pages_on_devices.py",
    "docs/models.md": "test_models.py",
    "docs/torchax.md": "test_torchax.py",
}


def test_every_page_with_blocks_is_run():
    assert {page for page in PAGES if blocks(page)} == {*RUN, *ELSEWHERE}
    for page, test in ELSEWHERE.items():
        assert Path(page).name in (ROOT / "tests" / test).read_text(), test


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN)
def test_the_blocks_of_a_page_run(page, tmp_path):
    what = RUN[page]
    for module in what.needs:
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            pytest.skip(f"{module} is not installed")
    if what.prepare is not None:
        what.prepare(tmp_path)
    old, new = what.replaced
    text = "\n".join(blocks(page))
    assert old in text
    (tmp_path / "page.py").write_text(text.replace(old, new) if old else text)
    done = subprocess.run([sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def heading_names(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    found = set()
    for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        plain = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower())
        found.add(plain.strip().replace(" ", "-"))
    return found


def test_every_link_leads_somewhere():
    links = 0
    for page in [*PAGES, "CONTRIBUTING.md", "CHANGELOG.md"]:
        text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if "://" in target or target.startswith("mailto:"):
                continue
            links += 1
            path, _, anchor = target.partition("#")
            there = (ROOT / page).parent / path if path else ROOT / page
            assert there.exists(), f"{page} links to {target}"
            if anchor and there.suffix == ".md":
                assert anchor in heading_names(there.read_text()), f"{page} links to {target}"
    assert links > 30


def test_every_question_is_answered_by_a_section():
    text = (ROOT / "docs" / "questions.md").read_text()
    asked = re.findall(r"^\*\*(.+?)\*\* (.+?)(?=\n\n|\Z)", text, re.DOTALL | re.MULTILINE)
    assert len(asked) >= 20
    for question, answer in asked:
        assert re.search(r"\]\([\w./-]+\.md#[\w-]+\)", answer), question


def test_examples_in_docstrings_run():
    found = doctest.DocTestFinder().find(api, "portable_gdn")
    examples = [test for test in found if test.examples]
    assert len(examples) >= 4
    for test in examples:
        assert doctest.DocTestRunner(verbose=False).run(test).failed == 0, test.name


def test_no_docstring_has_an_example_that_is_not_run():
    for folder in ("portable_gdn", "gpu", "tpu"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.name != "api.py":
                assert ">>> " not in path.read_text(), path
