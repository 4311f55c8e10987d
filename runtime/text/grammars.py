"""Constrained decoding: token masks of a JSON schema, regular expression or Lark grammar.

llguidance computes the masks. A mask depends only on the text, so that draft, target and plain
decoding apply the same one, and the text follows the target's masked distribution. A complete text
that cannot continue is followed by an end token. V tokens.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from specedge.bundle import Bundle
from specedge.errors import MissingExtraError, OptionError
from specedge.request import GenerationRequest
from specedge.sampling_options import MAX_DRAFT_TOKENS

from ..sampling.history import History, common_prefix_length
from .compilation import Compilations
from .schemas import simplify

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_RENEWALS = 8  # of a request's matcher, each for its text and its drafts; one may take a second
NUM_CACHED = 16  # compiled grammars, for lines of a file and choices of a request
COMPILE_SECONDS = 20.0  # limit per request; large grammars could take minutes
# A lexer state takes one or two kilobytes; llguidance's default limit is 250,000.
_LIMITS = {"max_lexer_states": 50_000, "verbose_errors": False}
# White space between symbols of JSON: a space, or a line break with indentation; bounded, since
# models may otherwise never stop.
WHITE_SPACE = r" |\n[ \t]{0,20}"


class Grammars:
    """Cache of compiled grammars of a bundle."""

    def __init__(self, bundle: Bundle, tokenizer: Tokenizer) -> None:
        self._bundle, self._tokenizer = bundle, tokenizer
        self._tokens: Any = None
        self._compilations = Compilations()
        self._cache: OrderedDict[tuple[str, str], Future[LLMatcher]] = OrderedDict()
        self._num_waiting: Counter[Future[LLMatcher]] = Counter()
        self._lock = threading.Lock()

    def constraint(self, request: GenerationRequest) -> GrammarConstraint | None:
        """Return the constraint of a request, or None.

        Raises:
            OptionError: The grammar is invalid or unsatisfiable, or takes too long to compile.
            MissingExtraError: llguidance is not installed.
        """
        grammar = request.grammar_option
        if grammar is None:
            return None
        ends = self._bundle.end_tokens
        if not ends:
            raise OptionError(
                f"{grammar[0]} needs an end token, {self._bundle.target.source.id} has none; "
                "omit it",
                grammar[0],
            )
        budget = _Budget(grammar[0], COMPILE_SECONDS)
        compilation = self._compilation(grammar, budget)
        renew = partial(self._renewed, compilation, grammar, budget)
        constraint = GrammarConstraint(
            compilation.result(), self._bundle.target.vocab_size, ends, renew
        )
        try:
            allows_none = bool(constraint.banned(History([])).all())
        except OptionError as error:  # such as a schema that only refers to itself
            message = f"{grammar[0]} is unsatisfiable or too complex: {error}"
            raise OptionError(message, grammar[0]) from error
        if allows_none:
            raise OptionError(
                f"{grammar[0]} allows no text that can be encoded by this bundle's tokenizer",
                grammar[0],
            )
        return constraint

    def _compilation(self, key: tuple[str, str], budget: _Budget) -> Future[LLMatcher]:
        """Return the finished compilation of a grammar, which other requests share.

        Its matcher must be copied before it reads a token.
        """
        with self._lock:
            self._tokens = self._tokens or self._llguidance_tokenizer(key[0])
            if key not in self._cache:
                self._cache[key] = self._compilations.begin(lambda: compiled(self._tokens, *key))
            self._cache.move_to_end(key)
            compilation = self._cache[key]
            self._num_waiting[compilation] += 1
        try:
            budget.wait(compilation)
            return compilation
        finally:
            with self._lock:
                self._num_waiting[compilation] -= 1
                if not self._num_waiting[compilation]:
                    del self._num_waiting[compilation]
                    # Not begun and no longer needed, or failed.
                    if compilation.cancel() or (compilation.done() and compilation.exception()):
                        self._drop(compilation, key)
                done = [k for k, future in self._cache.items() if future.done()]
                for old in done[: max(0, len(self._cache) - NUM_CACHED)]:
                    del self._cache[old]

    def _drop(self, compilation: Future[LLMatcher], key: tuple[str, str]) -> None:
        if self._cache.get(key) is compilation:
            del self._cache[key]

    def _renewed(self, full: Future[LLMatcher], key: tuple[str, str], budget: _Budget) -> LLMatcher:
        """Compile a matcher for one request, and drop the full one from the cache.

        Copies of a matcher share one lexer, whose states are never freed.
        """
        with self._lock:
            self._drop(full, key)
        running = self._compilations.begin(lambda: compiled(self._tokens, *key))
        try:
            return budget.wait(running)
        finally:
            running.cancel()

    def _llguidance_tokenizer(self, name: str) -> Any:
        """Return the tokenizer in llguidance's form."""
        try:
            import llguidance
        except ImportError as error:
            raise MissingExtraError(
                f'{name} needs llguidance: pip install "specedge[grammar]"'
            ) from error
        size = max(self._bundle.target.vocab_size, self._tokenizer.get_vocab_size())
        ends = list(self._bundle.end_tokens)
        try:
            text = _with_byte_fallback(self._tokenizer.to_str())
            return llguidance.LLTokenizer(text, n_vocab=size, eos_token=ends)
        except Exception as error:  # llguidance has no exception types
            raise OptionError(
                f"{name} cannot be used with this bundle's tokenizer: {_one_line(str(error))}",
                name,
            ) from error


