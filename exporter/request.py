"""Request of an export, validated before any file is read."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from specedge.bundle import store
from specedge.bundle.graph_variants import CACHE_TYPES, COMPUTE_TYPES, INT8_CACHES, OPS, QDQ
from specedge.bundle.precision import (
    GPTQ,
    KEEP,
    NEAREST,
    PRECISION_CHOICES,
    QUANTIZED_DTYPES,
    ROUNDINGS,
)
from specedge.errors import ExportError
from specedge.option_specs import check_integer
from specedge.sampling_options import MAX_EXPORTED_DRAFT_TOKENS

from .checkpoint import self_draft

OPS_CHOICES = ("auto", "all", *OPS)
STANDARD_COMPUTE_TYPES = ("fp32", QDQ)  # GPUs have no GroupQueryAttention for them
LAYERS, FULL = VERIFICATIONS = ("layers", "full")
_CHOICES: dict[str, Collection[str]] = {
    "precision": PRECISION_CHOICES,
    "draft_precision": PRECISION_CHOICES,
    "ops": OPS_CHOICES,
    "compute": COMPUTE_TYPES,
    "cache": CACHE_TYPES,
    "rounding": ROUNDINGS,
    "verification": VERIFICATIONS,
}
_REQUIRED = ("ops", "rounding", "verification")  # options without None
NO_DRAFT = "none"  # as a draft's name: no draft model
PathOrName: TypeAlias = str | os.PathLike[str]


@dataclass(frozen=True)
class ExportRequest:
    """Checkpoints, destination and options of an export.

    Args:
        draft: Folder or hub id of the draft model or EAGLE-3 head; "self:N" for the target's own
            first N layers, which share its weights file; "mtp" for the target's MTP layer; None or
            "none" for no draft model: the bundle then drafts by suffix decoding.
        target: Folder or hub id of the target model.
        output: Folder of the bundle; None for one in the user's data folder, which becomes the
            default bundle.
        num_draft_tokens: Maximum number of draft tokens per round.
        max_length: Context length; None for that of the models, up to 4096.
        ops: Attention operators: "onnx" (standard), "gqa" (GroupQueryAttention), "all" for both if
            possible, or "auto": "gqa" if the model supports it, else "onnx", "all" with the
            compute types "qdq" and "fp32", for which GPUs need standard operators, and otherwise
            "gqa" with "int8" caches, which require it.
        tolerance: Maximum float32 error relative to the largest value of an output; None to bound
            errors by PyTorch's own float32 errors.
        precision: Precision of the target. "keep" keeps the integers of a quantized checkpoint;
            "fp32" stores weights in the checkpoint's own type, or dequantized, and computes in
            float32; "fp16" and "bf16" convert matrices to that type first; "int8",
            "int8-block" and "int4" quantize weights, and their inputs to 8 bits. "int8" has one
            scale per channel, which has the fastest verify passes; the others are block-wise
            (block 32). None for "keep" if the checkpoint is quantized, else "fp32".
        draft_precision: Precision of the draft model; None for "int8" beside a target in "int8",
            "int4" or "keep", for "keep" if both are quantized checkpoints, else for the target's,
            also with `compute`.
        draft_vocab: Size of a reduced draft vocabulary, the most frequent tokens of the
            calibration set. Other tokens are not drafted, and draft passes are cheaper.
        compute: Additional graph variants that compute in "fp16", "bf16" or, with quantized
            weights, "fp32", such as "onnx-fp16" in addition to "onnx". They read the same weights,
            and their logits differ. "qdq" is fp16 with quantized weights in the form that TensorRT
            requires, for which block-wise weights are stored twice. The draft model then has the
            target's precision.
        cache: Additional graph variants with "fp16" caches, such as "gqa-kv16" in addition to
            "gqa", or the additional graph variant "gqa-kv8" with "int8" caches, whose static scales
            are calibrated. Their logits differ as well.
        calibrate: Text file of the calibration set; None for the built-in text.
        rounding: "gptq", or "nearest", which takes less time, for "int8" and "int4".
        bits: Average bits per weight of the layers in "int4", from 4 to 8: above 4 some down
            projections have 8 bits.
        draft_revision: Branch, tag or commit of the draft model on the hub.
        target_revision: Branch, tag or commit of the target model on the hub.
        verification: "layers": the first layers of each kind are compared with PyTorch in
            float64, and all layers in float32; or "full": all layers in float64.
        adapter: LoRA adapter to merge into the target, a folder or a hub id.
        draft_adapter: LoRA adapter to merge into the draft model.

    Raises:
        ValueError: An option is invalid.
        SpecEdgeError: Options exclude each other.
    """

    draft: PathOrName | None
    target: PathOrName
    output: PathOrName | None = None
    num_draft_tokens: int = 4
    max_length: int | None = None
    ops: str = "auto"
    tolerance: float | None = None
    precision: str | None = None
    draft_precision: str | None = None
    draft_vocab: int | None = None
    compute: str | None = None
    cache: str | None = None
    calibrate: PathOrName | None = None
    rounding: str = GPTQ
    bits: float | None = None
    draft_revision: str | None = None
    target_revision: str | None = None
    verification: str = LAYERS
    adapter: PathOrName | None = None
    draft_adapter: PathOrName | None = None

    @property
    def draft_name(self) -> str | None:
        """Name of the draft model; None without one."""
        name = NO_DRAFT if self.draft is None else os.fspath(self.draft)
        return None if name == NO_DRAFT else name

    @property
    def num_draft_layers(self) -> int | None:
        """N of a self-draft "self:N"; None for a separate draft model, or without one."""
        name, adapter = self.draft_name, self.adapter_of("draft")
        if name is None:
            return None
        return self_draft.parse_num_layers(name, self.draft_revision, adapter)

    @property
    def folder(self) -> Path:
        """Folder of the bundle."""
        if self.output is not None:
            return Path(self.output)
        return store.default_destination(self.draft_name, os.fspath(self.target))

    @property
    def variant_suffixes(self) -> tuple[str, ...]:
        """Suffixes of the names of additional graph variants."""
        return tuple(filter(None, (self.compute, CACHE_TYPES.get(self.cache or ""))))

    @property
    def average_bits(self) -> float:
        """Average bits per weight that int4 may use in the layers."""
        return 4.0 if self.bits is None else self.bits

    @property
    def has_int8_caches(self) -> bool:
        """True if the graph variant with int8 caches is requested."""
        return INT8_CACHES in self.variant_suffixes

    @property
    def required_ops(self) -> str:
        """Attention operators; a compute type or cache type may require some instead of "auto"."""
        if self.ops != "auto":
            return self.ops
        if self.compute in STANDARD_COMPUTE_TYPES:
            return "all"
        return "gqa" if self.has_int8_caches else "auto"

    def with_precisions(
        self, target_is_quantized: bool, draft_is_quantized: bool | None
    ) -> ExportRequest:
        """Return the request with default precisions for these checkpoints.

        The draft's precision affects speed only; int8 has fast single-token passes and keeps the
        acceptance rate.

        Args:
            target_is_quantized: True if the target's checkpoint is quantized.
            draft_is_quantized: The same for the draft model; None without a separate one.

        Raises:
            ValueError: The compute type does not support a precision.
        """
        precision = self.precision or (KEEP if target_is_quantized else "fp32")
        draft_precision = self.draft_precision
        if draft_precision is None and self.compute is None and draft_is_quantized is not None:
            keeps = precision == KEEP and draft_is_quantized
            is_integer = precision in ("int8", "int4", KEEP) and not keeps
            draft_precision = "int8" if is_integer else precision
        return replace(self, precision=precision, draft_precision=draft_precision)

    def precision_of(self, role: str) -> str:
        """Return the requested precision of a model, "fp32" by default."""
        return (self.draft_precision if role == "draft" else None) or self.precision or "fp32"

    def rounding_of(self, role: str) -> str:
        """Return the rounding of a model's weights; int8-block always rounds to nearest."""
        return NEAREST if self.precision_of(role) == "int8-block" else self.rounding

    def adapter_of(self, role: str) -> str | None:
        """Return the name of a model's adapter."""
        adapter = self.draft_adapter if role == "draft" else self.adapter
        return None if adapter is None else os.fspath(adapter)

    def __post_init__(self) -> None:
        """Check the options."""
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices and (value is not None or name in _REQUIRED):
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        if self.has_int8_caches and self.ops == "onnx":
            raise ExportError("--cache int8 requires GroupQueryAttention; omit --ops")
        self._check_compute({self.precision_of("target"), self.precision_of("draft")})
        if self.bits is not None and not 4 <= self.bits <= 8:
            raise ValueError(f"bits must be from 4 to 8, got {self.bits}")
        if self.bits is not None and self.precision != "int4":
            raise ExportError(
                f"--bits applies to --precision int4, not {self.precision_of('target')}; omit it"
            )
        check_integer("num_draft_tokens", self.num_draft_tokens, 1, MAX_EXPORTED_DRAFT_TOKENS)
        if self.max_length is not None:
            check_integer("max_length", self.max_length, 2)
        if self.draft_vocab is not None:
            check_integer("draft_vocab", self.draft_vocab, 1)
        if self.tolerance is not None and not 0 < self.tolerance < float("inf"):
            raise ValueError(f"tolerance must be above 0 and finite, got {self.tolerance}")
        self._check_draft()
        if self.output is not None and not os.fspath(self.output):
            raise ExportError("--output is empty; specify a folder")

    def _check_draft(self) -> None:
        """Reject options of a separate draft model for a self-draft, or without a draft model."""
        if self.draft_name is not None:
            is_own_precision = self.draft_precision not in (None, self.precision_of("target"))
            if self.num_draft_layers is not None and is_own_precision:
                raise ExportError("a self-draft has the target's precision; omit --draft-precision")
            return
        options = {
            "--draft-precision": self.draft_precision,
            "--draft-vocab": self.draft_vocab,
            "--draft-revision": self.draft_revision,
            "--draft-adapter": self.draft_adapter,
        }
        for option, value in options.items():
            if value is not None:
                raise ExportError(
                    f"{option} needs a draft model; specify --draft, or omit {option}"
                )

    def _check_compute(self, precisions: set[str]) -> None:
        quantized = sorted(precisions & {*QUANTIZED_DTYPES})
        if self.precision is None and not quantized:
            return  # a quantized checkpoint has the precision "keep"
        if self.compute == "fp32" and not quantized:
            raise ValueError(
                "all graphs of these precisions compute in fp32; omit compute, or specify a "
                f"precision of {', '.join(QUANTIZED_DTYPES)}"
            )
        if self.compute == "bf16" and quantized:
            raise ValueError(
                f"weights in {quantized[0]} cannot be dequantized to bf16: ONNX Runtime supports "
                "fp32 and fp16 only; compute in fp16, or specify a precision of fp32 or bf16"
            )
        if self.compute == QDQ and not quantized:
            raise ValueError(
                f"compute {QDQ} is for quantized weights; specify a precision of "
                f"{', '.join(QUANTIZED_DTYPES)}, or compute in fp16"
            )
        if self.compute == QDQ and KEEP in quantized:
            raise ValueError(
                f"compute {QDQ} does not support the block formats of a checkpoint; specify a "
                f"precision of {', '.join(p for p in QUANTIZED_DTYPES if p != KEEP)}"
            )
        if self.compute == QDQ and self.ops == "gqa":
            raise ValueError(f"compute {QDQ} needs the graph variant onnx; omit ops")
