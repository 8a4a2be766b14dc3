"""The physical limit: the least that a step of a model has to read and multiply, and how long that takes a device.

A step that wastes nothing reads every weight once and the K/V of every sequence once, and does the multiplications of its
tokens. Its time is at least the longer of the two (the roofline model: Williams, Waterman, Patterson, 2009).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.workload import Workload
from nanoengine.core.messages import StepPlan
from nanoengine.models.model_config import ModelConfig

if TYPE_CHECKING:  # it brings torch, and `--cpu` must come before that
    from nanoengine.core.attention import KVLayer


@dataclass(frozen=True)
class Ceiling:
    """What the device can do at best: bytes read per second, and floating-point operations per second in one dtype."""

    read_bytes_s: float
    flop_s: float


class StepWork(NamedTuple):
    """What one step has to do, whatever engine does it."""

    num_tokens: int  # computed by the layers
    num_sampled: int  # tokens, each from logits of its own
    num_context: int  # tokens whose K/V is read: of each run, all up to its last new one
    num_pairs: int  # (query, key) pairs of attention

    @classmethod
    def of_plan(cls, plan: StepPlan) -> StepWork:
        context = pairs = int(plan.decode_starts.sum()) + len(plan.decode_rows)  # one query each
        for run in plan.runs:
            context += run.start + run.num_new
            pairs += run.num_new * run.start + run.num_new * (run.num_new + 1) // 2
        return cls(plan.num_tokens, plan.num_samples, context, pairs)


def kv_bytes_per_token(pool: KVLayer, block_size: int, num_layers: int) -> int:
    """Bytes of the K and V of one token, scales included, in all layers that have some.

    Args:
        pool: K and V of one layer: the first dimension of each is that of blocks.
        block_size: tokens of a block.
        num_layers: those with K and V, whether or not some of them share memory: each keeps a token in a block of its group.
    """
    return num_layers * sum(tensor[0].nbytes for tensor in pool) // block_size


class ModelLimit:
    """The least time of a step of one model. Layers with windows count as if they read all tokens, states of layers as nothing.

    Args:
        model: its shapes.
        dtype_bytes: of a weight.
        kv_bytes: K and V of one token in all layers, as the pool holds them.
        weight_bytes: of all matrices, if they do not have that dtype.
        num_weights: of the files; None: as many as the shapes of a family say.
    """

    def __init__(
        self,
        model: ModelConfig,
        dtype_bytes: int,
        kv_bytes: int,
        weight_bytes: int | None = None,
        num_weights: int | None = None,
    ):
        from nanoengine.models.loader import num_parameters  # it brings torch, and `--cpu` must come before that

        head = model.vocab_size * model.hidden_size
        all_weights = num_weights or num_parameters(model)
        read = all_weights - (0 if model.tie_word_embeddings else head)  # of an untied embedding few rows are read
        every = all_weights * dtype_bytes if weight_bytes is None else weight_bytes
        self.weight_bytes = every * read // all_weights
        self.kv_bytes = kv_bytes
        self.token_flop = 2 * (read - head)
        self.logits_flop = 2 * head
        self.pair_flop = 4 * model.num_layers * model.num_heads * model.head_dim

    def seconds(self, work: StepWork, ceiling: Ceiling, *, in_turn: bool = False) -> float:
        """Of one step; `in_turn`: of an engine whose products and attention never run at the same time: kernels on one stream."""
        if not work.num_tokens:  # it only copies blocks, which an engine need not do
            return 0.0
        products = work.num_tokens * self.token_flop + work.num_sampled * self.logits_flop
        parts = [(self.weight_bytes, products), (work.num_context * self.kv_bytes, work.num_pairs * self.pair_flop)]
        if not in_turn:
            parts = [(sum(own[0] for own in parts), sum(own[1] for own in parts))]
        return sum(max(num_bytes / ceiling.read_bytes_s, flop / ceiling.flop_s) for num_bytes, flop in parts)

    def workload_seconds(self, workload: Workload, ceiling: Ceiling, *, in_turn: bool = False) -> float:
        """The least time of a workload whose requests are all there at the start: one prefill, then as many decode steps
        as the longest output needs, each with all sequences that are not done."""
        lens = [len(prompt) for prompt in workload.prompts]
        prefill = StepWork(sum(lens), len(lens), sum(lens), sum(n * (n + 1) // 2 for n in lens))
        total = self.seconds(prefill, ceiling, in_turn=in_turn)
        pairs = list(zip(lens, workload.output_lens, strict=True))
        for step in range(1, max(workload.output_lens)):
            pairs = [pair for pair in pairs if pair[1] > step]
            context = sum(length for length, _ in pairs) + step * len(pairs)
            total += self.seconds(StepWork(len(pairs), len(pairs), context, context), ceiling, in_turn=in_turn)
        return total