def _with_byte_fallback(tokenizer: str) -> str:
    """Return a tokenizer whose decoder llguidance knows: it rejects T5's, which is Metaspace alone.

    Args:
        tokenizer: Contents of tokenizer.json.
    """
    document = json.loads(tokenizer)
    decoder = document.get("decoder") or {}
    if decoder.get("type") != "Metaspace":
        return tokenizer
    space = {"type": "Replace", "pattern": {"String": decoder["replacement"]}, "content": " "}
    document["decoder"] = {"type": "Sequence", "decoders": [space, {"type": "ByteFallback"}]}
    return json.dumps(document)


class _Budget:
    """Time budget of a request for the compilation of its grammars."""

    def __init__(self, option: str, seconds: float) -> None:
        self._option, self._total, self._left = option, seconds, seconds

    def wait(self, running: Future[LLMatcher]) -> LLMatcher:
        """Return the compiled matcher; raise OptionError if the budget is exceeded."""
        begin = time.perf_counter()
        try:
            return running.result(max(0.0, self._left))
        except FutureTimeoutError as error:
            raise OptionError(
                f"{self._option} takes more than {self._total:g} seconds to compile; simplify it, "
                "or try again when fewer grammars are being compiled",
                self._option,
            ) from error
        finally:
            self._left -= time.perf_counter() - begin


def compiled(tokens: Any, name: str, text: str) -> LLMatcher:
    """Compile a matcher for a grammar; raise OptionError if llguidance rejects it."""
    from llguidance import LLMatcher, LLParserLimits

    read = {
        "json_schema": _schema_grammar,
        "regex": LLMatcher.grammar_from_regex,
        "grammar": LLMatcher.grammar_from_lark,
    }[name]
    try:
        matcher: LLMatcher = LLMatcher(
            tokens, read(text), log_level=0, limits=LLParserLimits(**_LIMITS)
        )
        reason = matcher.get_error()
    except ValueError as error:
        reason = str(error)
    if reason:
        raise OptionError(f"{name} is rejected by llguidance: {_one_line(reason)}", name)
    return matcher


def _schema_grammar(text: str) -> str:
    """Return a schema's grammar, with bounded white space unless the schema sets it."""
    from llguidance import LLMatcher

    schema = json.loads(text)
    if (simple := simplify(schema)) != schema:  # else the text is unchanged
        text = json.dumps(simple, ensure_ascii=False)
    settings = schema.get("x-guidance")
    has_white_space = isinstance(settings, dict) and any(
        name.startswith("whitespace_") for name in settings
    )
    defaults = None if has_white_space else {"whitespace_pattern": WHITE_SPACE}
    grammar: str = LLMatcher.grammar_from_json_schema(text, defaults)
    return grammar


