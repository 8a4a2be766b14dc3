"""Drive an engine through a workload and keep what happened: when each token came, and what each step did.

Time counts from the moment a request was due, not from when the loop got round to it: a step that delays an arrival is
part of what its user waits for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from time import perf_counter, sleep
from types import MappingProxyType
from typing import Any

from benchmarks.limit import StepWork
from benchmarks.workload import Workload
from nanoengine import SamplingParams
from nanoengine.core.llm_engine import Executor, LLMEngine
from nanoengine.core.messages import Launched, StepPlan, StepResult
from nanoengine.core.scheduler import Scheduler
from nanoengine.core.sequence import Request
from nanoengine.interrupts import InterruptGuard, Interruptible

TEMPERATURE = 0.6
NO_PARAMS: Mapping[str, Any] = MappingProxyType({})
Adapt = Callable[[list[Request]], object]
STEPS_PER_WASTE_SAMPLE = 16  # it looks at every running sequence, which costs more than all the rest


@dataclass
class RequestTimes:
    """One request: times in seconds since the start of the run."""

    due: float
    token_times: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.due

    @property
    def tpot(self) -> float | None:
        """Mean time per token after the first; None for a single token."""
        steps = len(self.token_times) - 1
        return (self.token_times[-1] - self.token_times[0]) / steps if steps else None

    @property
    def itls(self) -> list[float]:
        """The gaps between its tokens."""
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]


class Kind(Enum):
    """What a step computes."""

    PREFILL = "prefill"  # chunks alone
    DECODE = "decode"  # one new token for each of its sequences, or some where they have drafts
    MIXED = "mixed"

    @classmethod
    def of_plan(cls, plan: StepPlan) -> Kind | None:
        """None if it computes nothing, but copies blocks or waits for files."""
        if not plan.num_tokens:
            return None
        if all(run.drafts for run in plan.runs):
            return cls.DECODE
        return cls.MIXED if len(plan.decode_rows) or plan.num_drafted else cls.PREFILL


@dataclass(slots=True)
class Step:
    """One step of the engine: times in seconds since the start of the run."""

    start: float
    end: float
    model_seconds: float  # in the executor: its launch, in the call before if two are in flight, and its result
    kind: Kind | None
    num_seqs: int
    work: StepWork


@dataclass
class Run:
    """All that was recorded. `requests` are in the order of the workload."""

    requests: list[RequestTimes]
    steps: list[Step] = field(default_factory=list)
    seconds: float = 0.0
    num_preemptions: int = 0
    wasted_slots: int = 0  # summed over samples: KV slots in blocks of running sequences that hold no token
    sampled_slots: int = 0  # all slots in those blocks

    @property
    def num_output_tokens(self) -> int:
        return sum(len(request.token_times) for request in self.requests)

    @property
    def kv_waste(self) -> float:
        return self.wasted_slots / self.sampled_slots if self.sampled_slots else 0.0


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in the middle of a run; `run` holds what was recorded."""

    def __init__(self, run: Run):
        self.run = run

    def __str__(self) -> str:
        count, seconds = self.run.num_output_tokens, self.run.seconds
        return (
            f"the run that was cut had made {count} output tokens in {seconds:.1f} s ({count / seconds:.1f} a second)"
        )


class Tap:
    """Stands in for an engine's executor, and times it."""

    def __init__(self, executor: Executor):
        self.executor = executor
        self.taken: list[
            tuple[StepPlan, float]
        ] = []  # whose results were taken, with the seconds in the executor for each

    def launch(self, plan: StepPlan) -> Launched:
        start = perf_counter()
        launched = self.executor.launch(plan)
        seconds = perf_counter() - start

        def result() -> StepResult:
            start = perf_counter()
            found = launched()
            self.taken.append((plan, seconds + perf_counter() - start))
            return found

        return result

    def take(self) -> list[tuple[StepPlan, float]]:
        """What was taken since the last call."""
        taken, self.taken = self.taken, []
        return taken

    def close(self) -> None:
        self.executor.close()


