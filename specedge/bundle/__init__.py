"""Bundle format: manifest, signatures, graph variants, precisions and reports."""

from .bundle import (
    FIRST_FORMAT_WITH_HOSTS,
    FIRST_FORMAT_WITHOUT_DRAFT,
    FORMAT,
    LICENSE_FILE,
    MANIFEST,
    MAX_EAGER_HASH_SIZE,
    MAX_MANIFEST_SIZE,
    Bundle,
    oldest_format,
    pack_ids,
)

__all__ = [
    "FIRST_FORMAT_WITHOUT_DRAFT",
    "FIRST_FORMAT_WITH_HOSTS",
    "FORMAT",
    "LICENSE_FILE",
    "MANIFEST",
    "MAX_EAGER_HASH_SIZE",
    "MAX_MANIFEST_SIZE",
    "Bundle",
    "oldest_format",
    "pack_ids",
]
