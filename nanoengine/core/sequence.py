"""Request and Sequence: the state of a request, and of each of its completions, with tokens and progress."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from enum import Enum
from typing import Any

from nanoengine.core.detokenizer import Detokenizer
from nanoengine.core.messages import RowSampling
from nanoengine.core.outputs import CompletionOutput, FinishReason, RequestOutput
from nanoengine.core.randomness import sequence_seed
from nanoengine.core.sampling_params import CoreSamplingParams


@dataclass(eq=False)
class Request:
    """The live state of a request; callers may read it at any time."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: CoreSamplingParams
    cache_salt: str = ""  # hits of cached prefixes need an equal salt
    priority: int = 0  # a smaller one comes first
    client: str = ""
    arrival_time: float | None = None  # seconds of time.perf_counter, if measured
    # Index -> output tokens of a completion that resumes here; empty: all begin without output.
    completions: dict[int, list[int]] = field(default_factory=dict)
    sequences: list[Sequence] = field(default_factory=list)  # set when it is submitted
    num_finished: int = 0  # of them
    error: Exception | None = None
    metrics: Any = None  # from the observer
    prompt_logprobs: list[Any] | None = None  # from the collector

    @property
    def finished(self) -> bool:
        return bool(self.sequences) and self.num_finished == len(self.sequences)

    def output(self) -> RequestOutput:
        """A copy of the result so far."""
        outputs = self.params.choose([seq.output() for seq in self.sequences])
        cached = (self.sequences[0].num_cached_tokens or 0) if self.sequences else 0
        return RequestOutput(
            self.request_id, self.prompt, self.prompt_token_ids, outputs, cached, self.metrics, self.prompt_logprobs
        )


class Phase(Enum):
    """Phase of a sequence. `Scheduler` alone changes it."""

    WAITING = "waiting"  # in the queue: new, or preempted
    PREFILLING = "prefilling"  # has a row and blocks; chunks compute its tokens, new or resumed
    DECODING = "decoding"  # a step computes its last token and samples the next
    VERIFYING = "verifying"  # a step in flight verifies drafts: in no other step until its result is there
    ENDING = "ending"  # its last token is in flight
    FINISHED = "finished"


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """One completion of a request.

    `num_tokens - num_computed` tokens remain to compute: for a new prompt, a chunk, a decode and a resumed sequence alike.
    Both counts run ahead of the results: a token counts as computed, and as sampled, once a step that does it is scheduled.
    `token_ids` holds the tokens that are known.
    """

    seq_id: int  # unique in the life of the engine; a smaller one is older
    request: Request
    index: int = 0  # which of the request's completions it is
    seed: InitVar[int] = 0  # of the request
    eos_token_ids: InitVar[tuple[int, ...]] = ()  # of the model
    max_model_len: InitVar[int] = 2**24
    # Set below, and never changed:
    params: CoreSamplingParams = field(init=False)
    order: tuple[int, int] = field(init=False)  # smaller: starts first, is preempted last
    num_prompt_tokens: int = field(init=False)
    max_num_tokens: int = field(init=False)
    stop_token_ids: frozenset[int] = field(init=False)
    sampling: RowSampling = field(init=False)
    # How far it is:
    token_ids: list[int] = field(init=False)
    num_tokens: int = field(init=False)
    num_computed: int = 0
    phase: Phase = Phase.WAITING
    row: int = -1  # of the runner, while it runs
    start_step: int = 0  # the number of the step that started it last
    num_preemptions: int = 0
    num_cached_tokens: int | None = None  # prompt tokens of the prefix cache, at its first start
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: Exception | None = None
    # Of the block manager: tables of each KV group, the first block in the window of each, (hash, tokens) of its full blocks, the
    # number of leading blocks in the prefix cache, of tokens that are committed or were hit, and of tokens that its blocks hold.
    block_tables: list[list[int]] = field(default_factory=list)
    first_blocks: list[int] = field(default_factory=list)
    block_hashes: list[tuple[bytes, bytes]] = field(default_factory=list)
    num_published: int = 0
    num_written: int = 0
    num_slots: int = 0
    reads_cache: bool = True  # False: all prompt tokens must be computed, for their mean or log probabilities
    waits_for: bytes | None = None  # hash of a block that another sequence computes or loads
    detokenizer: Detokenizer = field(init=False)  # set by the engine
    logprobs: list[Any] | None = None  # from the collector
    state: dict[str, Any] = field(default_factory=dict)  # of capabilities

    def __post_init__(self, seed: int, eos_token_ids: tuple[int, ...], max_model_len: int) -> None:
        request, params = self.request, self.request.params
        self.params, self.order = params, (request.priority, self.seq_id)
        self.token_ids = [*request.prompt_token_ids, *request.completions.get(self.index, ())]
        self.num_prompt_tokens, self.num_tokens = len(request.prompt_token_ids), len(self.token_ids)
        self.max_num_tokens = min(max_model_len, self.num_prompt_tokens + (params.max_tokens or max_model_len))
        eos = () if params.ignore_eos else eos_token_ids
        self.stop_token_ids = frozenset(eos) | frozenset(params.stop_token_ids)
        seed = sequence_seed(seed, self.index)
        self.sampling = RowSampling(params, seed, self.num_prompt_tokens, tuple(sorted(self.stop_token_ids)))

    @property
    def has_all_tokens(self) -> bool:
        """Whether none of its tokens is in flight."""
        return len(self.token_ids) == self.num_tokens

    @property
    def finished(self) -> bool:
        return self.phase is Phase.FINISHED

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def text_from(self, start: int) -> str:
        """The final text of its tokens so far, from this character on."""
        if self.detokenizer.due and not self.finished:
            with suppress(Exception):  # of the tokenizer: it occurs in the engine again, and ends the sequence
                self.detokenizer.read(self.token_ids, self.stop_token_ids)
        return self.detokenizer.text_from(start)

    def output(self) -> CompletionOutput:
        """Its tokens and text so far."""
        text, tokens = self.text_from(0), self.output_token_ids
        logprobs = self.params.returned_logprobs(self.logprobs, tokens)
        return CompletionOutput(self.index, text, tokens, self.finish_reason, self.stop_reason, *logprobs)

    def __repr__(self) -> str:
        return f"Sequence({self.seq_id}, {self.phase.value}, {self.num_computed}/{self.num_tokens} tokens computed)"
