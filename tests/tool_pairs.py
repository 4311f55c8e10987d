"""The embedded pair as if it called functions in a family's format."""

from __future__ import annotations

import dataclasses
import json

from tokenizers import Tokenizer

import specedge
from specedge.bundle import store
from specedge.runtime.requests.pipeline import Pipeline
from tool_templates import SPECIAL, TEMPLATES

LAST = 4095


def renamed(tokenizer, names):
    """The tokenizer with its last tokens' ids for added tokens, special or not."""
    facts = json.loads(tokenizer.to_str())
    by_id = {token: text for text, token in facts["model"]["vocab"].items()}
    for token, (name, special) in zip(range(LAST, 0, -1), names.items(), strict=False):
        gone = by_id[token]
        del facts["model"]["vocab"][gone]
        facts["model"]["vocab"][name] = token
        facts["model"]["merges"] = [
            pair for pair in facts["model"]["merges"] if gone not in (*pair, "".join(pair))
        ]
        added = {"id": token, "content": name, "special": special, "normalized": False}
        added |= dict.fromkeys(["single_word", "lstrip", "rstrip"], False)
        facts["added_tokens"].append(added)
    return Tokenizer.from_str(json.dumps(facts))


class Writing(Pipeline):
    """Model that generates a scripted text."""

    text = None
    asked = None

    @property
    def asked_text(self):
        """Text of the prompt that was asked last."""
        return self.tokenizer.decode(self.asked, skip_special_tokens=False)

    def stream(self, prompt, *args, **options):
        self.asked = prompt
        if self.text is not None and "grammar" not in options:
            options["grammar"] = f"start: {self._lark(self.text)}"
        return super().stream(prompt, *args, **options)

    def _lark(self, text):
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        added = self.tokenizer.get_added_tokens_decoder()
        parts, plain = [], []
        for token in [*ids, None]:
            if token is None or token in added:
                spelt = self.tokenizer.decode(plain, skip_special_tokens=False)
                parts += [json.dumps(spelt, ensure_ascii=False)] if spelt else []
                parts += [] if token is None else [f"<[{token}]>"]
                plain = []
            else:
                plain.append(token)
        return " ".join(parts)


def tool_pair(name, slots=2, special=True):
    """A pair of a family; its marks are tokens, or else ordinary text."""
    added = {"<think>": False} | (SPECIAL[name] if special else {})
    return scripted_pair(TEMPLATES[name], added, slots)


def scripted_pair(template, added=(), slots=1):
    """A pair with a chat template that writes a text; `added` tokens are special or not."""
    pipeline = specedge.load(store.embedded_folder(), slots=slots)
    bundle = dataclasses.replace(
        pipeline.bundle,
        chat_template=template,
        special_tokens={"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
    ).at(pipeline.bundle.folder)
    tokenizer = renamed(pipeline.tokenizer, dict(added))
    first, *more = pipeline.slots.all
    more = [(slot.target, slot.draft) for slot in more]
    return Writing(bundle, tokenizer, first.target, first.draft, more=more)
