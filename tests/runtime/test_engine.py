"""The engine: which passes run next, in which threads, and what ends a request."""

import itertools
import threading
import time
from types import SimpleNamespace

import pytest

from specedge.errors import SpecEdgeError
from specedge.runtime.decoding.protocols import Feed, Round
from specedge.runtime.decoding.timing import Stopwatch, TimedModel
from specedge.runtime.requests import engine as engine_module
from specedge.runtime.requests.engine import Engine, Job
from threads import in_threads


class Passes:
    """Model that logs its passes, alone or in batches."""

    def __init__(self, log, name, batch=None):
        self.log, self.name, self.batch = log, name, batch

    def forward(self, tokens, num_rows=None):
        self.log.append([(self.name, len(tokens))])
        return f"logits of {self.name}"

    def prefill(self, tokens):
        self.log.append([(self.name, len(tokens))])


class Batch:
    """Batched model of all `Passes` that refer to it."""

    def __init__(self, log, max_rows=100, max_logits=100):
        self.log, self.max_rows, self.max_logits = log, max_rows, max_logits

    def forward(self, feeds):
        self.log.append([(model.name, len(tokens)) for model, tokens, _ in feeds])
        return [f"logits of {model.name}" if num_rows else None for model, _, num_rows in feeds]


def job_of(model, lengths, part="verify", results=None, on_end=lambda: None):
    """Return a job with one pass of each length, each followed by a round."""
    stopwatch = Stopwatch()
    timed = TimedModel(model, stopwatch, part)

    def steps():
        for length in lengths:
            logits = yield Feed(timed, [0] * length, 1 if length < 32 else 0)
            if results is not None:
                results.append(logits)
            if length < 32:
                yield Round([1], 0, 0)

    return Job(steps(), stopwatch, on_end)


def run_all(engine, jobs):
    """Run jobs to their ends, in one thread."""
    while jobs := [job for job in jobs if not job.has_ended]:
        engine.wait(jobs)
        for job in jobs:
            job.take()


def test_requests_that_are_ready_share_a_pass_and_get_their_own_results():
    log, results, engine = [], {"a": [], "b": [], "c": []}, Engine()
    batch = Batch(log)
    jobs = [job_of(Passes(log, name, batch), [1, 2], results=results[name]) for name in "abc"]
    run_all(engine, jobs)
    assert log == [[("a", 1), ("b", 1), ("c", 1)], [("a", 2), ("b", 2), ("c", 2)]]
    assert results == {name: [f"logits of {name}"] * 2 for name in "abc"}
    assert engine.num_passes_by_length == {3: 1, 6: 1}


def test_a_single_request_runs_its_own_graph():
    log, engine = [], Engine()
    batch = Batch([])
    run_all(engine, [job_of(Passes(log, "a", batch), [1, 5])])
    assert log == [[("a", 1)], [("a", 5)]]
    assert batch.log == []


def test_passes_of_models_without_batches_take_turns_from_the_oldest_on():
    log, engine = [], Engine()
    run_all(engine, [job_of(Passes(log, name), [1, 1, 1]) for name in "ab"])
    names = [name for ((name, _),) in log]
    assert sorted(names[:2]) == sorted(names[2:4]) == ["a", "b"]


def test_a_pass_has_at_most_the_tested_number_of_rows():
    log, engine = [], Engine()
    batch = Batch(log, max_rows=10)
    run_all(engine, [job_of(Passes(log, name, batch), [4]) for name in "abc"])
    assert log == [[("a", 4), ("b", 4)], [("c", 4)]]


def test_a_pass_has_at_most_the_tested_number_of_logits():
    log, engine = [], Engine()
    batch = Batch(log, max_logits=2)
    run_all(engine, [job_of(Passes(log, name, batch), [4]) for name in "abc"])
    assert log == [[("a", 4), ("b", 4)], [("c", 4)]]


