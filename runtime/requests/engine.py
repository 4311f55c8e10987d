"""Engine: runs the passes of all requests of a pipeline.

It has no thread. The threads that wait for their requests take turns to lead it (flat combining,
Hendler et al. 2010): the leader runs the operations of all waiting requests until one of its own
has an event, and then hands over. So a request that is alone runs in its caller's thread.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from specedge.errors import SpecEdgeError

from ..decoding.protocols import BatchedModel, Feed, Operation, Operations, Round
from ..decoding.timing import Stopwatch, TimedModel

PROMPT_LENGTH = 32  # tokens from which on a pass counts as one over a prompt
MAX_DRAFT_PASSES = 16  # draft passes in a row while a request waits for its verify pass
_IDLE_SECONDS = 0.05  # between looks at jobs whose code runs elsewhere
CLOSED = "this pipeline is closed; load the bundle again"

T = TypeVar("T")


class Job:
    """Operations and events of a request, for the engine.

    Attributes:
        event: Round that its thread has not taken yet.
        has_ended: True if no event follows.
        result: Return value of the generator.
        seconds: Time of its code and passes so far.
        operation: Operation that it waits for; None before its code runs on.
        since: Number of passes of the engine before it.
        is_away: True while its code runs outside the engine.
        waiter: Thread that waits for it.
        thread: Identifier of the thread that waited for it last.
    """

    def __init__(self, steps: Generator[Operation | Round, Any, Any], stopwatch: Stopwatch) -> None:
        self.event: Round | None = None
        self.has_ended = False
        self.result: Any = None
        self.seconds = 0.0
        self.operation: Operation | None = None
        self.since = 0
        self.is_away = False
        self.is_cancelled = False
        self.waiter: _Waiter | None = None
        self.thread = 0
        self._error: BaseException | None = None
        self._steps, self._stopwatch = steps, stopwatch
        self._part: str | None = "other"
        self._input: Any = None

    @property
    def is_done(self) -> bool:
        """True if there is something for its thread to take."""
        return self.event is not None or self.has_ended

    @property
    def model(self) -> TimedModel | None:
        """Model of its operation."""
        model = getattr(self.operation, "model", None)
        return model if isinstance(model, TimedModel) else None

    @property
    def batch(self) -> BatchedModel | None:
        """Batched model of its pass; None if the operation is run alone."""
        model = self.model if isinstance(self.operation, Feed) else None
        return None if model is None else model.batch

    @property
    def num_tokens(self) -> int:
        """Number of tokens of its pass; 0 for other operations."""
        return len(self.operation.tokens) if isinstance(self.operation, Feed) else 0

    @property
    def drafts(self) -> bool:
        """True if its operation is a draft model's."""
        return self.model is not None and self.model.is_draft

    def take(self) -> Round | None:
        """Return its event; None if it has ended. Raises its error once."""
        event, self.event = self.event, None
        error, self._error = self._error, None
        if error is not None:
            raise error
        return event

    def advance(self) -> None:
        """Run its code up to the next operation or event."""
        with _Clock(self):
            try:
                step = self._steps.send(self._input)
            except StopIteration as end:
                self.has_ended, self.result = True, end.value
            except BaseException as error:
                self.end(error)
            else:
                if isinstance(step, Round):
                    self.event = step
                else:
                    self.operation = step
            self._input = None

    def run(self) -> None:
        """Run its operation."""
        assert self.operation is not None
        with _Clock(self):
            try:
                self.resume(self.operation.run())
            except BaseException as error:
                self.end(error)

    def resume(self, result: Any) -> None:
        """Set the result of its operation."""
        self.operation, self._input = None, result

    def end(self, error: BaseException | None = None) -> None:
        """End it between its operations, with an error for its thread or without."""
        self.operation, self._error, self.has_ended = None, error, True
        self._steps.close()


class _Clock:
    """Context in which the time of a job counts."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __enter__(self) -> None:
        self._begin = time.perf_counter()
        self._job._stopwatch.switch(self._job._part)

    def __exit__(self, *_: object) -> None:
        self._job._part = self._job._stopwatch.switch(None)
        self._job.seconds += time.perf_counter() - self._begin


class _Waiter:
    """Thread that waits for an event of its jobs or, without jobs, for the engine to stand still.

    Attributes:
        is_away: True while the thread, which led the engine, runs a job's code outside of it.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = jobs
        self.thread = threading.get_ident()
        self.is_main = threading.current_thread() is threading.main_thread()
        self.is_away = False
        self._wake = threading.Lock()
        self._wake.acquire()

    @property
    def is_done(self) -> bool:
        return any(job.is_done for job in self.jobs)

    @property
    def may_lead(self) -> bool:
        return not (self.is_away or self.is_done)

    def sleep(self) -> None:
        """Wait for `wake`."""
        self._wake.acquire()

    def wake(self) -> None:
        """Wake the thread now, or at its next `sleep`. Only the leader calls it."""
        if self._wake.locked():
            self._wake.release()


