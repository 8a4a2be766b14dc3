"""ReplicatedEngine: an LLMEngine whose requests are computed by replicas.

Requests and sequences here are mirrors: results of the replicas are written into them, so `LLM`, `AsyncLLMEngine` and the server
use this engine like any other. A step handles the messages that have arrived.
"""

from __future__ import annotations

import copy
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from nanoengine.core.detokenizer import Detokenizer
from nanoengine.core.llm_engine import Executor, LLMEngine
from nanoengine.core.messages import Launched, StepPlan, StepResult
from nanoengine.core.outputs import FinishReason
from nanoengine.core.scheduler import Scheduler
from nanoengine.core.sequence import Request
from nanoengine.core.tokenizer import Tokenizer
from nanoengine.scale.replicas.carrier import Carrier
from nanoengine.scale.replicas.fleet import Fleet
from nanoengine.scale.replicas.messages import Finish, ResetPrefixCache
from nanoengine.scale.replicas.options import ReplicaOptions
from nanoengine.scale.replicas.router import Router
from nanoengine.scale.replicas.supervisor import Supervisor

if TYPE_CHECKING:
    from nanoengine.features.lora.adapters import Adapters


class ReplicatedEngine(LLMEngine):
    """The engine of the front; see `LLMEngine`.

    Args:
        carrier: starts replicas.
        options: the number of replicas, and the limits after which one counts as lost.
        adapters: the LoRA adapters of the requests.
        scheduler: makes no step; its block manager hashes prompts.
        executor: unused.
        rest: other arguments of `LLMEngine`.

    Raises:
        NanoEngineError: an error of the start-up of a replica.
        EngineDead: a replica ended without a word, or took too long.
    """

    def __init__(
        self,
        carrier: Carrier,
        options: ReplicaOptions,
        adapters: Adapters | None,
        scheduler: Scheduler,
        executor: Executor,
        tokenizer: Tokenizer,
        **rest: Any,
    ):
        blocks = scheduler.blocks
        router, begin = Router(blocks.block_size), scheduler._unqueue
        hashes = lambda seq: [hash for hash, _ in blocks.hit_hashes(seq)]  # noqa: E731
        fleet = Fleet(router, hashes, begin, adapters)
        self.supervisor = Supervisor(fleet, carrier, options)
        super().__init__(scheduler, MessageWait(self.supervisor), tokenizer, **rest)
        self.fleet, self.inbox = fleet, Inbox(self.supervisor)
        try:
            while self.supervisor.num_ready < len(self.supervisor.slots):
                self.supervisor.watch()
                if self.supervisor.failure is not None:
                    raise self.supervisor.failure
        except BaseException:
            self.supervisor.close(0.0)
            raise
        facts = self.supervisor.facts
        assert facts is not None
        self.max_model_len, blocks.seed = facts.max_model_len, facts.hash_seed

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    @property
    def unavailable(self) -> str | None:
        """Reason why no request can be computed now; None: a replica runs, or will soon."""
        return self.supervisor.unavailable

    def submit(self, request: Request) -> None:
        if request.params.seed is None:  # a request that moves has the same seed
            request.params = copy.copy(request.params)
            request.params.keep("seed", self._seeds.getrandbits(63))
        self.queue(request)
        mirror(request, self.tokenizer)
        self.fleet.submit(request)

    def abort(self, request_id: str, reason: FinishReason = "abort") -> bool:
        request = self.requests.pop(request_id, None)
        if request is None:
            return False
        self.fleet.abort(request, Finish(reason))
        return True

    def step(self) -> list[Request]:
        """Wait for a message or a call of `Supervisor.wake`; returns the requests that advanced or ended."""
        self._check_open()
        if not self.supervisor.advanced:
            self.executor.launch(StepPlan())()
            self.supervisor.watch()
        advanced, self.supervisor.advanced = self.supervisor.advanced, {}
        for request in advanced:
            if request.finished:
                self.requests.pop(request.request_id, None)
        return list(advanced)

    def reset_prefix_cache(self) -> bool:
        if self.has_unfinished:
            return False
        self.supervisor.send_all(ResetPrefixCache())
        return True

    def restart(self) -> int:
        """Restart replicas one by one; see `Supervisor.restart`."""
        return self.supervisor.restart()

    def close(self) -> None:
        if self._is_closed:
            return
        for request_id in list(self.requests):
            self.abort(request_id)
        self._is_closed = True
        self.supervisor.close()


def mirror(request: Request, tokenizer: Tokenizer) -> None:
    """Prepare a queued request for texts and log probabilities from a replica."""
    params: Any = request.params
    for seq in request.sequences:
        seq.detokenizer = Detokenizer(tokenizer.decode)
        seq.logprobs = None if getattr(params, "num_logprobs", None) is None else []
    if getattr(params, "prompt_logprobs", None) is not None:
        request.prompt_logprobs = [None] * len(request.prompt_token_ids)
        request.sequences[0].reads_cache = False


class MessageWait:
    """An executor that waits for a message of a replica. `LLM` lets Ctrl-C through during this wait alone."""

    def __init__(self, supervisor: Supervisor):
        self.supervisor = supervisor

    def launch(self, plan: StepPlan) -> Launched:
        return self._wait

    def _wait(self) -> StepResult:
        self.supervisor.wait()
        return StepResult([])

    def close(self) -> None: ...


class Inbox(SimpleQueue[Any]):
    """Queue of calls from other threads (`AsyncLLMEngine`). `put` ends the wait for messages of replicas; `get` handles messages
    while it waits for a call.
    """

    def __init__(self, supervisor: Supervisor):
        super().__init__()
        self._supervisor = supervisor

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        super().put(item, block, timeout)
        self._supervisor.wake()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        while self.empty():
            self._supervisor.watch()
        return super().get(block, timeout)
