"""Log probabilities of prompts: those of transformers, however a prompt is cut and whatever shares its steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nanoengine.engine.messages import Chunk, PromptLogprobs, StepPlan
from nanoengine.outputs import TokenLogprob, TokenLogprobs
from nanoengine.runner.model_runner import ModelRunner
from tests.runner.conftest import MakeRunner
from tests.runner.fake_stream import FakeStream
from tests.runner.plans import assert_close, decodes, execute, fill_with_nan, start
from tests.support import reference_logits, reference_model

TEXT = torch.randint(0, 300, (90,), generator=torch.Generator().manual_seed(5)).tolist()
TABLE = [4, 1, 3, 2, 7, 6]
COUNT = 3


@pytest.fixture(scope="module")
def exact(folder: Path) -> list[TokenLogprobs]:
    """Of every token of TEXT but the first, by transformers."""
    logprobs = reference_logits(reference_model(folder), TEXT)[:-1].double().log_softmax(-1)
    return [entries_of(row, token) for row, token in zip(logprobs, TEXT[1:], strict=True)]


def entries_of(logprobs: torch.Tensor, token: int) -> TokenLogprobs:
    rank = int((logprobs > logprobs[token]).sum()) + 1
    entries = {token: TokenLogprob(float(logprobs[token]), rank)}
    for place, likely in enumerate(logprobs.topk(COUNT).indices.tolist(), start=1):
        entries.setdefault(likely, TokenLogprob(float(logprobs[likely]), place))
    return entries


def check(parts: list[PromptLogprobs], exact: list[TokenLogprobs], row: int = 0, first: int = 1) -> None:
    """Parts that follow one another, from the token at `first` to the last."""
    position = first
    for part in parts:
        assert (part.row, part.start) == (row, position)
        position += len(part.entries)
    assert position == len(exact) + 1
    found = [entries for part in parts for entries in part.entries]
    for entries, others in zip(found, exact[first - 1 :], strict=True):
        assert_close(entries, others, within=1e-4)


def chunks_of(cut: int | list[int], row: int = 0) -> list[Chunk]:
    """TEXT in chunks of some size, or that end where it says; the last one samples."""
    ends = [*range(cut, len(TEXT), cut), len(TEXT)] if isinstance(cut, int) else cut
    starts = [0, *ends[:-1]]
    return [
        Chunk(row, begin, end - begin, (row,) * (end == len(TEXT))) for begin, end in zip(starts, ends, strict=True)
    ]


def curious(row: int = 0, table: list[int] = TABLE, **params: Any) -> StepPlan:
    return StepPlan(started=[start(row, TEXT, table, **{"prompt_logprobs": COUNT} | params)])


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("cut", [1, 2, 7, 16, 63, 64, 65, 89, 90, [1, 90], [88, 90], [89, 90]], ids=str)
def test_log_probabilities_of_a_prompt_are_those_of_transformers(
    make: MakeRunner, exact: list[TokenLogprobs], cut: int | list[int], kernels: str
) -> None:
    runner = fill_with_nan(make(kernels=kernels))
    execute(runner, curious())
    results = [execute(runner, StepPlan(chunks=[chunk])) for chunk in chunks_of(cut)]
    check([part for result in results for part in result.prompt_logprobs], exact)
    assert all(not result.logprobs for result in results)
    assert [len(result.token_ids) for result in results] == [0] * (len(results) - 1) + [1]
    assert execute(runner, StepPlan(decodes=decodes((0, 90)))).prompt_logprobs == [], "what is sampled is not of it"


def test_a_part_is_of_the_tokens_that_its_chunk_predicts(make: MakeRunner) -> None:
    runner = make()
    execute(runner, curious())
    parts = [execute(runner, StepPlan(chunks=[chunk])).prompt_logprobs for chunk in chunks_of([1, 11, 89, 90])]
    assert [[(part.start, len(part.entries)) for part in some] for some in parts] == [
        [(1, 1)],
        [(2, 10)],
        [(12, 78)],
        [],
    ]


@pytest.mark.parametrize("depth", [1, 3])
def test_in_mixed_steps_each_row_gets_its_own(make: MakeRunner, exact: list[TokenLogprobs], depth: int) -> None:
    runner: ModelRunner = fill_with_nan(make(stream=FakeStream(), max_num_seqs=6))
    execute(runner, StepPlan([start(3, [9, 8, 7], [20])], chunks=[Chunk(3, 0, 3, (3,))]))
    plans = []
    long, short = chunks_of(40, row=1), chunks_of([25, 50, 90], row=4)  # both end in the third step
    for step in range(4):
        plan = StepPlan(decodes=decodes((3, 3 + step)))
        if not step:
            plan.started = [
                *curious(1).started,
                *curious(4, [14, 11, 13, 12, 17, 16], temperature=1.0, logprobs=1).started,
                start(2, TEXT, [24, 21, 23, 22, 27, 26]),
            ]
        plan.chunks = [*short[step : step + 1], *long[step : step + 1], *[Chunk(2, 9 * step, 9, ())]]
        plans.append(plan)
    results = []
    for first in range(0, len(plans), depth):
        steps = [runner.launch(plan) for plan in plans[first : first + depth]]
        results += [step.result() for step in steps]
    parts = [part for result in results for part in result.prompt_logprobs]
    assert {part.row for part in parts} == {1, 4}
    for row in (1, 4):
        check([part for part in parts if part.row == row], exact, row)
    assert [sorted(result.logprobs) for result in results] == [[], [], [1], []], "of what was sampled, by its number"


def test_a_row_that_begins_anew_asks_anew(make: MakeRunner, exact: list[TokenLogprobs]) -> None:
    runner = fill_with_nan(make())
    first, *_ = chunks_of(50)
    execute(runner, StepPlan(curious().started, chunks=[first]))
    results = [execute(runner, StepPlan(curious(table=[10, 9, 8, 13, 12, 11]).started, chunks=[first]))]
    results += [execute(runner, StepPlan(chunks=[chunk])) for chunk in chunks_of(50)[1:]]
    check([part for result in results for part in result.prompt_logprobs], exact)
    plain = StepPlan([start(0, TEXT, TABLE)], chunks=[first])
    assert execute(runner, plain).prompt_logprobs == []


def test_of_a_prompt_that_begins_later_the_rest_is_told(make: MakeRunner, exact: list[TokenLogprobs]) -> None:
    """Where another row has computed its beginning."""
    runner = fill_with_nan(make())
    execute(runner, StepPlan([start(1, TEXT, TABLE)], chunks=[Chunk(1, 0, 48, ())]))
    table = [*TABLE[:3], 8, 9, 10]
    result = execute(runner, StepPlan(curious(table=table).started, chunks=[Chunk(0, 48, 42, (0,))]))
    check(result.prompt_logprobs, exact, first=49)


def test_no_likeliest_tokens_still_tells_the_prompts_own(make: MakeRunner, exact: list[TokenLogprobs]) -> None:
    runner = make()
    result = execute(runner, StepPlan(curious(prompt_logprobs=0).started, chunks=chunks_of(90)))
    (part,) = result.prompt_logprobs
    for entries, others, token in zip(part.entries, exact, TEXT[1:], strict=True):
        assert_close(entries, {token: others[token]}, within=1e-4)
