"""Measure specedge beside other libraries on one pair of checkpoints. Development only.

    python tools/peers/compare.py TARGET DRAFT --prompts FILE --output FOLDER

Each library runs in an environment and processes of its own, on the same prompts, greedily, each
with the threads, K and draft precision that are its best here. docs/peers.md says what is measured.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import platformdirs
from tokenizers import Tokenizer

from bench import Bench
from environments import PEERS, Peer, UnavailableError, check_precision, python_of
from measuring import AUTO, Prompt, Run, Setting, Tried, best, in_turn, sweep
from processes import Pool, WorkerError
from reporting import Row, picture, row, table


@dataclass(frozen=True)
class Plan:
    """What is measured: names of peers and precisions, and the settings of the sweep."""

    peers: list[str]
    precisions: list[str]
    draft_precisions: list[str]
    threads: list[int]
    ks: list[int]
    tokens: int
    rounds: int

    def drafts_of(self, peer: str) -> list[str]:
        """A draft precision may be one peer's alone: PEER:PRECISION."""
        parts = (one.rpartition(":") for one in self.draft_precisions)
        return [precision for owner, _, precision in parts if owner in ("", peer)]


@dataclass
class Found:
    """What was tried, the rows, and what could not be tried."""

    tried: list[Tried] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def compare(
    bench: Bench, plan: Plan, given: dict[str, str], limit: float, said: Callable[[str], object]
) -> Iterator[Found]:
    """Sweep each peer in each precision, then run the best settings in turn.

    `given` are Pythons by peer, `limit` the bytes that all processes may take. Gives all that is
    known after each round.
    """
    pool = Pool(bench.start, bench.guess, limit)
    found = Found()
    try:
        settings = []
        for precision in plan.precisions:
            for name in plan.peers:
                said(f"{name} {precision}: finding its best settings")
                settings += _chosen(bench, pool, plan, (name, precision), given, found)
        for runs, failed in in_turn(pool, settings, bench.prompts, plan.tokens, plan.rounds, said):
            rows = found.rows + [_row(pool, setting, runs, failed) for setting in settings]
            order = plan.precisions.index, plan.peers.index
            rows.sort(key=lambda one: (order[0](one.precision), one.mode, order[1](one.peer)))
            yield replace(found, rows=rows)
    finally:
        pool.close()


def _row(pool: Pool, setting: Setting, runs: list[Run], failed: dict[Setting, str]) -> Row:
    """A setting's line of the table."""
    loaded = setting.loaded
    if setting in failed:
        mode = "draft" if setting.k else "plain"
        return Row(loaded.peer, loaded.precision, mode, failed[setting])
    answers = pool.answers[loaded]
    seconds = min(answer["seconds"] for answer in answers)
    version = answers[0].get("version", "")
    return row(setting, runs, seconds, pool.peak_bytes(loaded), version)


def _chosen(
    bench: Bench,
    pool: Pool,
    plan: Plan,
    which: tuple[str, str],
    given: dict[str, str],
    found: Found,
) -> list[Setting]:
    """The best plain and the best speculative setting of a peer in a precision."""
    name, precision = which
    try:
        drafts = _prepare(bench, PEERS[name], precision, plan.drafts_of(name), given, found)
    except UnavailableError as error:
        found.rows += [Row(name, precision, mode, str(error)) for mode in ("plain", "draft")]
        return []
    prompts = bench.prompts[:1]
    ks = [AUTO, *plan.ks] if PEERS[name].plans else plan.ks
    tried = sweep(pool, name, precision, drafts, prompts, plan.tokens, plan.threads, ks)
    found.tried += tried
    settings = []
    for mode in ("plain", "draft"):
        of_mode = [one for one in tried if bool(one.setting.k) == (mode == "draft")]
        if (chosen := best(of_mode)) is not None:
            settings.append(chosen)
        else:
            reason = of_mode[0].reason if of_mode else "no plain decoding to begin from"
            found.rows.append(Row(name, precision, mode, reason))
    return settings


def _prepare(
    bench: Bench,
    peer: Peer,
    precision: str,
    drafts: list[str],
    given: dict[str, str],
    found: Found,
) -> list[str]:
    """Environment and conversions; the draft precisions that there are. Raises UnavailableError."""
    check_precision(peer, precision)
    bench.pythons[peer.name] = python_of(peer, bench.cache / "environments", given)
    made: list[str] = []
    errors: list[Exception] = []
    for draft in dict.fromkeys(drafts):
        try:
            check_precision(peer, draft)
            bench.convert(peer.name, precision, draft)
            made.append(draft)
        except (UnavailableError, WorkerError) as error:
            errors.append(error)
            what = f"{peer.label} {precision} with a draft in {draft}"
            found.notes.append(f"{what}: {error}")
    if not drafts:
        raise UnavailableError("not asked for: --draft-precision has none for it")
    if not made:
        errors.sort(
            key=lambda error: isinstance(error, UnavailableError)
        )  # what failed comes first
        raise UnavailableError(f"not converted: {errors[0]}")
    return made


