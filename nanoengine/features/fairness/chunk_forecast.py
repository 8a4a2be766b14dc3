"""ChunkForecast: the tokens of the next chunks of prompts, and the time that they add to a step."""

from __future__ import annotations

from collections.abc import Iterable

from nanoengine.core.block_manager import BlockManager
from nanoengine.core.sequence import Phase, Request, Sequence
from nanoengine.features.fairness.step_cost import StepCost


class ChunkForecast:
    """Predicts the next chunks of prompts.

    Args:
        cost: predicts times.
        blocks: of the pool, with the cached prefixes of prompts.
        max_chunk: most tokens of one prompt in a step.
    """

    def __init__(self, cost: StepCost, blocks: BlockManager, max_chunk: int):
        self.cost, self.blocks, self.max_chunk = cost, blocks, max_chunk

    def measure(self, seqs: Iterable[Sequence], budget: int, longest: float) -> tuple[int, float]:
        """The tokens of the next chunks of prompts in a step of at most `budget` tokens and `longest` seconds, and the seconds
        that they add beside the curve's.
        """
        num_tokens, seconds, cost = 0, 0.0, self.cost
        of_token = longest / max(1.0, cost.prompts.most(longest))
        cached: dict[Request, int] = {}  # tokens; completions of a request have one prompt
        room = self.blocks.num_free * self.blocks.block_size
        for seq in seqs:
            if num_tokens >= budget:
                break
            start = seq.num_computed
            if seq.phase is Phase.WAITING:
                if num_tokens and room <= 0:
                    break
                if seq.request not in cached:
                    cached[seq.request] = (self.blocks.find(seq) or 0) * self.blocks.block_size
                start = min(cached[seq.request], seq.num_tokens - 1)
                room -= seq.num_tokens - start
            count = min(seq.num_tokens - start, self.max_chunk, budget - num_tokens)
            of_last = of_token + cost.of_chunk(seq, start + count, 1)
            count = min(count, max(int((longest - num_tokens * of_token - seconds) / of_last), int(not num_tokens)))
            if not count:
                break
            num_tokens, seconds = num_tokens + count, seconds + cost.of_chunk(seq, start, count)
        return num_tokens, seconds
