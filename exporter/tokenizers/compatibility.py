"""Comparison of two tokenizers on ordinary text.

Settings are those of `tokenizer.json`. Added tokens, such as chat markers, may differ: they affect
acceptance rates, but not exactness.
"""

from __future__ import annotations

import json
from typing import Any

from specedge.errors import PairError

TokenizerSettings = dict[str, Any]

_PARTS = {"normalizer": "normalizer", "pre_tokenizer": "pre-tokenizer"}
_RULES = {
    "post_processor": "adds different special tokens to a prompt",
    "decoder": "decodes differently",
}


def compare(target: TokenizerSettings, draft: TokenizerSettings) -> list[str]:
    """Return notes of harmless differences. Raises PairError for others."""
    added = _added_tokens(target).keys() | _added_tokens(draft).keys()
    _check_vocabulary(_ordinary_tokens(target, added), _ordinary_tokens(draft, added))
    _check_model(target["model"], draft["model"])
    for key, name in _PARTS.items():
        of_target, of_draft = (_without_offsets(x.get(key)) for x in (target, draft))
        if of_target != of_draft:
            raise PairError(
                f"draft and target have different {name}s: {_show_both(of_target, of_draft)}"
            )
    notes = [
        f"the draft {difference}; those of the target are used"
        for key, difference in _RULES.items()
        if target.get(key) != draft.get(key)
    ]
    return _describe_added(target, draft, added) + notes


def _added_tokens(settings: TokenizerSettings) -> dict[int, dict[str, Any]]:
    return {entry["id"]: entry for entry in settings.get("added_tokens") or []}


def _vocabulary(settings: TokenizerSettings) -> dict[str, tuple[Any, ...]]:
    """Return each token of the model with its id, and with its score in unigram models."""
    vocab = settings["model"].get("vocab") or {}
    if isinstance(vocab, dict):
        return {token: (id_,) for token, id_ in vocab.items()}
    return {token: (id_, score) for id_, (token, score) in enumerate(vocab)}


def _ordinary_tokens(settings: TokenizerSettings, added: set[int]) -> dict[str, tuple[Any, ...]]:
    """Return the tokens whose ids are added tokens in neither tokenizer."""
    return {token: entry for token, entry in _vocabulary(settings).items() if entry[0] not in added}


def _check_vocabulary(
    of_target: dict[str, tuple[Any, ...]], of_draft: dict[str, tuple[Any, ...]]
) -> None:
    if of_target == of_draft:
        return
    token = min(
        (t for t in of_target.keys() | of_draft.keys() if of_target.get(t) != of_draft.get(t)),
        key=lambda t: (min(v[t][0] for v in (of_target, of_draft) if t in v), t),
    )
    texts = [
        f"is {' with score '.join(map(str, v[token]))}" if token in v else "does not exist"
        for v in (of_target, of_draft)
    ]
    raise PairError(
        f"draft and target have different vocabularies: {token!r} {texts[0]} in the target's "
        f"({len(of_target)} ordinary tokens) and {texts[1]} in the draft's ({len(of_draft)})"
    )


def _check_model(of_target: TokenizerSettings, of_draft: TokenizerSettings) -> None:
    a, b = of_target.get("merges") or [], of_draft.get("merges") or []
    if a != b:
        at = next(
            (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
        )
        merges = [m[at] if at < len(m) else "none" for m in (a, b)]
        raise PairError(
            f"draft and target have different merges: number {at} is {merges[0]} in the target's "
            f"and {merges[1]} in the draft's"
        )
    for key in sorted((of_target.keys() | of_draft.keys()) - {"merges", "vocab"}):
        # None, false and "" are equivalent.
        if (x := of_target.get(key) or None) != (y := of_draft.get(key) or None):
            raise PairError(f"draft and target tokenize differently: {key}, {_show_both(x, y)}")


def _without_offsets(value: Any) -> Any:
    """Remove fields that affect only token offsets."""
    if isinstance(value, list):
        return [_without_offsets(x) for x in value]
    if isinstance(value, dict):
        return {k: _without_offsets(v) for k, v in value.items() if k != "trim_offsets"}
    return value


def _show_both(of_target: Any, of_draft: Any) -> str:
    shown = [json.dumps(value, ensure_ascii=False)[:100] for value in (of_target, of_draft)]
    return f"{shown[0]} in the target's and {shown[1]} in the draft's"


def _describe_added(
    target: TokenizerSettings, draft: TokenizerSettings, added: set[int]
) -> list[str]:
    """Describe differences of the added tokens, with counts and examples."""
    names, flags = map(_token_names, (target, draft)), map(_added_tokens, (target, draft))
    (target_names, draft_names), (target_flags, draft_flags) = names, flags
    differences: dict[str, list[str]] = {}
    for id_ in sorted(added):
        of_target, of_draft = target_names.get(id_), draft_names.get(id_)
        if of_draft is None:
            differences.setdefault("only in the target's", []).append(f"{id_} {of_target}")
        elif of_target is None:
            differences.setdefault("only in the draft's", []).append(f"{id_} {of_draft}")
        elif of_target != of_draft:
            example = f"{id_} {of_target} in the target's and {of_draft} in the draft's"
            differences.setdefault("with another name", []).append(example)
        elif target_flags.get(id_) != draft_flags.get(id_):
            differences.setdefault("with other flags", []).append(f"{id_} {of_target}")
    if not differences:
        return []
    descriptions = (
        f"{len(examples)} {difference} (such as {examples[0]})"
        for difference, examples in differences.items()
    )
    return [
        f"added tokens differ, which affects speed only: {', '.join(descriptions)}; the bundle "
        "has the target's"
    ]


def _token_names(settings: TokenizerSettings) -> dict[int, str]:
    names = {entry[0]: token for token, entry in _vocabulary(settings).items()}
    return names | {id_: entry["content"] for id_, entry in _added_tokens(settings).items()}