def test_draft_passes_run_first_so_that_requests_verify_together():
    log, engine = [], Engine()
    target, draft = Batch(log), Batch([])
    draft.log = log
    stopwatch = Stopwatch()

    def drafting(name, count):
        def steps():
            model = TimedModel(Passes(log, f"draft {name}", draft), stopwatch, "draft")
            for _ in range(count):
                yield Feed(model, [0], 1)
            yield Feed(TimedModel(Passes(log, name, target), stopwatch, "verify"), [0, 0], 2)
            yield Round([1], 0, 0)

        return Job(steps(), Stopwatch())

    run_all(engine, [drafting("a", 0), drafting("b", 1), drafting("c", 2)])
    assert log == [
        [("draft b", 1), ("draft c", 1)],
        [("draft c", 1)],
        [("a", 2), ("b", 2), ("c", 2)],
    ]
    assert engine.num_passes_by_length == {6: 1}


def test_draft_passes_delay_a_verify_pass_by_a_bounded_number_of_passes():
    log, engine = [], Engine()
    verifying = job_of(Passes(log, "a", Batch(log)), [1])
    drafting = job_of(Passes(log, "draft", Batch(log)), [1] * 100, part="draft")
    run_all(engine, [verifying, drafting])
    assert log.index([("a", 1)]) <= engine_module.MAX_DRAFT_PASSES


@pytest.fixture
def log(monkeypatch):
    """Return a log of passes; for the engine, those of 64 tokens take 4 s, others 1 s."""
    passes = []

    def now():
        return sum(4.0 if max(length for _, length in group) >= 64 else 1.0 for group in passes)

    monkeypatch.setattr(engine_module, "time", SimpleNamespace(perf_counter=now))
    return passes


@pytest.mark.parametrize("is_batched", [False, True])
def test_prompts_take_a_third_of_the_time_beside_other_requests(log, is_batched):
    engine = Engine()
    batch = Batch(log) if is_batched else None
    decoding = job_of(Passes(log, "text", batch), [1] * 40)
    reading = job_of(Passes(log, "prompt"), [64] * 4)
    run_all(engine, [reading, decoding])
    chunks = [i for i, group in enumerate(log) if ("prompt", 64) in group]
    assert len(chunks) == 4
    assert [later - earlier for earlier, later in itertools.pairwise(chunks)] == [9] * 3


@pytest.mark.parametrize("is_batched", [False, True])
def test_texts_of_other_threads_come_before_the_next_chunk_of_a_prompt(is_batched):
    """A thread that takes its event needs some time until it is back."""
    log, engine = [], Engine()
    batch = Batch(log, max_rows=64) if is_batched else None

    class Slow(Passes):
        def forward(self, tokens, num_rows=None):
            time.sleep(0.004)
            return super().forward(tokens, num_rows)

        def prefill(self, tokens):
            time.sleep(0.04)
            super().prefill(tokens)

    def request(name, lengths):
        job = job_of(Slow(log, name, batch), lengths)
        while engine.next(job) is not None:
            pass

    in_threads(lambda: request("prompt", [64] * 8), lambda: request("text", [1] * 20))
    texts = [i for i, group in enumerate(log) if group == [("text", 1)]]
    num_chunks_between = texts[-1] - texts[0] + 1 - len(texts)
    assert num_chunks_between <= 3  # 20 passes of a tenth of a chunk's time


def test_short_prompts_share_the_passes_of_long_ones():
    log, engine = [], Engine()
    batch = Batch(log, max_rows=128)
    long, short = (
        job_of(Passes(log, name, batch), [64] * count)
        for name, count in (("long", 8), ("short", 2))
    )
    run_all(engine, [long, short])
    assert log[:2] == [[("long", 64), ("short", 64)]] * 2


@pytest.mark.parametrize("is_batched", [False, True])
def test_a_short_prompt_runs_before_the_rest_of_a_long_one(is_batched):
    log, engine = [], Engine()
    batch = Batch(log, max_rows=128) if is_batched else None
    long = job_of(Passes(log, "long", batch), [64, 64, 64, 1, 64, 64])
    engine.next(long)
    short = job_of(Passes(log, "short", batch), [64, 64])
    run_all(engine, [long, short])
    assert log[4:] == [[("short", 64)]] * 2 + [[("long", 64)]] * 2


