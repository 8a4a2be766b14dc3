"""Rows to sample from, and what their rules make of logits, worked out slowly from all of their tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nanoengine import SamplingParams
from nanoengine.core.randomness import sequence_seed
from nanoengine.core.sampling import SamplingTable
from nanoengine.engine.messages import RowSampling, Started
from nanoengine.kernels.torch_kernels import TorchKernels
from nanoengine.outputs import TokenLogprobs
from nanoengine.runner.sampler import Sampler, Samples
from nanoengine.runner.stream import Stream
from tests.runner.fake_stream import FakeStream

NUM_PROMPT_TOKENS = 3


class CountingStream(FakeStream):
    """Count what is sent."""

    num_sent = 0

    def host_tensor(self, size: int, dtype: torch.dtype) -> Tensor:
        self.num_sent += 1
        return super().host_tensor(size, dtype)


class WatchedKernels(TorchKernels):
    """Keep the logits that tokens were chosen from."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def choose_tokens(
        self, logits: Tensor, table: SamplingTable, rows: Tensor, positions: Tensor, last_tokens: Tensor | None = None
    ) -> Tensor:
        self.seen.append(logits.clone())
        return super().choose_tokens(logits, table, rows, positions, last_tokens)


def sampling(
    *,
    seed: int = 1,
    prompt: int = NUM_PROMPT_TOKENS,
    stops: tuple[int, ...] = (),
    bad: Sequence[Sequence[int]] = (),
    **params: object,
) -> RowSampling:
    bad_words = tuple(tuple(word) for word in bad)
    own = SamplingParams(**params)  # type: ignore[arg-type]
    return RowSampling(own, sequence_seed(seed, 0), prompt, stop_token_ids=stops, bad_words=bad_words)


def begin(row: int, own: RowSampling, token_ids: Sequence[int] | None = None) -> Started:
    return Started(row, list([0] * own.num_prompt_tokens if token_ids is None else token_ids), ([],), own)


def words_of(allowed: set[int], vocab_size: int) -> bytes:
    """A mask, as xgrammar writes it."""
    words = np.zeros(-(-vocab_size // 32), dtype="<u4")
    for token in allowed:
        words[token // 32] |= np.uint32(1 << (token % 32))
    return words.tobytes()


def reference(
    logits: Sequence[float], own: RowSampling, token_ids: Sequence[int], mask: set[int] | None = None
) -> list[float]:
    """The logits that the next token is drawn from, before temperature and filters; `token_ids` are all so far."""
    params, output = own.params, list(token_ids[own.num_prompt_tokens :])
    result = []
    for token, logit in enumerate(logits):
        x = logit
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            x += -np.inf
        if mask is not None and token not in mask:
            x += -np.inf
        for word in own.bad_words:
            before = list(word[:-1])
            if word[-1] == token and len(before) <= len(output) and output[len(output) - len(before) :] == before:
                x += -np.inf
        if len(output) < params.min_tokens and token in own.stop_token_ids:
            x += -np.inf
        x += dict(params.logit_bias).get(token, 0.0)
        if token in token_ids:
            x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        x -= params.frequency_penalty * output.count(token)
        x -= params.presence_penalty * (token in output)
        result.append(x)
    return result


class Room:
    """A sampler, and how it is called: rows on the host and on the device, and padding behind them."""

    def __init__(self, num_rows: int, vocab_size: int, stream: Stream | None = None):
        self.num_rows, self.vocab_size = num_rows, vocab_size
        self.kernels = WatchedKernels()
        self.stream = FakeStream() if stream is None else stream
        self.sampler = Sampler(num_rows, vocab_size, self.kernels, self.stream)

    def sample(self, logits: Tensor, rows: Sequence[int], positions: Sequence[int], padding: int = 0) -> Samples:
        filler = torch.full((padding, self.vocab_size), torch.nan)
        return self.sampler.sample(
            torch.cat((logits, filler)),
            np.array(rows, dtype=np.int32),
            np.array(positions, dtype=np.int32),
            torch.tensor([*rows, *[self.num_rows] * padding], dtype=torch.int32),
            torch.tensor([*positions, *[0] * padding], dtype=torch.int32),
        )


def run(
    logits: Tensor, rows: Sequence[RowSampling], masks: dict[int, set[int]] | None = None
) -> tuple[list[int], dict[int, TokenLogprobs], Exception | None]:
    """Sample the first token of every row; the rows of the device are in the opposite order."""
    count, vocab_size = logits.shape
    room, into = Room(count, vocab_size), list(range(count))[::-1]
    room.sampler.start([begin(row, own) for row, own in zip(into, rows, strict=True)])
    room.sampler.set_masks([(into[i], words_of(mask, vocab_size)) for i, mask in (masks or {}).items()])
    return room.sample(logits.clone(), into, [own.num_prompt_tokens for own in rows], padding=1).read()


def adjusted(
    logits: Tensor, own: RowSampling, token_ids: Sequence[int], mask: set[int] | None = None
) -> tuple[Tensor, list[float]]:
    """What one row's rules make of logits [vocab_size], and what the slow reference does."""
    room = Room(4, len(logits))
    room.sampler.start([begin(2, own, token_ids)])
    if mask is not None:
        room.sampler.set_masks([(2, words_of(mask, len(logits)))])
    room.sample(logits[None].clone(), [2], [len(token_ids)])
    return room.kernels.seen[0][0], reference(logits.tolist(), own, token_ids, mask)


def check(logits: Tensor, own: RowSampling, token_ids: Sequence[int], mask: set[int] | None = None) -> Tensor:
    """`adjusted`, when both are the same."""
    found, expected = adjusted(logits, own, token_ids, mask)
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-5, equal_nan=True)
    return found


def random_logits(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3
