"""Runs with drafts in a sampler: it says and keeps what another does that samples the same positions one at a time.

Lives of rows are drawn and lived once, without drafts. Then the same rows are sampled in steps in which some have drafts: right
ones, or wrong from a drawn place on. What comes of the first samples must be equal to the bit, and so must all that comes later.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanoengine.engine.messages import UNKNOWN, Drafted, RowSampling
from nanoengine.errors import NotFiniteLogits
from nanoengine.kernels.interface import Kernels
from nanoengine.kernels.native_kernels import NativeKernels
from nanoengine.kernels.torch_kernels import TorchKernels
from nanoengine.outputs import TokenLogprobs
from nanoengine.runner.drafts import Drafts
from nanoengine.runner.sampler import Sampler, Samples
from tests.runner.fake_stream import FakeStream
from tests.runner.sampled_rows import begin, random_logits, sampling, words_of

VOCAB = 23
LENGTH = 16
"""Tokens that each row samples."""


class Rows:
    """A sampler, and the last token of each row."""

    def __init__(self, num_rows: int, kernels: Kernels):
        self.kernels = kernels
        self.num_rows = num_rows
        self.sampler = Sampler(num_rows, VOCAB, kernels, FakeStream())
        self.last_tokens = torch.full((num_rows + 1,), UNKNOWN)

    def sample(
        self,
        logits: Tensor,
        before: Sequence[tuple[int, int]] = (),
        runs: Sequence[Drafted] = (),
        behind: Sequence[tuple[int, int]] = (),
        padding: int = 0,
    ) -> Samples:
        """One step: (row, position) of samples before the runs with drafts, and of those behind them."""
        drafted = [(run.row, run.num_computed + 1 + i) for run in runs for i in range(run.num_new)]
        rows, positions = zip(*before, *drafted, *behind, strict=True)
        stream = self.sampler.stream
        drafts = Drafts.of(runs, len(before), len(rows) + padding, stream) if runs else None
        return self.sampler.sample(
            torch.cat((logits, torch.full((padding, VOCAB), torch.nan))),
            np.array(rows, dtype=np.int32),
            np.array(positions, dtype=np.int32),
            torch.tensor([*rows, *[self.num_rows] * padding], dtype=torch.int32),
            torch.tensor([*positions, *[0] * padding], dtype=torch.int32),
            self.last_tokens,
            drafts,
        )


@dataclass
class Life:
    """What a row samples, one token at a time."""

    own: RowSampling
    prompt: list[int]
    logits: Tensor  # [LENGTH, VOCAB]
    mask: set[int] | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)

    def begin(self, sampler: Sampler, row: int, count: int = 0) -> None:
        """Let a row be this life when it has so many tokens."""
        sampler.start([begin(row, self.own, [*self.prompt, *self.token_ids[:count]])])
        sampler.set_masks([(row, None if self.mask is None else words_of(self.mask, VOCAB))])


def draw_wishes(rng: random.Random) -> dict[str, Any]:
    wishes = {
        "presence_penalty": lambda: rng.uniform(-2, 2),
        "frequency_penalty": lambda: rng.uniform(-2, 2),
        "repetition_penalty": lambda: rng.choice([0.3, 1.4, 2.0]),
        "logit_bias": lambda: {rng.randrange(VOCAB): rng.uniform(-9, 9) for _ in range(rng.randint(1, 5))},
        "allowed_token_ids": lambda: rng.sample(range(VOCAB), 6),
        "bad": lambda: [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 3))] for _ in range(rng.randint(1, 60))],
        "logprobs": lambda: rng.randint(0, 5),
        "top_k": lambda: rng.randint(2, 9),
        "top_p": lambda: rng.uniform(0.5, 0.95),
        "min_p": lambda: rng.uniform(0.01, 0.2),
    }
    found: dict[str, Any] = {"temperature": rng.choice([0, 0.3, 1, 2.0]), "seed": rng.getrandbits(30)}
    if rng.random() < 0.3:  # of that come words of several tokens, and counts above one
        found["allowed_token_ids"] = rng.sample(range(VOCAB), 3)
        found["bad"] = [[rng.choice(found["allowed_token_ids"]) for _ in range(rng.randint(2, 5))] for _ in range(9)]
        found["frequency_penalty"] = rng.choice([0, 0.3])
        return found
    if rng.random() < 0.4:
        found |= {"min_tokens": rng.randint(1, LENGTH), "stops": tuple(rng.sample(range(VOCAB), 15))}
    return found | {name: wishes[name]() for name in rng.sample(sorted(wishes), rng.randint(0, 5))}


def draw_lives(rng: random.Random, kernels: Kernels, count: int) -> list[Life]:
    """Lives whose wishes leave them a token, lived side by side."""
    lives = []
    for _ in range(count):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))]
        own = sampling(prompt=len(prompt), **draw_wishes(rng))
        mask = set(rng.sample(range(VOCAB), 18)) if rng.random() < 0.1 else None
        lives.append(Life(own, prompt, random_logits(rng.getrandbits(30), LENGTH, VOCAB), mask))
    rows = Rows(count, kernels)
    for row, life in enumerate(lives):
        life.begin(rows.sampler, row)
    for i in range(LENGTH):
        where = [(row, len(life.prompt) + i) for row, life in enumerate(lives)]
        tokens, logprobs, _ = rows.sample(torch.stack([life.logits[i] for life in lives]), where).read()
        assert rows.last_tokens.clamp(min=UNKNOWN).tolist() == [*tokens, UNKNOWN]
        for row, life in enumerate(lives):
            life.token_ids.append(tokens[row])
            life.logprobs.append(logprobs.get(row))
    return [life for life in lives if UNKNOWN not in life.token_ids] or draw_lives(rng, kernels, count)


class Script:
    """Several lives in one sampler, in steps in which some rows have drafts."""

    def __init__(self, seed: int, kernels: Kernels):
        self.rng = rng = random.Random(seed)
        self.num_rows = rng.randint(1, 5)
        self.all_lives = draw_lives(rng, kernels, 6)
        self.rows = Rows(self.num_rows, kernels)
        self.lives: dict[int, Life] = {}
        self.counts: dict[int, int] = {}  # row -> tokens that it has sampled
        self.num_drafts = self.num_accepted = self.num_tokens = 0

    def step(self) -> None:
        rng = self.rng
        for row in range(self.num_rows):
            self._change(row)
        rows = [row for row, count in self.counts.items() if count < LENGTH and rng.random() < 0.8]
        rng.shuffle(rows)
        if not rows:
            return
        runs = [self._draft(row) for row in rows if LENGTH - self.counts[row] > 1 and rng.random() < 0.7]
        plain = [row for row in rows if row not in {run.row for run in runs}]
        first = rng.randint(0, len(plain))
        where = [(row, len(self.lives[row].prompt) + self.counts[row]) for row in plain]
        order = [(row, 1) for row in plain[:first]] + [(run.row, run.num_new) for run in runs]
        order += [(row, 1) for row in plain[first:]]
        pieces = [self.lives[row].logits[self.counts[row] :][:count] for row, count in order]
        padding = rng.choice([0, 3])
        samples = self.rows.sample(torch.cat(pieces), where[:first], runs, where[first:], padding)
        self._compare(samples, order, {run.row: run.drafts for run in runs})

    def _change(self, row: int) -> None:
        """Begin, end, resume or fork."""
        chance = self.rng.random()
        if row not in self.lives or (self.counts[row] == LENGTH and chance < 0.5):
            self.lives[row], self.counts[row] = self.rng.choice(self.all_lives), 0
            self.lives[row].begin(self.rows.sampler, row)
        elif chance < 0.05:
            self.rows.sampler.end([row])
            del self.lives[row], self.counts[row]
        elif chance < 0.15:
            other = self.rng.choice(sorted(self.lives))
            self.lives[row], self.counts[row] = self.lives[other], self.counts[other]
            self.lives[row].begin(self.rows.sampler, row, self.counts[row])

    def _draft(self, row: int) -> Drafted:
        """A run, right up to a drawn place; what comes after a wrong draft may be right again."""
        rng, life, count = self.rng, self.lives[row], self.counts[row]
        drafts = life.token_ids[count : count + rng.randint(1, LENGTH - count - 1)]
        wrong = rng.randrange(2 * len(drafts))
        for place in range(wrong, len(drafts)):
            if place == wrong:
                drafts[place] = (drafts[place] + rng.randrange(1, VOCAB)) % VOCAB
            elif rng.random() < 0.5:
                drafts[place] = rng.randrange(VOCAB)
        return Drafted(row, len(life.prompt) + count - 1, tuple(drafts))

    def _compare(self, samples: Samples, order: list[tuple[int, int]], drafts: dict[int, tuple[int, ...]]) -> None:
        tokens, logprobs, _ = samples.read()
        assert len(tokens) == sum(count for _, count in order)
        accepted = iter([] if samples.num_accepted is None else samples.num_accepted)
        start = 0
        for row, count in order:
            life, first = self.lives[row], self.counts[row]
            right = life.token_ids[first : first + count]
            num_accepted = next(accepted) if row in drafts else 0
            guess = drafts.get(row, ())
            assert num_accepted == next((i for i, (a, b) in enumerate(zip(guess, right)) if a != b), len(guess))  # noqa: B905
            num_new = num_accepted + 1
            assert tokens[start : start + num_new] == right[:num_new]
            assert [logprobs.get(start + i) for i in range(num_new)] == life.logprobs[first : first + num_new]
            assert self.rows.last_tokens[row] == right[num_accepted]
            self.counts[row] += num_new
            self.num_drafts += len(guess)
            self.num_accepted += num_accepted
            self.num_tokens += num_new
            start += count


KERNELS: dict[str, Callable[[], Kernels]] = {"torch": TorchKernels, "native": NativeKernels}


def run(seed: int, kernels: Kernels) -> Script:
    script = Script(seed, kernels)
    for _ in range(8):
        script.step()
    return script


@pytest.mark.parametrize("kernels", KERNELS)
@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10**6))
def test_drafts_change_neither_what_is_sampled_nor_what_is_kept(kernels: str, seed: int) -> None:
    """Fresh, ended, resumed and forked rows; plain rows before the runs and behind them; padding."""
    run(seed, KERNELS[kernels]())


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_nor_do_they_with_the_kernels_of_a_gpu() -> None:
    from nanoengine.kernels.triton_kernels import TritonKernels

    assert run(0, TritonKernels()).num_accepted > 10


def test_the_scripts_accept_and_reject_many() -> None:
    scripts = [run(seed, TorchKernels()) for seed in range(8)]
    num_drafts, num_accepted = sum(s.num_drafts for s in scripts), sum(s.num_accepted for s in scripts)
    assert num_drafts > 500
    assert 0.3 * num_drafts < num_accepted < 0.8 * num_drafts


# ---- rows without a token


@pytest.mark.parametrize("wish", [{}, {"frequency_penalty": 1.0, "bad": [[1, 2], [3, 4, 5]], "logprobs": 2}], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("place", range(5))
def test_a_run_ends_at_the_first_accepted_sample_without_a_token(
    place: int, temperature: float, wish: dict[str, Any]
) -> None:
    """What stands before it are tokens, and the row beside it is as it was."""
    own = sampling(temperature=temperature, **wish)
    lives = [Life(own, [1, 2, 3], random_logits(n, LENGTH, VOCAB)) for n in range(2)]
    for life in lives:
        rows = Rows(1, TorchKernels())
        life.begin(rows.sampler, 0)
        for i in range(6):
            life.token_ids += rows.sample(life.logits[i : i + 1].clone(), [(0, 3 + i)]).read()[0]
    rows = Rows(2, TorchKernels())
    for row, life in enumerate(lives):
        life.begin(rows.sampler, row)
    lives[0].logits[place] = torch.nan
    runs = [Drafted(row, 2, tuple(life.token_ids[:4])) for row, life in enumerate(lives)]
    samples = rows.sample(torch.cat([life.logits[:5] for life in lives]), runs=runs)
    tokens, _, error = samples.read()
    assert isinstance(error, NotFiniteLogits)
    assert samples.num_accepted == [place, 4]
    assert tokens[: place + 1] == [*lives[0].token_ids[:place], UNKNOWN]
    assert tokens[5:] == lives[1].token_ids[:5]
    after = rows.sample(lives[1].logits[5:6].clone(), [(1, 8)]).read()
    assert after[0] == lives[1].token_ids[5:6]


def test_what_is_sampled_behind_a_wrong_draft_may_be_without_a_token() -> None:
    """It is no token of the row, and nothing of it is kept."""
    own = sampling(temperature=0, allowed_token_ids=[4, 5], bad=[[5, 4], [5, 5]])
    logits = torch.zeros(3, VOCAB)
    logits[:, 4] = 1.0
    rows = Rows(1, TorchKernels())
    rows.sampler.start([begin(0, own)])
    samples = rows.sample(logits.clone(), runs=[Drafted(0, 2, (5, 4))])
    tokens, _, error = samples.read()
    assert samples.num_accepted == [0]
    assert tokens[:2] == [4, UNKNOWN]
    assert error is None, "nobody goes without"
    assert rows.last_tokens[0] == 4
    assert rows.sample(logits[:1].clone(), [(0, 4)]).read() == ([4], {}, None)
