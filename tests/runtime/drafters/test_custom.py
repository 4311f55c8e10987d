"""Custom drafters: violated rules are reported, and their drafts are not used."""

import numpy as np
import pytest

from fakes import Sure
from specedge import Distribution, Draft
from specedge.errors import DrafterError
from specedge.runtime.drafters.registry import CustomDrafter
from specedge.runtime.sampling.history import History
from specedge.sampling_options import Sampling


def distribution(*probs, ids=None):
    return Distribution(np.array(probs), None if ids is None else np.array(ids))


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (Draft([0, 1, 2]), "proposed 3 tokens, expected at most 2"),
        (Draft([3]), "token 3, which is not between 0 and 2"),
        (Draft([-1]), "token -1"),
        (Draft(["a"]), "'a', which is not a token id"),
        (Draft([1.0]), "1.0, which is not a token id"),
        (Draft([0], [distribution(1.0), distribution(1.0)]), "1 tokens and 2 distributions"),
        (Draft([0], None, ["a", "b"]), "1 tokens and 2 sources"),
        (Draft([0], [distribution(1.5, -0.5)]), "negative"),
        (Draft([0], [distribution(np.nan, 1.0)]), "add up to nan"),
        (Draft([0], [distribution(np.inf, 1.0)]), "add up to inf"),
        (Draft([0], [distribution(0.0, 1.0)]), "whose probability in its distribution is 0"),
        (Draft([0], [distribution(0.1, 0.2, 0.3, 0.4)]), "over 4 tokens, expected 3"),
        (Draft([0], [distribution(0.5, 0.5, ids=[0])]), "over 2 tokens"),
        (Draft([0], [distribution(0.5, 0.5, ids=[1, 0])]), "do not ascend"),
        (Draft([0], [distribution(0.5, 0.5, ids=[0, 3])]), "do not ascend within"),
        (Draft([0], [distribution(ids=[])]), "add up to 0"),
    ],
)
def test_an_invalid_draft_names_the_violated_rule(draft, message):
    class Wrong(Sure):
        def propose(self, history, max_tokens, sampling, uniforms):
            return draft

    with pytest.raises(DrafterError, match=f"the drafter 'sure' .*({message})"):
        CustomDrafter(Wrong(), 3).propose(History((0,)), 2, Sampling(1.0), np.zeros(2))


def test_numpy_integers_are_accepted_as_tokens():
    class Numbers(Sure):
        def propose(self, history, max_tokens, sampling, uniforms):
            return Draft(list(np.array([1, 2])))

    made = CustomDrafter(Numbers(), 3).propose(History((0,)), 2, Sampling(1.0), np.zeros(2))
    assert [type(token) for token in made.tokens] == [int, int]


def test_history_keeps_deprecated_attribute_name():
    history = History((0, 1)).then([2])
    assert history.num_kept == history.num_committed == 2
