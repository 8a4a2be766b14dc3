"""TimeShare: beside N - 1 other clients, the steps of a client are predicted to take at most N times as long as alone.

Each client has a clock of the time that was spent on its work. A step is made for the client whose clock is most behind: all that
it has to compute is in it. The others join, the most behind first, as long as the step is predicted to take no longer than N
times what it would take without them. So who has one row gets its steps at its own pace, and who has many rows or long prompts
gets the rest of each step; many equal clients are all in every step. A client that comes starts with the clock that is most
behind (start-time fair queueing, Goyal et al., 1996). Virtual token counters (Sheng et al., OSDI 2024) choose by such a clock
whose requests are admitted; here it also decides who is in a step, and how large the step is.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from itertools import islice

from nanoengine.core.block_manager import BlockManager
from nanoengine.core.messages import StepResult
from nanoengine.core.scheduler import Scheduler, Step
from nanoengine.core.seams import PolicyPart
from nanoengine.core.sequence import Phase, Request, Sequence
from nanoengine.fairness.step_cost import StepCost, Work, told_of


class TimeShare(PolicyPart):
    """Says who is in the next step, while several clients have requests. It costs a look at each running sequence, and at the
    waiting ones while one may start.

    Args:
        num_unfinished: sequences of each client that has any.
        blocks: of the pool: what of a prompt is cached.
        num_rows: most sequences that run at once.
        max_tokens: most tokens of a step.
        max_chunk: most tokens of one prompt in a step.
        is_mixed: whether a step has decodes and prompts at once.
        clock: measures steps, in seconds; None: they take what is predicted.
    """

    def __init__(
        self,
        num_unfinished: Counter[str],
        blocks: BlockManager,
        num_rows: int,
        max_tokens: int,
        max_chunk: int,
        *,
        is_mixed: bool,
        clock: Callable[[], float] | None = None,
    ):
        self.num_unfinished, self.blocks, self.num_rows = num_unfinished, blocks, num_rows
        self.max_tokens, self.max_chunk, self.is_mixed, self.clock = max_tokens, max_chunk, is_mixed, clock
        self.cost = StepCost()
        self.clocks: dict[str, float] = {}
        self._turns = Counter[str]()  # how many rows of a client have had a place that is not enough for all
        self._in_flight: dict[int, tuple[float, Work, dict[str, float]]] = {}  # start, work and charges of each step
        self._last_end = float("-inf")
        # The rest is of the step that is made.
        self._leader = ""
        self._first: list[Sequence] = []  # waiting sequences of the leader
        self._left: dict[str, float] = {}  # seconds that prompts of each other client may add
        self._is_untouched = True  # none of them has added anything
        self._kept = 0  # tokens that are kept for prompts of the leader
        self._held: set[Sequence] = set()  # decodes that are not in it

    def join(self, client: str) -> None:
        """A client comes: as if it had been served as much as who is most behind, or more if it was."""
        present = [at for own, at in self.clocks.items() if own != client and own in self.num_unfinished]
        now = min(present, default=0.0)
        self.clocks = {own: at for own, at in self.clocks.items() if at > now or own in self.num_unfinished}
        self.clocks[client] = max(self.clocks.get(client, now), now)
        for gone in self._turns.keys() - self.num_unfinished.keys():
            del self._turns[gone]

    # ---- while a step is made

    def make_way(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> list[Sequence]:
        """Choose for whom the step is, how long it may take, and which decodes of the others are in it."""
        decodes, prompts = defaultdict[str, list[Sequence]](list), defaultdict[str, list[Sequence]](list)
        num_running = Counter[str]()
        for seq in running:
            num_running[seq.request.client] += 1
            if seq.phase is Phase.DECODING:
                decodes[seq.request.client].append(seq)
            elif seq.phase is Phase.PREFILLING:
                prompts[seq.request.client].append(seq)
        num_free = self.num_rows - len(running)
        own_rows = max(1, self.num_rows // len(self.num_unfinished))  # who has fewer is given one: see `block_share.py`
        starting = {
            client
            for client, count in self.num_unfinished.items()
            if count > num_running[client] and (num_free > 0 or num_running[client] < own_rows)
        }
        clients = [own for own in self.num_unfinished if decodes[own] or prompts[own] or own in starting]
        clients.sort(key=lambda client: (self.clocks[client], num_running[client]))
        self._held, self._first, self._leader, self._left, self._is_untouched = set(), [], "", {}, True
        if not clients:
            return []
        self._leader = leader = clients[0]
        if leader in starting:
            most = min(max(1, num_free), self.num_unfinished[leader] - num_running[leader], self.max_tokens)
            self._first = list(islice((seq for seq in waiting if seq.request.client == leader), most))
        own = decodes[leader]
        num_tokens, seconds = self._prompts_of([*prompts[leader], *self._first], self.max_tokens - len(own))
        alone = self.cost.rates.steps + seconds + sum(map(self.cost.of_rows, own))
        self._kept = min(num_tokens, self.max_tokens // 2)
        left, others = alone * (len(clients) - 1), clients[1:]
        room = self.max_tokens - len(own) - self._kept
        for place, client in enumerate(others if self.is_mixed or not num_tokens else ()):
            count = len(others) - place  # what a client leaves is for those behind it, and for prompts
            if decodes[client]:
                taken, seconds = self._place(client, decodes[client], left / count, room // count, is_first=place == 0)
                room, left = room - taken, left - seconds
        if num_tokens or self.is_mixed:  # else prompts of others would take the step from the leader's decodes
            with_prompts = [client for client in others if prompts[client] or client in starting]
            self._left = dict.fromkeys(with_prompts, left / max(1, len(with_prompts)))
        return []

    def _prompts_of(self, seqs: Iterable[Sequence], budget: int) -> tuple[int, float]:
        """The tokens of the next chunks of prompts in a step of so many, and what they add to it."""
        taken, seconds = 0, 0.0
        for seq in seqs:
            if taken >= budget:
                break
            start = seq.num_computed
            if seq.phase is Phase.WAITING:
                start = (self.blocks.find(seq) or 0) * self.blocks.block_size
            count = min(seq.num_tokens - start, self.max_chunk, budget - taken)
            taken, seconds = taken + count, seconds + self.cost.of_chunk(seq, start, count)
        return taken, seconds

    def _place(
        self, client: str, decodes: list[Sequence], part: float, most: int, *, is_first: bool
    ) -> tuple[int, float]:
        """Leave out the decodes of a client for which its part of the step has no time, or no room: in the next step they come
        first. One of the client that is most behind is always in it: the leader may find no block. Returns how many are in it,
        and what they add to it.
        """
        count, seconds = len(decodes), sum(map(self.cost.of_rows, decodes))
        if seconds > part or count > most:
            begin = self._turns[client] % count
            decodes = decodes[begin:] + decodes[:begin]
            count, seconds = 0, 0.0
            for seq in decodes:
                cost = self.cost.of_rows(seq)
                if (seconds + cost > part or count >= most) and (count or not is_first):
                    break
                count, seconds = count + 1, seconds + cost
            self._turns[client] += count
            self._held.update(decodes[count:])
        self._is_untouched = self._is_untouched and not count
        return count, seconds

    def postponed(self, scheduler: Scheduler) -> Iterable[Sequence]:
        return self._held

    def candidates(self, waiting: Iterable[Sequence]) -> Iterator[Sequence]:
        """Those of the leader first, and others while there is time for them."""
        yield from self._first
        left = self._left
        for seq in waiting if left else ():
            if left.get(seq.request.client, 0.0) > 0.0:
                yield seq
            elif max(left.values()) <= 0.0:
                return

    def allowed(self, seq: Sequence, budget: int) -> int:
        if seq.request.client == self._leader:
            return budget
        client = seq.request.client
        if self._left.get(client, 0.0) <= 0.0:
            return 0
        affordable = self._affordable(seq, self._affordable(seq, 0))
        if not affordable:
            self._left[client] = 0.0  # nor is there time for the next
        return max(min(budget - self._kept, affordable), int(self._is_untouched))  # the leader may find no block

    def _affordable(self, seq: Sequence, behind: int) -> int:
        """Tokens of a prompt for which there is time, if each costs as much as the one that is so many further."""
        return int(self._left[seq.request.client] / self.cost.of_chunk(seq, seq.num_computed + behind, 1))

    def took(self, seq: Sequence, count: int) -> None:
        if seq.request.client == self._leader:
            self._kept = max(0, self._kept - count)
        else:
            self._is_untouched = False
            self._left[seq.request.client] -= self.cost.of_chunk(seq, seq.num_computed - count, count)

    def complete(self, step: Step) -> None:
        """Charge the clients for it, as predicted."""
        cost, charges = self.cost, defaultdict[str, float](float)
        num_rows, num_tokens, attended, told = len(step.decodes), 0, 0.0, 0
        for seq in step.decodes:
            charges[seq.request.client] += cost.of_rows(seq)
            told += told_of(seq, "logprobs")
        for seq, run in zip(step.runs, step.plan.runs, strict=True):
            if run.drafts:
                charges[seq.request.client] += cost.of_rows(seq, run.num_new)
                num_rows, told = num_rows + run.num_new, told + run.num_new * told_of(seq, "logprobs")
            else:
                charges[seq.request.client] += cost.of_chunk(seq, run.start, run.num_new)
                num_tokens, attended = num_tokens + run.num_new, attended + run.num_new * (run.start + run.num_new / 2)
                told += run.num_new * told_of(seq, "prompt_logprobs")
        for client in charges:
            charges[client] += cost.rates.steps / len(charges)
            self.clocks[client] = self.clocks.get(client, 0.0) + charges[client]
        if self.clock is not None and charges:
            work = Work(1, num_rows, num_tokens, attended, told)
            self._in_flight[step.number] = self.clock(), work, charges

    # ---- when its result is there

    def after_step(self, step: Step, result: StepResult | BaseException, seqs: list[Sequence]) -> None:
        """Charge what it took instead, and learn from it."""
        if self.clock is None or (made := self._in_flight.pop(step.number, None)) is None:
            return
        start, work, charges = made
        now = self.clock()
        seconds, self._last_end = now - max(start, self._last_end), now
        if seconds <= 0 or isinstance(result, BaseException) or step.is_dropped:
            return
        off = seconds / self.cost.of(work)
        self.cost.learn(work, seconds)
        for client, charged in charges.items():
            if client in self.clocks:
                self.clocks[client] += (off - 1) * charged

    def concerns(self, seq: Sequence) -> bool:
        return False


class Clients(PolicyPart):
    """Counts the sequences of each client. While there are several clients, the shares are parts of the policy.

    Args:
        num_unfinished: what is counted.
        time: is told who comes.
        shares: the parts that share out, `time` among them.
        parts: all of the policy.
    """

    def __init__(
        self, num_unfinished: Counter[str], time: TimeShare, shares: list[PolicyPart], parts: list[PolicyPart]
    ):
        self.num_unfinished, self.time, self.shares, self.parts = num_unfinished, time, shares, parts

    def submitted(self, request: Request) -> None:
        clients = self.num_unfinished
        if request.client not in clients:
            self.time.join(request.client)
        clients[request.client] += len(request.sequences)
        if len(clients) > 1 and self.time not in self.parts:
            self.parts.extend(self.shares)

    def finished(self, seq: Sequence) -> None:
        clients, client = self.num_unfinished, seq.request.client
        clients[client] -= 1
        if not clients[client]:
            del clients[client]
            if len(clients) == 1:
                for share in self.shares:
                    self.parts.remove(share)
