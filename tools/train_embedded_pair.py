"""Train the embedded pair on CPython's standard library.

    python tools/train_embedded_pair.py --work build/embedded

Stages are skipped if their result exists, and resumed if they were interrupted: tokenizer, target
(cross-entropy; the checkpoint with the lowest held-out loss is kept), samples of the target,
teacher distributions (on library text and samples), draft model (distilled from these). Random
numbers are functions of seed and step.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import click
import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from corpus import END, is_held_out, library_files, train_tokenizer

SEED = 1
CARD = """---
license: apache-2.0
---
Part of specedge's embedded pair; `models/README.md` documents its training.
"""
VOCAB_SIZE = 4096
CONTEXT = 512
BATCH = 8
TARGET = {"n_layer": 6, "n_embd": 320, "n_head": 5}
DRAFT = {"n_layer": 2, "n_embd": 160, "n_head": 5}
TARGET_STEPS = 2000
DRAFT_STEPS = 3200
NUM_SAMPLES = 1024  # texts that the target generates
NUM_WINDOWS = 2048  # of the library, for the draft model
TOP = 96  # most probable tokens of the teacher's distribution that are stored
EVERY = 100  # steps between checkpoints and held-out evaluations

# On CPUs without bfloat16 instructions it is many times slower than float32.
BFLOAT16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()


class Muon(torch.optim.Muon):
    """PyTorch's Muon, with float32 instead of bfloat16 products where these are slower."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        if BFLOAT16:
            return super().step(closure)
        with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):
            return super().step(closure)


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """Return all texts as one stream with an end token before and after each. -> [N]"""
    end = tokenizer.convert_tokens_to_ids(END)
    stream = [end]
    for text in texts:
        stream += [*tokenizer(text)["input_ids"], end]
    return torch.tensor(stream)


def windows(stream: torch.Tensor, step: int, count: int) -> torch.Tensor:
    """Return random windows, as a function of seed and step. -> [count, CONTEXT + 1]"""
    generator = torch.Generator().manual_seed(SEED * 1_000_003 + step)
    starts = torch.randint(len(stream) - CONTEXT - 1, (count,), generator=generator)
    return torch.stack([stream[s : s + CONTEXT + 1] for s in starts])


