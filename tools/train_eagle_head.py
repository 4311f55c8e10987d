"""Train an EAGLE-3 head for SmolLM2-135M-Instruct on texts that this target generates.

    python tools/train_eagle_head.py FOLDER [--target CHECKPOINT] [--shards N] [--steps N]

Writes FOLDER/head, a checkpoint of SafeAILab's format for `specedge export --draft`, and
FOLDER/report.json, its acceptance by position on held-out prompts. Stages are skipped if their
result exists, and resumed if they were interrupted: the target's checkpoint, shards of texts with
the target's hidden states (several processes may generate at once), and training with the
training-time test of EAGLE-3. Random numbers are functions of seed, shard and step.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from filelock import FileLock, Timeout
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Cache,
    DynamicLayer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import real_weights
from draft_prompts import TrainingPrompt, training_prompts
from eagle_head import EagleHead
from train_embedded_pair import BFLOAT16, SEED, Trainer, minimize

MAX_PROMPT = 112  # tokens
NEW_TOKENS = 160
SHARD = 128  # texts of a shard, which are generated together
HELD_OUT_SHARDS = 2
TEMPERATURES = {"train": (0.0, 0.7, 1.0, 1.0), "held_out": (0.0, 1.0)}
DRAFT_VOCAB = 8192
TEST_STEPS = 3  # of the training-time test
STEP_WEIGHT = 0.8  # of a step's loss, relative to that of the step before
BATCH = 8  # texts per training step
EVERY = 25  # steps between checkpoints and held-out evaluations
RATE, HEAD_RATE = 4e-3, 5e-4  # of matrices of the layer, and of norms and the pretrained LM head
REPORTED = 5  # tokens of the drafts in the report


@dataclass(frozen=True)
class TextShard:
    """Texts of one length that a target generated, with its hidden states.

    Attributes:
        tokens: Prompt and generated tokens [B, N].
        features: Hidden states of the tokens but the last: the inputs of three layers, which an
            EAGLE-3 head reads, and the output of the final norm. [B, N - 1, 4 H] float16
        prompt: Number of tokens of each prompt.
        ends: Number of tokens of each text up to its first generated end token [B].
        kinds: Kind of each prompt.
        temperatures: Temperature of each text [B].
    """

    tokens: torch.Tensor
    features: torch.Tensor
    prompt: int
    ends: torch.Tensor
    kinds: Sequence[str]
    temperatures: torch.Tensor

    def rows(self, index: torch.Tensor) -> TextShard:
        """Return some of the texts, in float32."""
        return TextShard(
            self.tokens[index].long(), self.features[index].float(), self.prompt,
            self.ends[index], [self.kinds[i] for i in index], self.temperatures[index],
        )  # fmt: skip


class PreallocatedLayer(DynamicLayer):
    """Layer of a KV cache that grows in place; concatenation copies the whole cache each step."""

    size = 0

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values and return all. [B, H, T, D] each"""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            batch, heads, _, dim = key_states.shape
            shape = (batch, heads, self.capacity, dim)
            self.buffers = [key_states.new_empty(shape), value_states.new_empty(shape)]
        start, self.size = self.size, self.size + key_states.shape[2]
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, start : self.size] = states
        self.keys, self.values = (buffer[:, :, : self.size] for buffer in self.buffers)
        return self.keys, self.values


