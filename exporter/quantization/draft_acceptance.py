"""Acceptance rates of a draft model, which the planner assumes before it has tested a token.

A draft that reads hidden states of its target is compared with it along texts: row i reads the
hidden state of token i and token i + 1, and predicts token i + 2. Further draft tokens read the
state that the preceding row returned. T tokens, C columns, V vocabulary entries.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime as ort
from tokenizers import Tokenizer

from specedge.bundle.manifest import CONFIDENCE_BOUNDS, MeasuredAcceptance
from specedge.bundle.precision import QUANTIZED_DTYPES
from specedge.bundle.token_readings import TokenReadings

from ..progress import Progress
from ..tracing.geometry import Geometry
from ..tracing.hidden_states import HIDDEN_STATES, NEXT_HIDDEN
from ..verification.subgraph import SubgraphSession, can_prepack, open_session, unpacked_options
from .float_model import FloatModel
from .report import compute_logits
from .target_states import TargetStates
from .texts import TextEncoder, TextSource

NUM_TEXTS = 3
PROMPT_TOKENS, ANSWER_TOKENS = 48, 32  # of each text; greedy rates are those of the answers
MAX_READ_BYTES = 8e10  # weights read to generate answers, about 10 seconds
MIN_ANSWER_TOKENS = 8  # below, greedy rates are those of the prompts
MIN_TOKENS = 4  # of a text
NUM_CHAINS = 96  # chains of K draft tokens in all texts
# Rate of first draft tokens below which a head is probably read wrongly. Such faults gave a mean
# length of 1.0 to 1.4 tokens a round, rates of about 0.3, instead of 2.4, about 0.7.
MIN_FIRST_RATE = 0.4
MIN_RATIO = 0.5  # of the rate of second draft tokens to that of first ones
PRIOR_TOKENS = 4  # weight of a class's prior rate


def measure_acceptance(
    target: FloatModel,
    draft: FloatModel,
    source: TextSource,
    tokenizer: Path,
    end_tokens: Container[int],
    progress: Progress,
    num_draft_tokens: int,
    decoder_prompt: Sequence[int] = (),
    readings: TokenReadings | None = None,
) -> MeasuredAcceptance | None:
    """Measure a draft's acceptance rates on a few short texts and the target's greedy answers.

    The rate of a parallel draft, which falls with the position, is that of all tested tokens in
    drafts of `num_draft_tokens` tokens. Rates of a draft that reads hidden states are measured by
    position, because wrong hidden states show nowhere else. Rates by confidence are those of
    drafts that draw one token after another.

    Args:
        target: Final target.
        draft: Final draft model.
        source: Texts, of which the evaluation documents are used.
        tokenizer: Path of tokenizer.json.
        end_tokens: Tokens that end an answer.
        progress: Receives notes and the duration of the step.
        num_draft_tokens: K of the bundle.
        decoder_prompt: Tokens that begin the answers of an encoder-decoder, whose sources are the
            texts.
        readings: The draft's tokens for each of the target's, if its tokenizer is another one.

    Returns:
        None if the models compute in 16 bits, for which CPUs have no kernels, read speech, or the
        texts are too short, or if there is no memory for the passes of a parallel draft.
    """
    if {target.model.dtype, draft.model.dtype} != {"float32"}:
        return None
    if target.model.encoder is not None and target.model.encoder.reads_speech:
        return None
    vocab_size, context = target.model.vocab_size, target.model.context_length
    if readings is None:
        vocab_size = min(vocab_size, draft.model.vocab_size)
        context = min(context, draft.model.context_length)
    encoder = TextEncoder(Tokenizer.from_file(str(tokenizer)), vocab_size)
    prompts = first_windows(encoder, source.evaluation, min(PROMPT_TOKENS, context // 2))
    if not prompts:
        return None
    with progress.step("Measuring the draft's acceptance rate"):
        sources = prompts if decoder_prompt else None
        if decoder_prompt:
            prompts = [np.array(decoder_prompt)] * len(prompts)
        texts = _answer(target, prompts, end_tokens, context, sources)
        texts = [text[: _num_shared(text, vocab_size)] for text in texts]
        starts, k = [len(prompt) - 1 for prompt in prompts], 1
        read, ends = texts, list[np.ndarray]()
        if readings is not None:
            translated = [_read(readings, text, draft) for text in texts]
            read, ends = [tokens for tokens, _ in translated], [n for _, n in translated]
            texts = [text[: len(n)] for text, n in zip(texts, ends, strict=True)]
        if draft.model.reads_hidden:
            logits, fused = TargetStates(target, draft).run(texts)
        else:
            logits = compute_logits(target.runner(target.folder, target.ops[-1]), texts, sources)
        if draft.model.reads_hidden:
            k = max(1, min(num_draft_tokens, *starts))
            rows = draft_from_states(draft, texts, logits, fused, k)
        elif draft.model.mask_token is None:
            drafted = compute_logits(draft.runner(draft.folder, draft.ops[-1]), read, sources)
            if ends:
                drafted = [rows[n - 1] for rows, n in zip(drafted, ends, strict=True)]
            columns = map(partial(acceptance_by_row, head=draft.head), drafted, logits)
            rows = [column[..., None] for column in columns]
        elif readings is None and _can_run(draft):
            k = max(1, min(num_draft_tokens, *starts))
            rows = draft_in_parallel(draft, texts, logits, k)
        else:
            return None
        answers = [slice(n, -k) for n in starts]
        if not _complete_drafts(rows, answers).size:
            answers = [slice(None)] * len(rows)
        # Prompts are text, except those of an encoder-decoder, whose answers are.
        spans = [slice(n, None) if decoder_prompt else slice(n - k + 1) for n in starts]
        (agreed, _, greedy_confidences), (_, overlapping, sampled_confidences) = (
            _complete_drafts(rows, span) for span in (answers, spans)
        )
        if not agreed.size or not overlapping.size:
            return None
        (greedy_rates, greedy), (sampled_rates, sampled) = map(
            rates_by_position, (agreed, overlapping)
        )
        rates = MeasuredAcceptance(greedy, sampled)
        if draft.model.mask_token is None:
            rates = replace(
                rates,
                greedy_by_confidence=rates_by_confidence(greedy_confidences, agreed),
                sampled_by_confidence=rates_by_confidence(sampled_confidences, overlapping),
            )
    progress.note(
        f"draft: acceptance rate {rates.greedy:.0%} greedy, {rates.sampled:.0%} sampled, on a few "
        "texts"
    )
    position_rates = PositionRates((*greedy_rates,), (*sampled_rates,))
    if k > 1:
        progress.note(position_rates.describe())
    if draft.model.reads_hidden and (warning := position_rates.warning()):
        progress.note(warning)
    return rates


@dataclass(frozen=True)
class PositionRates:
    """Acceptance rates of draft tokens 1 to K whose predecessors are accepted.

    Attributes:
        greedy: Rates at temperature 0, in the target's greedy answers.
        sampled: Rates at temperature 1, in the prompts.
    """

    greedy: tuple[float, ...]
    sampled: tuple[float, ...]

    def describe(self) -> str:
        """Describe the rates."""
        greedy, sampled = (
            ", ".join(f"{rate:.0%}" for rate in rates) for rates in (self.greedy, self.sampled)
        )
        return f"draft: acceptance by position {greedy} greedy, {sampled} sampled, on a few texts"

    def warning(self) -> str | None:
        """Return a warning of rates that a head of this target would not have, or None."""
        first, *later = self.greedy
        if first < MIN_FIRST_RATE:
            return (
                f"draft: only {first:.0%} of first draft tokens are accepted, which most trained "
                "heads exceed. Check that it was trained for this target, the layers whose hidden "
                "states it reads, and its norms; or it is undertrained"
            )
        if later and later[0] < MIN_RATIO * first:
            return (
                f"draft: only {later[0]:.0%} of second draft tokens are accepted, of first ones "
                f"{first:.0%}. Check whether returned hidden states are normalized (norm_output)"
            )
        return None


def draft_from_states(
    draft: FloatModel,
    texts: Sequence[np.ndarray],
    logits: Sequence[np.ndarray],
    fused: Sequence[np.ndarray],
    k: int,
) -> list[np.ndarray]:
    """Compare chains of k draft tokens along texts with the target, as `draft_in_parallel`.

    Args:
        draft: The draft model, which reads hidden states.
        texts: Tokens. [T] each
        logits: Logits of the target. [T, V] each
        fused: States that the draft reads. [T, H] each
        k: Number of tokens of a draft.
    """
    step, results = max(1, sum(map(len, texts)) // NUM_CHAINS), []
    with _open_decoder(_decoder(draft), draft.geometry, _options(draft)) as session:
        for text, expected, states in zip(texts, logits, fused, strict=True):
            result = np.full((3, len(text), k), np.nan)
            session.fill_noise(0, draft.geometry.capacity)
            for position, row, drafted in _drafted_rows(session, text, states, k, step):
                column = acceptance_by_row(drafted, expected[row : row + 1], draft.head)
                result[:, row - position, position] = column[:, 0]
            results.append(result)
    return results


def _drafted_rows(
    session: SubgraphSession,
    text: np.ndarray,
    fused: np.ndarray,
    num_positions: int,
    step: int,
) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield position, row of the target that predicts the same token, and logits of a draft token.

    First draft tokens are those of each row of a text [T] with hidden states [T, H], further ones
    those of every `step`-th row. Logits are [1, C].
    """

    def run(tokens: np.ndarray, row: int, hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        inputs = {
            "input_ids": tokens[None].astype(np.int64),
            "past_length": np.array([row], np.int64),
            "logits_from": np.zeros(1, np.int64),
            HIDDEN_STATES: hidden[None],
        }
        outputs = session.run("decoder", False, inputs)
        return outputs["logits"][0], outputs[NEXT_HIDDEN][0]

    logits, returned = run(text[1:], 0, fused[:-1])
    for row in range(len(logits)):
        yield 0, row + 1, logits[row : row + 1]
    # Each chain overwrites the cache rows after its first, so the last one comes first.
    for first in range(0, len(returned), step)[::-1]:
        hidden = returned[first : first + 1]
        for position in range(1, min(num_positions, len(returned) - first)):
            row = first + position
            logits, hidden = run(text[row + 1 : row + 2], row, hidden)
            yield position, row + 1, logits


def rates_by_position(acceptance: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the acceptance rate of each position in a draft, and that of all tested tokens.

    Args:
        acceptance: Acceptance rates of tokens whose predecessors are accepted. [n, k]
    """
    tested = _test_probabilities(acceptance)
    accepted = tested * acceptance
    rates = accepted.sum(0) / np.maximum(tested.sum(0), np.finfo(float).tiny)
    return rates, float(accepted.sum() / tested.sum())


def draft_in_parallel(
    draft: FloatModel, texts: Sequence[np.ndarray], logits: Sequence[np.ndarray], k: int
) -> list[np.ndarray]:
    """Compare drafts of k tokens along texts with the target, as `acceptance_by_row`.

    As in the runtime, a pass reads unread tokens and k - 1 mask tokens, whose rows are overwritten.

    Args:
        draft: The draft model.
        texts: Tokens. [T] each
        logits: Logits of the target. [T, V] each
        k: Number of tokens of a draft, at most T.

    Returns:
        For each text, the results of the draft after each token; NaN without a draft. [3, T, k]
        each
    """
    masks = np.full(k - 1, draft.model.mask_token, np.int64)
    num_drafts = max(1, int(MAX_READ_BYTES / _weight_bytes(draft) / len(texts)))
    results = []
    with _open_decoder(_decoder(draft), draft.geometry, _options(draft)) as session:
        for text, expected in zip(texts, logits, strict=True):
            result = np.full((3, len(text), k), np.nan)
            session.fill_noise(0, draft.geometry.capacity)
            length, step = 0, -(-len(text) // num_drafts)
            for start in range(0, len(text) - k + 1, step):
                tokens = np.concatenate((text[length : start + 1], masks))
                drafted = _run_pass(session, tokens, length, k)
                length = start + 1
                rows = expected[start : start + k]
                result[:, start] = acceptance_by_row(drafted, rows, draft.head)
            results.append(result)
    return results


def acceptance_by_row(
    draft: np.ndarray, target: np.ndarray, head: Sequence[int] | np.ndarray | None
) -> np.ndarray:
    """Return acceptance rates at temperatures 0 and 1, and the draft's largest probability.

    Args:
        draft: Logits of the draft. [T, C]
        target: Logits of the target. [T, V]
        head: Tokens of the draft's columns if reduced, of the target's vocabulary.

    Returns:
        The three values of each row. [3, T]
    """
    size = min(draft.shape[1], target.shape[1])
    token_ids = np.arange(size) if head is None else np.array(head)
    agree = token_ids[draft[:, : len(token_ids)].argmax(1)] == target.argmax(1)
    draft_probs = _softmax(draft)
    overlaps = np.minimum(draft_probs[:, : len(token_ids)], _softmax(target)[:, token_ids]).sum(1)
    return np.stack((agree, np.minimum(overlaps, 1), draft_probs.max(1)))


def _read(
    readings: TokenReadings, text: np.ndarray, draft: FloatModel
) -> tuple[np.ndarray, np.ndarray]:
    """Return the draft's tokens for a text, and their number up to each token that fits."""
    lengths = [len(readings.read([token], i)) for i, token in enumerate(text.tolist())]
    ends = np.cumsum(lengths)
    ends = ends[ends <= draft.model.context_length]
    return np.array(readings.read(text.tolist())[: ends[-1]]), ends


def rates_by_confidence(confidences: np.ndarray, acceptance: np.ndarray) -> tuple[float, ...]:
    """Return the acceptance rate by class of the draft's largest probability, ascending.

    Each class has a prior with the weight of `PRIOR_TOKENS` tokens: the mean rate, shifted by the
    difference of the class's probability to the mean.

    Args:
        confidences: Largest probability of the draft at temperature 1. [n, k]
        acceptance: Acceptance rates of tokens whose predecessors are accepted. [n, k]
    """
    tested = _test_probabilities(acceptance)
    mean_rate, mean_confidence = (
        (tested * values).sum() / tested.sum() for values in (acceptance, confidences)
    )
    classes = np.searchsorted(CONFIDENCE_BOUNDS, confidences).ravel()
    edges = np.array([0, *CONFIDENCE_BOUNDS, 1])
    centers = (edges[1:] + edges[:-1]) / 2
    priors = np.clip(mean_rate + centers - mean_confidence, 0, 1)
    counts, sums = (
        np.bincount(classes, weights=values.ravel(), minlength=len(centers))
        for values in (tested, tested * acceptance)
    )
    rates = (sums + PRIOR_TOKENS * priors) / (counts + PRIOR_TOKENS)
    return tuple(np.maximum.accumulate(np.minimum(rates, 1)).tolist())


def _test_probabilities(acceptance: np.ndarray) -> np.ndarray:
    """Return the probability that a token is tested, from rates of acceptance. [n, k] -> [n, k]"""
    accepted = acceptance[:, :-1].cumprod(1)
    return np.concatenate((np.ones((len(accepted), 1)), accepted), 1)


def _complete_drafts(rows: Sequence[np.ndarray], spans: Sequence[slice]) -> np.ndarray:
    """Concatenate the results of complete drafts in a span of each text. -> [3, n, k]"""
    results = np.concatenate([row[:, span] for row, span in zip(rows, spans, strict=True)], 1)
    return results[:, ~np.isnan(results).any((0, 2))]


def first_windows(encoder: TextEncoder, documents: Sequence[str], size: int) -> list[np.ndarray]:
    """Return the beginnings of documents, or windows of a single one. [T] each"""
    prefix, each = encoder.prefix(), -(-NUM_TEXTS // len(documents))
    length = size - len(prefix)
    if length < MIN_TOKENS:
        return []
    prompts = []
    for document in documents:
        tokens = encoder.encode(document[: 32 * each * length])
        for i in range(each):
            window = tokens[i * length : (i + 1) * length]
            if len(window) >= MIN_TOKENS:
                prompts.append(np.concatenate((prefix, window)))
    return prompts


def _answer(
    target: FloatModel,
    prompts: list[np.ndarray],
    end_tokens: Container[int],
    context: int,
    sources: list[np.ndarray] | None,
) -> list[np.ndarray]:
    """Return prompts with the target's greedy answers, as long as its size allows. [T] each"""
    num_tokens = int(min(ANSWER_TOKENS, MAX_READ_BYTES / _weight_bytes(target) / len(prompts)))
    if num_tokens < MIN_ANSWER_TOKENS or not _can_run(target):
        return prompts
    geometry = replace(target.geometry, context_length=context)
    inputs = [] if sources is None else list(map(target.source_inputs, sources))
    return generate_answers(
        _decoder(target), geometry, prompts, end_tokens, num_tokens, _options(target), inputs
    )


def generate_answers(
    decoder: Path,
    geometry: Geometry,
    prompts: Sequence[np.ndarray],
    end_tokens: Container[int],
    num_tokens: int,
    options: ort.SessionOptions,
    source_inputs: Sequence[Mapping[str, np.ndarray]] = (),
) -> list[np.ndarray]:
    """Return prompts followed by a graph's greedy answers. [T] each

    Args:
        decoder: Path of the graph.
        geometry: Cache layout of the model.
        prompts: Tokens of the prompts, [T] each.
        end_tokens: Tokens that end an answer.
        num_tokens: Maximum tokens of an answer.
        options: Options of the session.
        source_inputs: Inputs for the source of each prompt of an encoder-decoder.
    """
    texts = []
    with _open_decoder(decoder, geometry, options) as session:
        for prompt, source in zip(prompts, source_inputs or [{}] * len(prompts), strict=True):
            tokens, length = prompt.astype(np.int64), 0
            session.fill_noise(0, geometry.capacity)
            for _ in range(min(num_tokens, geometry.context_length - len(prompt))):
                logits = _run_pass(session, tokens[length:], length, 1, source)[-1]
                length, token = len(tokens), int(logits.argmax())
                tokens = np.append(tokens, token)
                if token in end_tokens:
                    break
            texts.append(tokens)
    return texts


def _run_pass(
    session: SubgraphSession,
    tokens: np.ndarray,
    past_length: int,
    num_rows: int,
    source: Mapping[str, np.ndarray] | None = None,
) -> np.ndarray:
    """Run a pass after `past_length` tokens; return its last logits. -> [num_rows, V]"""
    inputs = {
        "input_ids": tokens[None],
        "past_length": np.array([past_length], np.int64),
        "logits_from": np.array([len(tokens) - num_rows], np.int64),
        **(source or {}),
    }
    return session.run("decoder", False, inputs)["logits"][0]


@contextmanager
def _open_decoder(
    decoder: Path, geometry: Geometry, options: ort.SessionOptions
) -> Iterator[SubgraphSession]:
    """Open a graph with caches."""
    shapes = dict(zip(geometry.cache_names(), geometry.cache_shapes(), strict=True))
    options.enable_cpu_mem_arena = False
    # Constant folding would copy each transposed matrix; fusion with its product does not.
    folding = ["ConstantFolding"]
    session = SubgraphSession(shapes, "float32", lambda *_: open_session(decoder, options, folding))
    try:
        yield session
    finally:
        session.close()


def _decoder(model: FloatModel) -> Path:
    """Return the path of the graph for any pass length."""
    return model.folder / next(f for f in model.files if f.length is None).file_name(model.ops[-1])


def _options(model: FloatModel) -> ort.SessionOptions:
    is_quantized = model.model.weights_dtype in QUANTIZED_DTYPES
    return ort.SessionOptions() if is_quantized else unpacked_options()


def _weight_bytes(model: FloatModel) -> int:
    return (model.folder / model.model.weights.rpartition("/")[2]).stat().st_size


def _can_run(model: FloatModel) -> bool:
    """Return True if there is memory for passes of a model."""
    is_quantized = model.model.weights_dtype in QUANTIZED_DTYPES
    return not is_quantized or can_prepack(_weight_bytes(model))


def _num_shared(text: np.ndarray, vocab_size: int) -> int:
    """Return the number of tokens before the first that one of the models lacks."""
    missing = np.flatnonzero(text >= vocab_size)
    return int(missing[0]) if len(missing) else len(text)


def _softmax(values: np.ndarray) -> np.ndarray:
    weights = np.exp(values - values.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True)
