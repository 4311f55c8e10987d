"""Bundle format: manifest, signatures, op sets, precisions and reports."""

from .bundle import (
    FORMAT,
    LARGEST_MANIFEST,
    LICENCE_FILE,
    MANIFEST,
    SMALL,
    WITH_HOSTS,
    WITHOUT_DRAFT,
    Bundle,
    oldest_format,
    pack_ids,
)

__all__ = [
    "FORMAT",
    "LARGEST_MANIFEST",
    "LICENCE_FILE",
    "MANIFEST",
    "SMALL",
    "WITHOUT_DRAFT",
    "WITH_HOSTS",
    "Bundle",
    "oldest_format",
    "pack_ids",
]