class GrammarConstraint:
    """Token masks of a text that follows a grammar after its prompt.

    It reads drafts, rolls back to the position where another draft begins, and caches the masks of
    the positions of a round for draft and target.

    If the matcher reaches llguidance's limits, `renew` returns another one, since the lexer may be
    full of states of other texts and of rejected drafts. Renewals are limited separately for the
    text and for drafts; once those for drafts are used up, drafts are no longer constrained.

    Attributes:
        outside_engine: Context in which other requests run during a renewal, which may take
            seconds.

    Args:
        matcher: Matcher without tokens; it is copied.
        vocab_size: Number of tokens V.
        ends: End tokens, which end a complete text.
        renew: Function that compiles another matcher.
    """

    outside_engine: Callable[[], AbstractContextManager[None]] = nullcontext

    def __init__(
        self,
        matcher: LLMatcher,
        vocab_size: int,
        ends: Sequence[int],
        renew: Callable[[], LLMatcher],
    ) -> None:
        self._fresh, self._matcher = matcher, matcher.deep_copy()
        self._renew = renew
        self._num_renewals = {"text": 0, "mixed": 0}
        self._mixed = True  # the lexer may have states of drafts or other texts
        self._ends = frozenset(ends)
        self._only_ends = np.ones(vocab_size, bool)
        self._only_ends[list(ends)] = False
        self._read: list[int] = []
        self._num_consumed = 0  # tokens consumed by the matcher, without end tokens
        self._masks: dict[int, NDArray[np.bool_]] = {}

    def banned(self, history: History) -> NDArray[np.bool_]:
        """Return the mask of the tokens that cannot follow a text. -> [V]

        Raises:
            OptionError: The text violates the grammar, as a draft may.
        """
        drafted = history.length > history.num_committed
        if drafted and self._num_renewals["mixed"] >= MAX_RENEWALS:
            raise _LimitError("the grammar is not applied to drafts: it takes too much computation")
        self._mixed |= drafted
        new = history.last(history.num_new_tokens)
        try:
            return self._after(new)
        except _LimitError:
            if not self._may_renew():
                self._begin_anew()
                raise
        with self.outside_engine():
            matcher = self._renew()
        self._fresh, self._mixed = matcher, drafted
        self._begin_anew()
        try:
            return self._after(new)
        except _LimitError:  # the matcher is unusable, but only a draft may have reached the limit
            self._begin_anew()
            raise

    def _may_renew(self) -> bool:
        """Count a renewal; return True if it is allowed."""
        self._num_renewals["mixed" if self._mixed else "text"] += 1
        return self._mixed or self._num_renewals["text"] <= MAX_RENEWALS

    def _after(self, new: list[int]) -> NDArray[np.bool_]:
        shared = common_prefix_length(self._read, new)
        if shared < len(new) or shared not in self._masks:
            self._rollback(shared)
            self._read_on(new[shared:])
            self._masks[len(new)] = self._mask()
            while (first := next(iter(self._masks))) <= len(new) - 2 * MAX_DRAFT_TOKENS:
                del self._masks[first]  # keys are in the order of positions
        return self._masks[len(new)]

    def forced(self, history: History) -> int | None:
        """Return the forced token after a text; None if several may follow, or it has ended.

        It is derived from the mask, since several token sequences may spell llguidance's forced
        bytes.
        """
        banned = self.banned(history)
        if history.num_new_tokens and history.last(1)[0] in self._ends:
            return None
        several = len(banned) - np.count_nonzero(banned) != 1
        return None if several else int(banned.argmin())

    def _rollback(self, length: int) -> None:
        if self._num_consumed > length:
            self._matcher.rollback(self._num_consumed - length)
            self._num_consumed = length
        for at in range(length + 1, len(self._read) + 1):
            self._masks.pop(at, None)
        del self._read[length:]

    def _read_on(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if not self._ended and token not in self._ends:
                if not self._matcher.try_consume_tokens([token]):
                    self._mask()  # raises the error of a full lexer, which llguidance reports late
                    raise OptionError("the text so far violates the grammar")
                self._num_consumed += 1
            self._read.append(token)

    @property
    def _ended(self) -> bool:
        return self._num_consumed < len(self._read)

    def _mask(self) -> NDArray[np.bool_]:
        if self._ended:
            return self._only_ends
        allowed = np.frombuffer(self._matcher.compute_logit_bias(), np.uint8)
        self._check()
        banned: NDArray[np.bool_] = allowed[: len(self._only_ends)] == 0
        return banned

    def _check(self) -> None:
        """Raise an error if llguidance's limits stopped the matcher."""
        if reason := self._matcher.get_error():
            raise _LimitError(f"the grammar cannot be applied to this text: {_one_line(reason)}")

    def _begin_anew(self) -> None:
        self._matcher = self._fresh.deep_copy()
        self._read, self._num_consumed, self._masks = [], 0, {}


class _LimitError(OptionError):
    """Limit of llguidance that was reached, possibly because of other texts."""


def _one_line(reason: str) -> str:
    return " ".join(reason.split())[:300]