@torch.inference_mode()
def generate(
    target: PreTrainedModel,
    prompts: torch.Tensor,
    length: int,
    temperatures: torch.Tensor,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generate texts, whose end tokens do not end them.

    Args:
        target: Target of N layers.
        prompts: Prompts of one length [B, P].
        length: Number of tokens to generate.
        temperatures: Temperature of each text [B].
        generator: Source of random numbers.

    Returns:
        Tokens [B, P + length], and the hidden states that enter layer 2, layer N // 2, layer N - 3
        and the LM head [B, P + length - 1, 4 H] in float16.
    """
    layers = target.config.num_hidden_layers
    cache = Cache(layers=[PreallocatedLayer(prompts.shape[1] + length) for _ in range(layers)])
    tokens, features = [prompts], []
    is_greedy = temperatures == 0
    scale = temperatures.masked_fill(is_greedy, 1.0)[:, None]
    for _ in range(length):
        output = target(
            tokens[-1], past_key_values=cache, output_hidden_states=True, logits_to_keep=1
        )
        states = output.hidden_states
        at = (2, layers // 2, layers - 3, -1)
        features.append(torch.cat([states[i] for i in at], -1).half())
        logits = output.logits[:, -1].float()
        cumulative = (logits / scale).softmax(-1).cumsum(-1)
        uniforms = torch.rand(len(prompts), 1, generator=generator)
        sampled = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:])[:, 0]
        sampled = sampled.clamp(max=logits.shape[-1] - 1)
        tokens.append(torch.where(is_greedy, logits.argmax(-1), sampled)[:, None])
    return torch.cat(tokens, 1), torch.cat(features, 1)


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: TrainingPrompt, length: int
) -> list[int]:
    """Return the tokens of a question, or the first `length` tokens of a beginning."""
    if not prompt.is_question:
        return tokenizer(prompt.text[: 8 * length])["input_ids"][:length]
    messages = [{"role": "user", "content": prompt.text}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def prompt_batches(
    tokenizer: PreTrainedTokenizerBase, held_out: bool
) -> Iterator[tuple[list[str], list[list[int]]]]:
    """Yield kinds and tokens of SHARD prompts of one length; beginnings are cut to it."""
    buckets: dict[int, tuple[list[str], list[list[int]]]] = defaultdict(lambda: ([], []))
    length = MAX_PROMPT
    for prompt in training_prompts(SEED, held_out):
        tokens = encode_prompt(tokenizer, prompt, length)
        if len(tokens) > MAX_PROMPT or not (prompt.is_question or len(tokens) == length):
            continue
        length = len(tokens)
        kinds, prompts = buckets[length]
        kinds.append(prompt.kind)
        prompts.append(tokens)
        if len(prompts) == SHARD:
            yield buckets.pop(length)


def write_texts(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    part: str,
    count: int,
) -> None:
    """Generate shards of texts, except those that exist or that another process generates."""
    paths = [folder / f"{part}-{index:03}.pt" for index in range(count)]
    if all(path.exists() for path in paths):
        return
    batches = prompt_batches(tokenizer, part == "held_out")
    for index, (path, (kinds, prompts)) in enumerate(zip(paths, batches, strict=False)):
        try:
            with FileLock(path.with_suffix(".lock"), timeout=0):
                if path.exists():
                    continue
                start = time.monotonic()
                seed = SEED * 1_000_003 + 2 * index + (part == "held_out")
                write_shard(target, kinds, prompts, path, TEMPERATURES[part], seed)
                speed = len(prompts) * NEW_TOKENS / (time.monotonic() - start)
                print(f"{path.stem}: {dict(Counter(kinds))}, {speed:.0f} tokens/s", flush=True)
        except Timeout:
            continue


def write_shard(
    target: PreTrainedModel,
    kinds: list[str],
    prompts: list[list[int]],
    path: Path,
    temperatures: Sequence[float],
    seed: int,
) -> None:
    """Generate the texts of prompts of one length, at given temperatures in random order."""
    generator = torch.Generator().manual_seed(seed)
    count = len(prompts)
    order = torch.randperm(count, generator=generator)
    chosen = torch.tensor(temperatures).repeat(count)[:count][order]
    texts = generate(target, torch.tensor(prompts), NEW_TOKENS, chosen, generator)
    shard = {
        "tokens": texts[0].int(), "features": texts[1], "prompt": len(prompts[0]),
        "kinds": kinds, "temperatures": chosen,
    }  # fmt: skip
    torch.save(shard, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


def load_texts(folder: Path, part: str, count: int, end: int) -> list[TextShard]:
    """Load shards; hidden states are memory-mapped. Raises FileNotFoundError."""
    shards = []
    for index in range(count):
        shard = torch.load(folder / f"{part}-{index:03}.pt", weights_only=True, mmap=True)
        is_end = shard["tokens"] == end
        is_end[:, : shard["prompt"]] = False
        is_end = torch.cat([is_end, torch.ones(len(is_end), 1, dtype=torch.bool)], 1)
        length = shard["tokens"].shape[1]
        ends = (is_end.int().argmax(1) + 1).clamp(max=length)
        shards.append(TextShard(**shard, ends=ends))
    return shards


def draft_vocabulary(shards: Sequence[TextShard], size: int, end: int) -> torch.Tensor:
    """Return the most frequent generated tokens and the end token, ascending. [size]

    Of tokens that are equally frequent, those of smaller ids, which are more frequent in the
    texts that a BPE tokenizer was trained on, are preferred.
    """
    counts = Counter(dict.fromkeys(range(size), 0))  # so that there are enough
    for shard in shards:
        for row, length in zip(shard.tokens.tolist(), shard.ends.tolist(), strict=True):
            counts.update(row[shard.prompt : length])
    ranked = sorted(counts, key=lambda token: (token != end, -counts[token], token))
    return torch.tensor(sorted(ranked[:size]))


def is_predicted(shard: TextShard, rows: int, step: int) -> torch.Tensor:
    """Return True where a row's prediction at a step is of a generated token. [B, rows]"""
    index = torch.arange(rows) + 2 + step
    return (index >= shard.prompt) & (index < shard.ends[:, None])


class HeadTraining:
    """Training-time test of a head on shards of texts.

    Args:
        head: Head to train.
        embedding: Embedding of the target [vocabulary, H].
        lm_head: LM head of the target [vocabulary, H].
        train: Shards to train on.
        held_out: Shards to select the best weights by.
    """

    def __init__(
        self,
        head: EagleHead,
        embedding: torch.Tensor,
        lm_head: torch.Tensor,
        train: Sequence[TextShard],
        held_out: Sequence[TextShard],
    ) -> None:
        self.head, self.embedding = head, embedding
        self.teacher = lm_head[head.token_ids]
        self.train, self.held_out = train, held_out

    def batch(self, step: int) -> TextShard:
        """Return the texts of a step: every text is read once per epoch."""
        length = sum(len(shard.tokens) // BATCH for shard in self.train)
        epoch, index = divmod(step, length)
        generator = torch.Generator().manual_seed(SEED * 1_000_003 + epoch)
        chunks = [
            (shard, texts)
            for shard in self.train
            for texts in torch.randperm(len(shard.tokens), generator=generator).split(BATCH)
            if len(texts) == BATCH
        ]
        order = torch.randperm(len(chunks), generator=generator)
        shard, texts = chunks[order[index]]
        return shard.rows(texts)

    def distances(self, shard: TextShard) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return cross-entropy and mean acceptance rate 1 - TV of each step.

        Both compare the head to the target's distribution over the draft vocabulary.
        """
        size = self.embedding.shape[1]
        rows = shard.features.shape[1] - TEST_STEPS
        embeddings = functional.embedding(shard.tokens[:, 1 : rows + TEST_STEPS], self.embedding)
        generated = torch.arange(shard.prompt, shard.tokens.shape[1])
        distances = []
        with torch.autocast("cpu", torch.bfloat16, enabled=BFLOAT16):
            with torch.no_grad():
                last = shard.features[:, shard.prompt - 1 :, 3 * size :]
                teacher = functional.linear(last, self.teacher).float().softmax(-1)
            outputs = self.head(embeddings, shard.features[:, :rows, : 3 * size], TEST_STEPS)
            for step, hidden in enumerate(outputs):
                logits = self.head.lm_head(hidden[is_predicted(shard, rows, step)])
                is_row = (generated >= 2 + step) & (generated < 2 + step + rows)
                expected = teacher[is_row & (generated < shard.ends[:, None])]
                log_probs = logits.float().log_softmax(-1)
                entropy = -(expected * log_probs).sum(-1).mean()
                alpha = torch.minimum(expected, log_probs.exp()).sum(-1).mean()
                distances.append((entropy, alpha))
        return distances

    def loss(self, step: int) -> torch.Tensor:
        """Return cross-entropy + 2 TV: cross-entropy converges fast, 1 - TV is the acceptance."""
        distances = self.distances(self.batch(step))
        weighted = [
            STEP_WEIGHT**i * (entropy + 2 * (1 - alpha))
            for i, (entropy, alpha) in enumerate(distances)
        ]
        return torch.stack(weighted).sum()

    def held_out_losses(self) -> list[float]:
        """Return 1 - acceptance rate of each step on held-out texts."""
        texts = torch.arange(2 * BATCH)
        measured = [self.distances(shard.rows(texts)) for shard in self.held_out]
        return [1 - float(alpha) for distances in measured for _, alpha in distances]


def new_head(target: PreTrainedModel, shards: Sequence[TextShard]) -> EagleHead:
    """Return a head with the target's final norm and LM head."""
    end = target.config.eos_token_id
    token_ids = draft_vocabulary(shards, DRAFT_VOCAB, end)
    size = 3 * target.config.hidden_size
    scale = shards[0].features[:, :, :size].float().square().mean((0, 1)).sqrt().clamp(min=1e-3)
    torch.manual_seed(SEED)
    head = EagleHead(target.config, token_ids, scale)
    with torch.no_grad():
        head.norm.weight.copy_(target.model.norm.weight)
        head.lm_head.weight.copy_(target.get_output_embeddings().weight[token_ids])
    return head


@torch.inference_mode()
def acceptance(
    head: EagleHead, embedding: torch.Tensor, lm_head: torch.Tensor, shard: TextShard, length: int
) -> torch.Tensor:
    """Return the probability that draft tokens 1 to i + 1 are accepted, after each prefix.

    Drafts continue the target's own text x by greedy decoding or by sampling as the text was. The
    product of min(1, q(x) / p(x)) over a draft's tokens is an unbiased estimate of the probability
    that speculative sampling accepts as many.

    Returns:
        Estimates [B, rows, length], NaN where the text is shorter.
    """
    size = embedding.shape[1]
    rows = shard.features.shape[1] - length
    features = shard.features[:, :rows, : 3 * size]
    embeddings = functional.embedding(shard.tokens[:, 1 : rows + length], embedding)
    is_greedy = shard.temperatures == 0
    scale = shard.temperatures.masked_fill(is_greedy, 1.0)[:, None, None]
    columns = torch.full((len(lm_head),), -1)
    columns[head.token_ids] = torch.arange(len(head.token_ids))
    last = shard.features[:, 1:, 3 * size :]
    target = torch.stack([
        (functional.linear(states, lm_head) / t).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        for states, t, tokens in zip(last, scale[:, 0], shard.tokens[:, 2:], strict=True)
    ])  # fmt: skip
    products = torch.ones(len(features), rows)
    estimates = []
    for step, hidden in enumerate(head(embeddings, features, length)):
        logits = head.lm_head(hidden)
        column = columns[shard.tokens[:, step + 2 : step + 2 + rows]]
        draft = (logits / scale).log_softmax(-1).gather(2, column.clamp(min=0)[..., None])[..., 0]
        sampled = (draft - target[:, step : step + rows]).exp().clamp(max=1) * (column >= 0)
        products = products * torch.where(
            is_greedy[:, None], (logits.argmax(-1) == column).float(), sampled
        )
        estimates.append(products.masked_fill(~is_predicted(shard, rows, step), torch.nan))
    return torch.stack(estimates, -1)


def acceptance_report(
    head: EagleHead, embedding: torch.Tensor, lm_head: torch.Tensor, shards: Sequence[TextShard]
) -> dict[str, dict[str, list[float]]]:
    """Return the acceptance rate by position for each kind and temperature."""
    groups = defaultdict(list)
    for shard in shards:
        for texts in torch.arange(len(shard.tokens)).split(BATCH):
            part = shard.rows(texts)
            estimates = acceptance(head, embedding, lm_head, part, REPORTED)
            keys = zip(part.kinds, part.temperatures.tolist(), strict=True)
            for key, values in zip(keys, estimates, strict=True):
                groups[key].append(values[~values.isnan().any(-1)])
    report: dict[str, dict[str, list[float]]] = {}
    for (kind, temperature), values in sorted(groups.items()):
        accepted = torch.cat(values).mean(0)
        rates = accepted / torch.cat([torch.ones(1), accepted[:-1]])
        rounded = [round(rate, 3) for rate in rates.tolist()]
        report.setdefault(kind, {})[f"temperature {temperature:g}"] = rounded
    return report


def write_target(folder: Path) -> None:
    """Write SmolLM2-135M-Instruct as a checkpoint with dequantized weights."""
    gguf = real_weights.path_of(real_weights.FILES["smollm2"])
    options = {"gguf_file": gguf.name, "local_files_only": True}
    quantization = GgufConfig(gguf_file=gguf.name, dequantize=True)
    target = AutoModelForCausalLM.from_pretrained(
        gguf.parent, dtype=torch.float32, quantization_config=quantization, **options
    )
    AutoTokenizer.from_pretrained(gguf.parent, **options).save_pretrained(folder)
    target.save_pretrained(folder)


def train(target: PreTrainedModel, folder: Path, shards: int, steps: int) -> None:
    """Train a head on the shards of a folder, and write its checkpoint and report."""
    end = target.config.eos_token_id
    texts = load_texts(folder / "texts", "train", shards, end)
    held_out = load_texts(folder / "texts", "held_out", HELD_OUT_SHARDS, end)
    head = new_head(target, texts)
    embedding = target.get_input_embeddings().weight.detach()
    lm_head = target.get_output_embeddings().weight.detach()
    (folder / "run").mkdir(exist_ok=True)
    run = Trainer(head, steps, RATE, folder / "run", r"^fc|^midlayer", HEAD_RATE)
    training = HeadTraining(head, embedding, lm_head, texts, held_out)
    minimize("head", run, training.loss, training.held_out_losses, EVERY)
    head.load_state_dict(torch.load(folder / "run" / "best.pt", weights_only=True))
    head.save(folder / "head")
    report = {
        "seed": SEED,
        "shards": shards,
        "generated_tokens": sum(int((s.ends - s.prompt).sum()) for s in texts),
        "steps": run.step,
        "parameters": sum(p.numel() for p in head.parameters()),
        "acceptance_by_position": acceptance_report(head, embedding, lm_head, held_out),
    }
    (folder / "report.json").write_text(json.dumps(report, indent=1))
    print(json.dumps(report, indent=1), flush=True)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--target", type=click.Path(path_type=Path, exists=True))
@click.option("--shards", default=16, show_default=True)
@click.option("--steps", default=1500, show_default=True)
def main(folder: Path, target: Path | None, shards: int, steps: int) -> None:
    """Generate texts, and train a head and write its checkpoint."""
    (folder / "texts").mkdir(parents=True, exist_ok=True)
    if target is None:
        target = folder / "target"
        if not (target / "model.safetensors").exists():
            write_target(target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    dtype = torch.bfloat16 if BFLOAT16 else torch.float32
    model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype)
    write_texts(model, tokenizer, folder / "texts", "held_out", HELD_OUT_SHARDS)
    write_texts(model, tokenizer, folder / "texts", "train", shards)
    try:
        train(model.float(), folder, shards, steps)
    except FileNotFoundError as error:
        print(f"another process still generates {error.filename}")


if __name__ == "__main__":
    main()
