"""What is compared on what, and the processes of each library."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from environments import PEERS
from measuring import Prompt
from processes import GUESS, Loaded, Worker, WorkerError

ROOT = Path(__file__).parents[2]
WARM_UP = 8  # tokens after loading


@dataclass
class Bench:
    """What is compared on what, and the converted models by (peer, precision, draft precision)."""

    target: str
    draft: str
    prompts: list[Prompt]
    cache: Path
    log: Path
    places: dict[tuple[str, str, str], dict[str, str]] = field(default_factory=dict)
    pythons: dict[str, str] = field(default_factory=dict)

    def worker(self, peer: str) -> Worker:
        """A new process of a peer."""
        paths = [str(ROOT), str(ROOT / "tools/peers/workers")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
        environment |= {"TOKENIZERS_PARALLELISM": "false", "ORT_DISABLE_TELEMETRY": "1"}
        return Worker([self.pythons[peer], str(PEERS[peer].worker)], self.log, environment)

    def convert(self, peer: str, precision: str, draft_precision: str) -> None:
        """In a process of its own, so that its memory is not the model's. Raises WorkerError."""
        with self.worker(peer) as worker:
            found = worker.ask(
                "convert",
                model=self.target,
                draft=self.draft,
                precision=precision,
                draft_precision=draft_precision,
                cache=str(self.cache / "models"),
            )
        self.places[peer, precision, draft_precision] = found

    def start(self, loaded: Loaded) -> tuple[Worker, dict[str, Any]]:
        """A loaded and warm worker, and what it said of loading. Raises WorkerError."""
        worker = self.worker(loaded.peer)
        place = self._place(loaded)
        draft = place["draft"] if loaded.draft_precision else None
        try:
            answer = worker.ask("load", target=place["target"], draft=draft, threads=loaded.threads)
            k = 2 if loaded.draft_precision else 0
            worker.ask("generate", prompt=self.prompts[0], tokens=WARM_UP, k=k)
        except WorkerError:
            worker.close()
            raise
        return worker, answer

    def guess(self, loaded: Loaded) -> float:
        """Bytes that a process may take before it was measured."""
        place = self._place(loaded)
        folders = [place["target"], place["draft"] if loaded.draft_precision else None]
        sizes = [
            path.stat().st_size
            for folder in folders
            if folder
            for path in Path(folder).rglob("*")
            if path.is_file()
        ]
        return GUESS * float(sum(sizes))

    def _place(self, loaded: Loaded) -> dict[str, str]:
        if loaded.draft_precision:
            return self.places[loaded.peer, loaded.precision, loaded.draft_precision]
        known = (
            place
            for key, place in self.places.items()
            if key[:2] == (loaded.peer, loaded.precision)
        )
        return next(known)
