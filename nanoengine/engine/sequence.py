"""Sequence: the tokens of one completion and how far they are computed. It knows nothing of blocks' contents or text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING

from nanoengine.core.randomness import sequence_seed
from nanoengine.engine.messages import RowSampling
from nanoengine.outputs import FinishReason, TokenLogprobs
from nanoengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanoengine.engine.decode_set import DecodeSet
    from nanoengine.engine.kv.block_pool import Prefix

NO_ROW = -1


class Status(Enum):
    WAITING = "waiting"
    FETCHING = "fetching"  # waits until K/V of its prompt were read from files
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """One completion of a request, from its prompt to its last token.

    What remains to compute is `num_tokens - num_computed_tokens`, whether the sequence is fresh, in the middle of its
    prompt, decoding, or resumed after a preemption. Tokens count as computed as soon as a step that computes them is scheduled,
    and as the sequence's own as soon as a step that samples them is; `token_ids` holds those whose results were taken.

    While it is decoded, a step changes nothing here: both counts follow from the clock of its `DecodeSet`.

    Args:
        seq_id: unique in the engine's life; smaller is older.
        priority: whose is smaller comes first.
        client: who asked for it.
        index: which of the request's completions this is.
        seed: the request's seed.
        eos_token_ids: the model's end-of-text tokens.
        cache_salt: cached prefixes are shared only among sequences of equal salt.
        fork_of: the sequence with the same prompt whose blocks this one shares once that is prefilled.
        bad_words: the tokens of `params.bad_words`.
        in_lockstep: others are held until this one has its next token.
    """

    __slots__ = (
        "_computed",
        "_decodes",
        "_offset",
        "_tokens",
        "block_hashes",
        "block_tables",
        "block_tokens",
        "cache_salt",
        "client",
        "finish_reason",
        "first_blocks",
        "fork_of",
        "in_lockstep",
        "index",
        "logprobs",
        "max_num_tokens",
        "num_cached_tokens",
        "num_encoder_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_published",
        "num_slots",
        "order",
        "params",
        "prefix",
        "prompt_logprobs",
        "row",
        "sampling",
        "seed",
        "seq_id",
        "status",
        "stop_reason",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(
        self,
        seq_id: int,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        index: int = 0,
        seed: int = 0,
        eos_token_ids: Iterable[int] = (),
        cache_salt: str = "",
        fork_of: Sequence | None = None,
        bad_words: tuple[tuple[int, ...], ...] = (),
        in_lockstep: bool = False,
        priority: int = 0,
        client: str = "",
    ):
        self.seq_id = seq_id
        self.order = (priority, seq_id)  # who comes first, wherever there is not enough for all
        self.index = index
        self.params = params
        self.seed = sequence_seed(seed, index)
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.max_num_tokens = len(prompt_token_ids)  # it ends there; set when it is queued
        self._tokens = len(prompt_token_ids)
        self._computed = 0
        self._decodes: DecodeSet | None = None  # while it is in there, the counts above mean nothing
        self._offset = 0  # computed tokens, less the clock of the set
        self.num_cached_tokens: int | None = None  # prompt tokens found in the prefix cache when first admitted
        self.num_preemptions = 0
        self.cache_salt = cache_salt.encode()
        self.client = client
        self.fork_of = fork_of
        self.in_lockstep = in_lockstep
        self.num_encoder_tokens = 0  # that it sees beside its own; what they are must be in its cache_salt
        self.block_tables: list[list[int]] = []  # of each KV group; none while it does not run
        self.first_blocks: list[int] = []  # where each table begins: what is before, no token of it sees any more
        self.block_hashes: list[bytes] = []  # of its full blocks, as far as they were needed
        self.block_tokens: list[bytes] = []  # what was hashed: the tokens, in the first block behind the salt
        self.num_published = 0  # blocks at the start of the tables that the prefix cache knows
        self.prefix: Prefix | None = None  # the last of them
        self.num_slots = 0  # so many tokens can be written without asking the block manager
        self.row = NO_ROW  # where the executor keeps its last token and its block table while it runs
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []  # of the tokens behind the first
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        eos = () if params.ignore_eos else tuple(eos_token_ids)
        self.stop_token_ids = frozenset(eos) | frozenset(params.stop_token_ids)
        self.sampling = RowSampling(
            params,
            self.seed,
            self.num_prompt_tokens,
            stop_token_ids=tuple(self.stop_token_ids) if params.min_tokens else (),
            bad_words=bad_words,
            prompt_logprobs=params.prompt_logprobs if index == 0 and self.num_prompt_tokens > 1 else None,
        )

    def limit_length(self, max_model_len: int) -> None:
        """Note where it ends: at `max_model_len` tokens, or with its params' `max_tokens` new ones."""
        self.max_num_tokens = max_model_len
        if self.params.max_tokens is not None:
            self.max_num_tokens = min(max_model_len, self.num_prompt_tokens + self.params.max_tokens)

    # ---- decoding

    @property
    def decoding(self) -> bool:
        """Whether every step gives it one new token."""
        return self._decodes is not None

    def join(self, decodes: DecodeSet) -> None:
        """From now on its counts follow from the clock of a set."""
        assert self._tokens == self._computed + 1
        self._offset = self._computed - decodes.clock
        self._decodes = decodes

    def leave(self) -> None:
        """Its counts are its own again."""
        self._tokens, self._computed = self.num_tokens, self.num_computed_tokens
        self._decodes = None

    # ---- counts

    @property
    def num_tokens(self) -> int:
        """All tokens, those on their way included."""
        return self._tokens if self._decodes is None else self._decodes.clock + self._offset + 1

    @num_tokens.setter
    def num_tokens(self, count: int) -> None:
        assert self._decodes is None
        self._tokens = count

    @property
    def num_computed_tokens(self) -> int:
        return self._computed if self._decodes is None else self._decodes.clock + self._offset

    @num_computed_tokens.setter
    def num_computed_tokens(self, count: int) -> None:
        assert self._decodes is None
        self._computed = count

    @property
    def num_known_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_written_tokens(self) -> int:
        """Tokens whose K/V are in the cache for certain, because the step that computed them has come to its end.

        That of the last known token has not, as far as anybody knows: it is the one that samples the next.
        """
        return min(self.num_computed_tokens, len(self.token_ids) - 1)

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    # ---- log probabilities of the prompt

    @property
    def reads_cache(self) -> bool:
        """Whether cached prefixes are of use: while log probabilities of the prompt are wanted, all of it is computed."""
        return self.sampling.prompt_logprobs is None

    def take_prompt_logprobs(self, start: int, entries: list[TokenLogprobs]) -> None:
        """Those of the prompt tokens from position `start` on. A sequence that was preempted computes them again."""
        self.prompt_logprobs[start - 1 :] = entries
        if len(self.prompt_logprobs) == self.num_prompt_tokens - 1:
            self.sampling = replace(self.sampling, prompt_logprobs=None)

    def __repr__(self) -> str:
        return f"Sequence({self.seq_id}, {self.status.value}, {self.num_computed_tokens}/{self.num_tokens} tokens computed)"