def new_model(shape: dict[str, int]) -> GPT2LMHeadModel:
    torch.manual_seed(SEED)
    config = GPT2Config(
        vocab_size=VOCAB_SIZE, n_positions=CONTEXT, **shape, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


class Trainer:
    """Resumable training run with warm-up, plateau and linear decay to zero.

    Args:
        model: Model to train.
        steps: Number of steps.
        rate: Learning rate of the plateau.
        folder: Folder of its state and best weights.
        inner: Pattern of the names of matrices that Muon updates; AdamW updates the others.
        outer_rate: Learning rate of AdamW, by default `rate`.
    """

    def __init__(
        self,
        model: nn.Module,
        steps: int,
        rate: float,
        folder: Path,
        inner: str = r"\.\d+\.",
        outer_rate: float | None = None,
    ) -> None:
        self.model, self.steps, self.folder = model, steps, folder
        self.forward = torch.compile(model)
        named = dict(model.named_parameters())
        names = {n for n, p in named.items() if p.ndim == 2 and re.search(inner, n)}
        matrices = [p for n, p in named.items() if n in names]
        others = [p for n, p in named.items() if n not in names]
        self.optimizers = [
            Muon(matrices, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.rates = (rate, rate if outer_rate is None else outer_rate)
        self.step, self.best = 0, math.inf
        if (folder / "state.pt").exists():
            self.load()

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=BFLOAT16):
            return self.forward(tokens, use_cache=False).logits

    def update(self, loss: torch.Tensor) -> None:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        left = (self.steps - self.step) / self.steps
        factor = min((self.step + 1) / 50, left / 0.5, 1.0)
        for optimizer, rate in zip(self.optimizers, self.rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1

    def save(self, held_out_loss: float) -> None:
        if held_out_loss < self.best:
            self.best = held_out_loss
            torch.save(self.model.state_dict(), self.folder / "best.pt")
        state = {
            "model": self.model.state_dict(), "step": self.step, "best": self.best,
            "optimizers": [o.state_dict() for o in self.optimizers],
        }  # fmt: skip
        torch.save(state, self.folder / "state.tmp")
        os.replace(self.folder / "state.tmp", self.folder / "state.pt")

    def load(self) -> None:
        state = torch.load(self.folder / "state.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.best = state["step"], state["best"]


def cross_entropy(logits: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def minimize(
    name: str,
    run: Trainer,
    loss: Callable[[int], torch.Tensor],
    held_out: Callable[[], Sequence[float]],
    every: int = EVERY,
) -> None:
    """Minimize the loss of each step; keep the checkpoint with the lowest mean held-out loss."""
    start, first = time.monotonic(), run.step
    while run.step < run.steps:
        value = loss(run.step)
        run.update(value)
        if run.step % every == 0 or run.step == run.steps:
            with torch.no_grad():
                test = float(np.mean(held_out()))
            run.save(test)
            report(name, run, value.item(), test, start, first)


def train_on_text(name: str, run: Trainer, train: torch.Tensor, test: torch.Tensor) -> None:
    """Minimize cross-entropy on windows of the library."""

    def loss(stream: torch.Tensor, step: int) -> torch.Tensor:
        batch = windows(stream, step, BATCH)
        return cross_entropy(run.logits(batch[:, :-1]), batch)

    held_out = range(-1, -9, -1)
    minimize(
        name, run, lambda step: loss(train, step), lambda: [float(loss(test, s)) for s in held_out]
    )


def report(name: str, run: Trainer, loss: float, test: float, start: float, first: int) -> None:
    seconds = (time.monotonic() - start) / (run.step - first)
    figures = f"loss {loss:.3f}, held out {test:.4f}, {seconds:.2f} s/step"
    print(f"{name} {run.step}/{run.steps}: {figures}", flush=True)


def write_samples(target: GPT2LMHeadModel, train: torch.Tensor, path: Path) -> None:
    """Generate text after library prompts, half greedy, half at temperature 1."""
    rows = []
    for i in range(0, NUM_SAMPLES, 64):
        greedy = (i // 64) % 2 == 0
        prompts = windows(train, 10_000_000 + i, 64)[:, :64]
        torch.manual_seed(SEED + i)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=BFLOAT16):
            rows.append(
                target.generate(
                    prompts, max_length=CONTEXT, do_sample=not greedy, top_k=0,
                    eos_token_id=None, pad_token_id=0,
                )
            )  # fmt: skip
        print(f"samples {i + 64}/{NUM_SAMPLES}", flush=True)
    torch.save(torch.cat(rows), path)


def write_teacher(
    target: GPT2LMHeadModel, train: torch.Tensor, samples: torch.Tensor, path: Path
) -> None:
    """Write the target's distributions at all positions of its samples and of library windows.

    Precomputed distributions make distillation three times as fast.
    """
    library = [windows(train, 20_000_000 + i, 64) for i in range(NUM_WINDOWS // 64)]
    rows = torch.cat([samples, torch.cat(library)[:, :CONTEXT]])
    compiled = torch.compile(target)
    ids = torch.empty(len(rows), CONTEXT, TOP, dtype=torch.int16)
    probs = torch.empty(len(rows), CONTEXT, TOP, dtype=torch.float16)
    for i in range(0, len(rows), BATCH):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=BFLOAT16):
            logits = compiled(rows[i : i + BATCH], use_cache=False).logits
        top = logits.float().softmax(-1).topk(TOP, sorted=False)
        ids[i : i + BATCH], probs[i : i + BATCH] = top.indices, top.values
    torch.save((rows, ids, probs), path)
    print(f"teacher {len(rows)} x {CONTEXT}, mass {probs.float().sum(-1).mean():.3f}", flush=True)


def distances(
    logits: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean KL divergence and the mean acceptance rate 1 - TV.

    All tokens outside the most probable ones share a bucket.

    logits [B, T, V], ids and probs [B, T, TOP]
    """
    logits = logits.float()
    log_total = logits.logsumexp(-1, keepdim=True)
    draft_log = logits.gather(-1, ids) - log_total
    draft, rest = draft_log.exp(), (1 - probs.sum(-1)).clamp(min=1e-6)
    draft_rest = (1 - draft.sum(-1)).clamp(min=1e-6)
    kl = (probs * (probs.clamp(min=1e-8).log() - draft_log)).sum(-1)
    kl = kl + rest * (rest.log() - draft_rest.log())
    alpha = torch.minimum(probs, draft).sum(-1) + torch.minimum(rest, draft_rest)
    return kl.mean(), alpha.mean()


def train_draft(folder: Path, teacher: Path) -> None:
    """Minimize KL + 2 TV: KL converges fast, and 1 - TV is the acceptance rate."""
    run = Trainer(new_model(DRAFT), DRAFT_STEPS, 5e-3, folder)
    rows, ids, probs = torch.load(teacher, weights_only=True)
    validation = torch.arange(0, len(rows), 64)
    training = torch.tensor([i for i in range(len(rows)) if i % 64])
    measure = torch.compile(distances)

    def compare(at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return measure(run.logits(rows[at]), ids[at].long(), probs[at].float())

    def loss(step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(SEED + step)
        kl, alpha = compare(training[torch.randint(len(training), (BATCH,), generator=generator)])
        return kl + 2 * (1 - alpha)

    def held_out() -> list[float]:
        return [1 - float(compare(part)[1]) for part in validation.split(BATCH)]

    minimize("draft", run, loss, held_out)


def load_best(folder: Path, shape: dict[str, int]) -> GPT2LMHeadModel:
    """Return the best checkpoint in float32, with weights rounded to float16 as in the bundle."""
    model = new_model(shape)
    model.load_state_dict(torch.load(folder / "best.pt", weights_only=True))
    return model.half().float().eval()


def save_checkpoint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, to: Path) -> None:
    model.half().save_pretrained(to)
    (to / "README.md").write_text(CARD)
    tokenizer.save_pretrained(to)
    model.float()


def stages(work: Path, output: Path) -> Iterator[str]:
    files = library_files()
    tests = [name for name, _ in files if is_held_out(name)]
    digest = hashlib.sha256("".join(n + t for n, t in files).encode()).hexdigest()
    metadata = {"corpus_sha256": digest, "modules": len(files), "held_out": tests}
    (work / "corpus.json").write_text(json.dumps(metadata, indent=1))
    texts = [text for name, text in files if not is_held_out(name)]
    if not (work / "tokenizer.json").exists():
        train_tokenizer(texts, VOCAB_SIZE).save(str(work / "tokenizer.json"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(work / "tokenizer.json"), bos_token=END, eos_token=END,
        model_max_length=CONTEXT,
    )  # fmt: skip
    if not (work / "streams.pt").exists():
        streams = (
            encode(tokenizer, texts),
            encode(tokenizer, [t for n, t in files if is_held_out(n)]),
        )
        torch.save(streams, work / "streams.pt")
    train, test = torch.load(work / "streams.pt", weights_only=True)
    yield f"{len(files)} modules, {len(train)} tokens to train, {len(test)} held out"
    run = Trainer(new_model(TARGET), TARGET_STEPS, 2.5e-3, work / "target")
    train_on_text("target", run, train, test)
    target = load_best(work / "target", TARGET)
    save_checkpoint(target, tokenizer, output / "python-9m")
    yield f"target: {sum(p.numel() for p in target.parameters())} parameters"
    if not (work / "samples.pt").exists():
        write_samples(target, train, work / "samples.pt")
    if not (work / "teacher.pt").exists():
        samples = torch.load(work / "samples.pt", weights_only=True)
        write_teacher(target, train, samples, work / "teacher.pt")
    train_draft(work / "draft", work / "teacher.pt")
    draft = load_best(work / "draft", DRAFT)
    save_checkpoint(draft, tokenizer, output / "python-1m")
    yield f"draft: {sum(p.numel() for p in draft.parameters())} parameters"


@click.command()
@click.option("--work", type=click.Path(path_type=Path), default=Path("build/embedded"))
@click.option("--output", type=click.Path(path_type=Path), default=Path("models/checkpoints"))
def main(work: Path, output: Path) -> None:
    """Train the target and the draft of the embedded pair and write their checkpoints."""
    for folder in (work / "target", work / "draft", output):
        folder.mkdir(parents=True, exist_ok=True)
    for line in stages(work, output):
        print(line, flush=True)


if __name__ == "__main__":
    main()