def drive(
    engine: LLMEngine,
    workload: Workload,
    on_tokens: Callable[[int], object],
    temperature: float = TEMPERATURE,
    *,
    num_streams: int = 0,
    params: Mapping[str, Any] = NO_PARAMS,
    adapt: Adapt | None = None,
) -> Run:
    """Run a workload to its end: open loop, each request submitted when it is due.

    Args:
        engine: idle.
        on_tokens: told after every step how many tokens it brought, for a progress bar.
        temperature: of every request.
        num_streams: so many requests, the first ones, are there for the sake of the others: they are stopped one step after those
            have ended, so that the last gap between their tokens is there too.
        params: more of the sampling parameters of every request.
        adapt: gives the requests their adapters, before they are submitted.

    Raises:
        Interrupted: Ctrl-C; the engine is idle again.
        InvalidPrompt: a request does not fit the engine; nothing has run.
    """
    requests = [
        engine.make_request(
            prompt, SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=count, **params)
        )
        for prompt, count in zip(workload.prompts, workload.output_lens, strict=True)
    ]
    if adapt is not None:
        adapt(requests)
    due = workload.arrivals or [0.0] * len(workload)
    run = Run([RequestTimes(when) for when in due])
    times = {request.request_id: entry for request, entry in zip(requests, run.requests, strict=True)}
    pending = deque(sorted(zip(due, requests, strict=True), key=lambda pair: pair[0]))
    guard = InterruptGuard()
    tap = Tap(Interruptible(engine.executor, guard))
    before, engine.executor = engine.executor, tap
    preempted_before = engine.scheduler.num_preemptions
    start = perf_counter()
    try:
        with guard:
            while pending or engine.has_unfinished:
                now = perf_counter() - start
                while pending and pending[0][0] <= now:
                    engine.submit(pending.popleft()[1])
                if not engine.has_unfinished:
                    with guard.allowed():
                        sleep(max(pending[0][0] - (perf_counter() - start), 0.0))
                    continue
                is_last = num_streams > 0 and all(request.finished for request in requests[num_streams:])
                began = perf_counter() - start
                advanced = engine.step()
                now = perf_counter() - start
                _record_tokens(advanced, times, now)
                _record_step(run, tap, engine.scheduler, began, now)
                on_tokens(len(advanced))
                if is_last:
                    break
    except KeyboardInterrupt:
        raise Interrupted(run) from None
    finally:
        run.seconds = perf_counter() - start
        run.num_preemptions = engine.scheduler.num_preemptions - preempted_before
        engine.executor = before
        for request in requests:
            engine.abort(request.request_id)
    return run


def _record_tokens(advanced: list[Request], times: dict[str, RequestTimes], now: float) -> None:
    for request in advanced:
        if request.error is not None:
            raise request.error
        [seq], known = request.sequences, times[request.request_id].token_times
        known += [now] * (len(seq.token_ids) - seq.num_prompt_tokens - len(known))


def _record_step(run: Run, tap: Tap, scheduler: Scheduler, began: float, now: float) -> None:
    taken = tap.take()
    if not taken:  # it failed, and was nobody's
        return
    [(plan, seconds)] = taken
    if len(run.steps) % STEPS_PER_WASTE_SAMPLE == 0:
        wasted, slots = count_wasted_slots(scheduler)
        run.wasted_slots += wasted
        run.sampled_slots += slots
    num_seqs = len(plan.decode_rows) + len(plan.runs)
    run.steps.append(Step(began, now, seconds, Kind.of_plan(plan), num_seqs, StepWork.of_plan(plan)))


def count_wasted_slots(scheduler: Scheduler) -> tuple[int, int]:
    """KV slots in blocks of running sequences that hold no token, and all slots in those blocks, shared ones counted once."""
    blocks = scheduler.blocks
    reserved = sum(
        len(table) * blocks.block_size - seq.num_computed for seq in scheduler.running for table in seq.block_tables
    )
    return reserved, (blocks.num_blocks - blocks.num_free) * blocks.block_size
