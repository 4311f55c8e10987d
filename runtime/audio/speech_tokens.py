"""Control tokens of Whisper: languages, tasks and timestamps (Radford et al. 2022, section 2.3)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tokenizers import Tokenizer

from specedge.bundle import Bundle
from specedge.errors import BundleError, OptionError
from specedge.option_specs import NameEnum, suggest
from specedge.sampling_options import TimestampRules

SECONDS_PER_TOKEN = 0.02  # between timestamps
MAX_INITIAL = 50  # a first segment begins within the first second
_ENGLISH_END = 50256  # end token of GPT-2's vocabulary, which models for English have


class SpeechTask(NameEnum):
    """Task of a model: text in the language of the speech, or in English."""

    TRANSCRIBE = "transcribe"
    TRANSLATE = "translate"


@dataclass(frozen=True)
class SpeechTokens:
    """Control tokens of a tokenizer.

    Attributes:
        end: End token; tokens of text are below it.
        no_timestamps: Token for text without timestamps, which follow it in the vocabulary.
        tasks: Tokens by task; none if the model is for English only.
        languages: Tokens by language code, such as "en"; none if the model is for English only.
        num_timestamps: Number of timestamps that the model has.
    """

    end: int
    no_timestamps: int
    tasks: dict[str, int]
    languages: dict[str, int]
    num_timestamps: int

    @classmethod
    def of(cls, bundle: Bundle, tokenizer: Tokenizer) -> SpeechTokens:
        """Return the tokens of a bundle. Raises BundleError if it is not of a Whisper model."""

        def token(name: str) -> int:
            found = tokenizer.token_to_id(f"<|{name}|>")
            if found is None:
                raise BundleError(
                    f"{bundle.target.source.id} is not a Whisper model: its tokenizer has no "
                    f"<|{name}|>"
                )
            return int(found)

        end, last = token("endoftext"), token("notimestamps")
        tasks, languages = dict[str, int](), dict[str, int]()
        if end != _ENGLISH_END:
            tasks = {task: token(task) for task in SpeechTask}
            first = token("startoftranscript") + 1
            for language in range(first, min(tasks.values())):
                if code := re.fullmatch(r"<\|(\w+)\|>", tokenizer.id_to_token(language) or ""):
                    languages[code[1]] = language
        num_timestamps = max(0, bundle.target.vocab_size - (last + 1))
        return cls(end, last, tasks, languages, num_timestamps)

    def prefix(self, language: str, task: str, timestamps: bool) -> list[int]:
        """Return the tokens between the start token and a text."""
        tokens = [self.languages[language], self.tasks[task]] if self.languages else []
        return tokens if timestamps else [*tokens, self.no_timestamps]

    def rules(self) -> TimestampRules:
        """Return the rules of timestamps. Raises OptionError if the model has none."""
        if not self.num_timestamps:
            raise OptionError(
                "the model's tokenizer has no timestamps; omit them, or export a checkpoint whose "
                "tokenizer.json has them",
                "timestamps",
            )
        return TimestampRules(self.no_timestamps + 1, self.end, MAX_INITIAL)

    def check(self, language: str | None, task: str) -> None:
        """Raise OptionError for a language or task that the model does not have."""
        if task not in [*SpeechTask]:
            raise OptionError(f"task must be {' or '.join(SpeechTask)}, got {task!r}", "task")
        names = [*self.languages] or ["en"]
        if language is not None and language not in names:
            hint = suggest(language, names) if self.languages else "; the model is for English only"
            raise OptionError(
                f"language must be a code such as en, got {str(language)[:20]!r}{hint}", "language"
            )
        if task != SpeechTask.TRANSCRIBE and not self.tasks:
            raise OptionError("the model is for English only and cannot translate", "task")
