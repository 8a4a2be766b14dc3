"""The beams of one prompt against slow references."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoengine.features.beam_search.beams import Beams
from nanoengine.features.beam_search.params import BeamSearchParams

EOS = 0
VOCAB = 6
Tokens = tuple[int, ...]
Language = Callable[[Tokens], list[float]]  # the log probability of every token after these


def log_softmax(logits: list[float]) -> list[float]:
    total = math.log(sum(map(math.exp, logits)))
    return [logit - total for logit in logits]


def random_language(seed: int, vocab_size: int = VOCAB) -> Language:
    """One where end of text is about as likely as anything else."""

    def next_logprobs(tokens: Tokens) -> list[float]:
        source = random.Random(f"{seed} {tokens}")
        return log_softmax([source.gauss(0, 1.5) for _ in range(vocab_size)])

    return next_logprobs


@dataclass(frozen=True)
class Logprob:
    logprob: float


def likeliest(logprobs: list[float], count: int) -> dict[int, Logprob]:
    """What a model reports: its `count` likeliest next tokens."""
    ranked = sorted(range(len(logprobs)), key=lambda token: -logprobs[token])[:count]
    return {token: Logprob(logprobs[token]) for token in ranked}


def search_through(language: Language, params: BeamSearchParams, eos: Seq[int] = (EOS,)) -> Beams:
    """Search a language to the end."""
    search = Beams(params, eos, params.max_tokens)
    for _ in range(params.max_tokens):
        found = [likeliest(language(tuple(beam.token_ids)), search.num_candidates) for beam in search.running]
        search.advance(found)
        if not search.running:
            return search
    raise AssertionError("the search goes on behind its last token")


def reference(language: Language, params: BeamSearchParams, eos: Seq[int] = (EOS,)) -> list[tuple[Tokens, float]]:
    """Tokens and log probabilities of the finished beams, best first: every continuation of every beam is looked at."""
    width, penalty = params.beam_width, params.length_penalty
    eos = () if params.ignore_eos else eos
    running: list[tuple[Tokens, float]] = [((), 0.0)]
    finished: list[tuple[float, Tokens, float]] = []
    for length in range(1, params.max_tokens + 1):
        longer = [((*old, t), score + p) for old, score in running for t, p in enumerate(language(old))]
        longer.sort(key=lambda pair: -pair[1])
        longer = longer[: max(2, 1 + len(eos)) * width]
        ends = [tokens[-1] in eos or length == params.max_tokens for tokens, _ in longer]
        finished += [
            (p / length**penalty, tokens, p)
            for (tokens, p), is_end in zip(longer[:width], ends, strict=False)
            if is_end
        ]
        finished = sorted(finished, key=lambda beam: -beam[0])[:width]
        running = [pair for pair, is_end in zip(longer, ends, strict=True) if not is_end][:width]
        if not running:
            break
        if len(finished) == width:
            attainable = running[0][1] / length**penalty
            if attainable <= finished[-1][0]:
                break
    return [(tokens, logprob) for _, tokens, logprob in finished]


# ---- the search alone


@settings(max_examples=150)
@given(
    seed=st.integers(0, 10**6),
    width=st.integers(1, 6),
    max_tokens=st.integers(1, 9),
    length_penalty=st.sampled_from([-1.5, 0.0, 0.3, 1.0, 2.0]),
    ignore_eos=st.booleans(),
    eos=st.sampled_from([(EOS,), (EOS,), (), (EOS, 3), (EOS, 3, 5)]),
)
def test_it_finds_what_looking_at_every_continuation_finds_and_scores_it_right(
    seed: int, width: int, max_tokens: int, eos: Tokens, **how: Any
) -> None:
    params = BeamSearchParams(beam_width=width, max_tokens=max_tokens, **how)
    language = random_language(seed)
    search = search_through(language, params, eos)
    assert [(tuple(beam.token_ids), beam.logprob) for beam in search.finished] == reference(language, params, eos)
    for beam in search.finished:
        assert beam.score == pytest.approx(beam.logprob / len(beam.token_ids) ** params.length_penalty)
        assert beam.stopped == (beam.token_ids[-1] in eos and not params.ignore_eos)
