"""Bundle format: manifest, signatures, graph variants, precisions and reports."""

from .bundle import (
    FORMAT,
    LICENSE_FILE,
    MANIFEST,
    MAX_EAGER_HASH_SIZE,
    MAX_MANIFEST_SIZE,
    Bundle,
    pack_ids,
    unpack_ids,
)

__all__ = [
    "FORMAT",
    "LICENSE_FILE",
    "MANIFEST",
    "MAX_EAGER_HASH_SIZE",
    "MAX_MANIFEST_SIZE",
    "Bundle",
    "pack_ids",
    "unpack_ids",
]
