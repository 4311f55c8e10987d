"""A target and an EAGLE-3 head that fits it, both linear, so that every misreading of it shows.

All embeddings have the same norm and one constant channel, by which attention reads positions. The
first layers of the target rotate the other channels of the first half, and the last one adds twice
those of the token before to the second half. The head computes the same from its hidden states.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

import eagle_heads
from checkpoints import VOCAB_SIZE, make_config, make_model, make_tokenizer, save
from eagle_heads import HeadSpec
from specedge.exporter.quantization import texts
from specedge.exporter.quantization.draft_acceptance import first_windows
from specedge.exporter.tracing.hidden_states import HiddenStateRecorder

NUM_LAYERS, HIDDEN, HEADS = 6, 32, 4
HEAD_SIZE, HALF = HIDDEN // HEADS, HIDDEN // 2
LAYERS = (2, 4, 6)  # whose inputs the head reads
SPEC = HeadSpec(vocab_size=VOCAB_SIZE, columns=480, kv_heads=HEADS, layer_ids=LAYERS)
SCALE = 0.1  # of the head's hidden states, so that their norm shows


def make_target(folder: Path) -> Path:
    """Write the target."""
    random = torch.Generator().manual_seed(0)
    config = make_config("llama", layers=NUM_LAYERS, hidden=HIDDEN, heads=HEADS)
    model = make_model(config)
    embedding = torch.zeros(VOCAB_SIZE, HIDDEN)
    embedding[:, 1:HALF] = normalize(torch.randn(VOCAB_SIZE, HALF - 1, generator=random))
    embedding[:, 0] = 1
    rms = (HALF / HIDDEN) ** 0.5
    weights = {"model.embed_tokens": embedding, "model.norm": torch.ones(HIDDEN)}
    for i in range(NUM_LAYERS):
        is_last = i == NUM_LAYERS - 1
        rotation = torch.linalg.qr(torch.randn(HALF - 1, HALF - 1, generator=random)).Q
        value = torch.zeros(HIDDEN, HIDDEN)
        if is_last:
            value[HALF + 1 :, 1:HALF] = 2 * rms * rotation
        else:
            value[1:HALF, 1:HALF] = rms * (rotation - torch.eye(HALF - 1))
        q_proj, k_proj = attend_to_position(int(is_last), HIDDEN)
        layer = {
            "self_attn.q_proj": q_proj,
            "self_attn.k_proj": k_proj,
            "self_attn.v_proj": value,
            "self_attn.o_proj": torch.eye(HIDDEN),
            "mlp.down_proj": torch.zeros(HIDDEN, 2 * HIDDEN),
            "input_layernorm": torch.ones(HIDDEN),
        }
        # Noise, so that no two layers share a tensor.
        weights |= {
            f"model.layers.{i}.{name}": tensor + 1e-4 * torch.randn(tensor.shape, generator=random)
            for name, tensor in layer.items()
        }
    state = {f"{name}.weight": tensor for name, tensor in weights.items()}
    model.load_state_dict(state, strict=False)
    return save(model, make_tokenizer(folder / "tokenizer"), folder / "target")


def fit_head(target: Path, spec: HeadSpec, layers: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Return tensors of a head that predicts the target's final hidden state of the next token.

    The matrices of hidden states and embeddings are fitted by least squares; the head reads states
    at the inputs of `layers`.
    """
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64).eval()
    encoder = texts.TextEncoder(
        Tokenizer.from_file(str(target / "tokenizer.json")), spec.vocab_size
    )
    recorder = HiddenStateRecorder(model, [*layers, NUM_LAYERS])
    states, embeddings, finals = [], [], []
    for text in first_windows(encoder, texts.read_source(None).calibration, 64):
        with torch.no_grad(), recorder.recorded():
            model(torch.from_numpy(text)[None])
        *read, final = (rows[0] for rows in recorder.take())
        states.append(torch.cat(read, -1)[:-1])
        finals.append(normalize(final))
        embeddings.append(normalize(model.model.embed_tokens.weight[text[1:]]).detach())
    final = torch.cat([rows[:-1] for rows in finals])
    next_final = torch.cat([rows[1:] for rows in finals])
    fuse = torch.linalg.lstsq(torch.cat(states), final, driver="gelsd").solution.T
    read = torch.cat((torch.cat(embeddings), final), -1)
    value = torch.linalg.lstsq(read, next_final - final, driver="gelsd").solution.T

    tensors = eagle_heads.head_tensors(spec)
    prefix = next(name for name in tensors if "q_proj" in name).removesuffix(
        "self_attn.q_proj.weight"
    )
    q_proj, k_proj = attend_to_position(0, 2 * HIDDEN)
    columns = torch.arange(spec.columns) + tensors.get("d2t", 0)
    fitted = {
        "fc": SCALE * fuse,
        f"{prefix}self_attn.q_proj": q_proj,
        f"{prefix}self_attn.k_proj": k_proj,
        f"{prefix}self_attn.v_proj": value,
        f"{prefix}self_attn.o_proj": SCALE * torch.eye(HIDDEN),
        f"{prefix}mlp.down_proj": torch.zeros(HIDDEN, spec.inner),
        "lm_head": model.lm_head.weight[columns].detach(),
    }
    norms = (name for name in tensors if "norm" in name)
    tensors |= {name: torch.ones(HIDDEN) for name in norms}
    return tensors | {f"{name}.weight": x.float().contiguous() for name, x in fitted.items()}


def attend_to_position(distance: int, num_read: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return projections of queries and keys by which rows attend to the row `distance` before.

    They read the constant channel 0, so that scores depend on rotary positions alone.
    """
    angles = -distance * 10000.0 ** (-torch.arange(HEAD_SIZE // 2) * 2 / HEAD_SIZE)
    size = torch.tensor([6.0, 11.0, 11.0, 0.0])
    query, key = torch.zeros(2, HEADS, HEAD_SIZE, num_read)
    query[..., 0] = torch.cat((size * angles.cos(), size * angles.sin()))
    key[..., 0] = torch.cat((size, torch.zeros(HEAD_SIZE // 2)))
    return query.flatten(0, 1), key.flatten(0, 1)


def normalize(rows: torch.Tensor) -> torch.Tensor:
    """Normalize rows as RMS norms do. [..., H] -> [..., H]"""
    return rows / rows.square().mean(-1, keepdim=True).sqrt()
