"""Proposers for tests: those that know what will be said, and those that mean harm."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

from nanoengine.core.sampling_params import CoreSamplingParams
from nanoengine.core.sequence import Request, Sequence
from nanoengine.features.speculation.speculation import Speculation
from tests.core.toys import VOCAB

Say = Callable[[Seq[int], int], Seq[int]]
"""What a proposer says behind some tokens, if asked for so many."""


class Scripted:
    """A proposer, and the proposer of every sequence."""

    def __init__(self, say: Say):
        self.say = say
        self.begun: list[list[int]] = []
        self.num_forks = 0

    def begin(self, prompt: Seq[int]) -> Scripted:
        self.begun.append(list(prompt))
        return self

    def fork(self) -> Scripted:
        self.num_forks += 1
        return self

    def propose(self, token_ids: Seq[int], most: int) -> Seq[int]:
        return self.say(token_ids, most)


def continuation(token_ids: Seq[int], count: int) -> list[int]:
    """What stands behind some tokens in a text that depends on its last token alone."""
    tokens, last = [], token_ids[-1]
    for _ in range(count):
        last = (7 * last + 3) % VOCAB
        tokens.append(last)
    return tokens


def right(token_ids: Seq[int], most: int) -> list[int]:
    return continuation(token_ids, most)


def wrong(token_ids: Seq[int], most: int) -> list[int]:
    return [(token + 1) % VOCAB for token in continuation(token_ids, most)]


# ---- what those say who mean harm, around what somebody else says


def erring(rate: float) -> Callable[[Say], Say]:
    """Where it is wrong follows from the tokens alone."""

    def around(say: Say) -> Say:
        def propose(tokens: Seq[int], most: int) -> Seq[int]:
            luck = random.Random(len(tokens) * 1000 + sum(tokens))
            errors = [luck.random() < rate and luck.randrange(1, VOCAB) for _ in range(most)]
            return [
                (token + error) % VOCAB if error else token
                for token, error in zip(say(tokens, most), errors, strict=False)
            ]

        return propose

    return around


def raising(say: Say) -> Say:
    def propose(tokens: Seq[int], most: int) -> Seq[int]:
        if len(tokens) % 7 == 0:
            raise RuntimeError("no idea")
        return say(tokens, most)

    return propose


ODD: tuple[Any, ...] = ("seven", None, 1.5)
HARM: dict[str, Callable[[Say], Say]] = {
    "outside": lambda say: lambda tokens, most: [*say(tokens, most)[:2], VOCAB, -1, 2**40],
    "too_long": lambda say: lambda tokens, most: [*say(tokens, most), *range(VOCAB)],
    "no_tokens": lambda say: lambda tokens, most: [*say(tokens, most)[: len(tokens) % 4], *ODD],
    "no_list": lambda say: lambda tokens, most: ODD[1] if len(tokens) % 5 == 0 else say(tokens, most),
    "silent": lambda _: lambda *_: [],
    "raising": raising,
    "knowing": erring(0.0),
    "erring": erring(0.2),
    "mostly wrong": erring(0.7),
    "wrong": erring(1.0),
}


# ---- sequences that decode, and speculation for them


def sequence(length: int = 3, *, eos: tuple[int, ...] = (), n: int = 1, **params: object) -> Sequence:
    options = {"max_tokens": 10_000} | params
    prompt = [(11 * length + 7 * i) % VOCAB for i in range(length)]
    request = Request("a", None, prompt, CoreSamplingParams(n=n, **options))  # type: ignore[arg-type]
    request.sequences = [Sequence(i, request, index=i, eos_token_ids=eos) for i in range(n)]
    return request.sequences[0]


def speculation(say: Say = right, *, num_drafts: int = 4, step_tokens: int = 1000) -> Speculation:
    return Speculation(Scripted(say), num_drafts=num_drafts, vocab_size=VOCAB, step_tokens=step_tokens)
