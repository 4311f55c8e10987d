"""The two stages of a comparison: each peer's best settings, then the best ones in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from processes import Loaded, WorkerError

Prompt = list[int]
AUTO = "auto"  # K of a library that chooses it round by round


class Asked(Protocol):
    """What measuring needs of a pool of workers."""

    def ask(self, loaded: Loaded, **request: Any) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Setting:
    """A loaded peer and its K; 0 is plain decoding, AUTO its own choice."""

    loaded: Loaded
    k: int | str


@dataclass(frozen=True)
class Run:
    """One generation. Counts are None where a peer does not tell them."""

    setting: Setting
    round: int
    prompt: int
    tokens: tuple[int, ...]
    prefill_seconds: float
    decode_seconds: float
    accepted: int | None = None
    drafted: int | None = None

    @property
    def seconds(self) -> float:
        return self.prefill_seconds + self.decode_seconds


@dataclass(frozen=True)
class Tried:
    """A setting of a sweep and the time of its prompts, or why there is none."""

    setting: Setting
    seconds: float | None
    reason: str = ""


def generate(
    pool: Asked, setting: Setting, at: tuple[int, int], prompt: Prompt, length: int
) -> Run:
    """One generation; `at` are its round and the prompt's number. Raises WorkerError."""
    found = pool.ask(setting.loaded, prompt=prompt, tokens=length, k=setting.k)
    if len(found["tokens"]) != length:
        raise WorkerError(f"gave {len(found['tokens'])} tokens of {length}")
    return Run(
        setting,
        *at,
        tuple(found["tokens"]),
        found["prefill_seconds"],
        found["decode_seconds"],
        found.get("accepted"),
        found.get("drafted"),
    )


def sweep(
    pool: Asked,
    peer: str,
    precision: str,
    drafts: Sequence[str],
    prompts: Sequence[Prompt],
    length: int,
    threads: Sequence[int],
    ks: Sequence[int | str],
) -> list[Tried]:
    """Plain decoding with every number of threads; with the best, every draft precision and K."""
    plain = [
        _tried(pool, Setting(Loaded(peer, precision, None, count), 0), prompts, length)
        for count in threads
    ]
    fastest = best(plain)
    if fastest is None:
        return plain
    return plain + [
        _tried(pool, Setting(replace(fastest.loaded, draft_precision=draft), k), prompts, length)
        for draft in drafts
        for k in ks
    ]


def _tried(pool: Asked, setting: Setting, prompts: Sequence[Prompt], length: int) -> Tried:
    """The faster of two passes over the prompts."""
    try:
        times = [
            sum(
                generate(pool, setting, (turn, i), p, length).seconds for i, p in enumerate(prompts)
            )
            for turn in range(2)
        ]
    except WorkerError as error:
        return Tried(setting, None, str(error))
    return Tried(setting, min(times))


def best(tried: Sequence[Tried]) -> Setting | None:
    """The fastest setting, None if all failed."""
    worked = [(one.seconds, i) for i, one in enumerate(tried) if one.seconds is not None]
    return tried[min(worked)[1]].setting if worked else None


def in_turn(
    pool: Asked,
    settings: Sequence[Setting],
    prompts: Sequence[Prompt],
    length: int,
    rounds: int,
    said: Callable[[str], object] = lambda line: None,
) -> Iterator[tuple[list[Run], dict[Setting, str]]]:
    """All settings in each round, another one first each time; and why some failed.

    Gives all that is known after each round.
    """
    runs: list[Run] = []
    failed: dict[Setting, str] = {}
    for turn in range(rounds):
        start = turn % max(len(settings), 1)
        for setting in [*settings[start:], *settings[:start]]:
            if setting in failed:
                continue
            said(f"round {turn + 1} of {rounds}: {setting}")
            try:
                runs += [
                    generate(pool, setting, (turn, i), prompt, length)
                    for i, prompt in enumerate(prompts)
                ]
            except WorkerError as error:
                failed[setting] = str(error)
        yield runs, failed
