"""Drafts on the device, against a walk through each run, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanoengine.core.device import Device
from nanoengine.core.messages import NONE_LEFT, UNKNOWN, Run, StepPlan
from nanoengine.features.speculation.verification import Drafts, DraftVerifier
from tests.drawn import FAST

DEVICE = Device(torch.device("cpu"))
tokens_of = st.integers(0, 2)  # few, so that drafts are often right


def run(row: int, drafts: Sequence[int], start: int = 5) -> Run:
    return Run(row, start, 1 + len(drafts), True, tuple(drafts))


class Case(NamedTuple):
    """The samples of a step: decodes, runs with drafts, those of chunks, padding."""

    runs: list[Run]
    first: int
    tokens: list[int]  # sampled: NaN has no token, nor has a row that may sample nothing

    @property
    def drafts(self) -> Drafts:
        return Drafts.of(self.runs, self.first, len(self.tokens), DEVICE)

    @property
    def places(self) -> dict[int, tuple[int, int]]:
        """Of each sample of a run: which run, and how many drafts stand before it."""
        starts = accumulate((run.num_new for run in self.runs), initial=self.first)
        return {
            start + depth: (number, depth)
            for number, (start, run) in enumerate(zip(starts, self.runs, strict=False))
            for depth in range(run.num_new)
        }

    def before(self, sample: int) -> list[int]:
        """The drafts that stand before a sample."""
        if sample not in self.places:
            return []
        number, depth = self.places[sample]
        return list(self.runs[number].drafts[:depth])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    drafts = draw(st.lists(st.lists(tokens_of, min_size=1, max_size=5), min_size=1, max_size=4))
    rows = draw(st.permutations(range(9)))
    runs = [run(row, own) for row, own in zip(rows, drafts, strict=False)]
    first, behind = draw(st.integers(0, 3)), draw(st.integers(0, 4))
    count = first + sum(run.num_new for run in runs) + behind
    sampled = tokens_of | tokens_of | st.sampled_from([UNKNOWN, NONE_LEFT])
    return Case(runs, first, draw(st.lists(sampled, min_size=count, max_size=count)))


@FAST
@given(case=cases(), data=st.data())
def test_what_stands_before_a_sample(case: Case, data: st.DataObject) -> None:
    """Of samples in any order, some of them twice, or none."""
    numbers = data.draw(st.lists(st.integers(0, len(case.tokens) - 1)))
    tokens, stand_before = case.drafts.before(torch.tensor(numbers, dtype=torch.int64))
    found = [row[mask].tolist() for row, mask in zip(tokens, stand_before, strict=True)]
    assert found == [case.before(number) for number in numbers]


def verified(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """How many of the first drafts are what was sampled."""
    for place, draft in enumerate(drafts):
        if sampled[place] != draft:
            return place
    return len(drafts)


@FAST
@given(case=cases())
def test_a_draft_is_accepted_if_it_and_all_before_it_were_sampled(case: Case) -> None:
    found = case.drafts.verify(torch.tensor(case.tokens))
    starts = list(accumulate((run.num_new for run in case.runs), initial=case.first))
    counts = [verified(run.drafts, case.tokens[start:]) for run, start in zip(case.runs, starts, strict=False)]
    assert found.num_accepted.tolist() == counts
    for sample in range(len(case.tokens)):
        if sample in case.places:
            number, depth = case.places[sample]
            assert found.is_token[sample] == (depth <= counts[number])
        else:
            assert found.is_token[sample]


@FAST
@given(case=cases())
def test_the_last_token_of_each_row_is_its_last_sample_that_is_a_token(case: Case) -> None:
    """Of a row that has several samples, sampling itself writes any."""
    plan = StepPlan(decode_rows=np.arange(20, 20 + case.first, dtype=np.int32), runs=case.runs)
    verifier, tokens = DraftVerifier(DEVICE), torch.tensor(case.tokens)
    last_tokens = torch.full((30,), 99)
    verified = verifier.verify(verifier.drafts(plan, len(case.tokens)), tokens, last_tokens)
    ends = dict(zip([own.row for own in case.runs], verified.num_accepted.tolist(), strict=True))
    starts = accumulate((own.num_new for own in case.runs), initial=case.first)
    expected = {own.row: case.tokens[start + ends[own.row]] for own, start in zip(case.runs, starts, strict=False)}
    assert last_tokens.tolist() == [expected.get(row, 99) for row in range(30)]
