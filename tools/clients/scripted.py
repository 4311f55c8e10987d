"""Server with a scripted model, for deterministic tests of tool calls.

The last user message contains `SCRIPT: TURN ||| TURN`: the first turn is the answer to it, and the
next one the answer to what follows, such as a tool's result. Calls are in Hermes format. A grammar
may change the whitespace of a turn.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import click
import numpy as np
from tokenizers import Tokenizer

from specedge.bundle import Bundle
from specedge.runtime.requests.loader import load_tokenizer
from specedge.runtime.requests.pipeline import Pipeline
from specedge.runtime.sampling.history import common_prefix_length
from specedge.runtime.sampling.logits import Logits
from specedge.runtime.sampling.source import Source
from specedge.serve.app import ServerSettings, make_app
from specedge.serve.server import listen, serve

CONTEXT = 65536
TEMPLATE = """{% if tools %}<|im_start|>system
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools> <tool_call>{"name": <name>, "arguments": <arguments>}</tool_call><|im_end|>
{% endif %}{% for message in messages %}{% if message.role == 'tool' %}<|im_start|>user
<tool_response>{{ message.content }}</tool_response>{% else %}<|im_start|>{{ message.role }}
{{ message.content or '' }}{% for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
ANSWER = "<|im_start|>assistant\n"
END = "<|im_end|>"


class ScriptedModel:
    """Language model that generates the script in its prompt."""

    invariant_lengths = tuple(range(1, 66))
    float32_error = 5e-6
    num_experts = 0
    rounds_inputs = False
    fast_length = 64

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._tokens: list[int] = []

    @property
    def length(self) -> int:
        return len(self._tokens)

    def forward(self, tokens: Sequence[int], num_rows: int | None = None) -> Logits:
        rows = []
        for i, token in enumerate(tokens):
            self._tokens.append(int(token))
            if num_rows is None or i >= len(tokens) - num_rows:
                rows.append(self._row())
        return Logits(np.stack(rows))

    def prefill(self, tokens: Sequence[int]) -> None:
        self._tokens += map(int, tokens)

    def shared(self, tokens: Sequence[int], source: Source | None = None) -> int:
        return common_prefix_length(self._tokens, tokens)

    def reuse(self, tokens: Sequence[int]) -> int:
        self.truncate(self.shared(tokens))
        return self.length

    def truncate(self, length: int) -> None:
        del self._tokens[length:]

    def close(self) -> None:
        pass

    def _row(self) -> np.ndarray:
        """Return logits that prefer the script's next token. [V]"""
        text = self._tokenizer.decode(self._tokens, skip_special_tokens=False)
        prompt, _, written = text.rpartition(ANSWER)
        rest = _rest(script_turn(prompt), written)
        if written[-1:].isspace():
            rest = rest.lstrip()
        row = np.zeros(self._vocab_size, np.float32)
        choices = [rest, rest.lstrip(), rest.strip()[:1], END, " ", "\n"] if rest else [END, "\n"]
        for score, choice in enumerate(reversed(choices), 1):
            if choice:
                row[self._tokenizer.encode(choice, add_special_tokens=False).ids[0]] = 50 * score
        return row


def script_turn(prompt: str) -> str:
    """Return the turn of the script that follows a rendered prompt."""
    *_, script = re.finditer(r"SCRIPT: (.*?)(?=<\|im_end\|>|\n|$)", prompt)
    turns = script[1].split("|||")
    return turns[min(prompt.count(ANSWER, script.end()), len(turns) - 1)].strip()


def _rest(text: str, written: str) -> str:
    """Return the remaining part of a text, where `written` may differ in whitespace."""
    count = len("".join(written.split()))
    for i, character in enumerate(text):
        if not count:
            return text[i:]
        count -= not character.isspace()
    return ""


@click.command(help=__doc__)
@click.option("--bundle", required=True, help="Bundle whose tokenizer is used.")
@click.option("--port", type=int, required=True)
def main(bundle: str, port: int) -> None:
    loaded = Bundle.read(bundle)
    changes = {"models": {"target": loaded.target}, "chat_template": TEMPLATE}
    scripted = dataclasses.replace(loaded, **changes).at(loaded.folder)
    object.__setattr__(scripted.target, "context_length", CONTEXT)  # no cache limits the model
    tokenizer = load_tokenizer(loaded)
    models = [ScriptedModel(tokenizer, loaded.target.vocab_size) for _ in range(4)]
    pipeline = Pipeline(
        scripted, tokenizer, models[0], None, more=[(model, None) for model in models[1:]]
    )
    listening = listen("127.0.0.1", port)
    serve(make_app(pipeline, ServerSettings(model="scripted")), listening, grace=1)


if __name__ == "__main__":
    main()
