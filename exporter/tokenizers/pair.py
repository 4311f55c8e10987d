"""Compatibility of a draft and a target, and the bundle's text metadata."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from specedge.chat_templates import PROCESSOR_FILE, chat_template_of, read_template
from specedge.errors import ExportError, PairError
from specedge.request import BEAM_SEARCH
from specedge.sampling_options import DecodingDefaults, RecommendedSampling
from specedge.strict_json import build

from .. import internals
from ..checkpoint.checkpoints import Checkpoint
from ..checkpoint.gguf_tokenizer import named_end_tokens
from ..libraries import first_line
from ..progress import Progress
from . import compatibility
from .vocabulary_map import VocabularyMap, added_prefix, map_vocabularies

TOKENIZER_FILE = "tokenizer.json"
DRAFT_TOKENIZER_FILE = "draft-tokenizer.json"
DEFAULT_CONTEXT = 4096
DATE = datetime.datetime(2025, 1, 1, tzinfo=datetime.timezone.utc)  # fixed date for chat templates
SAMPLES = (
    "def read_config(path):\n    return path",
    "The quick brown fox, 1234567890 times!",
    "  spaces\tand\n\nlines ",
    "Grüße, 你好, привет, 👩‍🚀 — e\u0301",
    "<s>[INST] tags </s>",
    "",
)
FORCED = ("forced_bos_token_id",)
MAX_STATED_LENGTH = 10**9  # tokenizers without a maximum length state a larger one
_POSITIONS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx"),
    "max_target_positions",
)


@dataclass(frozen=True)
class TextMetadata:
    """Text metadata of the bundle, which is the target's.

    Attributes:
        tokenizer: Content of tokenizer.json.
        num_tokens: Number of ids.
        chat_template: Chat template, None without one.
        special_tokens: Variables of the chat template.
        draft: Content of the draft model's tokenizer.json, if its tokenizer is another one.
        vocabulary: Map of both vocabularies in this case.
    """

    tokenizer: str
    num_tokens: int
    chat_template: str | None
    special_tokens: dict[str, str]
    draft: str | None = None
    vocabulary: VocabularyMap | None = None


def check_pair(draft: Checkpoint | None, target: Checkpoint, progress: Progress) -> TextMetadata:
    """Compare the tokenizers of both models; map their vocabularies if they differ.

    Harmless differences are noted. A draft without a tokenizer reads the tokens of its target.

    Raises:
        PairError: The models cannot be a pair.
    """
    of_target, template = _tokenizer_settings(target), _chat_template(target)
    named = target.tokenizer.special_tokens_map
    special = {name: token for name, token in named.items() if isinstance(token, str)}
    text = TextMetadata(_dump(of_target), num_tokens_of(target), template, special)
    if draft is None or draft.tokenizer is None:
        return text
    _check_sources(draft, target)
    of_draft = _tokenizer_settings(draft)
    try:
        notes = compatibility.compare(of_target, of_draft)
    except PairError as error:
        if target.config.is_encoder_decoder:
            raise PairError(
                f"{error}; the draft of an encoder-decoder must have its tokenizer, so choose one "
                "of the target's family"
            ) from error
        progress.note(f"{error}")
        vocabulary = _map_vocabularies(target, draft)
        return replace(text, draft=_dump(of_draft), vocabulary=vocabulary)
    for note in notes:
        progress.note(note)
    if end_tokens(draft) != end_tokens(target):
        progress.note(
            f"the draft ends at tokens {list(end_tokens(draft))}, the target at "
            f"{list(end_tokens(target))}; those of the target are used"
        )
    if _chat_template(draft) != template:
        progress.note("the draft has a different chat template; that of the target is used")
    return text


def _map_vocabularies(target: Checkpoint, draft: Checkpoint) -> VocabularyMap:
    """Map vocabularies; the tokens that end or begin texts are equal, whatever their names."""
    first, second = (Tokenizer.from_str(_dump(_tokenizer_settings(c))) for c in (target, draft))
    of_target, of_draft = target.tokenizer, draft.tokenizer
    begin, draft_begin = added_prefix(first), added_prefix(second)
    equal = {of_target.eos_token_id: of_draft.eos_token_id}
    if len(begin) == 1:
        equal[begin[0]] = draft_begin[0] if draft_begin else of_draft.bos_token_id
    sizes = [
        min(num_tokens_of(c), internals.decoder_text_config(c.config).vocab_size)
        for c in (target, draft)
    ]
    equal = {t: d for t, d in equal.items() if t is not None and d is not None and d < sizes[1]}
    return map_vocabularies(first, second, (sizes[0], sizes[1]), equal)


def num_tokens_of(checkpoint: Checkpoint) -> int:
    """Return the number of ids of a checkpoint's tokenizer."""
    return int(max(checkpoint.tokenizer.get_vocab().values())) + 1


