"""What drawn schedules cannot reach: many completions that end at once, and an engine that is closed while a part is broken."""

from __future__ import annotations

import pytest

from nanoengine.core.errors import EngineClosed
from nanoengine.core.sampling_params import SamplingParams
from nanoengine.core.sequence import Sequence

from .toys import check, make_engine


def test_the_end_of_a_waiting_sequence_looks_at_few_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort of n completions behind m waiting ones takes n log m looks, and not n times m."""
    engine = make_engine(max_num_seqs=1)
    ahead = [engine.make_request([1, 2, 3], SamplingParams(n=500, max_tokens=1)) for _ in range(4)]
    last = engine.make_request([4, 5, 6], SamplingParams(n=500), "last")
    for request in (*ahead, last):
        engine.submit(request)
    num_looks = 0

    def order(seq: Sequence) -> tuple[int, int]:
        nonlocal num_looks
        num_looks += 1
        return seq.order

    monkeypatch.setattr("nanoengine.core.scheduler._order", order)
    assert engine.abort("last")
    assert num_looks < 500 * 20
    assert last.finished
    check(engine.scheduler)
    assert len(engine.scheduler.waiting) == 4 * 500
    assert not any(request.num_finished for request in ahead)


def test_the_executor_is_closed_though_an_abort_raises() -> None:
    class Broken:
        def submitted(self, request: object) -> None: ...

        def after_step(self, step: object, result: object, seqs: object) -> None: ...

        def finished(self, seq: object) -> None:
            raise LookupError("broken listener")

    engine = make_engine(listeners=[Broken()])
    engine.submit(engine.make_request([1, 2, 3]))
    with pytest.raises(LookupError):
        engine.close()
    assert engine.executor.is_closed
    engine.close()
    with pytest.raises(EngineClosed):
        engine.step()


def test_completions_start_together_once_their_prompt_is_computed() -> None:
    engine = make_engine()
    request = engine.make_request([1] * 9, SamplingParams(n=20))
    engine.submit(request)
    engine.step()
    assert len(engine.scheduler.running) == 1
    engine.step()
    assert len(engine.scheduler.waiting) == 0
    assert engine.executor.num_computed == 9 + 19 * 1, "the second step computes one token of each"
