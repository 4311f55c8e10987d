"""Hidden states of texts that a draft model reads of its target.

Row i of the draft reads the hidden state of token i and token i + 1. T tokens, V vocabulary
entries, H channels of the fused states.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..verification.fused_states import FusedStates
from ..verification.runner import Action, FillNoise, PassAction, ReadHiddenStates
from .float_model import FloatModel
from .texts import CalibrationTexts

SAMPLE_STEP = 64  # tokens per row of the sample of hidden states


class TargetStates:
    """Passes of a target over texts, whose hidden states the draft's graph `fuse` reads.

    Args:
        target: Final target.
        draft: Draft model.
    """

    def __init__(self, target: FloatModel, draft: FloatModel) -> None:
        self._fuse = draft.fuse_graph(draft.folder, draft.ops[-1])
        self._runner = target.runner(target.folder, target.ops[-1])
        self._hidden: list[np.ndarray] = []  # sample of hidden states, [n, F] each

    def run(
        self, texts: Sequence[np.ndarray], with_logits: bool = True
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return logits and fused states of each text. [T] each -> [T, V] and [T, H] each

        Logits are those of the last row unless they are requested.
        """
        actions: list[Action] = []
        for text in texts:
            first = 0 if with_logits else len(text) - 1
            actions += [
                FillNoise(0, self._runner.geometry.capacity),
                PassAction("decoder", text, 0, first, packed=True),
                ReadHiddenStates(then=self._fused),
            ]
        results = self._runner.run(actions)
        return results[1::3], results[2::3]

    def of_texts(self, texts: CalibrationTexts) -> tuple[FusedStates | None, CalibrationTexts]:
        """Return what the draft reads of texts: hidden states, and all tokens but the first.

        There are no states if ONNX Runtime has no kernels for the target on this machine.
        """
        windows = (*(texts.caches or texts.calibration), *texts.evaluation)
        uses = (texts.calibration, texts.evaluation, texts.caches)
        of_draft = CalibrationTexts(texts.name, *([text[1:] for text in use] for use in uses))
        if not self._runner.can_run():
            return None, of_draft
        _, fused = self.run(windows, with_logits=False)
        states = [rows[:-1] for rows in fused]
        pairs = zip((text[1:] for text in windows), states, strict=True)
        hidden = np.concatenate(self._hidden)
        return FusedStates(np.concatenate(states), tuple(pairs), hidden), of_draft

    def _fused(self, states: np.ndarray) -> np.ndarray:
        self._hidden.append(states[::SAMPLE_STEP].copy())
        return self._fuse(states)
