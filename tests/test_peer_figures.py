"""Interleaved timings of the comparison, and the tables that are made of them."""

import json

import pytest

import reporting
from measuring import AUTO, Figures, Round, Run, Variant, loaded, measure_rounds
from processes import WorkerError

PROMPTS = [("chat", [1, 2]), ("code", [3])]


class Peer:
    """A worker that answers at once, and notes what it was asked."""

    def __init__(self, name, log, milliseconds=1.0):
        self.name, self.log, self.milliseconds = name, log, milliseconds

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.log.append(("end", self.name))

    def ask(self, op, **arguments):
        if op == "load":
            if arguments["model"].endswith("broken"):
                raise WorkerError("cannot load")
            return {"version": "7"}
        if op == "passes":
            return {"seconds_by_length": [[0.002, 0.001], [0.003]], "peak_bytes": 5}
        k = arguments["k"]
        self.log.append((self.name, k, arguments["prompt"][0]))
        seconds = self.milliseconds * arguments["tokens"] / 1000 / (2 if k else 1)
        counts = {"accepted": 3, "drafted": 4} if k else {}
        return {
            "tokens": [7] * arguments["tokens"],
            "prefill_seconds": 0.0,
            "decode_seconds": seconds,
            **counts,
        }


def measured(rounds=2, seconds=60.0, figures=None):
    """Figures of two variants, and the log of what was asked."""
    log = []
    figures = figures or Figures("model")
    for variant in (
        Variant("llamacpp", "Q8_0", "q8", 100_000_000),
        Variant("specedge", "int8", "int8", 200_000_000, has_drafts=True),
    ):
        figures.variants.setdefault(variant.name, variant)
    workers = {
        "llamacpp Q8_0": Peer("llama", log, 6.0),
        "specedge int8": Peer("ours", log, 8.0),
    }
    for _ in measure_rounds(workers, figures, PROMPTS, 4, rounds, seconds):
        pass
    return figures, log


def test_every_setting_runs_each_prompt_in_turn_another_one_first_each_time():
    _, log = measured(rounds=2)
    assert log == [
        ("llama", 0, 1), ("ours", 0, 1), ("ours", AUTO, 1),
        ("ours", 0, 3), ("ours", AUTO, 3), ("llama", 0, 3),
        ("ours", 0, 1), ("ours", AUTO, 1), ("llama", 0, 1),
        ("ours", AUTO, 3), ("llama", 0, 3), ("ours", 0, 3),
    ]  # fmt: skip


def test_limited_run_goes_on_where_it_ended():
    figures, _ = measured(rounds=2, seconds=0.0)
    assert len(figures.rounds) == 1
    again = Figures.parse(json.loads(json.dumps(figures.json())))
    assert again == figures
    again, log = measured(rounds=2, figures=again)
    assert len(again.rounds) == 2
    assert len(log) == 6


def test_rounds_of_another_model_are_discarded():
    figures, _ = measured(rounds=2)
    figures.variants["specedge int8"].model = "exported anew"
    again, log = measured(rounds=2, figures=figures)
    assert len(again.rounds) == 2
    assert len(log) == 12


def test_text_of_another_length_is_no_measurement():
    log = []
    peer = Peer("llama", log)
    peer.ask = lambda op, **_: {"tokens": [1], "prefill_seconds": 0, "decode_seconds": 0}
    figures = Figures("model", variants={"llamacpp Q8_0": Variant("llamacpp", "Q8_0")})
    with pytest.raises(WorkerError, match="gave 1 tokens of 4"):
        next(measure_rounds({"llamacpp Q8_0": peer}, figures, PROMPTS, 4, 1, 1))


def test_variant_that_cannot_be_loaded_gets_a_reason_and_the_others_run(tmp_path):
    log, said = [], []
    variants = [Variant("llamacpp", "Q8_0", "q8"), Variant("openvino", "int8", "broken")]
    options = {"models": tmp_path, "prompt": [1], "threads": 2, "say": said.append}
    with loaded(variants, lambda variant: Peer(variant.peer, log), **options) as workers:
        assert list(workers) == ["llamacpp Q8_0"]
    assert variants[0].version == "7"
    assert variants[1].reason == "cannot load"
    assert said == ["openvino int8: cannot load"]
    assert log[-2:] == [("end", "openvino"), ("end", "llamacpp")]


def run(variant, milliseconds, k=0, prompt=0, text="a"):
    return Run(variant, k, prompt, 10, 0.0, milliseconds / 100, text)


def test_requests_are_minima_and_medians_of_rounds_and_ratios_of_pairs():
    rounds = [
        Round("", "2026-01-01", [run("llamacpp Q8_0", 6.0), run("specedge int8", 3.0)], {}),
        Round("", "2026-01-01", [run("llamacpp Q8_0", 9.0), run("specedge int8", 6.0)], {}),
        Round("", "2026-01-01", [run("llamacpp Q8_0", 6.0), run("specedge int8", 9.0)], {}),
    ]
    figures = Figures("model", ["chat"], {}, rounds)
    ours = [one.runs[1] for one in rounds]
    assert reporting.request_ms(ours) == (pytest.approx(3), pytest.approx(6))
    assert reporting.ratio(figures, ours) == pytest.approx(1.5)
    assert reporting.ratio(Figures("model", ["chat"]), ours) is None


def test_tables_list_figures_and_what_could_not_be_measured():
    figures, _ = measured()
    text = {"tokens": 9, "kl": 0.0042, "top1": 0.95, "perplexity": 8.0}
    text["reference_perplexity"] = 7.9
    figures.variants["specedge int8"].quality = dict.fromkeys(reporting.TEXTS, text)
    figures.variants["genai int4"] = Variant("genai", "int4", reason="not converted: no builder")
    page = reporting.page([figures], "A machine", "compare")
    rows = [line for line in page.splitlines() if line.startswith("| specedge int8 |")]
    assert rows[0].split(" | ")[1:6] == [
        "200", "0.0042 / 0.0042 / 0.0042", "**0.0042**", "95.0%", "8.0 / 8.0 / 8.0"
    ]  # fmt: skip
    assert rows[0].endswith("| 1.0 (1.5) | 3.0 (3.0) | 8.00 (8.00) | 4.00 (4.00) | 0.75 | 1.50 |")
    assert "| specedge int8 drafted | 4.00 (4.00) | 4.00 (4.00) | 1.50 | 1.50 | 75% | 2/2 |" in page
    assert "* onnxruntime-genai int4: not converted: no builder" in page
    drawn = reporting.chart(figures)
    assert drawn.startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    assert "specedge int8, KL 0.004" in drawn
