"""Training of EAGLE-3 heads: texts, training-time test, checkpoints, reported acceptance."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

import draft_prompts
import train_eagle_head as training
from eagle_head import EagleHead

END = 2
CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=7,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, eos_token_id=END,
)  # fmt: skip
SIZE, VOCAB = CONFIG.hidden_size, 24


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"NEW_TOKENS": 12, "DRAFT_VOCAB": VOCAB, "BATCH": 4, "EVERY": 2, "HELD_OUT_SHARDS": 1}
    for name, value in sizes.items():
        monkeypatch.setattr(training, name, value)


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).eval()
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 2)
        elif weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.3)
    return model


def write_texts(target: LlamaForCausalLM, folder: Path) -> None:
    (folder / "texts").mkdir()
    for part, shards in (("train", 2), ("held_out", 1)):
        for index in range(shards):
            torch.manual_seed(index)
            prompts = torch.randint(3, CONFIG.vocab_size, (8, 5)).tolist()
            kinds = ["chat", "code", "prose", "code"] * 2
            path = folder / "texts" / f"{part}-{index:03}.pt"
            temperatures = training.TEMPERATURES[part]
            training.write_shard(target, kinds, prompts, path, temperatures, index)


def new_head() -> EagleHead:
    torch.manual_seed(1)
    token_ids = torch.randperm(CONFIG.vocab_size)[:VOCAB].sort().values
    head = EagleHead(CONFIG, token_ids, torch.rand(3 * SIZE) + 0.5)
    for name, weight in head.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 2)
    return head


class RowByRow:
    """Drafting with the tensors of a checkpoint, one row at a time, in float64."""

    def __init__(self, folder: Path) -> None:
        self.tensors = {n: t.double() for n, t in load_file(folder / "model.safetensors").items()}
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def linear(self, name: str, states: torch.Tensor) -> torch.Tensor:
        return self.tensors[f"{name}.weight"] @ states

    def norm(self, name: str, states: torch.Tensor) -> torch.Tensor:
        scale = (states.square().mean() + CONFIG.rms_norm_eps) ** -0.5
        return states * scale * self.tensors[f"{name}.weight"]

    def rotate(self, heads: torch.Tensor) -> torch.Tensor:
        """Rotate pairs of channels as complex numbers. [heads, D]"""
        theta = CONFIG.rope_parameters["rope_theta"]
        angles = len(self.keys) * theta ** -(torch.arange(0, 8, 2) / 8).double()
        turned = torch.complex(*heads.chunk(2, 1)) * torch.polar(torch.ones(4).double(), angles)
        return torch.cat([turned.real, turned.imag], 1)

    def read(self, embedding: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Append a row and return the hidden state of the next. [H]"""
        inputs = torch.cat([
            self.norm("midlayer.input_layernorm", embedding),
            self.norm("midlayer.hidden_norm", hidden),
        ])  # fmt: skip
        query, key, value = (
            self.linear(f"midlayer.self_attn.{name}_proj", inputs).view(-1, 8) for name in "qkv"
        )
        query, key = self.rotate(query), self.rotate(key)
        self.keys.append(key)
        self.values.append(value)
        outputs = []
        for head in range(4):
            scores = torch.stack([key[head // 2] @ query[head] for key in self.keys])
            weights = (scores / 8**0.5).softmax(0)
            outputs += [sum(w * v[head // 2] for w, v in zip(weights, self.values, strict=True))]
        hidden = hidden + self.linear("midlayer.self_attn.o_proj", torch.cat(outputs))
        inner = self.norm("midlayer.post_attention_layernorm", hidden)
        gate = functional.silu(self.linear("midlayer.mlp.gate_proj", inner))
        gated = gate * self.linear("midlayer.mlp.up_proj", inner)
        return hidden + self.linear("midlayer.mlp.down_proj", gated)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear("lm_head", self.norm("norm", hidden))

    def truncate(self, length: int) -> None:
        del self.keys[length:], self.values[length:]


@torch.no_grad()
def test_training_steps_are_those_of_drafting(tmp_path: Path) -> None:
    head, rows, steps = new_head(), 6, 4
    head.save(tmp_path)
    embeddings = torch.randn(2, rows + steps - 1, SIZE)
    features = torch.randn(2, rows, 3 * SIZE) * 5

    logits = [head.lm_head(hidden) for hidden in head(embeddings, features, steps)]

    for text in range(2):
        drafting = RowByRow(tmp_path)
        for row in range(rows):
            hidden = drafting.linear("fc", features[text, row].double())
            for step in range(steps):
                hidden = drafting.read(embeddings[text, row + step].double(), hidden)
                expected = drafting.logits(hidden).float()
                torch.testing.assert_close(logits[step][text, row], expected, rtol=1e-4, atol=1e-4)
            drafting.truncate(row + 1)


def test_checkpoint_maps_draft_tokens_to_target_tokens(tmp_path: Path) -> None:
    head = new_head()
    head.save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())

    assert config["draft_vocab_size"] == VOCAB
    assert torch.equal(tensors["d2t"] + torch.arange(VOCAB), head.token_ids)
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], head.token_ids)


@torch.no_grad()
def test_texts_are_those_of_transformers_with_their_hidden_states(target: LlamaForCausalLM) -> None:
    prompts = torch.randint(3, CONFIG.vocab_size, (3, 6))
    temperatures, generator = torch.tensor([0.0, 1.0, 0.0]), torch.Generator().manual_seed(0)

    tokens, features = training.generate(target, prompts, 9, temperatures, generator)

    output = target(tokens[:, :-1], output_hidden_states=True)
    assert torch.equal(tokens[::2, 6:], output.logits[::2, 5:].argmax(-1))
    assert not torch.equal(tokens[1, 6:], output.logits[1, 5:].argmax(-1))
    states = output.hidden_states
    expected = torch.cat([states[2], states[3], states[4], states[7]], -1)
    torch.testing.assert_close(features.float(), expected, rtol=2e-3, atol=2e-3)


def test_interrupted_training_has_the_same_result(
    target: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_texts(target, tmp_path)
    training.train(target, tmp_path, 2, 6)
    names = ("head/model.safetensors", "head/config.json", "report.json")
    expected = {name: (tmp_path / name).read_bytes() for name in names}
    for path in [*(tmp_path / "run").iterdir(), *(tmp_path / name for name in names)]:
        path.unlink()
    loss = training.HeadTraining.loss

    def interrupted(self: training.HeadTraining, step: int) -> torch.Tensor:
        if step == 3:
            raise KeyboardInterrupt
        return loss(self, step)

    monkeypatch.setattr(training.HeadTraining, "loss", interrupted)
    with pytest.raises(KeyboardInterrupt):
        training.train(target, tmp_path, 2, 6)
    assert (tmp_path / "run" / "state.pt").exists()
    monkeypatch.setattr(training.HeadTraining, "loss", loss)
    training.train(target, tmp_path, 2, 6)

    assert {name: (tmp_path / name).read_bytes() for name in names} == expected


def test_training_raises_acceptance(target: LlamaForCausalLM, tmp_path: Path) -> None:
    write_texts(target, tmp_path)
    losses = []
    for steps in (1, 30):
        (tmp_path / "run").mkdir(exist_ok=True)
        training.train(target, tmp_path, 2, steps)
        shards = training.load_texts(tmp_path / "texts", "train", 2, END)
        head = new_head()
        head.load_state_dict(torch.load(tmp_path / "run" / "state.pt", weights_only=True)["model"])
        weights = target.get_input_embeddings().weight.detach(), target.lm_head.weight.detach()
        losses.append(float(training.HeadTraining(head, *weights, shards, shards).loss(0).detach()))
    assert losses[1] < 0.9 * losses[0]


@torch.no_grad()
def test_reported_acceptance_is_that_of_speculative_sampling(target: LlamaForCausalLM) -> None:
    """Enumerate the texts that can follow a prompt of three tokens, by their probabilities."""
    head = new_head()
    embedding, lm_head = target.get_input_embeddings().weight, target.lm_head.weight
    prompt = torch.randint(3, CONFIG.vocab_size, (1, 3))
    pairs = torch.cartesian_prod(*[torch.arange(CONFIG.vocab_size)] * 2)
    tokens = torch.cat([prompt.expand(len(pairs), 3), pairs], 1)
    states = target(tokens, output_hidden_states=True).hidden_states
    features = torch.cat([states[2], states[3], states[4], states[7]], -1)
    count = len(tokens)
    shard = training.TextShard(
        tokens, features[:, :-1], 3, torch.full((count,), 5), ["code"] * count, torch.ones(count)
    )

    estimates = training.acceptance(head, embedding, lm_head, shard, 2)[:, 1]

    log_probs = target(tokens).logits.log_softmax(-1)
    first, second = (
        log_probs[:, at].gather(1, pairs[:, at - 2, None])[:, 0].double().exp() for at in (2, 3)
    )
    drafts = head(functional.embedding(tokens[:, 1:4], embedding), features[:, :2, : 3 * SIZE], 2)
    q = torch.zeros(2, count, CONFIG.vocab_size)
    for step in range(2):
        q[step][:, head.token_ids] = head.lm_head(drafts[step][:, 1]).softmax(-1)
    p_next = log_probs[:, 2].exp()[0], log_probs[:, 3].exp()[:: CONFIG.vocab_size]
    accepted = torch.minimum(p_next[0], q[0][0])  # of each first token
    rate = torch.minimum(p_next[1], q[1][:: CONFIG.vocab_size]).sum(-1)
    probability = first * second
    assert probability.sum() == pytest.approx(1, abs=1e-5)
    assert probability @ estimates[:, 0].double() == pytest.approx(float(accepted.sum()), rel=1e-4)
    assert probability @ estimates[:, 1].double() == pytest.approx(float(accepted @ rate), rel=1e-4)


@torch.no_grad()
def test_greedy_acceptance_counts_equal_tokens(target: LlamaForCausalLM) -> None:
    head = new_head()
    embedding, lm_head = target.get_input_embeddings().weight, target.lm_head.weight
    generator = torch.Generator().manual_seed(0)
    tokens, features = training.generate(
        target, torch.randint(3, CONFIG.vocab_size, (2, 4)), 12, torch.zeros(2), generator
    )
    shard = training.TextShard(
        tokens, features.float(), 4, torch.tensor([16, 12]), ["chat"] * 2, torch.zeros(2)
    )
    estimates = training.acceptance(head, embedding, lm_head, shard, 3)

    embeddings = functional.embedding(tokens[:, 1:15], embedding)
    drafts = head(embeddings, shard.features[:, :12, : 3 * SIZE], 3)
    for text in range(2):
        for row in range(12):
            accepted = 1.0
            for step in range(3):
                index = row + 2 + step
                draft = head.token_ids[head.lm_head(drafts[step][text, row]).argmax()]
                accepted *= draft == tokens[text, index]
                is_generated = 4 <= index < (16, 12)[text]
                value = estimates[text, row, step]
                assert value == accepted if is_generated else value.isnan()


@torch.no_grad()
def test_distances_compare_a_row_with_the_text_after_its_draft(target: LlamaForCausalLM) -> None:
    head = new_head()
    weights = target.get_input_embeddings().weight, target.lm_head.weight
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, CONFIG.vocab_size, (2, 4))
    tokens, features = training.generate(target, prompts, 12, torch.ones(2), generator)
    ends = torch.tensor([16, 11])
    shard = training.TextShard(tokens, features.float(), 4, ends, ["chat"] * 2, torch.ones(2))
    distances = training.HeadTraining(head, *weights, [], []).distances(shard)

    rows = 15 - training.TEST_STEPS
    embeddings = functional.embedding(tokens[:, 1 : rows + training.TEST_STEPS], weights[0])
    outputs = head(embeddings, shard.features[:, :rows, : 3 * SIZE], training.TEST_STEPS)
    teacher = target(tokens).logits[:, :, head.token_ids].softmax(-1)
    for step, (_, alpha) in enumerate(distances):
        draft = head.lm_head(outputs[step]).softmax(-1)
        rates = [
            float(torch.minimum(teacher[text, row + 1 + step], draft[text, row]).sum())
            for text in range(2)
            for row in range(rows)
            if 4 <= row + 2 + step < ends[text]
        ]
        assert float(alpha) == pytest.approx(sum(rates) / len(rates), abs=5e-3)


def test_vocabulary_has_the_most_frequent_generated_tokens() -> None:
    tokens = torch.tensor([[90, 90, 90, 7, 7, 7, 95, END, 99, 99, 99]])
    shard = training.TextShard(
        tokens, torch.zeros(1, 10, 4), 2, torch.tensor([8]), ["chat"], torch.ones(1)
    )
    assert training.draft_vocabulary([shard], 4, END).tolist() == [END, 7, 90, 95]
    assert training.draft_vocabulary([shard], 6, END).tolist() == [0, 1, END, 7, 90, 95]


def test_prompts_of_both_parts_have_different_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    function = 'def area(x):\n    """Return the area of x."""\n    return x * x\n' + "# text\n" * 50
    paragraph = (
        '"""' + "Prose of a docstring about {} that is long enough for a prompt. " * 5 + '"""'
    )
    files = [(f"module{i}.py", function.replace("area", f"area{i}")) for i in range(200)]
    files += [(f"text{i}.py", paragraph.replace("{}", f"number {i}")) for i in range(200)]
    monkeypatch.setattr(draft_prompts, "library_files", lambda: files)
    monkeypatch.setattr(draft_prompts, "PACKAGES", ())

    def texts(held_out: bool) -> set[str]:
        prompts = draft_prompts.training_prompts(1, held_out)
        return {next(prompts).text for _ in range(600)}

    assert texts(False) == texts(False)
    assert not texts(False) & texts(True)