@pytest.mark.parametrize("is_batched", [False, True])
def test_a_short_prompt_runs_before_the_rest_of_a_long_one_beside_a_text(log, is_batched):
    engine = Engine()
    batch = Batch(log, max_rows=65) if is_batched else None
    long = job_of(Passes(log, "long", batch), [64, 64, 64, 1, 64, 64])
    engine.next(long)
    short = job_of(Passes(log, "short", batch), [64, 64])
    text = job_of(Passes(log, "text", batch), [1] * 60)
    run_all(engine, [long, text, short])
    prompts = [name for group in log[4:] for name, length in group if length == 64]
    assert prompts == ["short", "short", "long", "long"]


def test_a_long_prompt_waits_for_a_bounded_number_of_shorter_ones():
    log, engine = [], Engine()
    long = job_of(Passes(log, "long"), [64, 64, 64, 1, 64])
    engine.next(long)
    shorts = [job_of(Passes(log, "short"), [64]) for _ in range(40)]
    run_all(engine, [long, *shorts])
    assert log[4:].index([("long", 64)]) <= engine_module.MAX_PROMPT_WAIT + 1


@pytest.mark.parametrize("is_batched", [False, True])
def test_requests_wait_for_a_bounded_number_of_passes(log, is_batched):
    """Six others are always there: a third has long prompts, and half of them draft."""
    engine, numbers = Engine(), itertools.count()
    target, drafter = (Batch(log, max_rows=66) if is_batched else None for _ in range(2))

    def job(name, num_chunks, num_drafts, num_rounds):
        def steps():
            verify = TimedModel(Passes(log, name, target), Stopwatch(), "verify")
            draft = TimedModel(Passes(log, "draft", drafter), Stopwatch(), "draft")
            for _ in range(num_chunks):
                yield Feed(verify, [0] * 64, 0)
            for _ in range(num_rounds):
                for _ in range(num_drafts):
                    yield Feed(draft, [0], 1)
                yield Feed(verify, [0], 1)
                yield Round([1], 0, 0)

        return Job(steps(), Stopwatch())

    def other():
        number = next(numbers)
        return job("other", 4 * (number % 3 == 0), 3 * (number % 2), 3)

    observed = [job("text", 0, 0, 50), job("prompt", 8, 0, 1)]
    others = [other() for _ in range(6)]
    while not all(request.has_ended for request in observed):
        assert len(log) < 1000
        engine.wait([request for request in (*others, *observed) if not request.has_ended])
        for request in (*others, *observed):
            request.take()
        others = [other() if request.has_ended else request for request in others]
    num_requests = len(observed) + len(others)
    limits = {
        "text": engine_module.MAX_DRAFT_PASSES + num_requests,
        "prompt": (1 + 8) * num_requests,  # 8 seconds for other passes after one of a prompt
    }
    for name, limit in limits.items():
        passes = [i for i, group in enumerate(log) if name in dict(group)]
        assert len(passes) == {"text": 50, "prompt": 9}[name]
        assert max(later - earlier for earlier, later in itertools.pairwise([-1, *passes])) <= limit


