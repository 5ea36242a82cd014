"""A checkpoint of transformers as a model in JAX that writes text, proved against the original.

python examples/port_and_generate.py                                  # a tiny random Qwen3.5, half a minute on a CPU
python examples/port_and_generate.py --model Qwen3.5-9B --out port    # a checkpoint of yours
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np

from portable_gdn.checkpoint import back, port
from portable_gdn.checkpoint.proof.oracle import hide_fla
from portable_gdn.models import generate, load_model, stream


def tiny_model(folder: Path) -> Path:
    """A Qwen3.5 of four layers with random weights, as transformers saves it."""
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=16, linear_value_head_dim=16, max_position_embeddings=512,
    )  # fmt: skip
    Qwen3_5ForCausalLM(config).save_pretrained(folder)
    return folder


def original_tokens(folder: Path, ids: np.ndarray, count: int) -> np.ndarray:
    """What transformers' own code writes, on a CPU."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.generate(torch.as_tensor(ids), max_new_tokens=count, do_sample=False)[:, ids.shape[1] :].numpy()


def main() -> None:
    """Port, write, compare, and go back."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a checkpoint's folder; a tiny random model if left out")
    parser.add_argument("--out", type=Path, help="where the port goes; a temporary folder if left out")
    parser.add_argument("--tokens", type=int, default=16, help="how many to write")
    options = parser.parse_args()
    hide_fla()  # transformers would call its GPU kernels on a CPU, too, where it is installed
    with tempfile.TemporaryDirectory() as room:
        source = options.model or tiny_model(Path(room) / "model")
        out = options.out or Path(room) / "port"
        port(source, out, "jax")
        model = load_model(out, precision="highest")
        ids = np.array([[3, 1, 4, 1, 5, 9, 2, 6]])
        print("token by token:", *(int(token[0]) for token in stream(model, ids, options.tokens)))
        ours = np.asarray(generate(model, ids, options.tokens).tokens)
        if options.model is None:
            theirs = original_tokens(source, ids, options.tokens)
            print(f"equal to transformers' in {np.sum(ours == theirs)} of {ours.size} tokens")
        back(out, Path(room) / "again")
        same = all(
            (source / path.name).read_bytes() == path.read_bytes()
            for path in (Path(room) / "again").glob("*.safetensors")
        )
        print("the way back returns the same files" if same else "the way back changed the files")


if __name__ == "__main__":
    main()
