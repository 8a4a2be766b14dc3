"""Steps of sequences that all decode: how long one takes; how busy the GPU is meanwhile, and with what."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from time import perf_counter

import torch

from benchmarks.figures import Figures
from benchmarks.gpu.modes import Mode, modes_of, running_in
from benchmarks.gpu.parts import SETTLING_STEPS, Bench
from benchmarks.gpu.trace import Activity, busy, by_kernel, record
from benchmarks.limit import StepWork
from benchmarks.report import Report
from benchmarks.session import Session
from nanoengine import SamplingParams
from nanoengine.core.llm_engine import Executor
from nanoengine.core.messages import Launched, StepPlan
from nanoengine.core.sequence import Phase

TOP_KERNELS = 30
NAME_LENGTH = 100
"""Those of templates are longer than anybody reads."""


class LaunchTimes:
    """Stands in for an engine's executor, and sees how long the host takes to launch a step."""

    def __init__(self, executor: Executor):
        self.executor = executor
        self.seconds: list[float] = []

    def launch(self, plan: StepPlan) -> Launched:
        start = perf_counter()
        launched = self.executor.launch(plan)
        self.seconds.append(perf_counter() - start)
        return launched

    def close(self) -> None:
        self.executor.close()

    @property
    def median_us(self) -> float:
        return 1e6 * statistics.median(self.seconds)


def decode(bench: Bench, session: Session) -> None:
    """Steps of sequences that all decode: how long one takes; how busy the GPU is meanwhile, and with what."""
    mode = modes_of(session.llm)[0]
    for num_seqs in dict.fromkeys((bench.args.num_seqs, 1)):
        with running_in(session.llm, mode):
            _decode_steps(bench, session, num_seqs, mode)
    if session.device.type != "cuda":
        bench.report.warn("left out: how busy the device is, and with which kernels, which only a GPU says")


def _decode_steps(bench: Bench, session: Session, num_seqs: int, mode: Mode) -> None:
    """Time the steps of so many sequences."""
    engine, count, length = session.llm.engine, bench.args.decode_steps, bench.args.decode_len
    session.llm.reset_prefix_cache()
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=bench.decode_tokens)
    requests = [engine.make_request(session.tokens(length, i), params) for i in range(num_seqs)]
    for request in requests:
        engine.submit(request)

    def steps(number: int) -> float:
        start = perf_counter()
        for _ in range(number):
            engine.step()
        return perf_counter() - start

    launches = LaunchTimes(engine.executor)

    try:
        while any(request.sequences[0].phase in (Phase.WAITING, Phase.PREFILLING) for request in requests):
            engine.step()
        steps(SETTLING_STEPS)
        engine.executor = launches
        seconds = steps(count) / count
        context = sum(len(request.sequences[0].token_ids) for request in requests)
        least = session.limit.seconds(StepWork(num_seqs, num_seqs, context, context), bench.ceiling)
        figures = {"step_ms": 1000 * seconds, "limit_share": least / seconds, "launch_us": launches.median_us}
        if session.device.type == "cuda":
            activities = record(lambda: _wait_after(lambda: steps(count)))
            figures |= _shares(activities, count)
            _report_kernels(bench.report, activities, num_seqs, count)
        bench.report.add({"work": "decode", "mode": str(mode), "num_seqs": num_seqs}, figures)
    finally:
        engine.executor = launches.executor
        for request in requests:
            engine.abort(request.request_id)


def _wait_after(work: Callable[[], object]) -> None:
    work()
    torch.cuda.synchronize()


def _shares(activities: Sequence[Activity], num_steps: int) -> Figures:
    """How the time of profiled steps was spent."""
    spent = busy(activities)
    return {
        "busy_share": spent.busy_share,
        "short_gap_share": spent.short_gap_share,
        "long_gap_share": spent.long_gap_share,
        "profiled_step_ms": 1000 * spent.seconds / num_steps,
        "kernel_ms": 1000 * sum(kernel.seconds for kernel in by_kernel(activities)) / num_steps,
    }


def _report_kernels(report: Report, activities: Sequence[Activity], num_seqs: int, num_steps: int) -> None:
    """The costliest kernels: what to tune."""
    kernels = by_kernel(activities)
    total = sum(kernel.seconds for kernel in kernels)
    for kernel in kernels[:TOP_KERNELS]:
        case = {"work": "kernels of decode", "num_seqs": num_seqs, "name": kernel.name[:NAME_LENGTH]}
        figures = {
            "us_per_step": 1e6 * kernel.seconds / num_steps,
            "calls_per_step": kernel.calls / num_steps,
            "kernel_time_share": kernel.seconds / total,
        }
        report.add(case, figures)
