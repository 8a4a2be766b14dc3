"""Guessers for tests: those who know what the toy model says, and those who mean harm."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from nanoengine.engine.speculation.speculation import Speculation
from nanoengine.engine.speculation.step_costs import StepCosts
from tests.engine.toys import VOCAB_SIZE, continuation

Say = Callable[[Sequence[int], int], Sequence[int]]
"""What a guesser says behind some tokens, if asked for so many."""


class Scripted:
    """A proposer, and the guesser of every sequence."""

    def __init__(self, say: Say):
        self.say = say
        self.num_begun = 0
        self.ended: list[list[int]] = []

    def begin(self, num_prompt_tokens: int, cache_salt: bytes) -> Scripted:
        self.num_begun += 1
        return self

    def guess(self, token_ids: Sequence[int], most: int) -> Sequence[int]:
        return self.say(token_ids, most)

    def end(self, token_ids: Sequence[int]) -> None:
        self.ended.append(list(token_ids))


def right(token_ids: Sequence[int], most: int) -> list[int]:
    return continuation(token_ids, most)


def wrong(token_ids: Sequence[int], most: int) -> list[int]:
    return [(token + 1) % VOCAB_SIZE for token in continuation(token_ids, most)]


def outside(token_ids: Sequence[int], most: int) -> list[int]:
    """Right at first, then what is in no vocabulary."""
    return [*right(token_ids, most)[:2], VOCAB_SIZE, -1, *right(token_ids, most)[4:]]


def too_long(token_ids: Sequence[int], most: int) -> list[int]:
    return right(token_ids, most + 30)


def no_tokens(token_ids: Sequence[int], most: int) -> list[int]:
    return [*right(token_ids, most)[:1], "seven", None, 1.5]  # type: ignore[list-item]


def raising(token_ids: Sequence[int], most: int) -> list[int]:
    if len(token_ids) % 3 == 0:
        raise RuntimeError("no idea")
    return right(token_ids, most)


def by_chance(token_ids: Sequence[int], most: int) -> list[int]:
    """Mostly right; where it is wrong follows from the tokens alone."""
    luck = random.Random(len(token_ids) * 1000 + sum(token_ids))
    return [token if luck.random() < 0.8 else luck.randrange(VOCAB_SIZE) for token in right(token_ids, most)]


def silent(token_ids: Sequence[int], most: int) -> list[int]:  # noqa: ARG001
    return []


HOSTILE: dict[str, Say] = {
    say.__name__: say for say in (right, wrong, outside, too_long, no_tokens, raising, by_chance, silent)
}


def speculation(say: Say = right, *, num_drafts: int = 4, costs: StepCosts | None = None) -> Speculation:
    """That takes drafts for free."""
    return Speculation(Scripted(say), num_drafts=num_drafts, vocab_size=VOCAB_SIZE, costs=costs or StepCosts())
