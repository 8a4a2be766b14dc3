"""Toy engines whose clients share the time of steps, and a clock of predicted time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from typing import Any

from nanoengine.core.block_manager import BlockManager
from nanoengine.core.llm_engine import LLMEngine
from nanoengine.core.sampling_params import CoreSamplingParams as SamplingParams
from nanoengine.core.scheduler import MIXED, Step
from nanoengine.core.seams import PolicyPart
from nanoengine.core.sequence import Request
from nanoengine.features.fairness.block_share import BlockShare
from nanoengine.features.fairness.clients import Clients
from nanoengine.features.fairness.step_cost import StepCost
from nanoengine.features.fairness.time_share import TimeShare
from tests.core.toys import VOCAB, make_engine

POLICIES = ["prefill_first", "mixed"]


class Recorder(PolicyPart):
    """Keeps the steps that were made, and tells the time that they are predicted to have taken."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.now = self.longest = 0.0
        self.cost = StepCost()

    def complete(self, step: Step) -> None:
        self.steps.append(step)
        seconds = seconds_of(self.cost, step)
        self.now += seconds
        self.longest = max(self.longest, seconds)


def seconds_of(cost: StepCost, step: Step) -> float:
    chunks = (cost.of_chunk(seq, run.start, run.num_new) for seq, run in zip(step.runs, step.plan.runs, strict=True))
    num_tokens = sum(run.num_new for run in step.plan.runs)
    return cost.of_tokens(len(step.decodes), num_tokens) + cost.of_logprobs(step.decodes) + sum(chunks)


def shared_engine(
    *,
    max_num_seqs: int = 100,
    parts: Seq[PolicyPart] = (),
    num_blocks: int = 400,
    enable_prefix_caching: bool = False,
    policy: str = "prefill_first",
    max_num_batched_tokens: int = 8192,
    max_chunk: int | None = None,
    **options: Any,
) -> tuple[LLMEngine, TimeShare]:
    """Equal prompts do not wait for each other: only completions of one request share blocks."""
    clients, blocks = Counter[str](), BlockManager(num_blocks, 4, enable_prefix_caching=enable_prefix_caching)
    most = max_num_batched_tokens, max_chunk or max_num_batched_tokens
    num_rows = min(max_num_seqs, max_num_batched_tokens)
    time = TimeShare(clients, blocks, num_rows, *most, is_mixed=policy == MIXED)
    plugged = list(parts)
    plugged.insert(0, Clients(clients, time, BlockShare(blocks, num_rows, clients), plugged))
    engine = make_engine(
        parts=plugged,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_chunk=max_chunk,
        blocks=blocks,
        policy=policy,
        **options,
    )
    return engine, time


def submit(engine: LLMEngine, length: int, client: str, max_tokens: int = 3, **options: Any) -> Request:
    params = SamplingParams(max_tokens=max_tokens, n=options.pop("n", 1), ignore_eos=True, seed=0)
    prompt = [(length * 7 + i * i + len(client)) % VOCAB for i in range(length)]
    request = engine.make_request(prompt, params, client=client, **options)
    engine.submit(request)
    return request


def rows_of_clients(engine: LLMEngine) -> Counter[str]:
    return Counter(seq.request.client for seq in engine.scheduler.running)
