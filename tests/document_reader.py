"""A reader and a host for bundles, written from docs/bundle.md and nothing else.

It shares no code with specedge: that it works shows that the document suffices.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
from pathlib import Path

import numpy as np

DOCUMENT = Path(__file__).parents[1] / "docs" / "bundle.md"
PRODUCT = Path(__file__).parents[1] / "specedge" / "product.onnx"
PLAIN = {"integer": int, "text": str, "boolean": bool}
PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"


def session_options():
    """Create sessions in the global thread pool, which other tests may have created already."""
    import onnxruntime

    with contextlib.suppress(Exception):
        onnxruntime.set_global_thread_pool_sizes(0, 1)
    plain, unsigned = onnxruntime.SessionOptions(), onnxruntime.SessionOptions()
    unsigned.add_session_config_entry("session.x64quantprecision", "1")
    products = []
    for options in (plain, unsigned):
        options.use_per_session_threads = False
        session = onnxruntime.InferenceSession(PRODUCT, options)
        products.append(session.run(None, {"x": np.full((1, 64), 255, np.uint8)})[0])
    return plain if np.array_equal(*products) else unsigned


@functools.cache
def tables(document: Path = DOCUMENT) -> dict[str, dict[str, str]]:
    """Each object's keys and their types, from the tables below `## bundle.json`."""
    found: dict[str, dict[str, str]] = {}
    section = document.read_text("utf-8").split("\n## bundle.json\n")[1].split("\n## ")[0]
    for part in section.split("\n### ")[1:]:
        title, _, body = part.partition("\n")
        table = body[body.index("| key | type |") :].split("\n\n")[0]
        rows = [line.split("|") for line in table.splitlines()[2:]]
        found[title] = {row[1].strip(" `"): row[2].strip() for row in rows}
    return found


OPTIONAL = ", optional"


class WrongError(ValueError):
    """The folder is no bundle by the document."""


def wanted(condition: bool, what: str) -> None:
    if not condition:
        raise WrongError(what)


def check(kind: str, value: object, known: dict[str, dict[str, str]], key: str = "") -> None:
    """Check a value's type by the tables, at any depth."""
    if kind.endswith(" or null"):
        if value is not None:
            check(kind.removesuffix(" or null"), value, known, key)
    elif kind == "number":
        wanted(type(value) in (int, float) and np.isfinite(value), key)
    elif kind in PLAIN:
        wanted(type(value) is PLAIN[kind], key)
        wanted(kind != "integer" or abs(value) <= 2**53, key)
    elif kind.startswith("list of "):
        wanted(type(value) is list, key)
        for item in value:
            check(kind.removeprefix("list of "), item, known, key)
    elif kind.startswith("map to "):
        wanted(type(value) is dict, key)
        for name, item in value.items():
            check(kind.removeprefix("map to "), item, known, f"{key}.{name}")
    elif " or " in kind:
        wanted(type(value) in [PLAIN[one] for one in kind.split(" or ")], key)
    else:
        types = known[kind]
        optional = {name for name, words in types.items() if words.endswith(OPTIONAL)}
        wanted(type(value) is dict and value.keys() | optional == types.keys(), f"keys of {key}")
        for name, item in value.items():
            check(types[name].removesuffix(OPTIONAL), item, known, f"{key}.{name}")


def parse(text: str) -> dict:
    """The manifest as plain values, of the types that the tables say."""
    manifest = json.loads(text)
    wanted(isinstance(manifest, dict) and manifest.get("format") == 10, "format")
    check("bundle", manifest, tables())
    wanted(manifest["models"].keys() in ({"target"}, {"target", "draft"}), "models")
    return manifest


def read(folder: Path) -> dict:
    """A bundle's manifest, with every file looked at."""
    manifest = parse((folder / "bundle.json").read_text("utf-8"))
    for name, file in manifest["files"].items():
        wanted(re.fullmatch(f"{PART}(/{PART})*", name) is not None and len(name) <= 200, name)
        wanted((folder / name).resolve().is_relative_to(folder.resolve()), name)
        content = (folder / name).read_bytes()
        wanted(len(content) == file["size"], name)
        wanted(hashlib.sha256(content).hexdigest() == file["sha256"], name)
    return manifest


