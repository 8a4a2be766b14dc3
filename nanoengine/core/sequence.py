"""Request and Sequence: what one caller asked for, and each of its completions: its tokens, and how far they are computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from nanoengine.core.detokenizer import Detokenizer
from nanoengine.core.messages import RowSampling
from nanoengine.core.outputs import CompletionOutput, FinishReason, RequestOutput
from nanoengine.core.randomness import sequence_seed
from nanoengine.core.sampling_params import SamplingParams


@dataclass(eq=False)
class Request:
    """The live state of a request; callers may read it at any time."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    cache_salt: str = ""  # cached prefixes are shared only among requests of equal salt
    priority: int = 0  # a smaller one comes first
    client: str = ""
    arrival_time: float | None = None  # seconds of time.perf_counter, if somebody measures it
    sequences: list[Sequence] = field(default_factory=list)  # set when it is submitted
    num_finished: int = 0  # of them
    error: Exception | None = None
    metrics: Any = None  # as a listener measured them
    prompt_logprobs: list[Any] | None = None  # as a listener collected them

    @property
    def finished(self) -> bool:
        return bool(self.sequences) and self.num_finished == len(self.sequences)

    def output(self) -> RequestOutput:
        """The result so far, as a value that does not change any more."""
        outputs = self.params.choose([seq.output() for seq in self.sequences])
        cached = self.sequences[0].num_cached_tokens if self.sequences else None
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            outputs,
            cached or 0,
            self.metrics,
            self.prompt_logprobs,
        )


class Phase(Enum):
    """Where a sequence stands. `Scheduler` moves it from one to the next."""

    WAITING = "waiting"  # in the queue: new, or preempted
    PREFILLING = "prefilling"  # has blocks; more than its last token is still to compute
    DECODING = "decoding"  # every step computes its last token and samples the next
    VERIFYING = "verifying"  # a step in flight verifies drafts: in no other step until its result is there
    ENDING = "ending"  # its last token is in flight
    FINISHED = "finished"


class Sequence:
    """One completion of a request.

    What remains to compute is `num_tokens - num_computed`: for a new prompt, a chunk, a decode and a resumed sequence alike.
    Both counts run ahead of the results: a token counts as computed, and as sampled, once a step that does it is scheduled.
    `token_ids` holds the tokens that are known.

    Args:
        seq_id: unique in the life of the engine; a smaller one is older.
        request: it belongs to.
        index: which of the request's completions it is.
        seed: of the request.
        eos_token_ids: end-of-text tokens of the model.
        max_model_len: most tokens of a sequence.
    """

    def __init__(
        self,
        seq_id: int,
        request: Request,
        *,
        index: int = 0,
        seed: int = 0,
        eos_token_ids: tuple[int, ...] = (),
        max_model_len: int = 2**24,
    ):
        params = request.params
        self.seq_id, self.request, self.index, self.params = seq_id, request, index, params
        self.order = (request.priority, seq_id)  # smaller: starts first, is preempted last
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = self.num_tokens = len(self.token_ids)
        self.max_num_tokens = min(max_model_len, self.num_tokens + (params.max_tokens or max_model_len))
        self.num_computed = 0
        self.reads_cache = True  # whether cached prefixes are of use
        self.num_cached_tokens: int | None = None  # prompt tokens found in the prefix cache at its first start
        self.num_preemptions = 0
        self.phase = Phase.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.error: Exception | None = None
        eos = () if params.ignore_eos else eos_token_ids
        self.stop_token_ids = frozenset(eos) | frozenset(params.stop_token_ids)
        seed = sequence_seed(seed, index)
        self.sampling = RowSampling(params, seed, self.num_tokens, tuple(sorted(self.stop_token_ids)))
        self.row = -1  # where the runner keeps its state while it runs
        self.first_step = 0  # the number of the step that started it last
        # The block manager's: tables of each KV group, the first block in each that it still sees, how many leading blocks are
        # in the prefix cache, tokens whose K/V are there for certain, tokens that it can compute without asking for blocks.
        self.block_tables: list[list[int]] = []
        self.first_blocks: list[int] = []
        self.block_hashes: list[tuple[bytes, bytes]] = []  # (hash, tokens) of its full blocks
        self.num_published = self.num_written = self.num_slots = 0
        self.retry_at = 0  # see `BlockManager.may_admit`
        self.waits_for: bytes | None = None  # hash of a block that a step in flight computes for it, too
        # The text's: set by the engine.
        self.detokenizer: Detokenizer | None = None
        self.num_taken = 0  # output tokens that were made into text
        self.logprobs: list[Any] | None = None  # as a listener collected them
        self.state: dict[str, Any] = {}  # what capabilities keep for it

    @property
    def is_known(self) -> bool:
        """Whether no token of it is in flight."""
        return len(self.token_ids) == self.num_tokens

    @property
    def finished(self) -> bool:
        return self.phase is Phase.FINISHED

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def output(self) -> CompletionOutput:
        """Its tokens and text so far."""
        text = "" if self.detokenizer is None else self.detokenizer.text
        tokens = self.output_token_ids
        logprobs = self.params.shown_logprobs(self.logprobs, tokens)
        return CompletionOutput(self.index, text, tokens, self.finish_reason, self.stop_reason, *logprobs)

    def __repr__(self) -> str:
        return f"Sequence({self.seq_id}, {self.phase.value}, {self.num_computed}/{self.num_tokens} tokens computed)"
