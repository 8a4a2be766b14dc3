"""Sampler: logits to tokens, each row by its own SamplingParams, without waiting for the device.

The order is fixed: what may not be sampled (masks and allowed_token_ids, bad_words, the min_tokens ban), logit_bias, penalties
(repetition, frequency, presence), then what `Kernels.choose_tokens` does: temperature, filters, and the draw. Log probabilities
are the model's own, before all of it.

All that sampling knows of a row came with the message that started it. What depends on tokens sampled since then is kept on the
device, and what depends on lengths follows from positions: the host need not have seen a token before the next is sampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanoengine.core.sampling import NONE_LEFT, SamplingTable, signed
from nanoengine.engine.messages import UNKNOWN, Started
from nanoengine.errors import NotFiniteLogits, NoTokenLeft
from nanoengine.kernels.interface import Kernels
from nanoengine.outputs import TokenLogprobs
from nanoengine.runner.bad_words import BadWords
from nanoengine.runner.drafts import Drafts, Verified
from nanoengine.runner.logit_offsets import LogitOffsets, logit_bias, min_tokens_ban
from nanoengine.runner.logprobs import Logprobs, compute_logprobs
from nanoengine.runner.penalties import Penalties
from nanoengine.runner.row_rules import RowPieces, RowRule
from nanoengine.runner.stream import Stream, send_array
from nanoengine.runner.token_masks import TokenMasks


@dataclass
class Asked:
    """Log probabilities of the samples whose rows asked for them."""

    numbers: list[int]
    counts: list[int]  # of likeliest tokens
    logprobs: Logprobs


@dataclass
class Samples:
    """What was sampled, on its way to the host.

    Attributes:
        tokens: [n] int64 on the device, one for each row of logits; negative where there is none.
    """

    tokens: Tensor
    num_samples: int  # the rows of logits behind them are padding
    bound: list[np.ndarray]  # numbers of the samples that rules bound
    asked: Asked | None
    verified: Verified | None = None  # None: there were no drafts

    def __post_init__(self) -> None:
        self._on_host = self.tokens.to("cpu", non_blocking=True)
        if self.verified is not None:
            self._num_accepted = self.verified.num_accepted.to("cpu", non_blocking=True)
            self._is_token = self.verified.is_token.to("cpu", non_blocking=True)

    @property
    def num_accepted(self) -> list[int]:
        """Drafts of each run that has any; like `read`."""
        return [] if self.verified is None else self._num_accepted.tolist()

    def read(self) -> tuple[list[int], dict[int, TokenLogprobs], Exception | None]:
        """What reached the host, once the event behind it was waited for: the token of each sample, UNKNOWN where there is none;
        log probabilities by the number of the sample; and why there is no token where there is none.
        """
        found = self._on_host[: self.num_samples].tolist()
        token_ids, error = found, None
        if min(found, default=0) < 0:
            token_ids, error = [max(token, UNKNOWN) for token in found], self._why_none(self._own(found))
        return token_ids, self._read_logprobs(token_ids), error

    def _read_logprobs(self, token_ids: list[int]) -> dict[int, TokenLogprobs]:
        if self.asked is None:
            return {}
        numbers = self.asked.numbers
        entries = self.asked.logprobs.read([token_ids[number] for number in numbers], self.asked.counts)
        return {number: entry for number, entry in zip(numbers, entries, strict=True) if token_ids[number] != UNKNOWN}

    def _own(self, found: list[int]) -> list[int]:
        """Without what was sampled behind a rejected draft: of that nothing is to be told."""
        if self.verified is None:
            return found
        return [token if own else 0 for token, own in zip(found, self._is_token.tolist(), strict=False)]

    def _why_none(self, found: list[int]) -> Exception | None:
        none = [number for number, token in enumerate(found) if token < 0]
        forbidden = [n for n in none if found[n] == NONE_LEFT and any(n in numbers for numbers in self.bound)]
        if not none:
            return None
        broken = len(none) - len(forbidden)
        reasons = []
        if broken:
            reasons.append(
                f"{broken} of {len(found)} rows have no finite highest logit: broken weights, or a dtype too narrow for them"
            )
        if forbidden:
            reasons.append(
                f"{len(forbidden)} of {len(found)} rows have no token left that may be sampled and has a finite logit: "
                "allow more by allowed_token_ids, bad_words, min_tokens or the mask"
            )
        return (NotFiniteLogits if broken else NoTokenLeft)("; ".join(reasons))


class Sampler:
    """Chooses tokens for the rows of one engine, and keeps all that this takes.

    Calls come in the order of the device's work. If one raises, the rows that it named hold nothing of use until they are started
    again; the others are as they were.

    Args:
        num_rows: most sequences that run at once. The row of this number is padding: what is sampled for it is of no use.
        vocab_size: number of logits.
        kernels: choose the tokens.
        stream: where work is done.
    """

    def __init__(self, num_rows: int, vocab_size: int, kernels: Kernels, stream: Stream):
        self.vocab_size, self.kernels, self.stream = vocab_size, kernels, stream
        count, place = num_rows + 1, stream.torch_device
        self.table = SamplingTable(
            temperature=torch.zeros(count, device=place),
            top_k=torch.zeros(count, dtype=torch.int32, device=place),
            top_p=torch.ones(count, device=place),
            min_p=torch.zeros(count, device=place),
            seeds=torch.zeros(count, dtype=torch.int64, device=place),
        )
        self._masks = TokenMasks(num_rows, vocab_size, stream)
        self._rules: tuple[RowRule, ...] = (
            self._masks,
            BadWords(num_rows, stream),
            LogitOffsets(num_rows, vocab_size, stream, min_tokens_ban),
            LogitOffsets(num_rows, vocab_size, stream, logit_bias),
            Penalties(num_rows, vocab_size, stream),
        )
        self._num_logprobs = RowPieces[int](num_rows, stream, lambda numbers, _: (numbers,))

    # ---- rows

    def start(self, started: Sequence[Started]) -> None:
        """Rows begin anew, whatever they held: fresh ones, resumed ones, forks."""
        if not started:
            return
        self.end(row.row for row in started)
        self._write_table(started)
        for rule in self._rules:
            rule.start(started)
        for row in started:
            count = row.sampling.params.num_logprobs
            if count is not None:
                self._num_logprobs.put(row.row, count)

    def end(self, rows: Iterable[int]) -> None:
        """Rows that nobody has any more."""
        rows = list(rows)
        for rule in self._rules:
            rule.end(rows)
        for row in rows:
            self._num_logprobs.drop(row)

    def set_masks(self, masks: Sequence[tuple[int, bytes | None]]) -> None:
        """Which tokens rows may sample from now on: bits of the vocabulary in little-endian words of 32, and only what
        allowed_token_ids allows too. A mask holds until it is replaced or its row begins anew. None: no mask.
        """
        self._masks.set(masks)

    def _write_table(self, started: Sequence[Started]) -> None:
        params = [row.sampling.params for row in started]
        rows = [row.row for row in started]
        top_k = [own.top_k if 0 < own.top_k < self.vocab_size else 0 for own in params]
        seeds = [signed(row.sampling.seed) for row in started]
        integers = send_array(np.array([rows, top_k, seeds], dtype=np.int64), self.stream)
        floats = send_array(
            np.array([[own.temperature, own.top_p, own.min_p] for own in params], dtype=np.float32).T, self.stream
        )
        places, table = integers[0], self.table
        table.top_k.index_copy_(0, places, integers[1].to(torch.int32))
        table.seeds.index_copy_(0, places, integers[2])
        for column, values in zip((table.temperature, table.top_p, table.min_p), floats, strict=True):
            column.index_copy_(0, places, values)

    # ---- samples

    def sample(
        self,
        logits: Tensor,
        rows: Sequence[int] | np.ndarray,
        positions: Sequence[int] | np.ndarray,
        rows_on_device: Tensor,
        positions_on_device: Tensor,
        last_tokens: Tensor | None = None,
        drafts: Drafts | None = None,
    ) -> Samples:
        """Sample a token for every row of logits.

        Args:
            logits: [n, vocab_size] float32; overwritten.
            rows: the row that each sample goes into; none twice, but for those of a run with drafts. Logits behind those of the
                samples are padding.
            positions: where in its sequence each token will stand.
            rows_on_device: [n] int32, the same; of padding the row for it.
            positions_on_device: [n] int32 or int64.
            last_tokens: [num_rows] int64: if given, each token is written into its row, too; of a run with drafts the last.
            drafts: of the step; None if there are none.
        """
        rows, positions = np.asarray(rows), np.asarray(positions)
        bound = [(rule, numbers) for rule in self._rules if len(numbers := rule.find(rows, positions))]
        asking = self._num_logprobs.find(rows, positions)
        raw: Tensor | None = None
        if len(asking):
            [at] = self._num_logprobs.send(asking, rows)
            if bound:
                raw = logits.index_select(0, at)
        for rule, numbers in bound:
            rule.apply(logits, numbers, rows, drafts)
        tokens = self.kernels.choose_tokens(logits, self.table, rows_on_device, positions_on_device, last_tokens)
        verified = None
        if drafts is not None:
            verified = drafts.verify(tokens)
            if last_tokens is not None:
                last = verified.last.index_select(0, drafts.starts)
                last_tokens.index_copy_(0, drafts.rows, tokens.index_select(0, last))
        for rule, numbers in bound:
            rule.observe(tokens, numbers, rows, verified)
        asked = None
        if len(asking):
            counts = [self._num_logprobs[row] for row in rows[asking].tolist()]

            def logits_of(part: slice) -> Tensor:
                return logits.index_select(0, at[part]) if raw is None else raw[part]

            asked = Asked(asking.tolist(), counts, compute_logprobs(logits_of, tokens.index_select(0, at), max(counts)))
        return Samples(tokens, len(rows), [numbers for _, numbers in bound], asked, verified)