def test_a_request_that_nobody_reads_does_not_delay_others():
    log, engine = [], Engine()
    unread = job_of(Passes(log, "unread"), [1, 1])
    assert engine.next(unread)
    run_all(engine, [job_of(Passes(log, "read"), [1] * 20)])
    assert log == [[("unread", 1)], *[[("read", 1)]] * 20]


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit, None])
@pytest.mark.parametrize("is_batched", [False, True])
def test_requests_go_on_after_their_leader_ends_within_a_pass(error, is_batched):
    """It fails or is cancelled while the other threads wait for it."""
    log, engine, results = [], Engine(), []
    batch, begun = Batch(log) if is_batched else None, threading.Event()

    class Ending(Passes):
        def forward(self, tokens, num_rows=None):
            begun.set()
            while len(engine._waiters) < 3:
                time.sleep(0.001)
            if error is not None:
                raise error
            leader.is_cancelled = True
            return super().forward(tokens, num_rows)

    leader = job_of(Ending([], "leader", batch), [1, 1])

    def lead():
        try:
            while engine.next(leader):
                pass
        except BaseException as raised:
            results.append(type(raised))

    def follow(name):
        begun.wait(30)
        job = job_of(Passes(log, name, batch), [1] * 5)
        while engine.next(job):
            pass

    in_threads(lead, lambda: follow("a"), lambda: follow("b"))
    assert results == ([] if error is None else [error])
    assert sorted(itertools.chain(*log)) == [("a", 1)] * 5 + [("b", 1)] * 5
    assert not engine.is_running


def test_threads_share_passes():
    """Each thread takes its event, and is back before the next pass."""
    log, engine = [], Engine()

    class Waiting(Batch):
        def forward(self, feeds):
            time.sleep(0.02)  # in which the other threads arrive
            return super().forward(feeds)

    batch = Waiting(log)

    class WaitingAlone(Passes):
        def forward(self, tokens, num_rows=None):
            time.sleep(0.02)
            return super().forward(tokens, num_rows)

    def request(name):
        job = job_of(WaitingAlone(log, name, batch), [1] * 10)
        while engine.next(job) is not None:
            pass

    in_threads(*(lambda name=name: request(name) for name in "abcd"))
    assert sum(len(group) for group in log) == 40
    assert len(log) <= 20


def test_an_error_ends_its_request_only():
    log, engine = [], Engine()

    class Broken(Passes):
        def forward(self, tokens, num_rows=None):
            raise ZeroDivisionError

    broken, sound = job_of(Broken(log, "a"), [1, 1]), job_of(Passes(log, "b"), [1, 1])
    engine.wait([broken, sound])
    while not broken.has_ended:
        engine.wait([broken])
    with pytest.raises(ZeroDivisionError):
        broken.take()
    run_all(engine, [sound])
    assert log == [[("b", 1)]] * 2


def test_a_failing_batch_ends_its_requests():
    log, engine = [], Engine()

    class Broken(Batch):
        def forward(self, feeds):
            raise MemoryError

    batch = Broken(log)
    jobs = [job_of(Passes(log, name, batch), [1]) for name in "ab"]
    engine.wait(jobs)
    for job in jobs:
        with pytest.raises(MemoryError):
            job.take()


def test_a_cancelled_request_ends_before_its_next_pass():
    log, engine = [], Engine()
    job = job_of(Passes(log, "a"), [1, 1])
    assert engine.next(job)
    job.is_cancelled = True
    assert engine.next(job) is None
    assert len(log) == 1


@pytest.mark.parametrize("num_jobs", [1, 2])
def test_a_request_that_is_cancelled_during_its_pass_ends_after_it(num_jobs):
    """Another thread must not close its generator, nor free its slot, while the pass runs."""
    log, engine, ended, ended_during_pass = [], Engine(), [], []

    class Cancelling(Passes):
        def forward(self, tokens, num_rows=None):
            in_threads(jobs[0].cancel)
            ended_during_pass.append([*ended])
            return super().forward(tokens, num_rows)

    class CancellingBatch(Batch):
        def forward(self, feeds):
            in_threads(jobs[0].cancel)
            ended_during_pass.append([*ended])
            return super().forward(feeds)

    batch = CancellingBatch(log) if num_jobs > 1 else None
    jobs = [
        job_of(Cancelling(log, name, batch), [1, 1], on_end=lambda name=name: ended.append(name))
        for name in "ab"[:num_jobs]
    ]
    engine.wait(jobs)
    assert jobs[0].take() is None
    assert ended == ["a"]
    assert ended_during_pass[0] == []
    run_all(engine, jobs[1:])


