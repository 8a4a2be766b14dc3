"""TimeShare: beside N - 1 other clients, the steps of a client are predicted to take at most N times as long as alone.

Each client has a clock with the time that was spent on its work. A step is made for its leader, the client with the smallest
clock: all its decodes are in it, and its prompts up to a length (LONGEST). The other clients join in the order of their
clocks, as long as the step is predicted to take at most N times its time without them. So a client with one row gets its steps
almost at the pace of an idle engine, and a client with many rows or long prompts gets the rest of each step; many equal
clients are all in every step. A new client starts with the smallest clock (start-time fair queueing, Goyal et al., 1996).
Virtual token counters (Sheng et al., OSDI 2024) choose by such a clock whose requests are admitted; here it also chooses the
sequences and the size of each step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from collections.abc import Sequence as Seq
from functools import partial
from itertools import islice

from nanoengine.core.block_manager import BlockManager
from nanoengine.core.messages import StepResult
from nanoengine.core.scheduler import Scheduler, Step
from nanoengine.core.seams import PolicyPart
from nanoengine.core.sequence import Phase, Sequence
from nanoengine.features.fairness.accounts import Accounts
from nanoengine.features.fairness.chunk_forecast import ChunkForecast

PART_OF_A_TRIAL = 1 / 128
"""Fraction of the time for steps with the leader's decodes alone, which measure their time without others."""

LONGEST = 8
"""Beside other clients, the prompts of a step are cut where it takes so many times as long as a step with one token of a
prompt: a new request waits for it, and reading the weights once more takes an eighth more time.
"""

RECENT_SECONDS = 0.2
"""Time after the last request of other clients in which steps stay short: the next message of a chat waits for the running
step.
"""

MOST_ALIKE = 8
"""Equal steps without a new choice, while the same sequences decode, fit into one step, and no waiting sequence can start."""


