"""Options of an export, validated before anything is read."""

from __future__ import annotations

from dataclasses import dataclass

from specedge.bundle.op_sets import CACHE_TYPES, COMPUTE_TYPES, OPS, QDQ
from specedge.bundle.precision import PRECISION_CHOICES, QUANTIZED_DTYPES, ROUNDINGS
from specedge.errors import ExportError
from specedge.option_specs import check_integer
from specedge.sampling_options import MAX_EXPORTED_DRAFT_TOKENS


@dataclass(frozen=True)
class ExportRequest:
    """Options of an export, the same for both models."""

    num_draft_tokens: int
    max_length: int | None
    ops: str
    tolerance: float | None
    precision: str
    draft_precision: str | None  # None where it is to be chosen
    calibration: str | None
    draft_vocab: int | None
    compute: str | None
    cache: str | None
    rounding: str
    bits: float | None  # None for 4

    @property
    def kinds(self) -> tuple[str, ...]:
        """Suffixes of the names of additional op sets."""
        return tuple(kind for kind in (self.compute, CACHE_TYPES.get(self.cache or "")) if kind)

    def of(self, role: str) -> str:
        """Return a model's precision, as far as it is known without the weights."""
        return (self.draft_precision if role == "draft" else None) or self.precision

    @property
    def average_bits(self) -> float:
        """Average bits per weight that int4 may use in the layers."""
        return 4.0 if self.bits is None else self.bits

    @property
    def chooses(self) -> bool:
        """True if the draft's precision is measured on this device, not given for another one."""
        return self.draft_precision is None and self.compute is None

    def __post_init__(self) -> None:
        for precision in (self.precision, self.draft_precision):
            if precision not in (*PRECISION_CHOICES, None):
                raise ValueError(
                    f"precision must be one of {', '.join(PRECISION_CHOICES)}, got {precision!r}"
                )
        if self.ops not in ("auto", *OPS):
            raise ValueError(f"ops must be auto, onnx or gqa, got {self.ops!r}")
        self._check_compute({self.of("target"), self.of("draft")})
        if self.cache not in (*CACHE_TYPES, None):
            raise ValueError(f"cache must be {', '.join(CACHE_TYPES)}, got {self.cache!r}")
        if self.rounding not in ROUNDINGS:
            raise ValueError(
                f"rounding must be one of {', '.join(ROUNDINGS)}, got {self.rounding!r}"
            )
        if self.bits is not None and not 4 <= self.bits <= 8:
            raise ValueError(f"bits must be from 4 to 8, got {self.bits}")
        if self.bits is not None and self.precision != "int4":
            raise ExportError(f"--bits is for --precision int4, not {self.precision}; leave it out")
        check_integer("num_draft_tokens", self.num_draft_tokens, 1, MAX_EXPORTED_DRAFT_TOKENS)
        if self.max_length is not None:
            check_integer("max_length", self.max_length, 2)
        if self.draft_vocab is not None:
            check_integer("draft_vocab", self.draft_vocab, 1)
        if self.tolerance is not None and not 0 < self.tolerance < float("inf"):
            raise ValueError(f"tolerance must be above 0 and finite, got {self.tolerance}")

    def _check_compute(self, precisions: set[str]) -> None:
        if self.compute not in (*COMPUTE_TYPES, None):
            raise ValueError(
                f"compute must be one of {', '.join(COMPUTE_TYPES)}, got {self.compute!r}"
            )
        rounded = sorted(precisions & {*QUANTIZED_DTYPES})
        if self.compute == "fp32" and not rounded:
            raise ValueError(
                "all graphs of these precisions compute in fp32; leave compute out, or give a "
                f"precision of {', '.join(QUANTIZED_DTYPES)}"
            )
        if self.compute == "bf16" and rounded:
            raise ValueError(
                f"weights in {rounded[0]} cannot be widened to bf16: ONNX Runtime multiplies them "
                "with fp32 and fp16 alone"
            )
        if self.compute == QDQ and not rounded:
            raise ValueError(
                f"compute {QDQ} is for weights that are integers; give a precision of "
                f"{', '.join(QUANTIZED_DTYPES)}, or compute in fp16"
            )
        if self.compute == QDQ and self.ops == "gqa":
            raise ValueError(f"compute {QDQ} needs the op set onnx; leave ops out")
