"""Names that something else wrapped: read without what was added, and written back as they were."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from checkpoints import checkpoint, facts, read_file, realistic, save, tensors
from typer.testing import CliRunner

from portable_gdn.checkpoint import back, port
from portable_gdn.cli.main import app
from portable_gdn.spec.errors import GdnError

pytest.importorskip("safetensors")


def text(name: str) -> str:
    """A published name of Qwen3.5's text model with vision -> the text model's own name."""
    return name.replace("model.language_model.", "model.", 1)


WRAPPED = {  # from a text model's names to others
    "compiled": lambda n: "_orig_mod." + n,
    "data parallel": lambda n: "module." + n,
    "fsdp": lambda n: "_fsdp_wrapped_module." + n.replace("layers.1.", "layers.1._fsdp_wrapped_module."),
    "checkpointed": lambda n: re.sub(r"(layers\.\d+\.)", r"\1_checkpoint_wrapped_module.", n),
    "inside": lambda n: re.sub(r"(linear_attn|mlp)\.", r"\1._orig_mod.", n),
    "nested": lambda n: "module._orig_mod." + n.replace("model.", "model.module.", 1).replace("mlp.", "mlp._orig_mod."),
    "one layer only": lambda n: n.replace("layers.1.", "layers.1._orig_mod."),
    "before the leaf": lambda n: n.replace("conv1d.", "conv1d._orig_mod."),
    "no prefix": lambda n: n.removeprefix("model."),
    "compiled without prefix": lambda n: "_orig_mod." + n.removeprefix("model."),
    "part of a larger model": lambda n: "language_model." + n,
    "base of a larger model": lambda n: n.replace("model.", "language_model.", 1),
    "published with vision": lambda n: n.replace("model.", "model.language_model.", 1),
    "within a trainer": lambda n: "model." + n,
    "a policy": lambda n: "_forward_module.policy." + n,
    "wrapped larger model": lambda n: "module.model.language_model._orig_mod." + n.removeprefix("model."),
}


def renamed(x: dict[str, np.ndarray], change) -> dict[str, np.ndarray]:
    found = {change(name): a for name, a in x.items()}
    assert len(found) == len(x)
    return found


def there_and_back(tmp_path: Path, source: Path) -> dict[str, np.ndarray]:
    outcome = port(source, tmp_path / "out", "jax")
    assert not back(tmp_path / "out", tmp_path / "back").changed
    for path in source.iterdir():
        assert path.read_bytes() == (tmp_path / "back" / path.name).read_bytes(), path.name
    stored = json.loads((tmp_path / "out" / "portable_gdn.json").read_text())
    assert stored["notes"] == list(outcome.notes)
    assert set(stored["source"]["tensors"]) == set(read_all(source))
    return read_all(tmp_path / "out")


def read_all(folder: Path) -> dict[str, np.ndarray]:
    return {n: a for p in sorted(folder.glob("*.safetensors")) for n, a in read_file(p).items()}


SOME = [
    *(("qwen3_5_text", how) for how in WRAPPED),
    *(("kimi_linear", how) for how in ("fsdp", "no prefix", "part of a larger model")),
    *(("fla_gated_deltanet", how) for how in ("nested", "one layer only", "wrapped larger model")),
]


@pytest.mark.parametrize(("family", "how"), SOME)
def test_wrapped_names_give_the_same_tree_and_come_back(tmp_path, family, how):
    found = facts(family)
    x = tensors(found["tensors"])
    port(save(tmp_path / "plain", x, found["config"]), tmp_path / "want", "jax")
    want = read_all(tmp_path / "want")
    source = save(tmp_path / "src", renamed(x, WRAPPED[how]), found["config"], files=2)
    have = there_and_back(tmp_path, source)
    assert have.keys() == want.keys()
    assert all(np.array_equal(have[n].view(np.uint8), want[n].view(np.uint8)) for n in want)
    result = CliRunner().invoke(app, ["inspect", str(source)], env={"COLUMNS": "300"})
    assert result.exit_code == 0, result.output
    published = family == "kimi_linear" and how == "part of a larger model"
    published |= family == "qwen3_5_text" and how == "published with vision"
    assert ("--back restores them" in result.output) == (not published)
    assert ("note: " in CliRunner().invoke(app, ["inspect", str(tmp_path / "out")]).output) == (not published)


@pytest.mark.parametrize("how", ["compiled", "nested", "base of a larger model"])
def test_vision_and_prediction_keep_their_own_names(tmp_path, how):
    found = facts("qwen3_5_conditional")
    x = tensors({**found["tensors"], "mtp.fc.weight": [64, 128]})
    change = WRAPPED[how]
    x = {change(text(name)): a for name, a in x.items()}
    have = there_and_back(tmp_path, save(tmp_path / "src", x, found["config"]))
    aside = {name for name in x if "visual" in name or "mtp" in name}
    assert len(aside) > 3
    assert aside <= have.keys()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda x: {**x, "_orig_mod.lm_head.weight": x["lm_head.weight"]}, "lm_head.weight are both lm_head.weight"),
        (
            lambda x: {**x, "model.layers.0.mlp.module.up_proj.weight": x["model.layers.0.mlp.up_proj.weight"]},
            "are both model.layers.0.mlp.up_proj.weight",
        ),
        (lambda x: {**x, **{"teacher." + n: a for n, a in x.items()}}, "both read as layers of one text model"),
        (lambda x: {**x, "layers.0.mlp.up_proj.weight": x["model.layers.0.mlp.up_proj.weight"]}, "both read as layers"),
        (lambda x: {**x, "_fsdp_wrapped_module._flat_param": x["lm_head.weight"]}, "flat parameter of FSDP"),
        (lambda x: {**x, "_orig_mod.model.layers.0.linear_attn.gate": x["lm_head.weight"]}, "like _orig_mod"),
    ],
)  # fmt: skip
def test_names_with_two_readings_are_refused(tmp_path, change, sentence):
    found = facts("qwen3_5_text")
    x = tensors(found["tensors"])
    x.setdefault("lm_head.weight", x["model.embed_tokens.weight"])
    source = save(tmp_path / "src", change(x), found["config"])
    with pytest.raises(GdnError, match=sentence):
        port(source, tmp_path / "out", "jax")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("family", "how"), [("qwen3_5_text", "nested"), ("fla_kda", "compiled")])
def test_wrapped_models_are_proved_like_others(tmp_path, family, how):
    """The original implementation runs on wrapped files, too."""
    pytest.importorskip("transformers")
    from portable_gdn.checkpoint import proof

    source = save(tmp_path / "src", renamed(realistic(family), WRAPPED[how]), facts(family)["config"])
    port(source, tmp_path / "out", "jax")
    report = proof.check(tmp_path / "out")
    assert report.ok, (report.wrong, report.unrun)


def test_layers_under_another_familys_names_are_said_to_be_no_model(tmp_path):
    """Before anything is written; a port in the family's own names is a model, and nothing is said."""
    fla = checkpoint(tmp_path / "fla", "fla_gated_deltanet")
    said = CliRunner().invoke(app, ["port", str(fla), str(tmp_path / "out"), "--to", "hf"])
    note = "note: only linear-attention layers are written, under Qwen3-Next's names: no model class of transformers"
    assert said.output.startswith(note)
    assert said.output.count("note: only") == 1
    assert "only linear-attention" not in CliRunner().invoke(app, ["port", str(fla), "--to", "fla", "--dry-run"]).output