class Engine:
    """Queue of the requests that wait for passes, which chooses the next pass.

    Requests that wait for passes of one batched model share a pass. Draft passes run before verify
    passes, so that requests verify together. While others wait, a prompt takes a third of the time.

    Attributes:
        num_passes: Number of passes so far.
        num_passes_by_length: Number of passes but draft passes, by number of tokens.
    """

    def __init__(self) -> None:
        self.num_passes = 0
        self.num_passes_by_length = Counter[int]()
        self.is_closed = False
        self._lock = threading.Lock()
        self._has_arrived = threading.Condition(self._lock)
        self._waiters: list[_Waiter] = []
        self._leader: _Waiter | None = None
        self._claims: list[_Waiter] = []  # waiters that are to lead from the next pass on
        self._current: Job | None = None  # whose code runs
        self._absent = weakref.WeakSet[Job]()  # jobs whose threads have just taken an event
        self._pass_seconds = 0.0  # time of the last pass
        self._prompt_seconds = 0.0  # time of the last pass over a prompt
        self._other_seconds = 0.0  # time of all passes since then
        self._num_draft_passes = 0  # in a row

    @property
    def is_running(self) -> bool:
        """True while a thread leads."""
        return self._leader is not None

    @property
    def num_requests(self) -> int:
        """Number of requests that wait, or did until just now."""
        return max(1, sum(len(waiter.jobs) for waiter in self._waiters) + len(self._absent))

    def next(self, job: Job) -> Round | None:
        """Wait for a job's next event and return it; None if the job has ended."""
        self.wait([job])
        return job.take()

    def run(self, operations: Operations[T], stopwatch: Stopwatch) -> T:
        """Run operations among those of other requests; return their result."""
        job = Job(operations, stopwatch)
        self.next(job)
        result: T = job.result
        return result

    def wait(self, jobs: Sequence[Job]) -> None:
        """Wait until one of the jobs has an event or has ended."""
        waiter = _Waiter(jobs)
        self._enter(waiter)
        try:
            while not waiter.is_done:
                if self._leader is not waiter:
                    waiter.sleep()
                elif self._claims:
                    self._hand_over()
                else:
                    self._step()
        finally:
            self._leave(waiter)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let no pass run during the block."""
        waiter = _Waiter(())
        self._enter(waiter)
        try:
            while self._leader is not waiter:
                waiter.sleep()
            yield
        finally:
            self._leave(waiter)

    @contextmanager
    def released(self, stopwatch: Stopwatch) -> Iterator[None]:
        """Let other threads lead during a block in the code of a job, which does not count it.

        Raises:
            SpecEdgeError: The pipeline was closed meanwhile.
        """
        leader, job = self._leader, self._current
        assert leader is not None
        assert job is not None
        leader.is_away = job.is_away = True
        self._hand_over()
        try:
            with stopwatch.part("waiting"):
                yield
        finally:
            self._lead_again(leader)
            job.is_away, self._current = False, job
        if self.is_closed:
            raise SpecEdgeError(CLOSED)

    def close(self) -> None:
        """End all requests with an error."""
        with self.paused():
            self.is_closed = True

    def _enter(self, waiter: _Waiter) -> None:
        with self._lock:
            self._waiters.append(waiter)
            for job in waiter.jobs:
                job.waiter, job.thread = waiter, waiter.thread
                self._absent.discard(job)
            if self._leader is None:
                self._leader = waiter
                return
            # An interrupt of the main thread must not end another thread's request.
            if not waiter.jobs or (self._leader.is_main and not waiter.is_main):
                self._claims.append(waiter)
            self._has_arrived.notify_all()

    def _leave(self, waiter: _Waiter) -> None:
        with self._lock:
            self._waiters.remove(waiter)
            if waiter in self._claims:
                self._claims.remove(waiter)
            for job in waiter.jobs:
                job.waiter = None
                if not job.has_ended:
                    self._absent.add(job)
        if self._leader is waiter:
            self._hand_over()

    def _hand_over(self) -> None:
        """Let another thread lead: one with a claim, else one that is not the main thread."""
        with self._lock:
            leader = self._claims.pop(0) if self._claims else None
            if leader is None:
                candidates = [waiter for waiter in self._waiters if waiter.may_lead]
                leader = min(candidates, key=lambda waiter: waiter.is_main, default=None)
            self._leader = leader
            if leader is not None:
                leader.wake()

    def _lead_again(self, waiter: _Waiter) -> None:
        """Wait until a thread leads again; an interrupt is raised only then."""
        with self._lock:
            if self._leader is None:
                self._leader = waiter
            else:
                self._claims.append(waiter)
                self._has_arrived.notify_all()
        interrupt: BaseException | None = None
        while self._leader is not waiter:
            try:
                waiter.sleep()
            except BaseException as error:
                interrupt = error
        waiter.is_away = False
        if interrupt is not None:
            raise interrupt

    def _step(self) -> None:
        """Run the code of all jobs that can continue; if there is none, run a pass."""
        with self._lock:
            jobs = [job for waiter in self._waiters for job in waiter.jobs if not job.is_done]
        jobs = [job for job in jobs if not job.is_away]
        has_advanced = False
        for job in jobs:
            # Another thread may have led meanwhile.
            if job.is_done or job.is_away:
                continue
            if self.is_closed:
                job.end(SpecEdgeError("the pipeline of this stream was closed"))
            elif job.is_cancelled:
                job.end()
            elif job.operation is None:
                self._current, job.since = job, self.num_passes
                job.advance()
                self._current = None
            else:
                continue
            has_advanced = True
            self._wake(job)
        if has_advanced:
            return
        if not jobs:
            self._wait_for_arrivals(_IDLE_SECONDS)
        elif not self._run_pass(jobs):
            # Sharing a pass saves at most a pass.
            self._wait_for_arrivals(self._pass_seconds / 2)

    def _wake(self, job: Job) -> None:
        if job.is_done and job.waiter is not None and job.waiter is not self._leader:
            job.waiter.wake()

    def _wait_for_arrivals(self, seconds: float) -> None:
        """Wait for another thread; expect no job to be back soon if none arrives."""
        with self._lock:
            if not self._has_arrived.wait(seconds):
                self._absent.clear()

    def _run_pass(self, jobs: Sequence[Job]) -> bool:
        """Run a pass; return False, without a pass, if others may share it or come first."""
        group = self._choose(jobs)
        lengths = [job.num_tokens for job in group]
        reads_prompt = max(lengths) >= PROMPT_LENGTH
        if (reads_prompt or group[0].batch is not None) and self._expects_jobs():
            return False
        begin = time.perf_counter()
        is_draft = group[0].drafts
        if len(group) == 1:
            group[0].run()
        else:
            self._run_batch(group)
        seconds = time.perf_counter() - begin
        self.num_passes += 1
        if is_draft:
            self._num_draft_passes += 1
        else:
            self._num_draft_passes = 0
            self.num_passes_by_length[sum(lengths)] += 1
        self._pass_seconds = seconds
        if reads_prompt:
            self._prompt_seconds, self._other_seconds = seconds, 0.0
        else:
            self._other_seconds += seconds
        for job in group:
            self._wake(job)
        return True

    def _expects_jobs(self) -> bool:
        """Return True if other threads may be back soon."""
        if not self._absent:
            return False
        thread = threading.get_ident()
        with self._lock:
            return any(job.thread != thread for job in self._absent if not job.has_ended)

    def _choose(self, jobs: Sequence[Job]) -> list[Job]:
        """Return the jobs whose operations are next: one, or several that share a pass."""
        others = [job for job in jobs if job.num_tokens < PROMPT_LENGTH]
        if others and self._other_seconds < 2 * self._prompt_seconds:
            jobs = others
        if self._num_draft_passes < MAX_DRAFT_PASSES and any(job.batch for job in jobs):
            jobs = [job for job in jobs if job.drafts] or jobs
        first = min(jobs, key=lambda job: job.since)
        if (batch := first.batch) is None:
            return [first]
        group, num_rows = [first], first.num_tokens
        for job in sorted(jobs, key=lambda job: (job.num_tokens >= PROMPT_LENGTH, job.since)):
            is_other = job is not first and job.batch is batch
            if is_other and num_rows + job.num_tokens <= batch.max_rows:
                group.append(job)
                num_rows += job.num_tokens
        return group

    def _run_batch(self, group: Sequence[Job]) -> None:
        """Run a pass for several jobs."""
        feeds = [cast(Feed, job.operation) for job in group]
        models = [cast(TimedModel, feed.model) for feed in feeds]
        batch = cast(BatchedModel, group[0].batch)
        begin = time.perf_counter()
        try:
            results = batch.forward(
                [
                    (timed.model, feed.tokens, feed.num_rows)
                    for timed, feed in zip(models, feeds, strict=True)
                ]
            )
        except BaseException as error:
            for job in group:
                job.end(error)
            return
        seconds = time.perf_counter() - begin
        for job, model, feed, logits in zip(group, models, feeds, results, strict=True):
            model.record(feed, seconds)
            job.seconds += seconds
            job.resume(logits)
