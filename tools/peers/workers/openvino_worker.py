"""OpenVINO GenAI, with models converted by optimum-intel."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai

from serving import FirstToken, cached, run_converter, serve, size_of

MATCH = 3  # tokens of a match of prompt lookup


class OpenVINO:
    """Quantized weights with the device's default options.

    Requests run in the pipeline; passes and logits use the same graph, compiled separately.
    """

    def convert(self, source: str, precision: str, cache: str, draft: str = "") -> Path:
        def make(folder: Path) -> None:
            _export(folder, source, precision)
            if draft:
                _export(folder / "draft", draft, precision)

        name = f"openvino-{openvino_genai.__version__}-{precision}"
        return cached(cache, source, f"{name}-{Path(draft).name}" if draft else name, make)

    def num_bytes(self, model: Path) -> int:
        return size_of(*model.rglob("openvino_model.bin"))

    def load(self, model: Path, threads: int) -> str:
        self._options: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
        self._folder, self._path = model, str(model / "openvino_model.xml")
        self._request: Any = None
        self._pipelines: dict[str, Any] = {}
        return openvino_genai.__version__

    def _pipeline(self, drafter: str) -> Any:
        """Return the pipeline of a drafter, loaded on the first call."""
        if drafter not in self._pipelines:
            # The pipeline's default scheduler, but without prefix caching.
            scheduler = openvino_genai.SchedulerConfig()
            scheduler.max_num_batched_tokens = sys.maxsize
            scheduler.enable_prefix_caching = False
            options = {"scheduler_config": scheduler, **self._options}
            if drafter == "model":
                draft = str(self._folder / "draft")
                options["draft_model"] = openvino_genai.draft_model(draft, "CPU", **self._options)
            elif drafter == "lookup":
                options["prompt_lookup"] = True
            pipeline = openvino_genai.LLMPipeline(str(self._folder), "CPU", **options)
            self._pipelines[drafter] = pipeline
        return self._pipelines[drafter]

    def generate(
        self, prompt: list[int], tokens: int, k: int, drafter: str = "model"
    ) -> dict[str, Any]:
        config = openvino_genai.GenerationConfig()
        pipeline = self._pipeline(drafter if k else "")
        if k:
            config.num_assistant_tokens = k
        if k and drafter == "lookup":
            config.max_ngram_size = MATCH
        config.max_new_tokens = tokens
        config.ignore_eos = True
        config.do_sample = False
        ids = np.array([prompt], np.int64)
        inputs = openvino_genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        watch = _Watch()
        result = pipeline.generate(inputs, config, watch)
        return {"tokens": [int(token) for token in result.tokens[0]], **watch.times.split()}

    def prefill(self, tokens: list[int]) -> None:
        self.logits(tokens)

    def run_pass(self, tokens: list[int]) -> None:
        """Run a pass; the cache grows, as the graph cannot roll it back."""
        self._run(tokens)

    def logits(self, tokens: list[int]) -> np.ndarray:
        if self._request is None:
            model = ov.Core().compile_model(self._path, "CPU", self._options)
            self._request = model.create_infer_request()
            self._inputs = {name for port in model.inputs for name in port.names}
        self._request.reset_state()
        self._length = 0
        return self._run(tokens)

    def _run(self, tokens: list[int]) -> np.ndarray:
        count, start = len(tokens), self._length
        self._length += count
        inputs = {
            "input_ids": np.array([tokens], np.int64),
            "attention_mask": np.ones((1, self._length), np.int64),
            "position_ids": np.arange(start, self._length, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        used = {name: value for name, value in inputs.items() if name in self._inputs}
        self._request.infer(used)
        return np.asarray(self._request.get_tensor("logits").data)[0]


class _Watch(openvino_genai.StreamerBase):
    def __init__(self) -> None:
        super().__init__()
        self.times = FirstToken()

    def write(self, token: int | list[int]) -> Any:
        self.times.arrived()
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        """Do nothing: tokens are not buffered."""


def _export(folder: Path, checkpoint: str, precision: str) -> None:
    """Export by the command line, as `main_export` of optimum-intel 2.2 does not quantize."""
    cli = str(Path(sys.executable).with_name("optimum-cli"))
    options = ["--task", "text-generation-with-past", "--weight-format", precision]
    run_converter([cli, "export", "openvino", "--model", checkpoint, *options, str(folder)])


if __name__ == "__main__":
    serve(OpenVINO())