def _dump(settings: dict[str, Any]) -> str:
    return json.dumps(settings, ensure_ascii=False)


def _check_sources(draft: Checkpoint, target: Checkpoint) -> None:
    """Check that both models read a source of one kind, or neither reads one. Raises PairError."""

    def describe(checkpoint: Checkpoint) -> str:
        if not checkpoint.config.is_encoder_decoder:
            return "a decoder"
        num_mel_bins = getattr(checkpoint.config, "num_mel_bins", None)
        source = "text" if num_mel_bins is None else f"spectrograms of {num_mel_bins} mel bins"
        return f"an encoder-decoder of {source}"

    if (of_draft := describe(draft)) != (of_target := describe(target)):
        raise PairError(
            f"the draft is {of_draft}, the target {of_target}; specify a draft of the same kind"
        )


def write_tokenizer(text: TextMetadata, target: Checkpoint, folder: Path) -> None:
    """Write tokenizer.json and compare it with transformers; write the draft's if it has another.

    Raises:
        ExportError: The tokenizer differs from that of transformers.
    """
    if text.draft is not None:
        (folder / DRAFT_TOKENIZER_FILE).write_text(text.draft, "utf-8")
    path = folder / TOKENIZER_FILE
    path.write_text(text.tokenizer, "utf-8")
    shipped = Tokenizer.from_file(str(path))
    for sample in SAMPLES:
        actual, expected = shipped.encode(sample).ids, target.tokenizer(sample)["input_ids"]
        if actual != expected:
            raise ExportError(
                f"tokenizer.json encodes {sample!r} as {actual[:8]}, transformers as "
                f"{expected[:8]}; it does not describe this tokenizer completely"
            )


