"""Toys for the tests of this folder: short makers, a model of slots that notices every wrong block, a byte tokenizer."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, settings

from nanoengine.core.randomness import mix
from nanoengine.engine.kv.block_manager import BlockManager
from nanoengine.engine.kv.block_pool import BlockPool
from nanoengine.engine.kv.groups import KVSpec
from nanoengine.engine.messages import UNKNOWN, Drafted, FileDone, Place, RowSampling, StepPlan, StepResult, Tier
from nanoengine.engine.scheduler import Scheduler
from nanoengine.engine.sequence import Sequence
from nanoengine.engine.speculation.speculation import Speculation
from nanoengine.sampling_params import SamplingParams

FAST = settings(max_examples=60, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
VOCAB_SIZE = 1000


def make_sequence(
    seq_id: int, prompt: Seq[int], *, eos: Seq[int] = (), priority: int = 0, client: str = "", **params: Any
) -> Sequence:
    own = SamplingParams(**params)
    return Sequence(seq_id, list(prompt), own, eos_token_ids=eos, priority=priority, client=client)


def tell(seq: Sequence, *tokens: int) -> None:
    """Give a sequence new tokens, sampled and known."""
    seq.token_ids += tokens
    seq.num_tokens += len(tokens)


def make_scheduler(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    budget: int = 64,
    max_model_len: int = 64,
    caching: bool = True,
    policy: str = "prefill_first",
    max_chunk: int | None = None,
    max_client_share: float = 0.5,
    specs: tuple[KVSpec, ...] = (KVSpec(),),
    speculation: Speculation | None = None,
) -> Scheduler:
    return Scheduler(
        BlockManager(num_blocks, block_size, caching, specs=specs, most_new_tokens=min(max_chunk or budget, budget)),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        policy=policy,
        long_prefill_token_threshold=max_chunk,
        max_client_share=max_client_share,
        speculation=speculation,
    )


def snapshot(pool: BlockPool) -> tuple[object, ...]:
    """Everything that a pool knows, as a value."""
    index = [(p.hash, id(p), [kv and (kv.blocks, kv.host_slot) for kv in p.kv]) for p in pool.prefixes()]
    return tuple(pool.ref_counts), tuple(map(id, pool.contents)), tuple(pool.free_blocks), repr(index)


def free_order(pool: BlockPool) -> list[int]:
    return list(pool.free_blocks)


def answer(plan: StepPlan, token: int = 7) -> StepResult:
    """The same token for every sample."""
    return StepResult([token] * plan.num_samples, num_accepted=[_num_equal(run.drafts, token) for run in plan.drafted])


def _num_equal(drafts: Seq[int], token: int) -> int:
    """How many of the first drafts are this token."""
    return len(list(itertools.takewhile(lambda draft: draft == token, drafts)))


def runs_of(plan: StepPlan) -> list[tuple[int, int, int]]:
    """(row, tokens before, new tokens) of each run, decodes first."""
    decodes = zip(plan.decodes.rows.tolist(), plan.decodes.num_computed.tolist(), strict=True)
    own = [(row, before, 1) for row, before in decodes]
    return own + [(run.row, run.num_computed, run.num_new) for run in (*plan.drafted, *plan.chunks)]


def new_tokens(plan: StepPlan) -> list[int]:
    """How many new tokens each run has."""
    return [count for _, _, count in runs_of(plan)]


def sampled_rows(plan: StepPlan) -> list[int]:
    """The row of each sample."""
    drafted = [run.row for run in plan.drafted for _ in range(run.num_new)]
    return plan.decodes.rows.tolist() + drafted + [row for chunk in plan.chunks for row in chunk.samples]


def samples_of(plan: StepPlan) -> list[tuple[int, int]]:
    """(position of the token, row) of each sample."""
    decodes = zip((plan.decodes.num_computed + 1).tolist(), plan.decodes.rows.tolist(), strict=True)
    drafted = [(run.num_computed + 1 + i, run.row) for run in plan.drafted for i in range(run.num_new)]
    return [*decodes, *drafted, *((c.num_computed + c.num_new, row) for c in plan.chunks for row in c.samples)]


def members(scheduler: Scheduler, plan: StepPlan) -> list[int]:
    """Whose runs they are, by seq_id. The plan has just been made."""
    owners = {seq.row: seq.seq_id for seq in scheduler.running}
    return [owners[row] for row, _, _ in runs_of(plan)]


def watch(scheduler: Scheduler) -> list[set[int]]:
    """Will hold who computes or samples in each plan that is made from now on, by seq_id."""
    seen: list[set[int]] = []
    make_plan = scheduler.schedule

    def schedule() -> StepPlan:
        plan = make_plan()
        owners = {seq.row: seq.seq_id for seq in scheduler.running}
        if plan:
            seen.append({*members(scheduler, plan), *(owners[row] for row in sampled_rows(plan))})
        return plan

    scheduler.schedule = schedule  # type: ignore[method-assign]
    return seen


def is_prefill(plan: StepPlan) -> bool:
    """Whether it computes chunks alone."""
    return bool(plan.chunks) and not len(plan.decodes.rows)


def is_decode(plan: StepPlan) -> bool:
    """Whether it decodes alone."""
    return bool(len(plan.decodes.rows)) and not plan.chunks


class Done:
    """Results that are there."""

    def __init__(self, result: StepResult):
        self.outcome = result

    def result(self) -> StepResult:
        return self.outcome


class Eager:
    """An executor whose plans are carried out when they are launched."""

    execute: Callable[[StepPlan], StepResult]

    def launch(self, plan: StepPlan) -> Done:
        return Done(self.execute(plan))


@dataclass
class ToyRow:
    """What an executor knows of a sequence: it came in plans, but for the tokens that it has sampled since."""

    token_ids: list[int]
    tables: list[list[int]]
    sampling: RowSampling


class ToyModel(Eager):
    """An executor whose KV cache is a table of slots, and whose next token depends on every slot that attention reads.

    A slot holds a digest of all tokens up to its own, so a block that was never written, was overwritten, or belongs to
    another prefix changes the output. A group reads what its spec says, and nothing else. `fail_if` says which plans raise;
    those leave garbage behind, as a real one may, and their rows are good for nothing until they are started again.
    """

    def __init__(
        self,
        block_size: int = 4,
        fail_if: Callable[[StepPlan], bool] = lambda _: False,
        specs: tuple[KVSpec, ...] = (KVSpec(),),
    ):
        self.block_size = block_size
        self.specs = specs
        self.fail_if = fail_if
        self.slots: dict[tuple[int, int], int] = {}
        self.rows: dict[int, ToyRow] = {}
        self.broken: set[int] = set()
        self.host: dict[int, dict[int, int]] = {}  # slot -> offset -> digest
        self.files: dict[str, tuple[bytes, dict[int, int]]] = {}  # path -> header, content
        self.plans: list[StepPlan] = []
        self.closed = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        failing = self.fail_if(plan)
        self.broken -= {start.row for start in plan.started}
        files = [] if failing else self._copy(plan)
        self._apply(plan)
        drafts = {run.row: run.drafts for run in plan.drafted}
        for row, start, count in runs_of(plan):
            if row not in self.broken:
                self.rows[row].token_ids += drafts.get(row, ())  # until they are rejected
                self._write_tokens(self.rows[row], start, count, failing)
        if failing:
            self.break_rows(plan)
            raise RuntimeError("the step broke")
        tokens: list[int] = []
        for row, before in zip(plan.decodes.rows.tolist(), plan.decodes.num_computed.tolist(), strict=True):
            tokens += self._sample(row, before + 1, (row,))
        accepted = [self._verify(run, tokens) for run in plan.drafted]
        for chunk in plan.chunks:
            tokens += self._sample(chunk.row, chunk.num_computed + chunk.num_new, chunk.samples)
        return StepResult(tokens, files=files, num_accepted=accepted)

    def _verify(self, run: Drafted, tokens: list[int]) -> int:
        """Sample behind each token of a run; returns how many of its drafts are right. The K/V of others stay."""
        if run.row in self.broken:
            tokens += [UNKNOWN] * run.num_new
            return 0
        row = self.rows[run.row]
        known, num_accepted, own = row.token_ids[: run.num_computed + 1], UNKNOWN, row.token_ids
        for i, draft in enumerate([*run.drafts, UNKNOWN]):
            row.token_ids = [*known, *run.drafts[:i]]
            tokens += self._sample(run.row, len(row.token_ids), (run.row,))
            if num_accepted == UNKNOWN and tokens[-1] != draft:
                num_accepted, own = i, row.token_ids
        row.token_ids = own
        return num_accepted

    def choose(self, row: ToyRow, token: int) -> int:
        """The token that a row gets where all rows with its tokens would get this one."""
        return token

    def break_rows(self, plan: StepPlan) -> None:
        """A plan failed: what the rows that it touches hold is anybody's guess."""
        changed = {change.row for change in (*plan.started, *plan.tables)}
        self.broken |= changed | {row for row, _, _ in runs_of(plan)} | set(sampled_rows(plan))

    def close(self) -> None:
        self.closed += 1

    def _apply(self, plan: StepPlan) -> None:
        for row, token_ids, tables, sampling in plan.started:
            self.rows[row] = ToyRow(list(token_ids), [list(table) for table in tables], sampling)
        for row, group, first, block_ids in plan.tables:
            if row not in self.broken:
                table = self.rows[row].tables[group]
                assert len(table) >= first
                table[first : first + len(block_ids)] = block_ids

    def _write_tokens(self, row: ToyRow, start: int, count: int, failing: bool) -> None:
        assert start + count <= len(row.token_ids), "the tokens of a run are known here"
        for position in range(start, start + count):
            before = 0 if failing else self._seen_by(row, position, [position - 1])[0]
            digest = -1 if failing else mix(3 * before + row.token_ids[position] + 1)
            for table in row.tables:
                self.slots[self._slot(table, position)] = digest

    def _seen_by(self, row: ToyRow, position: int, others: Seq[int]) -> list[int]:
        """What the token at a position finds at earlier ones (0 before the first): anything wrong that any group sees there."""
        found = []
        for other in others:
            tables = [t for t, spec in zip(row.tables, self.specs, strict=True) if spec.first_seen(position) <= other]
            digests = [self.slots[self._slot(table, other)] for table in tables] if other >= 0 else [0]
            right = _digests(row.token_ids[: other + 1])[-1] if len(self.specs) > 1 or not digests else digests[0]
            found.append(next((digest for digest in digests if digest != right), right))
        return found

    def _sample(self, row: int, end: int, into: Seq[int]) -> list[int]:
        if not into:
            return []
        if row in self.broken:
            self.broken.update(into)
            return [UNKNOWN] * len(into)
        token = _token_after(self._seen_by(self.rows[row], end - 1, range(end)))
        tokens = []
        for each in into:
            state = self.rows[each]
            assert len(state.token_ids) == end, "a row samples behind its last token"
            tokens.append(self.choose(state, token))
            state.token_ids.append(tokens[-1])
        return tokens

    def _copy(self, plan: StepPlan) -> list[FileDone]:
        written = {
            path: (header, self._read(source)) for path, header, source in plan.writes
        }  # as it was before the plan
        done = [FileDone(path) for path in written]
        for path, header, slot in plan.reads:
            found = self.files.get(path)
            good = found is not None and found[0] == header
            if found is not None and good:
                self.host[slot] = dict(found[1])
            done.append(FileDone(path, None if good else "it is not what it should be"))
        for path in plan.deletes:
            self.files.pop(path, None)
        self.files |= written
        for transfer in plan.transfers:
            self._write(transfer.target, self._read(transfer.source))
        return done

    def _read(self, place: Place) -> dict[int, int]:
        if place.tier is Tier.HOST:
            return dict(self.host[place.where])
        offsets = range(self.block_size)
        return {i: self.slots[place.where, i] for i in offsets if (place.where, i) in self.slots}

    def _write(self, place: Place, content: dict[int, int]) -> None:
        if place.tier is Tier.HOST:
            self.host[place.where] = content
            return
        for offset in range(self.block_size):
            self.slots.pop((place.where, offset), None)
        self.slots.update({(place.where, offset): digest for offset, digest in content.items()})

    @property
    def num_computed(self) -> int:
        return sum(plan.num_new_tokens for plan in self.plans)

    def _slot(self, table: list[int], position: int) -> tuple[int, int]:
        return table[position // self.block_size], position % self.block_size


def _token_after(digests: list[int]) -> int:
    return mix(sum(digests)) % VOCAB_SIZE


def continuation(prompt: Seq[int], count: int) -> list[int]:
    """What ToyModel generates after a prompt if nothing goes wrong."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(_token_after(_digests(tokens)[1:]))
    return tokens[len(prompt) :]


def _digests(tokens: Seq[int]) -> list[int]:
    """Of the beginnings of some tokens, the empty one first."""
    digests = [0]
    for token in tokens:
        digests.append(mix(3 * digests[-1] + token + 1))
    return digests


def run_step(scheduler: Scheduler, model: ToyModel) -> StepPlan:
    """One whole step, with the invariants checked at every stage."""
    plan = scheduler.schedule()
    scheduler.check()
    if plan:
        scheduler.update(plan, model.execute(plan))
        scheduler.check()
    return plan


def drain(scheduler: Scheduler, model: ToyModel, limit: int = 2000) -> list[StepPlan]:
    """Run until nothing is left; more than `limit` steps count as never."""
    plans = []
    for _ in range(limit):
        if not scheduler.has_unfinished:
            return plans
        plans.append(run_step(scheduler, model))
    raise AssertionError("the scheduler does not come to an end")


class ByteTokenizer:
    """One token per byte of UTF-8."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Seq[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(token_ids).decode(errors="replace")


seq_ids = itertools.count()


def add(scheduler: Scheduler, *lengths: int, **params: Any) -> list[Sequence]:
    """Queue sequences with these prompt lengths; their prompts share nothing."""
    seqs = []
    for length, seq_id in zip(lengths, seq_ids, strict=False):
        seqs.append(make_sequence(seq_id, [10 * seq_id + 1] * length, **params))
        scheduler.add(seqs[-1])
    return seqs


def add_family(
    scheduler: Scheduler,
    prompt: list[int],
    n: int,
    *,
    first_id: int = 0,
    seed: int = 0,
    priority: int = 0,
    client: str = "",
    **params: object,
) -> list[Sequence]:
    family: list[Sequence] = []
    for index in range(n):
        family.append(
            Sequence(
                first_id + index,
                prompt,
                SamplingParams(**params),  # type: ignore[arg-type]
                index=index,
                seed=seed,
                fork_of=family[0] if family else None,
                priority=priority,
                client=client,
            )
        )
        scheduler.add(family[-1])
    return family


def ids(*seqs: Sequence) -> list[int]:
    return [seq.seq_id for seq in seqs]


def step(scheduler: Scheduler, token: int = 7) -> StepPlan:
    """One step that samples the same token everywhere."""
    plan = scheduler.schedule()
    scheduler.check()
    scheduler.update(plan, answer(plan, token))
    scheduler.check()
    return plan


def ran(scheduler: Scheduler, token: int = 7) -> list[int]:
    """`step`; returns whose runs it had, by seq_id."""
    plan = scheduler.schedule()
    who = members(scheduler, plan)
    scheduler.check()
    scheduler.update(plan, answer(plan, token))
    scheduler.check()
    return who


def assert_idle(scheduler: Scheduler) -> None:
    """Nothing is left: no sequence, no block in use."""
    scheduler.check()
    assert not scheduler.has_unfinished
    assert scheduler.block_manager.pool.num_free == scheduler.block_manager.pool.num_blocks
    assert not scheduler.schedule()