def test_code_that_cancels_its_own_request_runs_to_its_next_operation():
    engine, log = Engine(), []
    stopwatch = Stopwatch()

    def steps():
        job.cancel()
        log.append("continues")
        yield Feed(TimedModel(Passes(log, "a"), stopwatch, "verify"), [0], 1)

    job = Job(steps(), stopwatch)
    assert engine.next(job) is None
    assert log == ["continues"]


def test_a_closed_engine_ends_requests_with_an_error():
    log, engine = [], Engine()
    job = job_of(Passes(log, "a"), [1])
    engine.close()
    with pytest.raises(SpecEdgeError, match="closed"):
        engine.next(job)
    assert not log


def test_threads_that_pause_again_and_again_do_not_stop_a_request():
    log, engine, has_ended = [], Engine(), threading.Event()

    def pause():
        while not has_ended.is_set():
            with engine.paused():
                pass

    job = job_of(Passes(log, "a"), [1] * 100)
    threads = [threading.Thread(target=pause, daemon=True) for _ in range(1)]
    threads.append(threading.Thread(target=run_all, args=(engine, [job]), daemon=True))
    for thread in threads:
        thread.start()
    threads[-1].join(20)
    has_ended.set()
    assert job.has_ended
    assert len(log) == 100


def test_no_pass_runs_while_the_engine_is_paused():
    log, engine = [], Engine()
    job = job_of(Passes(log, "a"), [1])
    with engine.paused():
        thread = threading.Thread(target=lambda: engine.next(job))
        thread.start()
        time.sleep(0.02)
        assert not log
    thread.join(30)
    assert log


def test_other_requests_run_while_the_code_of_one_is_outside_the_engine():
    log, engine, stopwatch = [], Engine(), Stopwatch()
    other_has_ended = threading.Event()

    def steps():
        with engine.released(stopwatch):
            other_has_ended.wait(30)
        assert log == [[("other", 1)]]
        yield Round([1], 0, 0)

    def other():
        assert engine.next(job_of(Passes(log, "other"), [1]))
        other_has_ended.set()

    outside = Job(steps(), stopwatch)
    assert not any(in_threads(lambda: engine.next(outside), other)[1:])
    assert other_has_ended.is_set()
    assert not engine.is_running


def test_an_interrupt_outside_the_engine_is_raised_once_its_thread_leads_again():
    engine, stopwatch, log = Engine(), Stopwatch(), []

    def steps():
        with engine.released(stopwatch):
            raise KeyboardInterrupt
        yield

    with pytest.raises(KeyboardInterrupt):
        engine.next(Job(steps(), stopwatch))
    assert not engine.is_running
    assert engine.next(job_of(Passes(log, "a"), [1]))


def test_an_interrupt_of_the_main_thread_spares_requests_of_other_threads():
    """The main thread hands over as soon as another thread waits."""
    log, engine = [], Engine()
    begun, threads = threading.Event(), []

    class Logging(Passes):
        def forward(self, tokens, num_rows=None):
            threads.append((self.name, threading.current_thread() is threading.main_thread()))
            begun.set()
            if self.name == "main" and len(threads) == 1:
                while not other.is_alive() or not engine._claims:
                    time.sleep(0.001)
            return super().forward(tokens, num_rows)

    def request():
        begun.wait(30)
        job = job_of(Logging(log, "other"), [1] * 3)
        while engine.next(job):
            pass

    other = threading.Thread(target=request)
    other.start()
    job = job_of(Logging(log, "main"), [1] * 3)
    while engine.next(job):
        pass
    other.join(30)
    assert {is_main for name, is_main in threads if name == "other"} == {False}
    assert [name for name, _ in threads].count("other") == 3


def test_an_interrupted_thread_leaves_the_engine_to_others():
    log, engine = [], Engine()

    class Interrupting(Passes):
        def forward(self, tokens, num_rows=None):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.next(job_of(Interrupting(log, "a"), [1]))
    assert in_threads(lambda: bool(engine.next(job_of(Passes(log, "b"), [1])))) == [True]
