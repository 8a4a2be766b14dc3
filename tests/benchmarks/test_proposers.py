"""Replays: what counts as a guess that came true."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from random import Random

import pytest

from benchmarks.options import BadOption
from benchmarks.proposers import PROPOSERS, TEXTS, add_arguments, replay, run
from benchmarks.report import Report


class Known:
    """Says what it was told, whatever the sequence."""

    def __init__(self, guess: list[int]):
        self.says = guess

    def begin(self, prompt: Sequence[int]) -> Known:
        return self

    def fork(self) -> Known:
        return self

    def propose(self, token_ids: Sequence[int], most: int) -> list[int]:
        return self.says[:most]


def test_a_step_brings_what_came_true_and_one_token_more() -> None:
    proposer = Known([5, 5, 5])
    figures = replay(proposer, [([1], [5, 5, 5, 5, 5, 6, 7])], 3)
    # Steps: 5 5 5 + 5; 5 + 6; 7, which the model samples whatever is guessed.
    assert figures["accepted_tokens"] == pytest.approx(4 / 3)
    assert figures["accepted_share"] == pytest.approx(4 / 9)


def test_every_proposer_meets_every_text() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    report = Report("proposers")
    run(parser.parse_args(["--num-seqs", "2", "--input-len", "40", "--output-len", "20", "--repeat", "1"]), report)
    found = {(row.case["text"], row.case["proposer"]) for row in report.rows}
    assert found == {(text, name) for text in TEXTS for name in PROPOSERS}
    with pytest.raises(BadOption, match="input-len"):
        TEXTS["prose"](10**7, 1, Random(0))  # more than there is
