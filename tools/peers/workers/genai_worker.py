"""onnxruntime-genai as a peer: its model builder, and a configuration with a draft beside."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import onnxruntime_genai as og

from serving import FirstToken, each_model, serve


class GenAI:
    """The draft is described in the target's configuration, which is written by hand."""

    def convert(self, request: dict[str, Any]) -> dict[str, Any]:
        return each_model(request, f"genai-{og.__version__}", _build)

    def load(self, target: str, draft: str | None, threads: int) -> dict[str, Any]:
        config = json.loads(Path(target, "genai_config.json").read_text("utf-8"))
        model = config["model"]
        if draft:
            described = json.loads(Path(draft, "genai_config.json").read_text("utf-8"))
            model["draft"] = described["model"]["decoder"]
        self._folder = tempfile.TemporaryDirectory()
        place = Path(self._folder.name)
        for path in Path(target).glob("*.json"):
            shutil.copy(path, place)
        for part, folder in (("decoder", target), ("draft", draft)):
            if folder:
                (place / part).symlink_to(folder)  # files must lie below the configuration
                model[part]["filename"] = f"{part}/{model[part]['filename']}"
                model[part].setdefault("session_options", {})["intra_op_num_threads"] = threads
        (place / "genai_config.json").write_text(json.dumps(config), "utf-8")
        self.model = og.Model(str(place))
        return {"version": og.__version__}

    def generate(self, prompt: list[int], tokens: int, k: int) -> dict[str, Any]:
        length = len(prompt) + tokens
        params = og.GeneratorParams(self.model)
        params.set_search_options(max_length=length, min_length=length, do_sample=False)
        if k:
            params.set_speculative_options(max_draft_tokens=k)
        times = FirstToken()
        generator = og.Generator(self.model, params)
        generator.append_tokens(prompt)
        while not generator.is_done() and generator.token_count() < length:
            generator.generate_next_token()
            times.came()
        found: dict[str, Any] = times.split()
        if k:
            stats = generator.get_speculative_stats()
            found["drafted"] = stats["draft_tokens_proposed"]
            found["accepted"] = stats["draft_tokens_accepted"]
        return {"tokens": [int(t) for t in generator.get_sequence(0)[len(prompt) :]], **found}


def _build(place: Path, source: str, precision: str) -> None:
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
    options = ["-i", source, "-o", str(place), "-p", precision, "-e", "cpu"]
    with tempfile.TemporaryDirectory() as scratch:
        done = subprocess.run(
            [*builder, *options, "-c", scratch],
            stdout=sys.stderr,
            stderr=subprocess.PIPE,
            text=True,
        )
    sys.stderr.write(done.stderr)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])


if __name__ == "__main__":
    serve(GenAI())
