"""OpenVINO GenAI as a peer, its models converted by optimum-intel."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai

from serving import FirstToken, each_model, serve


class OpenVINO:
    """float32 computes and caches in float32; quantised models keep the device's defaults."""

    def convert(self, request: dict[str, Any]) -> dict[str, Any]:
        return each_model(request, f"openvino-{openvino_genai.__version__}", _export)

    def load(self, target: str, draft: str | None, threads: int) -> dict[str, Any]:
        options = _options(target, threads)
        if draft:
            options["draft_model"] = openvino_genai.draft_model(
                draft, "CPU", **_options(draft, threads)
            )
        self.pipe = openvino_genai.LLMPipeline(target, "CPU", **options)
        return {"version": openvino_genai.__version__}

    def generate(self, prompt: list[int], tokens: int, k: int) -> dict[str, Any]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = tokens
        config.ignore_eos = True
        config.do_sample = False
        if k:
            config.num_assistant_tokens = k
        ids = np.array([prompt], np.int64)
        inputs = openvino_genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        watch = _Watch()
        found = self.pipe.generate(inputs, config, watch)
        return {"tokens": [int(token) for token in found.tokens[0]], **watch.times.split()}


class _Watch(openvino_genai.StreamerBase):
    def __init__(self) -> None:
        super().__init__()
        self.times = FirstToken()

    def write(self, token: int | list[int]) -> Any:
        self.times.came()
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        """Nothing is held back."""


def _options(folder: str, threads: int) -> dict[str, Any]:
    options: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
    # As the pipeline's own scheduler, but that no prompt is known from an earlier request.
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = sys.maxsize
    scheduler.enable_prefix_caching = False
    options["scheduler_config"] = scheduler
    if "-fp32-" in Path(folder).name:
        options |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    return options


def _export(place: Path, source: str, precision: str) -> None:
    from optimum.exporters.openvino import main_export
    from optimum.intel.openvino.configuration import OVConfig, OVWeightQuantizationConfig

    bits = {"int8": 8, "int4": 4}.get(precision)
    group = {"sym": True, "group_size": 32} if bits == 4 else {}
    scheme = OVWeightQuantizationConfig(bits=bits, **group) if bits else None
    config = OVConfig(dtype="fp32") if scheme is None else OVConfig(quantization_config=scheme)
    # A pipeline with a draft model compares tokenizers, and so needs them.
    task = "text-generation-with-past"
    main_export(source, place, task=task, ov_config=config, convert_tokenizer=True)


if __name__ == "__main__":
    serve(OpenVINO())
