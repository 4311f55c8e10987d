"""SmolLM2-135M-Instruct in int8: the distribution is near float32's, and drafts change nothing."""

import pytest

pytestmark = pytest.mark.slow

MOST = 0.005  # mean KL of prose, chat and code


def test_divergence_is_within_its_bound(smollm2, tmp_path, report):
    divergence = smollm2.divergence("int8", tmp_path)
    report(f"SmolLM2 int8: KL {divergence:.4f}")
    assert divergence <= MOST


def test_text_is_same_for_every_k(smollm2):
    smollm2.check_every_k("int8", smollm2.prompts()[::4])
