"""What the comparison with other libraries measures, and the figures that it makes of it."""

import pytest

from measuring import Run, Setting, Tried, best, generate, in_turn, sweep
from processes import Loaded, WorkerError
from reporting import Row, picture, row, table


def loaded(peer="specedge", precision="fp32", draft=None, threads=1):
    return Loaded(peer, precision, draft, threads)


def run(setting, turn, prompt, seconds, tokens=(1, 2), **counts):
    return Run(setting, turn, prompt, tokens, 0.0, seconds, **counts)


class Answers:
    """A pool whose times are a function of the setting."""

    def __init__(self, seconds, tokens=lambda loaded, k: 0):
        self.seconds, self.tokens, self.asked = seconds, tokens, []

    def ask(self, loaded, prompt, tokens, k):
        self.asked.append((loaded, k))
        seconds = self.seconds(loaded, k)
        if seconds is None:
            raise WorkerError("has no such thing")
        ids = [self.tokens(loaded, k)] * tokens
        return {"tokens": ids, "prefill_seconds": 0.0, "decode_seconds": seconds}


def test_a_sweep_takes_the_best_threads_and_then_drafts_and_k():
    def seconds(one, k):
        if k == 0:
            return 1.0 / one.threads
        return None if one.draft_precision == "int4" and k == 6 else 1 / k

    pool = Answers(seconds)
    tried = sweep(pool, "genai", "fp32", ["fp32", "int4"], [[1]], 5, [1, 2], [2, 4, 6])
    assert len(tried) == 2 + 2 * 3
    assert {one.setting.loaded.threads for one in tried[2:]} == {2}
    assert best(tried[:2]) == Setting(loaded("genai", threads=2), 0)
    assert best(tried[2:]) == Setting(loaded("genai", draft="fp32", threads=2), 6)
    assert [one.reason for one in tried if one.seconds is None] == ["has no such thing"]


def test_without_plain_decoding_no_draft_is_tried():
    tried = sweep(Answers(lambda one, k: None), "genai", "fp32", ["fp32"], [[1]], 5, [1], [2])
    assert [one.seconds for one in tried] == [None]
    assert best(tried) is None
    assert best([]) is None


def test_every_round_has_every_setting_and_begins_with_another():
    settings = [Setting(loaded(name), 0) for name in "abc"]
    pool = Answers(lambda one, k: None if one.peer == "c" else 1.0)
    *early, (runs, failed) = in_turn(pool, settings, [[1], [2]], 5, 3)
    assert len(early) == 2
    assert [one.peer for one, _ in pool.asked] == list("aabbcbbaaaabb")
    assert len(runs) == 3 * 2 * 2
    assert failed == {settings[2]: "has no such thing"}


def test_a_text_of_another_length_is_no_measurement():
    pool = Answers(lambda one, k: 1.0)
    pool.ask = lambda *_, **__: {"tokens": [1], "prefill_seconds": 0, "decode_seconds": 0}
    with pytest.raises(WorkerError, match="gave 1 tokens of 5"):
        generate(pool, Setting(loaded(), 0), (0, 0), [1], 5)


OURS, OURS_DRAFT = Setting(loaded(), 0), Setting(loaded(draft="int8"), 4)
THEIRS, THEIRS_DRAFT = Setting(loaded("genai"), 0), Setting(loaded("genai", draft="fp32"), 2)
RUNS = [
    *(run(OURS, turn, p, 4.0 + turn) for turn in range(3) for p in range(2)),
    *(run(OURS_DRAFT, turn, p, 2.0, accepted=3, drafted=4) for turn in range(3) for p in range(2)),
    *(run(THEIRS, turn, p, 8.0 + 2 * turn) for turn in range(3) for p in range(2)),
    *(run(THEIRS_DRAFT, turn, 0, 3.0) for turn in range(3)),
    *(run(THEIRS_DRAFT, turn, 1, 3.0, tokens=(1, 3)) for turn in range(3)),
]


def test_figures_are_of_rounds_and_ratios_of_runs_beside_each_other():
    plain = row(THEIRS, RUNS, 2.0, 3e9, "0.18")
    assert (plain.min_ms, plain.median_ms) == (4000, 5000)
    assert (plain.load_seconds, plain.memory_gb) == (2.0, 3.0)
    assert plain.times_ours == 2.0
    assert plain.speedup == 1.0
    ours = row(OURS_DRAFT, RUNS, 2.0, 3e9, "1")
    assert ours.speedup == 2.5
    assert ours.accepted == 0.75
    assert row(THEIRS_DRAFT, RUNS, 1, 1, "").times_ours == 1.5
    assert row(THEIRS_DRAFT, RUNS, 1, 1, "").accepted is None


def test_texts_are_compared_prompt_by_prompt():
    found = row(THEIRS_DRAFT, RUNS, 1, 1, "")
    assert (found.same_as_plain, found.same_as_ours) == ("1/2", "1/2")
    alone = row(THEIRS, [one for one in RUNS if one.setting == THEIRS], 1, 1, "")
    assert (alone.same_as_plain, alone.same_as_ours) == ("2/2", "")
    assert alone.times_ours is None


def test_the_table_lists_what_could_not_be_measured_with_its_reason():
    rows = [row(OURS, RUNS, 2.0, 3e9, "1"), row(THEIRS_DRAFT, RUNS, 2.0, 3e9, "2")]
    rows.append(Row("llamacpp", "fp32", "plain", "not built: a|b"))
    lines = table(rows).splitlines()
    assert len(lines) == 5
    assert len({line.count("|") for line in lines}) == 1
    assert "| 2000.0 (2500.0) |" in lines[2]
    assert "not built: a/b" in lines[4]
    drawn = picture(rows, "A pair")
    assert drawn.startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    assert "llama" not in drawn
    assert "ORT GenAI fp32" in drawn


def test_failed_settings_are_not_the_best():
    setting = Setting(loaded(), 0)
    assert best([Tried(setting, None, "no"), Tried(setting, 1.0)]) == setting
