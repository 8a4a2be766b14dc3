"""Sequence: the tokens of one completion and how far they are computed. It knows nothing of blocks' contents or text."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from nanoengine.engine.messages import SamplingRow
from nanoengine.engine.randomness import sequence_seed
from nanoengine.outputs import FinishReason, TokenLogprobs
from nanoengine.sampling_params import SamplingParams

NO_ROW = -1


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """One completion of a request, from its prompt to its last token.

    What remains to compute is `num_tokens - num_computed_tokens`, whether the sequence is fresh, in the middle of its
    prompt, decoding, or resumed after a preemption. Tokens count as computed as soon as a step that computes them is scheduled,
    and a token that such a step samples stands in `token_ids` as UNKNOWN until the step's results are taken.

    Args:
        seq_id: unique in the engine's life; smaller is older.
        index: which of the request's completions this is.
        seed: the request's seed.
        eos_token_ids: the model's end-of-text tokens.
        cache_salt: cached prefixes are shared only among sequences of equal salt.
        fork_of: the sequence with the same prompt whose blocks this one shares once that is prefilled.
    """

    __slots__ = (
        "block_hashes",
        "block_table",
        "block_tokens",
        "cache_salt",
        "finish_reason",
        "fork_of",
        "index",
        "logprobs",
        "max_num_tokens",
        "next_check",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_known_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_published",
        "num_slots",
        "params",
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
    ):
        self.seq_id = seq_id
        self.index = index
        self.params = params
        self.seed = sequence_seed(seed, index)
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_known_tokens = len(prompt_token_ids)  # those behind them are on their way
        self.max_num_tokens = len(prompt_token_ids)  # it ends there; set when it is queued
        self.num_computed_tokens = 0
        self.num_cached_tokens: int | None = None  # prompt tokens found in the prefix cache when first admitted
        self.num_preemptions = 0
        self.cache_salt = cache_salt.encode()
        self.fork_of = fork_of
        self.block_table: list[int] = []
        self.block_hashes: list[bytes] = []  # of its full blocks, as far as they were needed
        self.block_tokens: list[bytes] = []  # what was hashed: the tokens, in the first block behind the salt
        self.num_published = 0  # blocks at the start of the table that the prefix cache knows
        self.row = NO_ROW  # where the executor keeps its newest token and its block table while it runs
        self.num_slots = 0  # so many tokens can be written without asking the block manager
        self.logprobs: list[TokenLogprobs] = []
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None

        eos = () if params.ignore_eos else tuple(eos_token_ids)
        self.stop_token_ids = frozenset(eos) | frozenset(params.stop_token_ids)
        self.next_check = 0  # number of tokens at which the scheduler has to look at it again
        self.sampling = self._sampling()

    def _sampling(self) -> SamplingRow:
        """How its next token is sampled; before min_tokens, nothing that ends it."""
        least = self.num_prompt_tokens + self.params.min_tokens
        banned = tuple(self.stop_token_ids) if self.num_tokens < least else ()
        return SamplingRow(self.params, self.seed, banned)

    def limit_length(self, max_model_len: int) -> None:
        """Note where it ends: at `max_model_len` tokens, or with its params' `max_tokens` new ones."""
        self.max_num_tokens = max_model_len
        if self.params.max_tokens is not None:
            self.max_num_tokens = min(max_model_len, self.num_prompt_tokens + self.params.max_tokens)
        self.plan_next_check()

    def plan_next_check(self) -> None:
        """Note what changes next for its own sake: the end of its min_tokens, or its length limit."""
        self.sampling = self._sampling()
        least = self.num_prompt_tokens + self.params.min_tokens
        self.next_check = min(self.max_num_tokens, least) if least > self.num_tokens else self.max_num_tokens

    def forget_unknown_tokens(self) -> None:
        """It has ended: what is still on its way is not its own any more."""
        del self.token_ids[self.num_known_tokens :]

    @property
    def num_tokens(self) -> int:
        """All tokens, those on their way included."""
        return len(self.token_ids)

    @property
    def num_written_tokens(self) -> int:
        """Tokens whose K/V are in the cache for certain, because the step that computed them has come to its end.

        That of the newest known token has not, as far as anybody knows: it is the one that samples the next.
        """
        return min(self.num_computed_tokens, self.num_known_tokens - 1)

    @property
    def num_output_tokens(self) -> int:
        return self.num_known_tokens - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens : self.num_known_tokens]

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    def __repr__(self) -> str:
        return f"Sequence({self.seq_id}, {self.status.value}, {self.num_computed_tokens}/{self.num_tokens} tokens computed)"
