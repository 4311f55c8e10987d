"""Bundle: a folder with `bundle.json`, ONNX graphs, weights, and a tokenizer.

Standard library only. Reading is strict: every key is present and of the right type, every file is
inside the folder and has the stated size, and the models are consistent with each other.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import BundleError
from ..option_specs import check_integer
from ..sampling_options import MAX_DRAFT_TOKENS, DecodingDefaults, RecommendedSampling
from ..strict_json import MAX_INTEGER, OPTIONAL, JsonError, build, dump, parse, to_plain
from . import format_9
from .gpu_signatures import ONE_CALL
from .graph_variants import attention_ops
from .hosts import HostFiles
from .integrity import (
    check_relative_path,
    contained_file_size,
    has_encodable_path,
    sha256,
)
from .manifest import ENCODER, FUSE, REEXPORT_HINT, DraftTokenizer, FileEntry, ModelEntry
from .reports import check_single_line
from .token_readings import TokenReadings

FORMAT = 10
MANIFEST = "bundle.json"
MAX_MANIFEST_SIZE = 16 * 2**20
LICENSE_FILE = re.compile(r"(licen[cs]e|notice|use_policy)", re.IGNORECASE)
ID_SIZE = 4  # bytes per token id of a reduced vocabulary
MAX_EAGER_HASH_SIZE = 8 * 2**20  # bytes; larger files are not hashed at every load


@dataclass(frozen=True)
class Bundle:
    """Models and their shared files, as stated by `bundle.json`.

    Attributes:
        format: Version of the bundle format.
        specedge_version: Version of specedge that wrote the bundle.
        num_draft_tokens: Draft tokens per round of the fixed-shape graphs, K.
        end_tokens: Token ids that end a text.
        tokenizer: File of the tokenizer.
        chat_template: Jinja template, or None.
        special_tokens: Variables of the chat template, such as `bos_token`.
        default_sampling: Sampling options that the model's authors recommend.
        models: Models by name: "target" defines the text, and "draft" is the draft model, without
            which suffix decoding drafts.
        hosts: Graphs for applications without specedge; None if there are none.
        files: Sizes and hashes of all files.
        decoder_start: Tokens that begin each text of an encoder-decoder, whose prompt is the
            source; empty for other models.
        decoder_prefix: Tokens after them unless a request has others, such as a target language.
        decoding_defaults: Logits processors of an encoder-decoder.
        folder: Folder of the bundle.
    """

    format: int
    specedge_version: str
    num_draft_tokens: int
    end_tokens: tuple[int, ...]
    tokenizer: str
    chat_template: str | None
    special_tokens: dict[str, str]
    default_sampling: RecommendedSampling
    models: dict[str, ModelEntry]
    hosts: HostFiles | None
    files: dict[str, FileEntry]
    decoder_start: tuple[int, ...] = field(default=(), metadata=OPTIONAL)
    decoder_prefix: tuple[int, ...] = field(default=(), metadata=OPTIONAL)
    decoding_defaults: DecodingDefaults = field(default=DecodingDefaults(), metadata=OPTIONAL)
    folder: Path = field(default=Path(), init=False, compare=False)

    def __post_init__(self) -> None:
        check_single_line("specedge_version", self.specedge_version)
        check_integer("num_draft_tokens", self.num_draft_tokens, 1, MAX_DRAFT_TOKENS)
        for name in self.files:
            check_relative_path(name)
        if "target" not in self.models or self.models.keys() - {"target", "draft"}:
            raise ValueError(
                f"models must have target, and may have draft, got {', '.join(self.models)}"
            )
        if self.target.token_ids is not None:
            raise ValueError("models.target.token_ids must be null")
        ordered = {name: self.models[name] for name in ("target", "draft") if name in self.models}
        object.__setattr__(self, "models", ordered)
        for key, model in self.models.items():
            self._check_model(key, model)
            self._check_columns(key, model)
        for file in self.hosts.files if self.hosts else ():
            if file not in self.files:
                raise ValueError(f"hosts lists '{file}', which is not among the files")
        if self.tokenizer not in self.files:
            raise ValueError(f"tokenizer '{self.tokenizer}' is not among the files")
        self._check_draft()
        defaults = self.decoding_defaults
        for name, tokens in (
            ("end_tokens", self.end_tokens),
            ("decoder_start", self.decoder_start),
            ("decoder_prefix", self.decoder_prefix),
            ("decoding_defaults.suppress_tokens", defaults.suppress_tokens),
            ("decoding_defaults.begin_suppress_tokens", defaults.begin_suppress_tokens),
        ):
            if bad := [t for t in tokens if not 0 <= t < self.target.vocab_size]:
                raise ValueError(f"{name} has {bad[0]}, which is outside the vocabulary")
        self._check_encoder()
        self._check_hidden()

    def _check_encoder(self) -> None:
        target, draft = self.target, self.draft
        if bool(self.decoder_start) is not (target.encoder is not None):
            raise ValueError("decoder_start has tokens if and only if the target has an encoder")
        if self.decoder_prefix and target.encoder is None:
            raise ValueError("decoder_prefix is for a target with an encoder")
        if len(self.decoder_start) + len(self.decoder_prefix) >= self.context_length:
            raise ValueError("decoder_start and decoder_prefix must be shorter than the context")
        if target.encoder is not None and not target.has_graph(ENCODER):
            raise ValueError("a target with an encoder must have the graph 'encoder'")
        if self.decoding_defaults != DecodingDefaults() and target.encoder is None:
            raise ValueError("decoding_defaults is for a target with an encoder")
        host_graphs = {graph.name for graph in self.hosts.graphs} if self.hosts else None
        if host_graphs and ("open" in host_graphs) is not (target.encoder is not None):
            raise ValueError("hosts has the graph 'open' if and only if the target has an encoder")
        if draft is None:
            return
        if draft.encoder is None or target.encoder is None:
            if draft.encoder is not target.encoder:
                raise ValueError("target and draft must both have an encoder, or neither")
            return
        if draft.encoder.source_shape != target.encoder.source_shape:
            raise ValueError("target and draft must read the same tokens or spectrograms")
        if not draft.has_graph(ENCODER) and draft.encoder != target.encoder:
            raise ValueError("a draft without the graph 'encoder' must have the target's encoder")

    def _check_draft(self) -> None:
        for key in ("acceptance", "tokenizer", "mask_token"):
            if getattr(self.target, key) is not None:
                raise ValueError(f"{key} is a key of the draft, and the target has it")
        if self.draft is None:
            return
        if self.draft.tokenizer is not None:
            self._check_draft_tokenizer(self.draft, self.draft.tokenizer)
        elif self.draft.vocab_size > self.target.vocab_size:
            raise ValueError(
                f"draft.vocab_size {self.draft.vocab_size} is above target.vocab_size "
                f"{self.target.vocab_size}"
            )

    def _check_draft_tokenizer(self, draft: ModelEntry, tokenizer: DraftTokenizer) -> None:
        for file in (tokenizer.file, tokenizer.readings):
            if file not in self.files:
                raise ValueError(f"draft.tokenizer names '{file}', which is not among the files")
        if draft.token_ids is None:
            raise ValueError("a draft with a tokenizer must have token_ids")
        if draft.encoder is not None:
            raise ValueError("a draft with an encoder must have the target's tokenizer")
        if bad := [t for t in tokenizer.prefix if not 0 <= t < draft.vocab_size]:
            raise ValueError(f"draft.tokenizer.prefix has {bad[0]}, which is not one of its tokens")

    def _check_hidden(self) -> None:
        returned, read = self.target.hidden, None if self.draft is None else self.draft.hidden
        if returned is not None and returned.draft_size is not None:
            raise ValueError("target.hidden.draft_size must be null")
        if read is not None and read.draft_size is None:
            raise ValueError("draft.hidden.draft_size must be a number")
        if read is not None and (self.draft_model.tokenizer or self.draft_model.mask_token):
            raise ValueError("a draft with hidden must not have a tokenizer or a mask_token")
        if read is not None and replace(read, draft_size=None) != returned:
            raise ValueError("draft.hidden must have the layers and the size of target.hidden")
        host_graphs = {graph.name for graph in self.hosts.graphs} if self.hosts else set()
        has_fuse = self.draft is not None and self.draft.has_graph(FUSE)
        if "draft" in host_graphs and ("fuse" in host_graphs) is not has_fuse:
            raise ValueError("hosts has the graph 'fuse' if and only if the draft has it")

    def _check_columns(self, key: str, model: ModelEntry) -> None:
        columns, size = model.padded_vocab_size, model.vocab_size
        if model.token_ids is None:
            if size > columns:
                raise ValueError(f"{key}.vocab_size {size} is above its {columns} columns")
            return
        if model.token_ids not in self.files:
            raise ValueError(f"models.{key}.token_ids '{model.token_ids}' is not among the files")
        if (num_bytes := self.files[model.token_ids].size) != ID_SIZE * columns:
            raise ValueError(
                f"models.{key}.token_ids has {num_bytes} bytes, {columns} columns need "
                f"{ID_SIZE * columns}"
            )
        if columns > size:
            raise ValueError(
                f"{key}.padded_vocab_size {columns} is above {key}.vocab_size {size}: a pruned "
                "LM head cannot have more columns than tokens"
            )

    def _check_model(self, key: str, model: ModelEntry) -> None:
        for file in (model.weights, *(graph.file for graph in model.graphs)):
            if file not in self.files:
                raise ValueError(f"{key} names '{file}', which is not among the files")
        lengths = {"step": 1, "catchup": 2, "verify": self.num_draft_tokens + 1}
        for graph in model.graphs:
            if lengths.get(graph.name, graph.length) != graph.length:
                raise ValueError(f"{key}: {graph.name} must have length {lengths[graph.name]}")
            if graph.name in ONE_CALL:
                drafted = model.signatures[graph.signature].num_drafted
                if drafted != self.num_draft_tokens:
                    raise ValueError(
                        f"{key}: {graph.name} drafts {drafted} tokens, num_draft_tokens is "
                        f"{self.num_draft_tokens}"
                    )
        longest = max(g.length or 0 for g in model.graphs if g.name != "prefill")
        longest = max(longest, self.num_draft_tokens + 1)
        need = model.context_length + longest + ("gqa" in map(attention_ops, model.parity))
        if model.capacity < need:
            raise ValueError(f"{key}.capacity {model.capacity} is below {need}")

    @property
    def context_length(self) -> int:
        """Largest number of tokens of a text, by the target; the draft's may be smaller."""
        return self.target.context_length

    @property
    def supports_chat(self) -> bool:
        """True if the target has a chat template; the prompt of an encoder-decoder is no chat."""
        return self.chat_template is not None and self.target.encoder is None

    @property
    def max_prompt_length(self) -> int:
        """Largest number of tokens of a prompt, which is the source of an encoder-decoder."""
        encoder = self.target.encoder
        return self.context_length - 1 if encoder is None else encoder.max_length

    @property
    def reads_speech(self) -> bool:
        """True if the source of the texts is a log-mel spectrogram."""
        return self.target.encoder is not None and self.target.encoder.reads_speech

    @property
    def target(self) -> ModelEntry:
        """Model that defines the text."""
        return self.models["target"]

    @property
    def draft(self) -> ModelEntry | None:
        """Draft model, or None."""
        return self.models.get("draft")

    @property
    def draft_model(self) -> ModelEntry:
        """Draft model of a bundle that has one."""
        assert self.draft is not None
        return self.draft

    def path(self, file: str) -> Path:
        """Return the path of a listed file."""
        return self.folder / file

    def copy_to(self, folder: Path) -> None:
        """Copy the manifest and the listed files to a folder."""
        for name in (MANIFEST, *self.files):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.path(name), folder / name)

    def license_files(self, role: str) -> list[str]:
        """Return the listed license, notice and terms-of-use files of a model."""
        folder = self.models[role].weights.rpartition("/")[0]
        return [
            name
            for name in self.files
            if name.rpartition("/")[0] == folder and LICENSE_FILE.match(name.rpartition("/")[2])
        ]

    @property
    def shares_weights(self) -> bool:
        """True if the draft reads the target's weights file (early-exit self-draft)."""
        return self.draft is not None and self.draft.weights == self.target.weights

    @classmethod
    def read(cls, folder: Path) -> Bundle:
        """Read a bundle and check everything but the hashes of `large_files`.

        Raises:
            BundleError: If it is missing, damaged, inconsistent or of an unsupported format.
        """
        folder = Path(folder)
        if not has_encodable_path(folder):
            raise BundleError(
                f"{folder}: the path is not valid UTF-8; rename the folder, "
                "or specify another one written by 'specedge export'"
            )
        try:
            bundle = cls.from_json(_manifest_text(folder)).at(folder)
        except FormatError as error:
            raise BundleError(f"{folder / MANIFEST}: {error}") from error
        except (JsonError, UnicodeDecodeError) as error:
            raise BundleError(f"{folder / MANIFEST}: {error}; {REEXPORT_HINT}") from error
        for name, file in bundle.files.items():
            bundle._check_size(name, file)
            if file.size <= MAX_EAGER_HASH_SIZE:
                bundle.check_hash(name)
        for model in bundle.models.values():
            bundle.ids_of(model)
        bundle.readings()
        return bundle

    def ids_of(self, model: ModelEntry) -> tuple[int, ...] | None:
        """Return the token ids of the columns of a model's pruned LM head, ascending.

        Returns:
            None if the head is not pruned: column j is token j.
        """
        if model.token_ids is None:
            return None
        path = self.path(model.token_ids)
        try:
            ids = unpack_ids(path.read_bytes())
        except OSError as error:
            raise BundleError(f"{path}: {error.strerror}; {REEXPORT_HINT}") from error
        if any(a >= b for a, b in itertools.pairwise(ids)):
            raise BundleError(f"{path}: its ids are not ascending; {REEXPORT_HINT}")
        size = (model if model.tokenizer is None else self.target).vocab_size
        if ids[0] < 0 or ids[-1] >= size:
            raise BundleError(
                f"{path}: its ids are not all between 0 and {size - 1}; {REEXPORT_HINT}"
            )
        return ids

    def readings(self) -> TokenReadings | None:
        """Return the draft model's tokens for each of the target's; None if they are the same."""
        if self.draft is None or (tokenizer := self.draft.tokenizer) is None:
            return None
        path, draft = self.path(tokenizer.readings), self.draft
        try:
            data = path.read_bytes()
            readings = TokenReadings.unpack(data, self.target.vocab_size, tokenizer.prefix)
        except OSError as error:
            raise BundleError(f"{path}: {error.strerror}; {REEXPORT_HINT}") from error
        except ValueError as error:
            raise BundleError(f"{path}: {error}; {REEXPORT_HINT}") from error
        if not 0 <= min(readings.tokens) <= max(readings.tokens) < draft.vocab_size:
            raise BundleError(
                f"{path}: its tokens are not all between 0 and {draft.vocab_size - 1}; "
                f"{REEXPORT_HINT}"
            )
        if any(len(readings.of(token)) != 1 for token in self.ids_of(draft) or ()):
            raise BundleError(
                f"{path}: tokens of the draft's LM head are not one token each; {REEXPORT_HINT}"
            )
        if readings.longest > draft.context_length:
            raise BundleError(
                f"{path}: a reading of {readings.longest} tokens is longer than the draft's "
                f"context of {draft.context_length}; {REEXPORT_HINT}"
            )
        return readings

    @classmethod
    def from_json(cls, text: str) -> Bundle:
        """Parse a manifest without reading other files."""
        value = parse(text)
        if isinstance(value, dict) and _is_format(value, format_9.FORMAT):
            value = format_9.upgrade(value) | {"format": FORMAT}
        if isinstance(value, dict) and not _is_format(value, FORMAT):
            raise FormatError(_other_format(value.get("format")))
        return build(cls, value)

    def to_json(self) -> str:
        """Return the text of the manifest."""
        return dump(to_plain(self)) + "\n"

    def digest(self) -> str:
        """Return the SHA-256 of the manifest, which contains the hashes of all other files."""
        return sha256(self.path(MANIFEST))

    def at(self, folder: Path) -> Bundle:
        """Return the same bundle in another folder."""
        bundle = replace(self)
        object.__setattr__(bundle, "folder", folder)
        return bundle

    def large_files(self) -> list[str]:
        """Return the files whose hashes `read` does not check."""
        return [name for name, file in self.files.items() if file.size > MAX_EAGER_HASH_SIZE]

    def check_hash(self, name: str, progress: Callable[[int], None] | None = None) -> None:
        """Verify the hash of a file; `progress` receives the size of each chunk."""
        try:
            digest = sha256(self.path(name), progress)
        except OSError as error:
            raise BundleError(f"{self.path(name)}: {error.strerror}; {REEXPORT_HINT}") from error
        if digest != self.files[name].sha256:
            raise BundleError(
                f"{self.path(name)}: its SHA-256 differs from the manifest's; {REEXPORT_HINT}"
            )

    def _check_size(self, name: str, file: FileEntry) -> None:
        path = self.path(name)
        try:
            size = contained_file_size(self.folder, path)
        except OSError as error:
            raise BundleError(f"{path}: {error.strerror}; {REEXPORT_HINT}") from error
        if size != file.size:
            raise BundleError(
                f"{path}: has {size} bytes, {MANIFEST} lists {file.size}; {REEXPORT_HINT}"
            )