def end_tokens(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Return the end tokens of the generation config, else of the config.

    If they lack the tokenizer's own, which are its `eos_token` and those of the chat template,
    tokens that end a text by their names are added, as in GGUF files. Raises ExportError.
    """
    stated = _stated_end_tokens(checkpoint)
    vocabulary = checkpoint.tokenizer.get_vocab()
    by_name = named_end_tokens(vocabulary)
    template = _chat_template(checkpoint) or ""
    eos = vocabulary.get(checkpoint.tokenizer.eos_token)
    tokenizer_ends = [] if eos is None else [eos]
    tokenizer_ends += [token for name, token in by_name.items() if name in template]
    if stated and {*tokenizer_ends} <= {*stated}:
        return stated
    return tuple(dict.fromkeys([*stated, *tokenizer_ends, *by_name.values()]))


def decoder_tokens(checkpoint: Checkpoint) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens that begin each text of an encoder-decoder, and its usual prefix.

    These are the start token and the forced first token, by the generation config or else the
    config; of other models, none. Raises ExportError.
    """
    if not checkpoint.config.is_encoder_decoder:
        return (), ()

    def stated(*names: str) -> tuple[int, ...]:
        # As in transformers, config.json has the generation config if there is no other file.
        of_config = partial(getattr, checkpoint.config)
        sources: list[Callable[..., Any]]
        sources = [checkpoint.generation.get, checkpoint.raw.get, of_config]
        if names == FORCED and checkpoint.generation:
            del sources[1:]
        values = (source(name, None) for name in names for source in sources)
        value = next((value for value in values if value is not None), None)
        if value is None:
            return ()
        if type(value) is not int or value < 0:
            where = f"{checkpoint.role} {checkpoint.name}"
            raise ExportError(f"{where}: {names[0]} is {value!r}, which is not a token id")
        return (value,)

    start = stated("decoder_start_token_id", "bos_token_id")
    if not start:
        raise ExportError(
            f"{checkpoint.role} {checkpoint.name} is an encoder-decoder without a "
            "decoder_start_token_id; add it to its generation_config.json"
        )
    return start, stated(*FORCED)


def note_end_tokens(checkpoint: Checkpoint, ends: Sequence[int], progress: Progress) -> None:
    """Note the tokens at which texts end, and which of them the config does not name."""
    if not ends:
        progress.note("the tokenizer has no end token: texts end at their maximum length")
        return

    def describe(tokens: Sequence[int]) -> str:
        names = checkpoint.tokenizer.convert_ids_to_tokens(list(tokens))
        return " or ".join(f"{name} ({i})" for name, i in zip(names, tokens, strict=True))

    stated = _stated_end_tokens(checkpoint)
    added = [token for token in ends if token not in stated]
    detail = f", of which its config lacks {describe(added)}" if added else ""
    progress.note(f"texts end at {describe(ends)}{detail}")


def _stated_end_tokens(checkpoint: Checkpoint) -> tuple[int, ...]:
    stated = checkpoint.generation.get("eos_token_id")
    if stated is None:
        stated = getattr(internals.decoder_text_config(checkpoint.config), "eos_token_id", None)
    values = [] if stated is None else stated if isinstance(stated, list) else [stated]
    if bad := [value for value in values if type(value) is not int]:
        where = f"{checkpoint.role} {checkpoint.name}"
        raise ExportError(f"{where}: eos_token_id has {bad[0]!r}, which is not a token id")
    return tuple(dict.fromkeys(values))


def default_sampling(target: Checkpoint) -> RecommendedSampling:
    """Return the sampling options of the target's generation config, as vLLM applies them.

    `do_sample` is ignored. Options that the config omits are neutral: temperature 1, no filters.
    Raises ExportError for invalid values.
    """
    names = [option.name for option in fields(RecommendedSampling)]
    stated: dict[str, Any] = {
        name: value
        for name in names
        if isinstance(value := target.generation.get(name), int | float)
        and not isinstance(value, bool)
    }
    if not stated or stated.get("temperature") == 0:
        return RecommendedSampling()
    if "top_k" in stated:
        stated["top_k"] = max(0, int(stated["top_k"]))  # -1 is off
    try:
        return RecommendedSampling(**{"temperature": 1.0} | stated)
    except (ValueError, OverflowError) as error:
        raise ExportError(f"generation_config.json of {target.name}: {error}") from error


def decoding_defaults(target: Checkpoint, vocab_size: int, progress: Progress) -> DecodingDefaults:
    """Return the logits processors of an encoder-decoder's generation config; note what is ignored.

    `forced_eos_token_id` has no equivalent: a text would depend on the limit of its request.
    Raises ExportError for invalid values.
    """
    if not target.config.is_encoder_decoder:
        return DecodingDefaults()
    stated = target.generation or target.raw  # older checkpoints have them in config.json
    neutral = BEAM_SEARCH | {"min_length": (0,)}
    ignored = [
        f"{name} {value}"
        for name, values in neutral.items()
        if (value := stated.get(name)) is not None and value not in values
    ]
    if ignored:
        progress.note(
            f"ignored values of the generation config: {', '.join(ignored)}; texts are decoded "
            "without beam search, and their lengths are options of a request"
        )
    names = [option.name for option in fields(DecodingDefaults)]
    try:
        values = {name: value for name in names if (value := stated.get(name)) is not None}
        defaults = build(DecodingDefaults, values)
    except ValueError as error:
        raise ExportError(f"generation config of {target.name}: {error}") from error

    def in_vocabulary(tokens: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(token for token in tokens if 0 <= token < vocab_size)

    return replace(
        defaults,
        suppress_tokens=in_vocabulary(defaults.suppress_tokens),
        begin_suppress_tokens=in_vocabulary(defaults.begin_suppress_tokens),
    )


def context_lengths(
    target: Checkpoint, draft: Checkpoint | None, limit: int | None, progress: Progress
) -> tuple[int, int]:
    """Return the context lengths of target and draft; the draft's is at most the target's.

    An EAGLE-3 head states the length of its training texts, and has the target's positions.
    """
    of_target = context_length(target, limit, progress)
    is_separate = draft is not None and draft.target is None
    of_draft = context_length(draft, limit, progress) if draft and is_separate else of_target
    if of_draft < of_target:
        progress.note(
            f"the draft has {of_draft} positions, the target {of_target}; when its context is "
            "full, the draft continues with the last half of it"
        )
    return of_target, min(of_target, of_draft)


def vocab_sizes(num_tokens: int, rows: Sequence[int], progress: Progress) -> list[int]:
    """Return how many of the tokenizer's ids each model supports, the target first.

    Args:
        num_tokens: Ids of the tokenizer.
        rows: Rows of each model's embedding.
        progress: Receives notes.
    """
    of_target = min(num_tokens, rows[0])
    of_draft = min(of_target, *rows)
    if of_target < num_tokens:
        progress.note(
            f"the tokenizer has {num_tokens} ids, of which the target supports {of_target}"
        )
    if of_draft < of_target:
        progress.note(
            f"the draft supports {of_draft} of the target's {of_target} ids; the others are never "
            "drafted, and are replaced in its input"
        )
    return [of_target, of_draft][: len(rows)]


def context_length(checkpoint: Checkpoint, limit: int | None, progress: Progress) -> int:
    """Return the context length of a model, at most `limit`. Raises ExportError."""
    config = internals.decoder_text_config(checkpoint.config)
    stated = [v for n in _POSITIONS if isinstance(v := getattr(config, n, None), int) and v > 0]
    if not stated and checkpoint.config.is_encoder_decoder:  # positions relative to each other
        stated = [n for n in (checkpoint.tokenizer.model_max_length,) if n < MAX_STATED_LENGTH]
    if not stated and limit is None:
        raise ExportError(
            f"{checkpoint.role} {checkpoint.name} does not state its context length; "
            "specify --max-length"
        )
    positions = stated[0] if stated else limit
    assert positions is not None
    if limit is None:
        if positions > DEFAULT_CONTEXT:
            progress.note(
                f"the context of {checkpoint.name} is reduced from {positions} to "
                f"{DEFAULT_CONTEXT} tokens to save memory; use --max-length to change it"
            )
        return min(positions, DEFAULT_CONTEXT)
    positions = max(positions, _scaled_positions(config, positions))
    if limit > positions:
        progress.note(
            f"{checkpoint.name} has {positions} positions, fewer than --max-length {limit}"
        )
    return min(positions, limit)


def _scaled_positions(config: Any, positions: int) -> int:
    """Return the number of positions with rotary scaling."""
    rope = getattr(config, "rope_parameters", None) or {}
    factor = rope.get("factor")
    if rope.get("rope_type") not in ("dynamic", "yarn") or not isinstance(factor, int | float):
        return positions
    return int(factor * rope.get("original_max_position_embeddings", positions))


def _tokenizer_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    settings = json.loads(checkpoint.tokenizer.backend_tokenizer.to_str())
    settings["truncation"] = settings["padding"] = None
    return settings


def chat_writer(
    checkpoint: Checkpoint, progress: Progress
) -> Callable[[list[dict[str, str]]], str] | None:
    """Return a function that renders a conversation with the chat template, if there is one.

    A generation prompt follows a user's turn. The current date in templates is fixed, so that
    exports are reproducible. A template that fails on plain text, such as that of an image model,
    is noted and not used.
    """
    template = _chat_template(checkpoint)
    if template is None:
        return None

    def render(turns: list[dict[str, str]]) -> str:
        text = checkpoint.tokenizer.apply_chat_template(
            turns,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=turns[-1]["role"] == "user",
            strftime_now=DATE.strftime,
        )
        return str(text)

    try:
        question = {"role": "user", "content": "a"}
        render([question])
        render([question, {"role": "assistant", "content": "b"}])
    except Exception as error:  # a template can fail in any way that code can
        progress.note(f"calibration without the chat template, which fails: {first_line(error)}")
        return None
    return render


def _chat_template(checkpoint: Checkpoint) -> str | None:
    """Return the tokenizer's chat template, else the processor's; None if there is none."""
    template = chat_template_of(getattr(checkpoint.tokenizer, "chat_template", None))
    if template is not None or not checkpoint.raw:  # a GGUF file has no other template
        return template
    path = checkpoint.folder / PROCESSOR_FILE
    if not path.is_file():
        return None
    try:
        return read_template(path)
    except ValueError as error:
        where = f"{checkpoint.role} {checkpoint.name}"
        raise ExportError(
            f"{where}: {PROCESSOR_FILE} is not valid JSON: {first_line(error)}"
        ) from error
