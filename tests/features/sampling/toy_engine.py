"""An engine over the toy model of the core's tests whose tokens are sampled: logits follow from every slot that is read."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanoengine.core.device import Device
from nanoengine.core.kernels import CoreKernels
from nanoengine.core.llm_engine import LLMEngine
from nanoengine.core.messages import RowSampling, Run, StepPlan, StepResult
from nanoengine.core.randomness import sequence_seed
from nanoengine.core.seams import PolicyPart
from nanoengine.core.sequence import Sequence
from nanoengine.features.sampling.collector import Collector
from nanoengine.features.sampling.params import SamplingParams
from tests.core.toys import EOS, VOCAB, Done, ToyModel, make_engine
from tests.features.sampling.rows import CPU, Bench, begin, reference, sampler_with_part

NUM_ROWS = 100


def logits_of(digests: Tensor) -> Tensor:
    """[n] int64 digests of all tokens that a position sees -> [n, VOCAB]; -1: they are no numbers."""
    rows = [
        torch.randn(VOCAB, generator=torch.Generator().manual_seed(digest)) * 3
        for digest in digests.clamp(min=0).tolist()
    ]
    return torch.stack(rows).masked_fill(digests[:, None] < 0, torch.nan)


def adapter_digest(token_ids: list[int]) -> int:
    """As the toy model computes it."""
    digest = 0
    for token in token_ids:
        digest = (digest * 31 + token * 7 + 1) & (2**40 - 1)
    return digest


class SampledToy(ToyModel):
    """The runner's part of sampling is the real one; "hidden states" are digests."""

    def __init__(self, block_size: int, **options: Any):
        super().__init__(block_size, **options)
        self.token_ids: dict[int, list[int]] = {}
        runner = {"token_ids": self.token_ids, "model": SimpleNamespace(compute_logits=logits_of)}
        self.sampler, self.part = sampler_with_part(NUM_ROWS, VOCAB, CoreKernels(), Device(CPU), **runner)
        self.last_tokens = torch.zeros(NUM_ROWS + 1, dtype=torch.int64)
        self.digests: list[int] = []

    def launch(self, plan: StepPlan) -> Done:
        if plan.epoch <= self.failed_epoch:
            return super().launch(plan)
        self.digests = []
        self.token_ids |= {start.row: start.token_ids for start in plan.started}
        for row in plan.ended:
            self.last.pop(row, None)
        done = super().launch(plan)
        return done if plan.epoch <= self.failed_epoch else Done(self._sample(plan))

    def _sample(self, plan: StepPlan) -> StepResult:
        self.sampler.apply(plan)
        self.part.begin(plan)
        read = self.part.after_forward(plan, None, torch.tensor(self.digests))  # type: ignore[arg-type]
        sampled, rows, positions, at = [], [], [], 0
        columns = zip(plan.decode_rows.tolist(), plan.decode_starts.tolist(), strict=True)
        for run in [*(Run(row, start, 1, True) for row, start in columns), *plan.runs]:
            at += run.num_new
            count = run.num_new if run.drafts else int(run.samples)
            sampled += self.digests[at - count : at]
            rows += [run.row] * count
            positions += range(run.start + run.num_new + 1 - count, run.start + run.num_new + 1)
        result = StepResult([])
        if sampled:
            where = np.array(rows, np.int32), np.array(positions, np.int32)
            on_device = [torch.from_numpy(own) for own in where]
            self.sampler.sample(plan, logits_of(torch.tensor(sampled)), where, on_device, self.last_tokens)(result)
            self.last |= {row: int(self.last_tokens[row]) for row in rows}
        if read is not None:
            read(result)
        return result

    def _compute(self, run: Run, is_decode: bool, result: StepResult) -> None:
        known, [table], _ = self.rows[run.row]
        tokens = [self.last[run.row], *run.drafts] if is_decode else known[run.start : run.start + run.num_new]
        for position, token in enumerate(tokens, run.start):
            self.slots[table[position // self.block_size], position % self.block_size] = token, position
        for position in range(run.start, run.start + len(tokens)):
            seen = [self.slots[table[i // self.block_size], i % self.block_size] for i in range(position + 1)]
            assert [at for _, at in seen] == list(range(position + 1))
            broken = any(slot in self.broken for slot in seen)
            self.digests.append(-1 if broken else adapter_digest([token for token, _ in seen]))


def make(model: SampledToy | None = None, parts: Seq[PolicyPart] = (), **way: Any) -> LLMEngine:
    """An engine with this capability."""
    model = SampledToy(4) if model is None else model
    return make_engine(model=model, parts=[*parts, Collector()], **way)


def alone(seq: Sequence) -> tuple[list[int], list[Any]]:
    """The tokens of a sequence and their log probabilities, from its params alone, slowly."""
    params = seq.params
    assert isinstance(params, SamplingParams)
    stops = (*params.stop_token_ids, *(() if params.ignore_eos else (EOS,)))
    seed = sequence_seed(0 if params.seed is None else params.seed, seq.index)
    own = RowSampling(params, seed, len(seq.request.prompt_token_ids), stops)
    plain = RowSampling(
        SamplingParams(
            temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p, logprobs=20
        ),
        seed,
        1,
    )
    token_ids, entries = list(seq.request.prompt_token_ids), []
    for _ in range(params.max_tokens or 16):
        logits = logits_of(torch.tensor([adapter_digest(token_ids)]))
        adjusted = torch.tensor([reference(logits[0].tolist(), own, token_ids)])
        bench = Bench(1, VOCAB)
        bench.start(begin(0, plain))
        [token] = bench.sample(adjusted, [0], [len(token_ids)]).token_ids
        if token < 0:
            break
        own_logprobs = logits[0].log_softmax(-1)
        rank = int((logits[0] > logits[0, token]).sum()) + 1
        top = own_logprobs.topk(params.num_logprobs or 0)
        likeliest = zip(top.indices.tolist(), zip(top.values.tolist(), range(1, 51), strict=False), strict=True)
        entries.append({token: (float(own_logprobs[token]), rank)} | dict(likeliest))
        token_ids.append(token)
        if token in stops:
            break
    return token_ids[own.num_prompt_tokens :], entries
