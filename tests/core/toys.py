"""A model without tensors for the policy of the core: its next token depends on every slot that attention would read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

from nanoengine.core.block_manager import BlockManager
from nanoengine.core.llm_engine import LLMEngine
from nanoengine.core.messages import NULL_BLOCK, UNKNOWN, Run, StepPlan, StepResult
from nanoengine.core.scheduler import Scheduler
from nanoengine.core.seams import KVLayout
from nanoengine.core.sequence import Phase, Request

VOCAB = 50
EOS = 7


class Done:
    def __init__(self, result: StepResult | Exception):
        self._result = result

    def __call__(self) -> StepResult:
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


class ToyModel:
    """Slots hold (token, position, group). A read of a slot that holds another position, or nothing, is an assertion.

    Args:
        failing: numbers of the launches that raise.
        broken: (token, position) pairs whose K/V are no numbers: whoever reads one gets no token.
        layouts: of each group: which tokens are read.
    """

    def __init__(
        self,
        block_size: int,
        failing: Iterable[int] = (),
        broken: Iterable[tuple[int, int]] = (),
        layouts: Seq[KVLayout] = (KVLayout(),),
    ):
        self.block_size, self.failing, self.broken = block_size, set(failing), set(broken)
        self.layouts = layouts
        self.slots: dict[tuple[int, int], tuple[int, int, int]] = {}
        self.rows: dict[int, tuple[list[int], list[list[int]], int]] = {}
        self.last: dict[int, int] = {}
        self.num_launched = self.num_computed = 0
        self.largest_step = self.largest_chunk = 0  # tokens
        self.failed_epoch = -1
        self.is_closed = False

    def launch(self, plan: StepPlan) -> Done:
        self.num_launched += 1
        if plan.epoch <= self.failed_epoch:
            return Done(StepResult([]))
        if self.num_launched in self.failing:
            self.failed_epoch = plan.epoch
            return Done(RuntimeError("injected"))
        self.largest_step = max(self.largest_step, plan.num_tokens)
        self.largest_chunk = max([self.largest_chunk, *(run.num_new for run in plan.runs if not run.drafts)])
        for block in plan.zeroed:
            for offset in range(self.block_size):
                self.slots.pop((block, offset), None)
        for row in plan.ended:
            self.rows.pop(row, None)  # a row that a failed plan started is unknown here
        for start in plan.started:
            self.rows[start.row] = start.token_ids, [table.copy() for table in start.tables], start.sampling.seed
            self.last[start.row] = start.token_ids[-1]
        for entries in plan.tables:
            table = self.rows[entries.row][1][entries.group]
            table[entries.first : entries.first + len(entries.block_ids)] = entries.block_ids
        columns = zip(plan.decode_rows.tolist(), plan.decode_starts.tolist(), strict=True)
        decodes = [(Run(row, start, 1, True), True) for row, start in columns]
        result = StepResult([])
        for run, is_decode in [*decodes, *((run, bool(run.drafts)) for run in plan.runs)]:
            self._compute(run, is_decode, result)
        return Done(result)

    def _compute(self, run: Run, is_decode: bool, result: StepResult) -> None:
        known, tables, seed = self.rows[run.row]
        tokens = [self.last[run.row], *run.drafts] if is_decode else known[run.start : run.start + run.num_new]
        self.num_computed += len(tokens)
        for position, token in enumerate(tokens, run.start):
            for group, table in enumerate(tables):
                block = table[position // self.block_size]
                assert block != NULL_BLOCK, "a new token has a slot in every group"
                self.slots[block, position % self.block_size] = token, position, group
        if not run.samples:
            return
        first = run.start if is_decode else run.start + run.num_new - 1
        sampled = [self._next(tables, position, seed) for position in range(first, run.start + run.num_new)]
        result.token_ids += sampled
        num_accepted = 0
        if run.drafts:
            pairs = zip(run.drafts, sampled, strict=False)
            num_accepted = next((i for i, (draft, token) in enumerate(pairs) if draft != token), len(run.drafts))
            result.num_accepted.append(num_accepted)
        self.last[run.row] = sampled[num_accepted]

    def _next(self, tables: list[list[int]], position: int, seed: int) -> int:
        digest = seed
        for group, (layout, table) in enumerate(zip(self.layouts, tables, strict=True)):
            for seen in range(layout.first_visible(position), position + 1):
                block = table[seen // self.block_size]
                assert block != NULL_BLOCK, "a token sees one whose block was given back"
                token, *where = self.slots[block, seen % self.block_size]
                assert where == [seen, group], "a slot holds the K/V of another position or group"
                if (token, seen) in self.broken:
                    return UNKNOWN
                digest = (digest * 31 + token * 7 + 1) & (2**40 - 1)
        return (digest >> 7) % VOCAB

    def close(self) -> None:
        self.is_closed = True


class ToyTokenizer:
    def encode(self, text: str) -> list[int]:
        return [ord(letter) % VOCAB for letter in text]

    def decode(self, token_ids: Seq[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(97 + token) for token in token_ids)


def check(scheduler: Scheduler) -> None:
    """Raise AssertionError if an invariant of the policy is broken."""
    blocks = scheduler.blocks
    counts = [0] * (blocks.num_blocks + 1)
    for seq in scheduler.running:
        assert seq.phase not in (Phase.WAITING, Phase.FINISHED)
        assert seq.num_written <= seq.num_computed < seq.num_tokens <= seq.max_num_tokens
        assert len(seq.token_ids) <= seq.num_tokens
        if seq.phase is Phase.DECODING:
            assert seq.num_computed == seq.num_tokens - 1
        for table, first in zip(seq.block_tables, seq.first_blocks, strict=True):
            assert not any(table[:first])
            assert len(table) * blocks.block_size >= seq.num_computed
            for block in table[first:]:
                counts[block] += 1
    assert counts[NULL_BLOCK] == 0
    assert counts == blocks.ref_counts
    assert set(blocks.free_blocks) == {block for block in range(1, blocks.num_blocks + 1) if not counts[block]}
    found = {block: (group, hash) for group, index in enumerate(blocks.index) for hash, block in index.items()}
    assert found == {block: (own.group, own.hash) for block, own in enumerate(blocks.contents) if own is not None}
    for queue in (scheduler.waiting, scheduler.running):
        assert queue == sorted(queue, key=lambda seq: seq.order)
    assert all(seq.phase is Phase.WAITING and not seq.block_tables for seq in scheduler.waiting)
    rows = [seq.row for seq in scheduler.running]
    assert sorted([*rows, *scheduler.free_rows]) == list(range(scheduler.max_num_seqs))


def make_engine(
    *,
    num_blocks: int = 400,
    block_size: int = 4,
    model: ToyModel | None = None,
    depth: int = 1,
    max_num_seqs: int = 100,
    max_num_batched_tokens: int = 8192,
    max_model_len: int = 60,
    enable_prefix_caching: bool = True,
    blocks: BlockManager | None = None,
    seed: int = 0,
    kind: Callable[..., LLMEngine] = LLMEngine,
    **scheduler: object,
) -> LLMEngine:
    blocks = blocks or BlockManager(num_blocks, block_size, enable_prefix_caching=enable_prefix_caching)
    limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    return kind(
        Scheduler(blocks, **limits, **scheduler),
        model or ToyModel(block_size),
        ToyTokenizer(),
        vocab_size=VOCAB,
        max_model_len=max_model_len,
        eos_token_ids=(EOS,),
        depth=depth,
        seed=seed,
    )


def run(engine: LLMEngine, requests: Iterable[Request]) -> int:
    """Run requests to their end, and look at all invariants after every step; returns the number of steps."""
    for request in requests:
        engine.submit(request)
    num_steps = 0
    while engine.has_unfinished:
        engine.step()
        check(engine.scheduler)
        num_steps += 1
        assert num_steps < 5000, "the engine does not come to an end"
    check_idle(engine)
    return num_steps


def check_idle(engine: LLMEngine) -> None:
    """Raise AssertionError if something is left of requests, or a step was larger than it may be."""
    scheduler, model = engine.scheduler, engine.executor
    assert not scheduler.in_flight
    assert scheduler.blocks.num_free == scheduler.blocks.num_blocks
    assert isinstance(model, ToyModel)
    assert model.largest_step <= scheduler.max_num_batched_tokens
    assert model.largest_chunk <= scheduler.max_chunk
