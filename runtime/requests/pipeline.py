"""A loaded pair and its requests."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self, Unpack

from tokenizers import Tokenizer

from specedge.bundle import Bundle
from specedge.bundle.manifest import chunk_length
from specedge.request import AUTO, Coupling, GenerationRequest, RequestOptions, build_request
from specedge.sampling_options import MAX_EXPORTED_DRAFT_TOKENS, Sampling

from ..decoding.invariance import Noise, longest_held
from ..decoding.protocols import LoadedModel, TargetModel
from ..decoding.random_numbers import GumbelNoise
from ..decoding.timing import Stopwatch, TimedModel
from ..drafters.registry import DrafterRegistry
from ..drafters.suffix import EarlierOutputs
from ..planning.cost_files import PassCosts
from ..planning.plans import create_plan
from ..sampling.logprobs import TokenLogprobs, token_logprobs
from ..text.assembler import Assembler, FinishReason
from ..text.bad_words import sampling_of
from ..text.grammars import Constraint as GrammarConstraint
from ..text.grammars import Grammars
from ..text.prompts import Prompts
from .async_stream import AsyncStream
from .run import Run
from .slots import Slot, Slots
from .stream import Generation, Stream

SCORE_CHUNK = 64  # tokens: their logits are in memory together


class _ScoreOwner:
    """Owner of a slot while a prompt is scored."""


class Pipeline:
    """A loaded target, perhaps with a draft model; in each slot one request at a time.

    A slot has caches of its own; weights are shared, and rounds of running requests take turns. A
    stream owns its slot until it ends, is closed, cancelled or garbage-collected, whichever threads
    read it. Where no slot is free, a new request waits for one. It raises SpecEdgeError instead
    with `wait` False, in a thread that runs an event loop, in the only thread of a process, and
    when nobody has read a stream for 30 seconds. `more` are the target and the draft of each slot
    but the first. Two pipelines are independent. `note` is what the self-test at load found of this
    machine, None if nothing.
    """

    def __init__(
        self,
        bundle: Bundle,
        tokenizer: Tokenizer,
        target: TargetModel,
        draft: LoadedModel | None,
        costs: PassCosts | None = None,
        note: str | None = None,
        more: Iterable[tuple[TargetModel, LoadedModel | None]] = (),
    ) -> None:
        self.bundle = bundle
        self.tokenizer = tokenizer
        self.target = target
        self.draft = draft
        self.drafters = DrafterRegistry(bundle)
        self.noise = Noise(target, bundle.context_length)
        self.costs = costs or PassCosts()
        self.note = note
        others = [Slot(one, other, self.noise.over(one)) for one, other in more]
        self.slots = Slots([Slot(target, draft, self.noise), *others])
        self.prompts = Prompts(bundle, tokenizer)
        self.grammars = Grammars(bundle, tokenizer)
        self._chunk_length = chunk_length(bundle.target.cache.capacity)
        held = target.invariant_lengths
        self.max_first_length = longest_held(held, self._chunk_length)

    def generate(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        *,
        wait: bool = True,
        **options: Unpack[RequestOptions],
    ) -> Generation:
        """Continue a prompt, text or ids, by `max_new_tokens` tokens or to an end.

        The output is the target's alone: its own tokens at temperature 0, else its distribution.
        Generation stops at one of the bundle's end tokens unless `ignore_eos`, at the first of the
        `stop` strings, or where the context is full. `num_draft_tokens` is chosen anew for each
        round unless it is given; 0 is plain decoding. Without `seed` a fresh one is taken;
        `Generation.seed` tells it. `drafter` is "auto" (the model, suffix and both in a chain, as
        pays best; the model where `num_draft_tokens` is given), "model", "lookup", "suffix",
        "chain", "block", "random", "ngram:FILE", or an object of your own
        (`runtime.loop.round.Drafter`); it changes the speed alone. `lookup_min` and `lookup_max`
        are the match lengths of lookup, by which auto and chain copy if they are given; with
        `remember` suffix drafts from earlier outputs, too. `exact` decides near-ties at temperature
        0 as plain decoding does, on any device. A prompt or a message that spells a special token
        is text, unless `special_tokens`. `json_schema`, `regex` or `grammar` is what the text must
        follow; the distribution is then the target's under the mask of what may come next.
        `coupling` "gumbel" makes the text depend on the seed alone above temperature 0, too,
        whatever drafts, where passes are pass-length-invariant; `choice` is its number among the
        texts of a seed.

        The other options are those of `specedge.request.Request`, which says what they mean.
        `lenience` below 1 gives up the target's distribution for speed. `logprobs` asks for the
        tokens' log-probabilities, and for those of that many likeliest ones.

        Raises PromptError, ContextLengthError, DrafterError or ValueError before anything runs, and
        OptionError if the options leave no token to go on with; SpecEdgeError if no slot is free
        and waiting is ruled out (see `Pipeline`).
        """
        stream = self.stream(prompt, max_new_tokens, temperature, wait=wait, **options)
        for _ in stream:
            pass
        return stream.generation

    def stream(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        *,
        wait: bool = True,
        shown: Collection[int] = (),
        stop_tokens: Collection[int] = (),
        include_stop: bool = False,
        **options: Unpack[RequestOptions],
    ) -> Stream:
        """Generate in pieces of text that join to exactly `Generation.text`.

        Takes the arguments of `generate`, and:

        Args:
            shown: Special tokens whose names are in the text; others have no text.
            stop_tokens: Tokens that end the text like end tokens, even with `ignore_eos`.
            include_stop: True if the text includes the stop string that ends it.
        """
        request = build_request(max_new_tokens=max_new_tokens, temperature=temperature, **options)
        sampling = self.sampling(request)
        tokens = self.prompts.tokens(prompt, request.special_tokens)
        if stop_tokens:
            ends = tuple(dict.fromkeys((*sampling.end_tokens, *stop_tokens)))
            sampling = replace(sampling, end_tokens=ends)
        return self._begin(request, sampling, tokens, wait, shown, include_stop)

    def score(
        self,
        prompt: Sequence[int],
        num_logprobs: int,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> list[TokenLogprobs]:
        """Return the log-probabilities of a prompt's tokens from the second one on.

        One prefill computes them, in chunks of at most `SCORE_CHUNK` tokens that take turns with
        the rounds of streams; it leaves the prompt in the cache of a slot.

        Args:
            prompt: At least one token.
            num_logprobs: Number of likeliest tokens to report for each position.
            is_cancelled: Asked before each chunk; True ends the computation early.

        Raises:
            PromptError: The prompt has no token, or one that the model does not have.
            ContextLengthError: The prompt is longer than the context.
        """
        tokens = self.prompts.tokens(prompt)
        logprobs: list[TokenLogprobs] = []
        owner = _ScoreOwner()
        slot = self.slots.take(owner, tokens, wait=True)
        try:
            for start in range(0, len(tokens) - 1, SCORE_CHUNK):
                if is_cancelled():
                    break
                chunk = tokens[start : min(start + SCORE_CHUNK, len(tokens) - 1)]
                following = tokens[start + 1 : start + 1 + len(chunk)]
                with self.slots.turns:
                    if start == 0:
                        slot.target.truncate(0)
                    scores = slot.target.forward(chunk, len(chunk))
                    logprobs += token_logprobs(scores, following, num_logprobs) or []
        finally:
            self.slots.give_back(owner)
        return logprobs

    def sampling(self, request: GenerationRequest) -> Sampling:
        """How the text of one request is drawn; OptionError for what this bundle cannot have."""
        sampling = sampling_of(request, self.bundle, self.tokenizer)
        return replace(sampling, constraint=self.grammars.constraint(request))

    def _begin(
        self,
        request: GenerationRequest,
        sampling: Sampling,
        prompt: list[int],
        wait: bool,
        shown: Collection[int],
        include_stop: bool,
    ) -> Stream:
        wanted, room = request.max_new_tokens, self.bundle.context_length - len(prompt)
        limit = min(wanted, room)
        watch = Stopwatch()
        draft = None if self.draft is None else TimedModel(self.draft, watch, "draft")
        drafters = self.drafters.create(request, draft)
        planned = request.drafter == AUTO and request.fixed_k is None
        seed = secrets.randbits(32) if request.seed is None else request.seed
        if request.coupling == Coupling.GUMBEL:
            sampling = replace(sampling, noise=GumbelNoise(seed, request.choice))
        run = Run(
            request=request,
            prompt=prompt,
            sampling=sampling,
            seed=seed,
            limit=limit,
            plan=create_plan(request, drafters, self.costs, self.max_planned_tokens),
            target=TimedModel(self.target, watch, "verify"),
            again=TimedModel(self.target, watch, "exact"),
            draft=draft,
            watch=watch,
            noise=self.noise,
            drafter=AUTO if planned else next(iter(drafters.values())).name,
            chunk_length=self._chunk_length,
            max_first_length=self.max_first_length,
        )
        text = Assembler(
            self.tokenizer,
            prompt,
            stops=request.stop,
            ends=frozenset(sampling.end_tokens),
            limit=limit,
            at_limit=FinishReason.LENGTH if wanted <= room else FinishReason.CONTEXT,
            shown=shown,
            include_stop=include_stop,
        )
        if isinstance(sampling.constraint, GrammarConstraint):
            sampling.constraint.outside_turn = partial(self.slots.outside_turn, watch)
        stream = Stream(run, text, self.slots, self._learn)
        run.use(self.slots.take(stream, prompt, wait))  # last: what is refused takes no slot
        return stream

    def _learn(self, run: Run, tokens: list[int]) -> None:
        """A request's text has ended; it still has its turn."""
        if run.request.remember:
            self.drafters.earlier.add(tokens)

    def astream(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        *,
        wait: bool = True,
        **options: Unpack[RequestOptions],
    ) -> AsyncStream:
        """As `stream`, for `async for`: a thread of its own waits and computes."""
        return AsyncStream(
            lambda: self.stream(prompt, max_new_tokens, temperature, wait=wait, **options)
        )

    def use_chat_template(self, template: str) -> None:
        """Render chats with another template than the bundle's."""
        folder = self.bundle.folder
        self.bundle = replace(self.bundle, chat_template=template).at(folder)
        self.prompts = Prompts(self.bundle, self.tokenizer)

    def forget(self) -> None:
        """Begin anew, for measurements, while nothing runs: the next request reads all of its
        prompt, and no output is remembered.
        """
        self.drafters.earlier = EarlierOutputs()
        for slot in self.slots.all:
            slot.target.truncate(0)
            if slot.draft is not None:
                slot.draft.truncate(0)

    def close(self) -> None:
        """Give back what its models hold, of a GPU above all; it generates no more.

        A round that runs in another thread ends before; its stream has an error then.
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
        """The largest K that is chosen without being asked for: as far as rows keep their bits.

        Where those of floats keep none, they are off by little; integers may turn anywhere.
        """
        held, fast = self.target.invariant_lengths, self.target.fast_length
        exact = longest_held(held, MAX_EXPORTED_DRAFT_TOKENS + 1) - 1
        none = 0 if self.target.rounds_inputs else self.bundle.num_draft_tokens
        return min(exact if exact > 0 else none, fast - 1)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        *,
        wait: bool = True,
        **options: Unpack[RequestOptions],
    ) -> Generation:
        """Answer a chat: messages with a "role" and a "content", by the target's own template.

        Takes the options of `generate` and raises what it raises; PromptError also where the
        bundle has no template or the template refuses the messages.
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
        """As `chat`, in pieces as `stream` gives them."""
        tokens = self.prompts.chat_tokens(messages, bool(options.get("special_tokens")))
        return self.stream(tokens, max_new_tokens, temperature, wait=wait, **options)