class Model:
    """One model of a bundle. Caches are fed and fetched by value, which is slow and simple.

    `noise` is what stale rows are filled with, to show that nothing reads them.
    """

    def __init__(self, folder: Path, entry: dict, ops: str, options, noise: float) -> None:
        import onnxruntime

        self.entry, self.noise, self.past_length = entry, noise, 0
        name = entry["token_ids"]
        self.ids = None if name is None else np.fromfile(folder / name, "<i4")
        graphs = [g for g in entry["graphs"] if g["ops"] == ops]
        self.sessions = {
            g["length"]: onnxruntime.InferenceSession(folder / g["file"], options)
            for g in graphs
            if g["name"] in ("decoder", "step", "catchup", "verify")
        }
        (prefill,) = (g for g in graphs if g["name"] == "prefill")
        self.prefill_length = prefill["length"]
        self.prefill = onnxruntime.InferenceSession(folder / prefill["file"], options)
        sizes = {"B": 1, "S": entry["capacity"]}
        self.caches = {
            state["name"]: np.zeros([sizes.get(d, d) for d in state["shape"]], state["dtype"])
            for state in entry["states"]
        }

    def feed(self, tokens: list[int]) -> np.ndarray | None:
        """Append tokens; the logits of the last pass. [T] -> [T, V]"""
        size = self.prefill_length
        while len(tokens) > size and self.past_length + size <= self.entry["capacity"]:
            self._pass(self.prefill, tokens[:size])
            tokens = tokens[size:]
        if not tokens:
            return None
        session = self.sessions.get(len(tokens), self.sessions[None])
        return self._pass(session, tokens)

    def _pass(self, session, tokens: list[int]) -> np.ndarray | None:
        feeds = {f"past_key_values.{name}": cache for name, cache in self.caches.items()}
        feeds["input_ids"] = np.array([tokens], np.int64)
        feeds["past_length"] = np.array([self.past_length], np.int64)
        if any(x.name == "logits_from" for x in session.get_inputs()):
            feeds["logits_from"] = np.array([0], np.int64)
        names = [output.name for output in session.get_outputs()]
        found = dict(zip(names, session.run(names, feeds), strict=True))
        self.past_length += len(tokens)
        for name in self.caches:
            self.caches[name] = found[f"present.{name}"]
            self.caches[name][:, :, self.past_length :] = self.noise
        logits = found.get("logits")
        if logits is None or self.ids is None:
            return None if logits is None else logits[0, :, : self.entry["vocab_size"]]
        row = np.full((len(tokens), self.entry["vocab_size"]), -np.inf, np.float32)
        row[:, self.ids] = logits[0]
        return row


def random_number(seed: int, i: int) -> float:
    bits = 2**64 - 1
    z = (seed + (i + 1) * 0x9E3779B97F4A7C15) & bits
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & bits
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & bits
    return ((z ^ (z >> 31)) >> 11) * 2.0**-53


def distribution(logits: np.ndarray, sampling: dict) -> np.ndarray:
    """Return the sampling distribution of a row of logits; one-hot if greedy."""
    if sampling["temperature"] == 0:
        return np.eye(1, len(logits), int(logits.argmax()), dtype=np.float32)[0]
    row = (logits - logits.max()) / np.float32(sampling["temperature"])
    if 0 < sampling["top_k"] < len(row):
        row = np.where(row < np.sort(row)[-sampling["top_k"]], np.float32(-np.inf), row)
    row = np.exp(row)
    row /= row.sum()
    if sampling["top_p"] < 1:
        order = np.lexsort((np.arange(len(row)), -row))
        sums = np.cumsum(row[order].astype(np.float64))
        before = np.concatenate(([0.0], sums[:-1]))
        row[order[before >= sampling["top_p"]]] = 0
        row /= row.sum()
    if sampling["min_p"] > 0:
        row[row < sampling["min_p"] * row.max()] = 0
        row /= row.sum()
    return row