def read_prompts(path: Path, target: Path, longest: int) -> list[Prompt]:
    """The last `longest` tokens of the prompt of each line of JSON."""
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    texts = [json.loads(line)["prompt"] for line in path.read_text("utf-8").splitlines() if line]
    return [tokenizer.encode(text).ids[-longest:] for text in texts]


def write(folder: Path, found: Found, facts: dict[str, Any], title: str) -> None:
    """table.md, figures.json and picture.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    versions = {one.peer: one.version for one in found.rows if one.version}
    facts = {**facts, "versions": versions, "notes": found.notes}
    (folder / "table.md").write_text(page(found), "utf-8")
    (folder / "picture.svg").write_text(picture(found.rows, title), "utf-8")
    parts = {name: [asdict(one) for one in getattr(found, name)] for name in ("rows", "tried")}
    (folder / "figures.json").write_text(json.dumps(facts | parts, indent=1) + "\n", "utf-8")


def page(found: Found) -> str:
    """The table, and what could not be tried below it."""
    return "\n".join([table(found.rows), *(f"* {note}" for note in found.notes)])


def _listed(_: Any, __: Any, value: str | None) -> list[str]:
    return [part.strip() for part in (value or "").split(",") if part.strip()]


def _numbers(context: Any, parameter: Any, value: str) -> list[int]:
    try:
        found = [int(part) for part in _listed(context, parameter, value)]
    except ValueError as error:
        raise click.BadParameter("give whole numbers with commas between them") from error
    if not found or min(found) < 1:
        raise click.BadParameter("give whole numbers from 1")
    return found


FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command()
@click.argument("target", type=FOLDER)
@click.argument("draft", type=FOLDER)
@click.option("--prompts", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--output", type=click.Path(path_type=Path), required=True)
@click.option("--tokens", default=64, show_default=True, help="New tokens of each prompt.")
@click.option("--precision", "precisions", default="fp32,int8,int4", callback=_listed)
@click.option(
    "--draft-precision",
    "drafts",
    callback=_listed,
    help="PEER:PRECISION is one library's alone.  [default: as --precision]",
)
@click.option("--peers", default=",".join(PEERS), callback=_listed, show_default=True)
@click.option("--threads", default="1,2", callback=_numbers, show_default=True)
@click.option("-k", "ks", default="2,4,6", callback=_numbers, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--prompt-length", default=96, show_default=True, help="Tokens, at most.")
@click.option("--count", default=5, show_default=True, help="Prompts, at most.")
@click.option("--memory", default=16.0, show_default=True, help="GB for all processes.")
@click.option("--python", "pythons", multiple=True, metavar="PEER=PATH", help="An environment.")
@click.option("--cache", type=click.Path(path_type=Path), help="Environments and models.")
@click.option("--label", default="", help="Words for the title, such as grown.")
def main(
    target: Path,
    draft: Path,
    prompts: Path,
    output: Path,
    tokens: int,
    precisions: list[str],
    drafts: list[str],
    peers: list[str],
    threads: list[int],
    ks: list[int],
    rounds: int,
    prompt_length: int,
    count: int,
    memory: float,
    pythons: tuple[str, ...],
    cache: Path | None,
    label: str,
) -> None:
    """Compare libraries on TARGET with DRAFT and write table.md, figures.json and picture.svg."""
    if unknown := [name for name in peers if name not in PEERS]:
        raise click.UsageError(f"no peer {unknown[0]}; there are {', '.join(PEERS)}")
    given = dict(part.split("=", 1) for part in pythons if "=" in part)
    found_prompts = read_prompts(prompts, target, prompt_length)[:count]
    if not found_prompts:
        raise click.UsageError(f"{prompts} has no prompts")
    place = (cache or Path(platformdirs.user_cache_dir("specedge")) / "peers").absolute()
    place.mkdir(parents=True, exist_ok=True)
    output.mkdir(parents=True, exist_ok=True)
    bench = Bench(
        str(target.absolute()), str(draft.absolute()), found_prompts, place, output / "log.txt"
    )
    plan = Plan(peers, precisions, drafts or precisions, threads, ks, tokens, rounds)
    facts = {
        "target": target.name, "draft": draft.name, "label": label, "tokens": tokens,
        "prompts": [len(prompt) for prompt in found_prompts], "rounds": rounds,
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
    }  # fmt: skip
    title = " ".join(filter(None, [f"{target.name} with {draft.name}", label and f"({label})"]))
    for found in compare(bench, plan, given, memory * 1e9, _say):
        write(output, found, facts, title)
    click.echo(page(found))


def _say(line: str) -> None:
    click.echo(line, err=True)


if __name__ == "__main__":
    main()
