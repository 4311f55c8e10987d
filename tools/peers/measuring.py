"""Quality and interleaved timings of converted models, stored as JSON."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from processes import Worker, WorkerError

AUTO = "auto"  # K is planned by the library
LENGTHS = (1, 5)  # tokens of the passes that are timed
REPEATS = 8  # passes of each length in a round
WARM_UP = 8  # tokens after loading


@dataclass
class Variant:
    """Model in one precision of a library.

    Attributes:
        model: Folder name of the conversion; empty if there is none.
        reason: Reason if there are no figures.
        drafters: Drafters with their K that are measured besides plain decoding.
    """

    peer: str
    precision: str
    model: str = ""
    num_bytes: int = 0
    reason: str = ""
    version: str = ""
    quality: dict[str, dict[str, float]] = field(default_factory=dict)
    drafters: list[tuple[str, int | str]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.peer} {self.precision}"

    @property
    def settings(self) -> list[tuple[str, int | str]]:
        """Drafters with their K to measure, plain decoding first."""
        return [(AUTO, 0), *((drafter, k) for drafter, k in self.drafters)]


@dataclass(frozen=True)
class Run:
    """Greedy generation from one prompt."""

    variant: str
    k: int | str
    prompt: int
    tokens: int
    prefill_seconds: float
    decode_seconds: float
    text: str  # digest of the token ids
    accepted: int | None = None
    drafted: int | None = None
    drafter: str = AUTO

    @property
    def ms_per_token(self) -> float:
        """Milliseconds of the complete request per new token."""
        return 1000 * (self.prefill_seconds + self.decode_seconds) / self.tokens


@dataclass
class Round:
    """Runs of all prompts with every setting, and passes by variant and length.

    Attributes:
        stamp: Digest of machine, models, prompts and settings; rounds with another one are
            discarded.
    """

    stamp: str
    date: str
    runs: list[Run]
    passes: dict[str, list[list[float]]]


@dataclass
class Kernels:
    """Mean KL of one GGUF type from its own weights in float32, which llama.cpp runs.

    Attributes:
        llamacpp: KL of llama.cpp's kernels.
        keep: KL of a bundle that keeps the type.
        keep_float: KL of the bundle's graph variant with float activations.
        same_text: Number of prompts whose greedy text with that variant is the float32 model's,
            and number of all prompts.
    """

    llamacpp: float
    keep: float
    keep_float: float
    same_text: tuple[int, int]


@dataclass
class Figures:
    """Results of one file, on the machine of its times."""

    name: str
    machine: str = ""
    kinds: list[str] = field(default_factory=list)  # of the prompts
    variants: dict[str, Variant] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)
    kernels: dict[str, Kernels] = field(default_factory=dict)  # by GGUF type

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Figures:
        """Return the figures of their JSON form."""
        rounds = [
            Round(r["stamp"], r["date"], [Run(**run) for run in r["runs"]], r["passes"])
            for r in fields["rounds"]
        ]
        variants = {name: Variant(**values) for name, values in fields["variants"].items()}
        kernels = {name: Kernels(**values) for name, values in fields.get("kernels", {}).items()}
        names = fields["name"], fields.get("machine", ""), fields["kinds"]
        return cls(*names, variants, rounds, kernels)

    def json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)


def measure_rounds(
    workers: Mapping[str, Worker],
    figures: Figures,
    prompts: Sequence[tuple[str, list[int]]],
    tokens: int,
    rounds: int,
    seconds: float,
    lengths: Sequence[int] = LENGTHS,
) -> Iterator[Round]:
    """Run the missing rounds until the time is over, at least one.

    For each prompt of a round the settings alternate in rotated order, so that compared runs are
    within seconds of each other. Passes of each length follow, if there are any.
    """
    variants = [figures.variants[name] for name in workers]
    settings = [(variant, *setting) for variant in variants for setting in variant.settings]
    models = [[variant.name, variant.model, variant.version] for variant in variants]
    stamp = _digest([figures.machine, models, [ids for _, ids in prompts], tokens])
    figures.kinds = [kind for kind, _ in prompts]
    figures.rounds = [past for past in figures.rounds if past.stamp == stamp]
    end = time.monotonic() + seconds
    while len(figures.rounds) < rounds:
        runs = []
        for i, (_, prompt) in enumerate(prompts):
            first = (i + len(figures.rounds)) % len(settings)
            for variant, drafter, k in [*settings[first:], *settings[:first]]:
                runs.append(_run(workers[variant.name], variant, drafter, k, i, prompt, tokens))
        request = {"prompt": prompts[0][1], "lengths": lengths, "repeats": REPEATS}
        passes = {
            name: worker.ask("passes", **request)["seconds_by_length"]
            for name, worker in workers.items()
            if lengths
        }
        figures.rounds.append(Round(stamp, time.strftime("%Y-%m-%d"), runs, passes))
        yield figures.rounds[-1]
        if time.monotonic() > end:
            return


def _run(
    worker: Worker,
    variant: Variant,
    drafter: str,
    k: int | str,
    number: int,
    prompt: list[int],
    tokens: int,
) -> Run:
    answer = worker.ask("generate", prompt=prompt, tokens=tokens, k=k, **_named(drafter))
    if len(answer["tokens"]) != tokens:
        raise WorkerError(f"{variant.name} returned {len(answer['tokens'])} of {tokens} tokens")
    return Run(
        variant.name,
        k,
        number,
        tokens,
        answer["prefill_seconds"],
        answer["decode_seconds"],
        _digest(answer["tokens"]),
        answer.get("accepted"),
        answer.get("drafted"),
        drafter,
    )


def _named(drafter: str) -> dict[str, str]:
    """Return the argument of a drafter; libraries without a choice do not have it."""
    return {} if drafter == AUTO else {"drafter": drafter}


@contextmanager
def loaded(
    variants: Sequence[Variant],
    start: Callable[[Variant], Worker],
    *,
    models: Path,
    prompt: list[int],
    threads: int,
    say: Callable[[str], object],
) -> Iterator[dict[str, Worker]]:
    """Load and warm up each variant in a separate process; record the reason of failures."""
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for variant in variants:
            worker = stack.enter_context(start(variant))
            try:
                model = str(models / variant.model)
                answer = worker.ask("load", model=model, threads=threads)
                variant.version = answer["version"]
                for drafter, k in variant.settings:
                    worker.ask("generate", prompt=prompt, tokens=WARM_UP, k=k, **_named(drafter))
                workers[variant.name] = worker
            except WorkerError as error:
                variant.reason = str(error)
                say(f"{variant.name}: {error}")
        yield workers


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]


def read(path: Path) -> list[Figures]:
    """Read the figures of a JSON file, if it exists."""
    if not path.exists():
        return []
    return [Figures.parse(fields) for fields in json.loads(path.read_text("utf-8"))["models"]]