def pack_ids(ids: Sequence[int]) -> bytes:
    """Return token ids as little-endian 32-bit integers."""
    return struct.pack(f"<{len(ids)}i", *ids)


def unpack_ids(data: bytes) -> tuple[int, ...]:
    """Return the token ids of little-endian 32-bit integers."""
    return struct.unpack(f"<{len(data) // ID_SIZE}i", data)


def _manifest_text(folder: Path) -> str:
    path = folder / MANIFEST
    try:
        size = contained_file_size(folder, path)
        if size > MAX_MANIFEST_SIZE:
            raise BundleError(
                f"{path}: has {size} bytes; the limit is {MAX_MANIFEST_SIZE}; {REEXPORT_HINT}"
            )
        with path.open(encoding="utf-8") as file:
            return file.read()
    except UnicodeDecodeError:
        raise
    except (OSError, ValueError) as error:  # a NUL in a path is a ValueError
        raise BundleError(_unreadable(folder, error)) from error


class FormatError(JsonError):
    """Manifest of an unsupported format."""


def _is_format(manifest: dict[str, Any], number: int) -> bool:
    version = manifest.get("format")
    return type(version) is int and version == number


def _other_format(version: object) -> str:
    """Return the error message for an unsupported format."""
    if type(version) is not int:
        return f"format must be {FORMAT}; {REEXPORT_HINT}"
    remedy = "export the bundle again" if 0 < version < FORMAT else "upgrade specedge"
    shown = version if abs(version) <= MAX_INTEGER else "a huge number"
    return (
        f"format is {shown}, this version of specedge reads {format_9.FORMAT} and {FORMAT}; "
        f"{remedy}"
    )


def _unreadable(folder: Path, error: Exception) -> str:
    if os.path.isfile(folder):
        return f"{folder} is a file; specify the folder of a bundle written by 'specedge export'"
    if not os.path.exists(folder):
        return (
            f"no bundle at {folder}: the folder does not exist; specify one written by "
            "'specedge export'"
        )
    if isinstance(error, FileNotFoundError):
        return f"{folder} has no {MANIFEST}; specify a folder written by 'specedge export'"
    return f"{folder / MANIFEST}: {getattr(error, 'strerror', None) or error}; {REEXPORT_HINT}"