class TimeShare(PolicyPart):
    """Chooses the sequences of the next step while several clients have requests. Its cost is linear in the running sequences,
    and in the waiting ones while one may start.

    Args:
        num_unfinished: sequences of each client that has any.
        blocks: of the pool, with the cached prefixes of prompts.
        num_rows: most sequences that run at once.
        max_tokens: most tokens of a step.
        max_chunk: most tokens of one prompt in a step.
        is_mixed: whether a step has decodes and prompts at once.
        clock: measures steps, in seconds; None: the predictions count.
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
        self.max_tokens, self.is_mixed = max_tokens, is_mixed
        self.accounts = Accounts(num_unfinished, clock)
        self.cost, self.clocks = self.accounts.cost, self.accounts.clocks
        self._chunks = ChunkForecast(self.cost, blocks, max_chunk)
        self.is_idle, self._alone_since = True, 0.0
        self._turns = Counter[str]()  # decodes of a client in steps that had no time for all of them (round robin)
        self._last_trial = float("-inf")  # time of the last step with the leader's decodes alone
        self._all: list[Sequence] = []  # the running sequences, if all of them were in the last step
        self._num_alike = 0  # steps since then
        self._num_waiting = self._num_free = 0  # waiting sequences and free blocks of that step
        self._has_newcomer = False  # whether a client has no running sequence
        # The rest is of the step that is being made.
        self._leader = ""
        self._first: list[Sequence] = []  # waiting sequences of the leader
        self._left: dict[str, float] = {}  # seconds that prompts of each other client may still add
        self._of_token = 0.0  # seconds for a token of them
        self._is_untouched = True  # no sequence of another client is in it
        self._longest = 0.0  # limit of its time in seconds
        self._leader_left = 0  # tokens of prompts that the leader may still have
        self._reserved = 0  # tokens that are reserved for them
        self._leaders: list[Sequence] = []  # decodes of the leader
        self._postponed: list[Sequence] = []  # decodes that are not in it

    def join(self, client: str) -> None:
        """A client has its first request."""
        self.accounts.open(client, was_alone=self.is_idle)
        for gone in self._turns.keys() - self.num_unfinished.keys():
            del self._turns[gone]

    def others_left(self) -> None:
        """Only one client has requests now."""
        if self.accounts.clock is None:
            self.is_idle = True
        else:
            self._alone_since = self.accounts.clock()

    # ---- while a step is made

    def preemption_victims(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> list[Sequence]:
        """Choose the leader of the step, its time, and the decodes of the other clients in it."""
        began = self.accounts.begin_step()
        is_same = running == self._all and len(waiting) == self._num_waiting
        if (
            is_same
            and running
            and self._num_alike < MOST_ALIKE
            and (not waiting or self.blocks.num_free <= self._num_free)
        ):
            self._num_alike, self._first, self._left = self._num_alike + 1, [], {}
            return []
        self.accounts.charge_due()
        self._leaders, self._postponed, self._first, self._leader, self._left, self._all = [], [], [], "", {}, []
        self._num_alike, self._num_waiting, self._num_free = 0, len(waiting), self.blocks.num_free
        self.is_idle = len(self.num_unfinished) < 2 and began - self._alone_since > RECENT_SECONDS
        self._is_untouched = True
        decodes, prompts = defaultdict[str, list[Sequence]](list), defaultdict[str, list[Sequence]](list)
        for seq in running:
            if seq.phase is Phase.DECODING:
                decodes[seq.request.client].append(seq)
            elif seq.phase is Phase.PREFILLING:
                prompts[seq.request.client].append(seq)
        num_rows = Counter([seq.request.client for seq in running]) if waiting else Counter[str]()
        starting = self._starting(len(running), num_rows) if waiting else frozenset[str]()
        clients = [name for name in self.num_unfinished if name in decodes or name in prompts or name in starting]
        if not clients:
            return []
        num_running = {client: len(decodes[client]) + len(prompts[client]) for client in clients}
        self._leader = leader = min(clients, key=lambda client: (self.clocks[client], num_running[client]))
        clients.remove(leader)
        self.accounts.leads(leader)
        if leader in starting:
            self._first = self._first_of(leader, self.num_rows - len(running), num_rows[leader], waiting)
        self._leaders = leaders = decodes[leader]
        longest, count = LONGEST * self.cost.prompts.at(1), len(leaders)
        num_tokens, seconds = self._chunks.measure([*prompts[leader], *self._first], self.max_tokens - count, longest)
        alone = self.cost.of_tokens(count, num_tokens) + seconds + self.cost.of_logprobs(leaders)
        self._leader_left, self._reserved = num_tokens, min(num_tokens, self.max_tokens // 2)
        left, room = alone * len(clients), self.max_tokens - count - self._reserved
        self._longest = alone * max(2, len(clients) + 1)
        if self._is_trial(leaders, num_tokens):
            left = 0.0
        num_decodes = count
        if self.is_mixed or not num_tokens:
            num_decodes, left = self._add_decodes(decodes, clients, num_tokens, left, room)
        if num_tokens or self.is_mixed:  # otherwise prompts of others would replace the leader's decodes
            with_prompts = [client for client in clients if prompts[client] or client in starting]
            if with_prompts:
                self._allow_prompts(with_prompts, num_decodes, num_tokens, left)
        if num_decodes == len(running) and not waiting:
            self._all = list(running)
        self._has_newcomer = sum(map(bool, num_running.values())) < len(self.num_unfinished)
        return []

    def _allow_prompts(self, clients: list[str], num_rows: int, num_tokens: int, left: float) -> None:
        """Divide the remaining time of a step with so many rows and tokens of prompts among the prompts of other clients."""
        of_tokens = self.cost.of_tokens
        least = of_tokens(num_rows, max(1, num_tokens))
        left -= max(0.0, least - of_tokens(num_rows, num_tokens))  # the cost of prompts at all
        most = self.cost.prompts.most(least + left) - num_rows - num_tokens
        self._left, self._of_token = dict.fromkeys(clients, left / len(clients)), left / max(1.0, most)

    def _starting(self, num_running: int, num_rows: Mapping[str, int]) -> Set[str]:
        """Clients with a waiting sequence and a row for it. `num_rows`: rows of each client."""
        row_share = max(1, self.num_rows // len(self.num_unfinished))  # see `block_share.py`
        has_room = num_running < self.num_rows
        waiting = (client for client, count in self.num_unfinished.items() if count > num_rows[client])
        return {client for client in waiting if has_room or num_rows[client] < row_share}

    def _first_of(self, client: str, num_free: int, num_running: int, waiting: Seq[Sequence]) -> list[Sequence]:
        """The first waiting sequences of a client that may start in this step, with so many free rows."""
        most = min(max(1, num_free), self.num_unfinished[client] - num_running, self.max_tokens)
        return list(islice((seq for seq in waiting if seq.request.client == client), most))

    def _is_trial(self, decodes: Seq[Sequence], num_tokens: int) -> bool:
        """Whether the step has the leader's decodes alone, to measure their time."""
        if self.accounts.clock is None or num_tokens or not self._is_sure():
            return False
        now, curve = self.accounts.clock(), self.cost.decodes
        if curve.is_known(len(decodes)) and curve.at(len(decodes)) > PART_OF_A_TRIAL * (now - self._last_trial):
            return False
        self._last_trial = now
        return True

    def _add_decodes(
        self, decodes: Mapping[str, list[Sequence]], clients: list[str], num_tokens: int, left: float, room: int
    ) -> tuple[int, float]:
        """Add decodes of other clients to a step with so many tokens of prompts, as far as its time and its tokens go: the others
        come first in the next step. Returns the number of decodes in the step, and the remaining time.
        """
        cost, of_logprobs = self.cost, self.cost.of_logprobs
        of_rows = partial(cost.of_tokens, prompt_tokens=num_tokens)
        num_rows = len(self._leaders)
        num_others = sum(len(decodes[client]) for client in clients if client in decodes)
        seconds = of_rows(num_rows + num_others) - of_rows(num_rows)
        seconds += sum([of_logprobs(decodes[client]) for client in clients if client in decodes])
        if seconds <= left and num_others <= room:
            self._is_untouched = not num_others
            return num_rows + num_others, left - seconds
        clients = sorted(clients, key=lambda client: self.clocks[client])
        for num_before, client in enumerate(clients):
            if not decodes[client]:
                continue
            queue = self._in_turn(client, decodes[client])
            num_left = len(clients) - num_before  # they divide what the clients before leave
            part, most, count, seconds = left / num_left, room // num_left, 0, 0.0
            for seq in queue[:most]:
                more = of_rows(num_rows + count + 1) - of_rows(num_rows + count) + of_logprobs([seq])
                if seconds + more > part:
                    break
                count, seconds = count + 1, seconds + more
            if count < len(queue) and seconds * len(queue) > count * (cost.of_tokens(len(queue)) + of_logprobs(queue)):
                count, seconds = 0, 0.0  # a separate step with all of them takes less time for each
            num_rows += count
            self._turns[client] += count
            self._postponed += queue[count:]
            room, left = room - count, left - seconds
        self._is_untouched = num_rows == len(self._leaders)
        return num_rows, left

    def _in_turn(self, client: str, decodes: list[Sequence]) -> list[Sequence]:
        """The decodes of a client in round-robin order, those that were left out before first."""
        begin = self._turns[client] % len(decodes)
        return decodes[begin:] + decodes[:begin]

    def postponed(self, scheduler: Scheduler) -> Iterable[Sequence]:
        """The decodes that are left out; but the first goes on if the leader's decodes may lack a block."""
        return self._postponed if self._is_sure() or not self._is_untouched else self._postponed[1:]

    def _is_sure(self) -> bool:
        """Whether the leader has a decode that needs no new block."""
        return any(seq.phase is Phase.DECODING and seq.num_computed < seq.num_slots for seq in self._leaders)

    def candidates(self, waiting: Iterable[Sequence]) -> Iterator[Sequence]:
        """The sequences of the leader first, then others while time remains for them."""
        yield from self._first
        left = self._left
        for seq in waiting if left else ():
            if left.get(seq.request.client, 0.0) > 0.0:
                yield seq
            elif max(left.values()) <= 0.0:
                return

    def allowed(self, seq: Sequence, budget: int) -> int:
        if seq.request.client == self._leader:
            return min(budget, self._leader_left)
        client, affordable = seq.request.client, 0
        if client not in self._left:
            return 0
        if self._left[client] > 0.0:
            affordable = self._affordable(seq, self._affordable(seq, 0))
        if not affordable:
            self._left[client] = 0.0  # the next one has no time either
        return max(min(budget - self._reserved, affordable), int(self._is_untouched and not self._is_sure()))

    def _affordable(self, seq: Sequence, behind: int) -> int:
        """Tokens of a prompt within the remaining time, if each costs as much as the token `behind` positions further."""
        of_next = self._of_token + self.cost.of_chunk(seq, seq.num_computed + behind, 1)
        return int(self._left[seq.request.client] / of_next)

    def took(self, seq: Sequence, count: int) -> None:
        if seq.request.client == self._leader:
            self._leader_left, self._reserved = self._leader_left - count, max(0, self._reserved - count)
        else:
            self._is_untouched = False
            of_chunk = self.cost.of_chunk(seq, seq.num_computed - count, count)
            self._left[seq.request.client] -= count * self._of_token + of_chunk

    def max_drafts(self, num_tokens: int, budget: int) -> int:
        """Drafts do not make a step longer than its limit."""
        return min(budget, max(0, int(self.cost.decodes.most(self._longest)) - num_tokens))

    def complete(self, step: Step) -> None:
        self.accounts.charge(step, is_new=not self._num_alike)
        if self._first and not (step.runs or self._has_newcomer):  # they did not fit
            self._all = step.decodes.copy()

    def after_step(self, step: Step, result: StepResult | BaseException, seqs: list[Sequence]) -> None:
        self.accounts.settle(step, result)

    def concerns(self, seq: Sequence) -> bool:
        return False
