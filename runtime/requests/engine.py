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
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from specedge.errors import SpecEdgeError

from ..decoding.protocols import BatchedModel, Feed, OpenSource, Operation, Operations, Round
from ..decoding.timing import Stopwatch, TimedModel

LONG_PASS = 32  # tokens of a prompt from which on a pass delays others
MAX_DRAFT_PASSES = 16  # draft passes in a row while a request waits for its verify pass
MAX_PROMPT_WAIT = 4  # passes over prompts that a longer one waits for
_IDLE_SECONDS = 0.05  # between looks at jobs whose code runs elsewhere
CLOSED = "this pipeline is closed; load the bundle again"

T = TypeVar("T")


class Job:
    """Operations and events of a request, for the engine.

    Attributes:
        event: Round that its thread has not taken yet.
        has_ended: True if no event follows.
        is_done: True if there is something for its thread to take.
        result: Return value of the generator.
        operation: Operation that it waits for; None before its code runs on.
        num_tokens: Number of tokens of its pass; 0 for other operations.
        num_rows: Number of rows of logits of its pass.
        is_long: True if its pass is over a part of a prompt that delays others.
        drafts: True if its operation is a draft model's.
        since: Number of passes of the engine before it.
        prompts_before: Number of passes over prompts before it.
        num_prompt_tokens: Number of tokens of its long passes so far.
        is_cancelled: True if it ends before its next operation.
        is_away: True while its code runs outside the engine.
        waiter: Thread that waits for it.
        is_absent: True if it had an event while others waited, and its thread may be back soon.
        stopwatch: Context in which the time of its code and passes counts.
        thread: Identifier of the thread that waited for it last.

    Args:
        steps: Generator of operations, each sent its result, and of rounds.
        stopwatch: Stopwatch of the request.
        on_end: Called once, in any thread, when it has ended.
    """

    def __init__(
        self,
        steps: Generator[Operation | Round, Any, Any],
        stopwatch: Stopwatch,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.event: Round | None = None
        self.has_ended = self.is_done = False
        self.result: Any = None
        self.operation: Operation | None = None
        self.num_tokens = self.num_rows = 0
        self.is_long = self.drafts = False
        self.since = 0
        self.prompts_before = 0
        self.num_prompt_tokens = 0
        self.is_cancelled = False
        self.is_away = self.is_absent = False
        self.waiter: _Waiter | None = None
        self.stopwatch = stopwatch
        self.thread = 0
        self._error: BaseException | None = None
        self._steps, self._on_end = steps, on_end
        self._input: Any = None
        self._running = threading.Lock()  # held while its code or a pass runs, and to end it

    @property
    def batch(self) -> BatchedModel | None:
        """Batched model of its pass; None if the operation is run alone."""
        operation = self.operation
        if isinstance(operation, Feed) and isinstance(operation.model, TimedModel):
            return getattr(operation.model, "batch", None)
        return None

    def take(self) -> Round | None:
        """Return its event; None if it has ended. Raises its error once."""
        event, self.event, self.is_done = self.event, None, False
        if self.has_ended:  # another thread may end it at any time
            self.is_done = True
        error, self._error = self._error, None
        if error is not None:
            raise error
        return event

    def cancel(self) -> None:
        """End it now or, from another thread while it runs, before its next operation."""
        self.is_cancelled = True
        if self._running.acquire(blocking=False):
            try:
                self.end()
            finally:
                self._running.release()

    def hold(self) -> None:
        """Let no other thread end it until `release`."""
        self._running.acquire()

    def release(self) -> None:
        """Let others end it, or end it if it was cancelled meanwhile.

        An interrupt may have come before `hold`.
        """
        if self._running.locked():
            self._running.release()
        if self.is_cancelled:
            self.cancel()

    def advance(self) -> None:
        """Run its code up to the next operation or event. Takes `hold` and `stopwatch`."""
        try:
            step = self._steps.send(self._input)
        except StopIteration as end:
            self.result = end.value
            self.end()
        except BaseException as error:
            self.end(error)
        else:
            self._input = None
            if isinstance(step, Round):
                self.event, self.is_done = step, True
                return
            self.operation = step
            self.num_tokens = self.num_rows = 0
            if isinstance(step, Feed):
                self.num_tokens, self.num_rows = len(step.tokens), step.num_rows
            elif isinstance(step, OpenSource):
                self.num_tokens = step.source.length
            self.is_long = self.num_tokens - self.num_rows >= LONG_PASS
            model = getattr(step, "model", None)
            self.drafts = isinstance(model, TimedModel) and model.is_draft

    def run(self) -> None:
        """Run its operation. Takes `hold` and `stopwatch`."""
        assert self.operation is not None
        try:
            self._input = self.operation.run()
            self.operation = None
        except BaseException as error:
            self.end(error)

    def resume(self, result: Any) -> None:
        """Set the result of its operation."""
        self.operation, self._input = None, result

    def end(self, error: BaseException | None = None) -> None:
        """End it, with an error for its thread or without. Takes `hold`."""
        if not self.has_ended:
            self.operation, self._error = None, error
            self.has_ended = self.is_done = True
            self._steps.close()
            self._on_end()


class _Waiter:
    """Thread that waits for an event of its jobs or, without jobs, for the engine to stand still.

    Attributes:
        is_away: True while the thread, which led the engine, runs a job's code outside of it.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = jobs
        self.thread = threading.get_ident()
        self.is_away = False
        self._wake = threading.Lock()
        self._wake.acquire()

    @property
    def is_main(self) -> bool:
        """True for the main thread."""
        return self.thread == threading.main_thread().ident

    @property
    def is_done(self) -> bool:
        for job in self.jobs:  # noqa: SIM110 (a generator takes twice the time)
            if job.is_done:
                return True
        return False

    def sleep(self) -> None:
        """Wait for `wake`; at most a second, since an interrupt may have prevented it."""
        self._wake.acquire(timeout=1.0)

    def wake(self) -> None:
        """Wake the thread now, or at its next `sleep`. Only the leader calls it."""
        if self._wake.locked():
            self._wake.release()


class Engine:
    """Queue of the requests that wait for passes, which chooses the next pass.

    Requests that wait for passes of one batched model share a pass. Draft passes run before verify
    passes, so that requests verify together. While others wait, prompts take a third of the time,
    the one first of which fewer tokens were processed (least attained service), so that short
    prompts do not wait for long ones.

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
        self._absent = weakref.WeakSet[Job]()  # jobs with an event, whose threads may be back soon
        self._pass_seconds = 0.0  # time of the last pass
        self._num_prompt_passes = 0
        self._prompt_seconds = 0.0  # time of the last pass over a prompt
        self._other_seconds = 0.0  # time of all passes since then
        self._num_draft_passes = 0  # in a row

    @property
    def is_running(self) -> bool:
        """True while a thread leads."""
        return self._leader is not None

    @property
    def num_requests(self) -> int:
        """Number of requests that wait, or did until just now, but at least 1.

        A request that was alone in its last round counts from its next one on.
        """
        with self._lock:
            jobs = {job for waiter in self._waiters for job in waiter.jobs} | {*self._absent}
        return max(1, sum(not job.has_ended for job in jobs))

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
        """Wait until one of the jobs has an event or has ended.

        Threads that pause the engine one after another do not stop it: a step is run in between.
        """
        waiter, has_stepped = _Waiter(jobs), False
        try:
            self._enter(waiter)
            while not waiter.is_done:
                if self._leader is not waiter:
                    waiter.sleep()
                    has_stepped = False
                elif self._claims and (has_stepped or any(x.jobs for x in [*self._claims])):
                    self._hand_over()
                else:
                    self._step()
                    has_stepped = True
        finally:
            self._leave(waiter)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let no pass run during the block."""
        waiter = _Waiter(())
        try:
            self._enter(waiter)
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
        try:
            leader.is_away = job.is_away = True
            self._hand_over()
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
                if job.is_absent:
                    job.is_absent = False
                    self._absent.discard(job)
            if self._leader is None:
                self._leader = waiter
                return
            # An interrupt of the main thread must not end another thread's request.
            if not waiter.jobs or (self._leader.is_main and not waiter.is_main):
                self._claims.append(waiter)
            self._has_arrived.notify_all()

    def _leave(self, waiter: _Waiter) -> None:
        """Wait and lead no longer; an interrupt is raised only then."""
        interrupt: BaseException | None = None
        while waiter in self._waiters or self._leader is waiter:
            try:
                with self._lock:
                    if waiter in self._waiters:
                        self._waiters.remove(waiter)
                    if waiter in self._claims:
                        self._claims.remove(waiter)
                    for job in waiter.jobs:
                        job.waiter = None
                    if self._leader is waiter:
                        self._choose_leader()
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _hand_over(self) -> None:
        """Let another thread lead."""
        with self._lock:
            self._choose_leader()

    def _choose_leader(self) -> None:
        """Choose the next leader: a thread with a claim, else one that is not the main thread."""
        leader = self._claims.pop(0) if self._claims else None
        if leader is None and self._waiters:
            candidates = [w for w in self._waiters if not (w.is_away or w.is_done)]
            leader = min(candidates, key=lambda waiter: waiter.is_main, default=None)
        self._leader = leader
        if leader is not None:
            leader.wake()

    def _lead_again(self, waiter: _Waiter) -> None:
        """Wait until a thread leads again; an interrupt is raised only then."""
        with self._lock:
            if self._leader is None:
                self._leader = waiter
            elif self._leader is not waiter:
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
        waiters = self._waiters
        if len(waiters) == len(waiters[0].jobs) == 1 and not self._absent:
            self._run_alone(waiters[0].jobs[0])
            return
        with self._lock:
            unique = dict.fromkeys(job for waiter in self._waiters for job in waiter.jobs)
        jobs = [job for job in unique if not (job.is_done or job.is_away)]
        has_advanced = False
        for job in jobs:
            # Another thread may have led meanwhile.
            if not (job.is_done or job.is_away) and self._advance(job):
                has_advanced = True
                self._wake(job)
        if has_advanced:
            return
        if not jobs:
            self._wait_for_arrivals(_IDLE_SECONDS)
        elif not self._run_pass(jobs):
            # Sharing a pass saves at most a pass.
            self._wait_for_arrivals(self._pass_seconds / 2)

    def _run_alone(self, job: Job) -> None:
        """Run the only job until it is done or another thread arrives, as `_step` would."""
        try:
            job.hold()
            with job.stopwatch:
                while len(self._waiters) == 1 and not job.is_done:
                    if job.operation is None or job.is_cancelled or self.is_closed:
                        self._continue(job)
                    else:
                        begin = time.perf_counter()
                        job.run()
                        self._count([job], time.perf_counter() - begin)
            if len(self._waiters) > 1:
                self._mark_absent(job)
        finally:
            job.release()

    def _advance(self, job: Job) -> bool:
        """Run a job's code up to the next operation; return False if it waits for one."""
        try:
            job.hold()
            with job.stopwatch:
                has_advanced = self._continue(job)
            self._mark_absent(job)
            return has_advanced
        finally:
            job.release()

    def _mark_absent(self, job: Job) -> None:
        """Expect a job with an event back soon. Takes `hold`."""
        if job.event is not None:
            with self._lock:
                job.is_absent = True
                self._absent.add(job)

    def _continue(self, job: Job) -> bool:
        """Do as `_advance`. Takes `hold` and `stopwatch`."""
        if self.is_closed:
            job.end(SpecEdgeError("the pipeline of this stream was closed"))
        elif job.is_cancelled:
            job.end()
        elif job.operation is not None:
            return False
        elif not job.is_done:
            self._current, job.since = job, self.num_passes
            job.prompts_before = self._num_prompt_passes
            job.advance()
            self._current = None
        return True

    def _wake(self, job: Job) -> None:
        waiter = job.waiter
        if job.is_done and waiter is not None and waiter is not self._leader:
            waiter.wake()

    def _wait_for_arrivals(self, seconds: float) -> None:
        """Wait for another thread; expect no job to be back soon if none arrives."""
        with self._lock:
            if not self._has_arrived.wait(seconds):
                self._absent.clear()

    def _run_pass(self, jobs: Sequence[Job]) -> bool:
        """Run a pass; return False, without a pass, if others may share it or come first."""
        group = self._choose(jobs)
        if (group[0].batch or any(job.is_long for job in group)) and self._expects_jobs():
            return False
        begin = time.perf_counter()
        held: list[Job] = []
        try:
            for job in group:
                held.append(job)
                job.hold()
            _run([job for job in held if job.operation is not None])
        finally:
            for job in held:
                job.release()
        self._count(group, time.perf_counter() - begin)
        for job in group:
            self._wake(job)
        return True

    def _count(self, group: Sequence[Job], seconds: float) -> None:
        """Record a pass of jobs that was run."""
        num_tokens, has_prompts = 0, False
        for job in group:
            num_tokens += job.num_tokens
            if job.is_long:
                has_prompts = True
                job.num_prompt_tokens += job.num_tokens
        self.num_passes += 1
        self._pass_seconds = seconds
        if group[0].drafts:
            self._num_draft_passes += 1
        else:
            self._num_draft_passes = 0
            self.num_passes_by_length[num_tokens] += 1
        if not has_prompts:
            self._other_seconds += seconds
            return
        self._num_prompt_passes += 1
        self._prompt_seconds, self._other_seconds = seconds, 0.0

    def _expects_jobs(self) -> bool:
        """Return True if other threads may be back soon."""
        if not self._absent:
            return False
        thread = threading.get_ident()
        with self._lock:
            return any(job.thread != thread for job in self._absent if not job.has_ended)

    def _choose(self, jobs: Sequence[Job]) -> list[Job]:
        """Return the jobs whose operations are next: one, or several that share a pass."""
        others = [job for job in jobs if not job.is_long]
        if others and self._other_seconds < 2 * self._prompt_seconds:
            jobs = others
        if self._num_draft_passes < MAX_DRAFT_PASSES and any(job.batch for job in jobs):
            jobs = [job for job in jobs if job.drafts] or jobs
        first = min(jobs, key=lambda job: job.since)
        if first.is_long and self._num_prompt_passes - first.prompts_before <= MAX_PROMPT_WAIT:
            prompts = [job for job in jobs if job.is_long]
            first = min(prompts, key=lambda job: (job.num_prompt_tokens, job.since))
        if (batch := first.batch) is None:
            return [first]
        group, num_tokens, num_rows = [first], first.num_tokens, first.num_rows
        for job in sorted(jobs, key=lambda job: (job.is_long, job.since)):
            is_later = first.is_long and job.num_prompt_tokens > first.num_prompt_tokens
            if (
                job is not first
                and job.batch is batch
                and not (job.is_long and is_later)
                and num_tokens + job.num_tokens <= batch.max_rows
                and num_rows + job.num_rows <= batch.max_logits
            ):
                group.append(job)
                num_tokens += job.num_tokens
                num_rows += job.num_rows
        return group


def _run(group: Sequence[Job]) -> None:
    """Run the operation of a job, or one pass for several jobs."""
    if len(group) == 1:
        with group[0].stopwatch:
            group[0].run()
    elif group:
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
            job.resume(logits)
