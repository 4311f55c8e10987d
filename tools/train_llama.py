"""Train a Llama of 2.4 million parameters, from which grow.py makes larger ones. Development only.

    python tools/train_llama.py --work build/llama --output build/python-llama

It has the tokenizer and the text of the embedded pair; a run that was interrupted is resumed.
"""

from __future__ import annotations

from pathlib import Path

import click
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from corpus import held_out, library_files
from train_embedded_pair import (
    CONTEXT,
    SEED,
    VOCAB_SIZE,
    Trainer,
    encode,
    save_checkpoint,
    train_on_text,
)

TOKENIZER = Path(__file__).parents[1] / "models/checkpoints/python-9m"
RATE = 5e-3
# Its heads and groups fit into those of the Llama shapes that grow.py knows.
SHAPE = {
    "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32,
}  # fmt: skip


def new_model() -> LlamaForCausalLM:
    torch.manual_seed(SEED)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE, max_position_embeddings=CONTEXT, tie_word_embeddings=True,
            rms_norm_eps=1e-5, bos_token_id=0, eos_token_id=0, **SHAPE,
        )
    )  # fmt: skip


@click.command()
@click.option("--work", type=click.Path(path_type=Path), default=Path("build/llama"))
@click.option("--output", type=click.Path(path_type=Path), default=Path("build/python-llama"))
@click.option("--steps", default=2000, show_default=True)
def main(work: Path, output: Path, steps: int) -> None:
    """Train the model and write its checkpoint."""
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    train, test = (
        encode(tokenizer, [text for name, text in library_files() if held_out(name) == wanted])
        for wanted in (False, True)
    )
    train_on_text("llama", Trainer(new_model(), steps, RATE, work), train, test)
    model = new_model()
    model.load_state_dict(torch.load(work / "best.pt", weights_only=True))
    save_checkpoint(model, tokenizer, output)
    click.echo(f"{output}: {model.num_parameters()} parameters")


if __name__ == "__main__":
    main()