def draw(weights: np.ndarray, u: float) -> int:
    sums = np.cumsum(weights, dtype=np.float64)
    above = np.flatnonzero(sums > u * sums[-1])
    return int(above[0]) if len(above) else int(np.flatnonzero(sums == sums[-1])[0])


def window(length: int, context: int) -> tuple[int, int]:
    """Return a draft's start position and maximum number of tokens, as docs/bundle.md has it."""
    page = DOCUMENT.read_text("utf-8").split("**A smaller draft.**")[1]
    names = {"L": length, "M": context}
    exec(page.split("```")[1], {"max": max, "__builtins__": {}}, names)
    return names["s"], names["most"]


def joint_ratio(x: list[int], d: list[np.ndarray], t: list[np.ndarray]) -> float:
    """Return p of the first tokens of a draft."""
    ratio = 1.0
    for token, drawn_from, expected in zip(x, d, t, strict=False):
        ratio = min(1.0, ratio * float(expected[token]) / float(drawn_from[token]))
    return ratio


def residual(x: list[int], d: list[np.ndarray], t: list[np.ndarray]) -> np.ndarray:
    """Return the residual distribution after the first tokens of a draft, unnormalized."""
    return np.maximum(np.float32(joint_ratio(x, d, t)) * t[len(x)] - d[len(x)], 0)


def num_accepted(
    x: list[int], d: list[np.ndarray], t: list[np.ndarray], uniforms: list[float]
) -> int:
    """Return the length of the longest prefix of a draft that passes its test."""
    for i in range(len(x), 0, -1):
        ratio = joint_ratio(x[:i], d, t)
        if i == len(x):
            passes = uniforms[i - 1] < ratio
        else:
            mass = float(residual(x[:i], d, t).sum(dtype=float))
            passes = ratio == 1 or uniforms[i - 1] * (mass + 1 - ratio) < mass
        if passes:
            return i
    return 0


def generate(
    target: Model,
    draft: Model,
    prompt: list[int],
    count: int,
    k: int,
    seed: int,
    sampling: dict,
) -> tuple[list[int], int]:
    """The new tokens, without regard to end tokens, and the number of rounds."""  # fmt: skip
    tokens, used, rounds, start = list(prompt), 0, 0, 0
    count = min(count, target.entry["context_length"] - len(prompt))
    size, known = target.entry["vocab_size"], draft.entry["vocab_size"]
    target.past_length = draft.past_length = 0
    target.feed(tokens[:-1])
    while len(tokens) < len(prompt) + count:
        missing = len(prompt) + count - len(tokens)
        u = [random_number(seed, used + i) for i in range(2 * k + 1)]
        used, rounds = used + 2 * k + 1, rounds + 1
        before, (start, most) = start, window(len(tokens), draft.entry["context_length"])
        if start != before:
            draft.past_length = 0
        x: list[int] = []
        d: list[np.ndarray] = []
        room = target.entry["context_length"] - len(tokens)
        for i in range(min(k, room if sampling["temperature"] else missing - 1, most)):
            lacking = [*tokens, *x][start + draft.past_length :]
            logits = draft.feed([token if token < known else 0 for token in lacking])
            drawn_from = distribution(logits[-1], sampling)
            x.append(draw(drawn_from, u[i]))
            d.append(np.concatenate([drawn_from, np.zeros(size - known, np.float32)]))
        t = [distribution(row, sampling) for row in target.feed([tokens[-1], *x])]
        i = num_accepted(x, d, t, u[k:])
        rest = residual(x[:i], d, t) if i < len(x) else t[i]
        tokens += [*x[:i], draw(rest if rest.any() else t[i], u[2 * k])]
        target.past_length = min(target.past_length, len(tokens) - 1)
        draft.past_length = min(draft.past_length, max(0, len(tokens) - 1 - start))
    return tokens[len(prompt) : len(prompt) + count], rounds
