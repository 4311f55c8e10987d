"""Write test vectors of EAGLE-3 heads, computed by speculators 0.9 in float64.

Needs an environment with speculators and transformers 5.17 to 5.19:

    python tools/eagle_vectors.py tests/exporter/checkpoint/eagle_vectors.json

For each variant of `tests/eagle_heads.py` the file has the results of three steps of a chain. The
first step reads all tokens with hidden states of the target, and further ones read the hidden state
that the preceding step returned. Step n has the logits and the next hidden state of row `ROW`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import eagle_heads
from eagle_heads import VARIANTS, HeadSpec

NUM_STEPS, ROW = 3, 5


def compute_vectors(spec: HeadSpec) -> dict[str, list[list[float]]]:
    """Run the head of a specification in speculators."""
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    fields = eagle_heads.head_config(spec)
    del fields["architectures"]
    config = Eagle3SpeculatorConfig(**fields)
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel(config)
    tensors = eagle_heads.head_tensors(spec)
    tensors.setdefault("embed_tokens.weight", eagle_heads.embedding(spec))
    result = model.load_state_dict(tensors, strict=False)
    assert not result.unexpected_keys, result.unexpected_keys
    assert all(key.startswith("verifier_") for key in result.missing_keys), result.missing_keys
    model = model.eval().double()
    recorded: dict[str, list[torch.Tensor]] = {
        "fused": [],
        "last": [],
        "normalized": [],
        "logits": [],
    }
    modules = (model.fc, model.layers[-1], model.norm, model.lm_head)
    for module, values in zip(modules, recorded.values(), strict=True):
        module.register_forward_hook(lambda _, __, output, values=values: values.append(output))
    tokens, states = eagle_heads.example(spec)
    with torch.no_grad():
        model(states, tokens, torch.zeros_like(tokens), ttt_steps=NUM_STEPS)
    states = recorded["normalized" if spec.norm_output else "last"]
    values = {"fused": recorded["fused"], "logits": recorded["logits"], "next_hidden": states}
    return {
        name: [[round(x, 7) for x in step[0, ROW].tolist()] for step in steps]
        for name, steps in values.items()
    }


if __name__ == "__main__":
    vectors = {name: compute_vectors(spec) for name, spec in VARIANTS.items()}
    text = json.dumps({"row": ROW, "variants": vectors}, indent=None, separators=(",", ":"))
    Path(sys.argv[1]).write_text(text.replace('"}', '"}\n') + "\n", "utf-8")
