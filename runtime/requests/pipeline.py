"""Pipeline: a loaded bundle and its requests."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from tokenizers import Tokenizer

from specedge.bundle import Bundle
from specedge.bundle.manifest import chunk_length as longest_chunk_length
from specedge.errors import OptionError, PromptError, SpecEdgeError
from specedge.request import (
    AUTO,
    Coupling,
    GenerationRequest,
    RequestOptions,
    build_request,
    item_seed,
)
from specedge.sampling_options import MAX_EXPORTED_DRAFT_TOKENS, Sampling, TimestampRules

from ..decoding.decoding import SpeculativeDecoder
from ..decoding.invariance import LogitNoise, longest_invariant
from ..decoding.protocols import ClosableModel, Feed, Operations, SourceModel, TargetModel
from ..decoding.random_numbers import GumbelNoise
from ..decoding.timing import Stopwatch, TimedModel
from ..drafters.registry import DrafterRegistry
from ..drafters.suffix import EarlierOutputs
from ..planning.cost_files import PassCosts
from ..planning.plans import create_plan
from ..sampling.logprobs import TokenLogprobs, token_logprobs
from ..sampling.source import Source
from ..text.bad_words import resolve_sampling
from ..text.detokenizer import FinishReason, TextAssembler
from ..text.grammars import GrammarConstraint, Grammars
from ..text.prompts import Prompts
from .async_stream import AsyncStream
from .slots import Slot, Slots
from .stream import ActiveRequest, Generation, Stream, run_together

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

SCORE_CHUNK = 64  # tokens whose logits are in memory at a time


class Pipeline:
    """Loaded target model, optionally with a draft model, that runs one request in each slot.

    A slot has separate caches; weights are shared, and running requests share passes or take turns
    to run them. A stream owns its slot until it ends, is closed, cancelled or garbage-collected,
    whichever threads read it. If no slot is free, a new request waits for one. It raises
    SpecEdgeError instead with `wait` False, in a thread that runs an event loop, in the only thread
    of a process, and if no stream was read for 30 seconds. Two pipelines are independent.

    Args:
        bundle: Bundle of the models.
        tokenizer: Tokenizer of the bundle.
        target: Target model of the first slot.
        draft: Draft model of the first slot, None if the bundle has none.
        costs: Pass costs for the planner.
        note: Note of the self-test at load about this machine.
        more: Target and draft model of each further slot.
        chunk_length: Length of a long prompt's chunks; by default the longest that memory allows.
    """

    def __init__(
        self,
        bundle: Bundle,
        tokenizer: Tokenizer,
        target: TargetModel,
        draft: ClosableModel | None,
        costs: PassCosts | None = None,
        note: str | None = None,
        more: Iterable[tuple[TargetModel, ClosableModel | None]] = (),
        chunk_length: int | None = None,
    ) -> None:
        self.bundle = bundle
        self.tokenizer = tokenizer
        self.target = target
        self.draft = draft
        self.drafters = DrafterRegistry(bundle)
        self.noise = LogitNoise(target, bundle.context_length)
        self.costs = costs or PassCosts()
        self.note = note
        more_slots = [
            Slot(target_model, draft_model, self.noise.for_model(target_model))
            for target_model, draft_model in more
        ]
        self.slots = Slots([Slot(target, draft, self.noise), *more_slots])
        self.prompts = Prompts(bundle, tokenizer)
        self.grammars = Grammars(bundle, tokenizer)
        longest_chunk = longest_chunk_length(bundle.target.capacity)
        self._chunk_length = chunk_length or longest_chunk
        self.max_first_length = longest_invariant(target.invariant_lengths, longest_chunk)

    def generate(
        self,
        prompt: str | Sequence[int] | Source,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        *,
        wait: bool = True,
        **options: Unpack[RequestOptions],
    ) -> Generation:
        """Generate the continuation of a prompt.

        The output is the target's alone: its own tokens at temperature 0, else its distribution.
        Generation ends after `max_new_tokens` tokens, at one of the bundle's end tokens unless
        `ignore_eos`, at the first of the `stop` strings, or if the context is full.

        Args:
            prompt: Text, or token ids. Text that spells a special token is encoded as text, unless
                `special_tokens`. For an encoder-decoder it is the source, which may also be a
                `Source`.
            max_new_tokens: Maximum number of new tokens.
            temperature: Sampling temperature; 0 is greedy.
            wait: False to raise an error instead of waiting for a free slot.
            **options: Fields of `specedge.request.GenerationRequest`, among them:
                num_draft_tokens: K, by default chosen for each round; 0 is plain decoding.
                drafter: "auto" (draft model, suffix decoding or both in a chain, as pays best; the
                draft model if K is given), "model", "suffix", "lookup", "chain", "random",
                "ngram:FILE", or an object (`runtime.decoding.protocols.Drafter`). It affects the
                speed alone.
                lookup_min, lookup_max: Match lengths of suffix decoding.
                remember: True to draft from earlier outputs, too.
                decoder_prefix: Text or token ids that the text of an encoder-decoder begins with,
                by default the bundle's.
                seed: Seed that repeats the request, by default a new one (`Generation.seed`).
                exact: True to resolve near-ties at temperature 0 as plain decoding does.
                coupling: "gumbel" makes the text depend on the seed alone above temperature 0;
                `choice` numbers the texts of a seed.
                json_schema, regex, grammar: Constraint on the text; the distribution is the
                target's under its mask.
                lenience: Below 1, gives up the target's distribution for speed.
                logprobs: Number of most likely tokens to report in addition to each token's
                log-probability.

        Raises:
            PromptError, ContextLengthError, DrafterError, ValueError: Before anything runs.
            OptionError: The options leave no token to continue with.
            SpecEdgeError: No slot is free and waiting is ruled out (see `Pipeline`).
        """
        stream = self.stream(prompt, max_new_tokens, temperature, wait=wait, **options)
        for _ in stream:
            pass
        return stream.generation

    def stream(
        self,
        prompt: str | Sequence[int] | Source,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        *,
        wait: bool = True,
        shown: Collection[int] = (),
        stop_tokens: Collection[int] = (),
        include_stop: bool = False,
        timestamps: TimestampRules | None = None,
        **options: Unpack[RequestOptions],
    ) -> Stream:
        """Generate in pieces of text that join to exactly `Generation.text`.

        Args:
            prompt: As in `generate`, like all options.
            max_new_tokens: As in `generate`.
            temperature: As in `generate`.
            wait: As in `generate`.
            shown: Special tokens that are included in the text; others have no text.
            stop_tokens: Tokens that end the text like end tokens, even with `ignore_eos`.
            include_stop: True if the text includes the stop string that ends it.
            timestamps: Rules of a Whisper model's timestamps; None for text without them.
        """
        request = build_request(max_new_tokens=max_new_tokens, temperature=temperature, **options)
        if timestamps is not None and request.exact:
            raise OptionError("exact does not apply to timestamps, which compare sums", "exact")
        sampling = replace(self.sampling(request), timestamps=timestamps)
        tokens, source = self.prompts.start(prompt, request.special_tokens, request.decoder_prefix)
        if stop_tokens:
            ends = tuple(dict.fromkeys((*sampling.end_tokens, *stop_tokens)))
            sampling = replace(sampling, end_tokens=ends)
        return self._begin(request, sampling, tokens, source, wait, shown, include_stop)

    def generate_batch(
        self,
        prompts: Iterable[str | Sequence[int] | Source],
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        **options: Unpack[RequestOptions],
    ) -> list[Generation]:
        """Generate the continuations of prompts, as many together as the pipeline has slots.

        Arguments are those of `generate`. Prompt i is sampled with `seed` + i. Each generation is
        that of its prompt alone. With `remember` or a custom drafter, prompts run one at a time.

        Raises:
            SpecEdgeError: As `generate`, for the first prompt that fails.
        """

        def begin(index: int, prompt: str | Sequence[int] | Source, wait: bool) -> Stream:
            request = options.copy()
            if (seed := options.get("seed")) is not None:
                request["seed"] = item_seed(seed, index)
            return self.stream(prompt, max_new_tokens, temperature, wait=wait, **request)

        begins = (partial(begin, index, prompt) for index, prompt in enumerate(prompts))
        generations = []
        has_object = not isinstance(options.get("drafter", ""), str)
        limit = 1 if options.get("remember") or has_object else None
        for result in run_together(self.slots, begins, limit):
            if isinstance(result, SpecEdgeError):
                raise result
            generations.append(result)
        return generations

    def score(
        self,
        prompt: Sequence[int],
        num_logprobs: int,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> list[TokenLogprobs]:
        """Return the log-probabilities of a prompt's tokens from the second one on.

        Passes over at most `SCORE_CHUNK` tokens compute them and leave the prompt in the cache of
        a slot.

        Args:
            prompt: At least one token.
            num_logprobs: Number of most likely tokens to report for each position.
            is_cancelled: Called before each chunk; True ends the computation early.

        Raises:
            PromptError: The prompt has no token, or one that the model does not have; or the model
                is an encoder-decoder, whose prompt is a source.
            ContextLengthError: The prompt is longer than the context.
        """
        if self.bundle.target.encoder is not None:
            raise PromptError(
                f"{self.bundle.target.source.id} is an encoder-decoder, whose prompt has no "
                "log-probabilities"
            )
        tokens = self.prompts.tokens(prompt)
        stopwatch = Stopwatch()
        lease = self.slots.lease(tokens, wait=True)
        target = TimedModel(lease.slot.target, stopwatch, "verify")
        try:
            operations = _score(target, tokens, num_logprobs, is_cancelled)
            return self.slots.engine.run(operations, stopwatch)
        finally:
            lease.release()

    def sampling(self, request: GenerationRequest) -> Sampling:
        """Return the sampling options of a request. Raises OptionError if the bundle lacks them."""
        sampling = resolve_sampling(request, self.bundle, self.tokenizer)
        return replace(sampling, constraint=self.grammars.constraint(request))

    def _begin(
        self,
        request: GenerationRequest,
        sampling: Sampling,
        prompt: list[int],
        source: Source | None,
        wait: bool,
        visible_tokens: Collection[int],
        include_stop: bool,
    ) -> Stream:
        num_free = self.bundle.context_length - len(prompt)
        limit = min(request.max_new_tokens, num_free)
        is_limited = request.max_new_tokens <= num_free
        seed = secrets.randbits(32) if request.seed is None else request.seed
        if request.coupling == Coupling.GUMBEL:
            sampling = replace(sampling, noise=GumbelNoise(seed, request.choice))
        stopwatch = Stopwatch()
        if isinstance(sampling.constraint, GrammarConstraint):
            sampling.constraint.outside_engine = partial(self.slots.engine.released, stopwatch)
        text = TextAssembler(
            self.tokenizer,
            prompt,
            stops=request.stop,
            ends=frozenset(sampling.end_tokens),
            limit=limit,
            at_limit=FinishReason.LENGTH if is_limited else FinishReason.CONTEXT,
            visible_tokens=visible_tokens,
            include_stop=include_stop,
        )
        self.drafters.check(request.drafter)  # before a slot is taken
        lease = self.slots.lease(prompt, wait, source)
        try:
            slot = lease.slot
            draft = None if slot.draft is None else TimedModel(slot.draft, stopwatch, "draft")
            drafters = self.drafters.create(request, draft)
            is_planned = request.drafter == AUTO and request.fixed_k is None
            plan = create_plan(
                request,
                drafters,
                self.costs.table,
                self.max_planned_tokens,
                partial(self.slots.num_sharing, slot),
            )
            target = TimedModel(slot.target, stopwatch, "verify")
            decoder = SpeculativeDecoder(
                target,
                plan,
                stopwatch,
                max_first_length=self.max_first_length,
                max_length=self.bundle.context_length,
                chunk_length=self._chunk_length,
            )
            active = ActiveRequest(
                request=request,
                prompt=prompt,
                source=source,
                sampling=sampling,
                seed=seed,
                limit=limit,
                decoder=decoder,
                target=target,
                exact_target=TimedModel(slot.target, stopwatch, "exact"),
                draft=draft,
                lease=lease,
                drafter=AUTO if is_planned else next(iter(drafters.values())).name,
            )
            return Stream(active, text, self.slots, self._finish)
        except BaseException:
            lease.release()
            raise

    def _finish(self, active: ActiveRequest, tokens: list[int]) -> None:
        """Remember the output of a request whose text has ended, and judge the pass costs."""
        if active.request.remember:
            self.drafters.earlier.add(tokens)
        times = active.round_times
        if times is not None and times.table is self.costs.table and times.contradicts_table:
            self.costs.contradict()

    def astream(
        self,
        prompt: str | Sequence[int] | Source,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        *,
        wait: bool = True,
        **options: Unpack[RequestOptions],
    ) -> AsyncStream:
        """Return an asynchronous iterator like `stream`; a separate thread waits and computes."""
        return AsyncStream(
            lambda _: self.stream(prompt, max_new_tokens, temperature, wait=wait, **options)
        )

    def use_chat_template(self, template: str) -> None:
        """Render chats with another template than the bundle's. Raises BundleError if broken."""
        from ..text.chat import load_template  # plain prompts do without Jinja

        bundle = replace(self.bundle, chat_template=template).at(self.bundle.folder)
        load_template(bundle)
        self.bundle = bundle
        self.prompts = Prompts(self.bundle, self.tokenizer)

    def forget(self) -> None:
        """Clear the caches and the remembered outputs, for measurements, while nothing runs."""
        self.drafters.earlier = EarlierOutputs()
        for slot in self.slots.all:
            for model in (slot.target, slot.draft):
                if model is not None:
                    model.truncate(0)
                    if self.bundle.target.encoder is not None:
                        cast(SourceModel, model).forget()

    def close(self) -> None:
        """Release the memory of the models; the pipeline is not used again.

        A round that runs in another thread ends first; its stream raises an error afterwards.
        """
        for slot in self.slots.close():
            slot.target.close()
            if slot.draft is not None:
                slot.draft.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def max_planned_tokens(self) -> int:
        """Largest K that the planner may choose: as far as passes are pass-length-invariant.

        If no pass length is, logits in float are off by little, those of quantized inputs may be
        off by anything.
        """
        lengths = self.target.invariant_lengths
        invariant = longest_invariant(lengths, MAX_EXPORTED_DRAFT_TOKENS + 1) - 1
        fallback = 0 if self.target.rounds_inputs else self.bundle.num_draft_tokens
        return min(invariant if invariant > 0 else fallback, self.target.fast_length - 1)

    @property
    def notes(self) -> list[str]:
        """Notes of the load about this machine and its pass costs."""
        return [note for note in (self.note, self.costs.note) if note]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        *,
        wait: bool = True,
        **options: Unpack[RequestOptions],
    ) -> Generation:
        """Answer a chat, rendered by the target's chat template.

        Takes the options of `generate`. Messages have a "role" and a "content".

        Raises:
            PromptError: The bundle has no template, or the template rejects the messages.
        """
        tokens = self.prompts.chat_tokens(messages, bool(options.get("special_tokens")))
        return self.generate(tokens, max_new_tokens, temperature, wait=wait, **options)

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        *,
        wait: bool = True,
        **options: Unpack[RequestOptions],
    ) -> Stream:
        """Answer a chat in pieces, as `stream` does."""
        tokens = self.prompts.chat_tokens(messages, bool(options.get("special_tokens")))
        return self.stream(tokens, max_new_tokens, temperature, wait=wait, **options)


def _score(
    target: TimedModel, tokens: list[int], num_logprobs: int, is_cancelled: Callable[[], bool]
) -> Operations[list[TokenLogprobs]]:
    """Yield the passes of `Pipeline.score`."""
    logprobs: list[TokenLogprobs] = []
    target.truncate(0)
    for start in range(0, len(tokens) - 1, SCORE_CHUNK):
        if is_cancelled():
            break
        chunk = tokens[start : min(start + SCORE_CHUNK, len(tokens) - 1)]
        logits = yield Feed(target, chunk, len(chunk))
        following = tokens[start + 1 : start + 1 + len(chunk)]
        logprobs += token_logprobs(logits, following, num_logprobs) or []
    return logprobs
