"""The ways in which an engine can run its steps on a GPU, and how one engine runs in several of them, one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.session import runner_of
from nanoengine import LLM


@dataclass(frozen=True)
class Mode:
    """How steps are run."""

    overlap: bool  # two in flight
    graphs: bool

    def __str__(self) -> str:
        return f"{'overlap' if self.overlap else 'one at a time'}, {'graphs' if self.graphs else 'eager'}"


FASTEST = Mode(overlap=True, graphs=True)
MODES = (FASTEST, Mode(overlap=False, graphs=True), Mode(overlap=True, graphs=False), Mode(overlap=False, graphs=False))


def modes_of(llm: LLM) -> list[Mode]:
    """The modes that an engine can run in, the fastest first: with graphs only if it has recorded some."""
    has_graphs = runner_of(llm).recorder is not None
    return [mode for mode in MODES if has_graphs or not mode.graphs]


@contextmanager
def running_in(llm: LLM, mode: Mode) -> Iterator[None]:
    """Run an idle engine as `async_scheduling` and `enforce_eager` would have it run, without loading another one."""
    engine, runner = llm.engine, runner_of(llm)
    assert not engine.has_unfinished
    before = engine.depth, runner.recorder
    engine.depth = 2 if mode.overlap else 1
    if not mode.graphs:
        runner.recorder = None
    try:
        yield
    finally:
        engine.depth, runner.recorder = before
