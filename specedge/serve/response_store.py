"""In-memory store of responses, for `previous_response_id` and `item_reference`."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

MAX_RESPONSES = 512
MAX_CHARACTERS = 2**25  # maximum JSON characters of all conversations


@dataclass(frozen=True)
class StoredResponse:
    """Response with the messages of its conversation, except instructions."""

    body: dict[str, Any]
    messages: list[dict[str, Any]]

    @property
    def items(self) -> dict[str, dict[str, Any]]:
        """Return the output items by id."""
        return {item["id"]: item for item in self.body["output"]}


class ResponseStore:
    """Thread-safe store of the latest responses within limits."""

    def __init__(self) -> None:
        self._responses: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()
        self._num_characters = 0
        self._lock = threading.Lock()

    def add(self, response: StoredResponse) -> None:
        """Store a response and evict the oldest ones beyond the limits."""
        size = len(json.dumps([response.body, response.messages], ensure_ascii=False))
        with self._lock:
            self._responses[response.body["id"]] = response, size
            self._num_characters += size
            while len(self._responses) > MAX_RESPONSES or self._num_characters > MAX_CHARACTERS:
                _, (_, dropped) = self._responses.popitem(last=False)
                self._num_characters -= dropped

    def get(self, id_: str) -> StoredResponse | None:
        """Return a response, or None if it is not stored."""
        with self._lock:
            return self._responses.get(id_, (None, 0))[0]

    def remove(self, id_: str) -> bool:
        """Delete a response; return False if it is not stored."""
        with self._lock:
            _, size = self._responses.pop(id_, (None, 0))
            self._num_characters -= size
        return size > 0

    def item(self, id_: str) -> dict[str, Any] | None:
        """Return an output item of any response, or None if it is not stored."""
        with self._lock:
            responses = [response for response, _ in self._responses.values()]
        return next((r.items[id_] for r in reversed(responses) if id_ in r.items), None)
