"""Quality and interleaved timings of converted models, kept as JSON."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from processes import WorkerError

AUTO = "auto"  # drafts as the library plans them
LENGTHS = (1, 5)  # tokens of the passes that are timed
REPEATS = 8  # passes of each length in a round
WARM_UP = 8  # tokens after loading


class Client(Protocol):
    """The part of a worker that measuring needs."""

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]: ...


@dataclass
class Variant:
    """A model as one library holds it in one precision.

    Attributes:
        model: Folder name of the conversion; empty if there is none.
        reason: Why there are no figures.
        has_drafts: True if the library also decodes with drafts here.
    """

    peer: str
    precision: str
    model: str = ""
    num_bytes: int = 0
    reason: str = ""
    version: str = ""
    peak_bytes: int = 0
    has_drafts: bool = False
    quality: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.peer} {self.precision}"


@dataclass(frozen=True)
class Run:
    """One greedy generation of a prompt."""

    variant: str
    k: int | str
    prompt: int
    tokens: int
    prefill_seconds: float
    decode_seconds: float
    text: str  # digest of the token ids
    accepted: int | None = None
    drafted: int | None = None

    @property
    def ms_per_token(self) -> float:
        """Milliseconds of the whole request for each new token."""
        return 1000 * (self.prefill_seconds + self.decode_seconds) / self.tokens


@dataclass
class Round:
    """One turn of every setting: all prompts, and passes by variant and length.

    Attributes:
        stamp: Digest of what was compared; rounds of another one are discarded.
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
        same_text: Number of prompts for which that variant's greedy text equals the float32
            model's, and number of all prompts.
    """

    llamacpp: float
    keep: float
    keep_float: float
    same_text: tuple[int, int]


@dataclass
class Figures:
    """Everything that is measured of one file."""

    name: str
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
        return cls(fields["name"], fields["kinds"], variants, rounds, kernels)

    def json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)


def measure_rounds(
    workers: Mapping[str, Client],
    figures: Figures,
    prompts: Sequence[tuple[str, list[int]]],
    tokens: int,
    rounds: int,
    seconds: float,
) -> Iterator[Round]:
    """Run rounds until there are enough or the time is over, at least one if one is missing.

    A round generates each prompt by every setting in turn, another one first each time, so that
    runs to compare lie within seconds of each other.
    """
    variants = [figures.variants[name] for name in workers]
    settings = [(v, k) for v in variants for k in ((0, AUTO) if v.has_drafts else (0,))]
    models = [[variant.name, variant.model, variant.version] for variant in variants]
    stamp = _digest([models, [ids for _, ids in prompts], tokens])
    figures.kinds = [kind for kind, _ in prompts]
    figures.rounds = [past for past in figures.rounds if past.stamp == stamp]
    end = time.monotonic() + seconds
    while len(figures.rounds) < rounds:
        runs = []
        for i, (_, prompt) in enumerate(prompts):
            first = (i + len(figures.rounds)) % len(settings)
            for variant, k in [*settings[first:], *settings[:first]]:
                runs.append(_run(workers[variant.name], variant, k, i, prompt, tokens))
        passes = {
            name: worker.ask("passes", prompt=prompts[0][1], lengths=LENGTHS, repeats=REPEATS)
            for name, worker in workers.items()
        }
        times = {name: answer["seconds_by_length"] for name, answer in passes.items()}
        for name, answer in passes.items():
            figures.variants[name].peak_bytes = answer["peak_bytes"]
        figures.rounds.append(Round(stamp, time.strftime("%Y-%m-%d"), runs, times))
        yield figures.rounds[-1]
        if time.monotonic() > end:
            return


def _run(
    worker: Client, variant: Variant, k: int | str, number: int, prompt: list[int], tokens: int
) -> Run:
    answer = worker.ask("generate", prompt=prompt, tokens=tokens, k=k)
    if len(answer["tokens"]) != tokens:
        raise WorkerError(f"{variant.name} gave {len(answer['tokens'])} tokens of {tokens}")
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
    )


@contextmanager
def loaded(
    variants: Sequence[Variant],
    start: Callable[[Variant], Any],
    *,
    models: Path,
    prompt: list[int],
    threads: int,
    say: Callable[[str], object],
) -> Iterator[dict[str, Client]]:
    """Load each variant in a process of its own and warm it up; those that fail get a reason."""
    with ExitStack() as stack:
        workers: dict[str, Client] = {}
        for variant in variants:
            worker = stack.enter_context(start(variant))
            try:
                model = str(models / variant.model)
                answer = worker.ask("load", model=model, threads=threads)
                variant.version = answer["version"]
                for k in (0, AUTO) if variant.has_drafts else (0,):
                    worker.ask("generate", prompt=prompt, tokens=WARM_UP, k=k)
                workers[variant.name] = worker
            except WorkerError as error:
                variant.reason = str(error)
                say(f"{variant.name}: {error}")
        yield workers


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]


def read(path: Path) -> list[Figures]:
    """Return the figures of a file, none if there is no file."""
    if not path.exists():
        return []
    return [Figures.parse(fields) for fields in json.loads(path.read_text("utf-8"))["models"]]
