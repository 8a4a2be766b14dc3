"""TimeShare: beside N - 1 other clients, the steps of a client are predicted to take at most N times as long as alone.

Each client has a clock of the time that was spent on its work. A step is made for the client whose clock is most behind: all its
decodes are in it, and its prompts up to a length (LONGEST). The others join, the most behind first, as long as the step is
predicted to take no longer than N times what it would take without them. So who has one row gets its steps at its own pace, and
who has many rows or long prompts gets the rest of each step; many equal clients are all in every step. A client that comes starts
with the clock that was most behind (start-time fair queueing, Goyal et al., 1996). Virtual token counters (Sheng et al., OSDI
2024) choose by such a clock whose requests are admitted; here it also decides who is in a step, and how large the step is.
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
from nanoengine.core.sequence import Phase, Request, Sequence
from nanoengine.features.fairness.accounts import Accounts

PART_OF_A_TRIAL = 1 / 128
"""The part of the time in which a step is made for its leader's decodes alone, to learn how long these take without others."""

LONGEST = 8
"""Beside other clients, a step's prompts end where it takes so many times as long as a step with one token of a prompt: who comes
meanwhile waits for it, and reading the weights once more takes an eighth more time.
"""

RECENT_SECONDS = 0.2
"""So long after others have gone, steps stay as short: who chats comes again, and waits for the step that runs."""

MOST_ALIKE = 8
"""So many steps are made alike while the same sequences decode, have room in one step, and nobody who waits has room to start."""


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
        self.max_tokens, self.max_chunk, self.is_mixed = max_tokens, max_chunk, is_mixed
        self.accounts = Accounts(num_unfinished, clock)
        self.cost, self.clocks = self.accounts.cost, self.accounts.clocks
        self.is_idle, self._alone_since = True, 0.0
        self._turns = Counter[str]()  # how many rows of a client have had a place that is not enough for all
        self._last_trial = float("-inf")  # when a step was made for its leader's decodes alone
        self._all: list[Sequence] = []  # the sequences that run, where all of them were in the last step
        self._num_alike = 0  # steps since that was found out
        self._num_waiting = self._num_free = 0  # sequences that waited beside them, and free blocks
        self._has_newcomer = False  # nothing of some client runs
        # The rest is of the step that is made.
        self._leader = ""
        self._first: list[Sequence] = []  # waiting sequences of the leader
        self._left: dict[str, float] = {}  # seconds that prompts of each other client may add
        self._of_token = 0.0  # what a token of theirs adds
        self._is_untouched = True  # none of them has added anything
        self._longest = 0.0  # seconds that the step may take
        self._own_left = 0  # tokens of prompts that the leader may have
        self._kept = 0  # tokens that are kept for them
        self._own: list[Sequence] = []  # decodes of the leader
        self._held: list[Sequence] = []  # decodes that are not in it

    def join(self, client: str) -> None:
        """A client comes."""
        self.accounts.open(client, was_alone=self.is_idle)
        for gone in self._turns.keys() - self.num_unfinished.keys():
            del self._turns[gone]

    def others_left(self) -> None:
        """One client is left."""
        if self.accounts.clock is None:
            self.is_idle = True
        else:
            self._alone_since = self.accounts.clock()

    # ---- while a step is made

    def make_way(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> list[Sequence]:
        """Choose for whom the step is, how long it may take, and which decodes of the others are in it."""
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
        self._own, self._held, self._first, self._leader, self._left, self._all = [], [], [], "", {}, []
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
        clients = [own for own in self.num_unfinished if own in decodes or own in prompts or own in starting]
        if not clients:
            return []
        num_running = {client: len(decodes[client]) + len(prompts[client]) for client in clients}
        self._leader = leader = min(clients, key=lambda client: (self.clocks[client], num_running[client]))
        clients.remove(leader)
        self.accounts.leads(leader)
        if leader in starting:
            self._first = self._first_of(leader, self.num_rows - len(running), num_rows[leader], waiting)
        self._own = own = decodes[leader]
        longest = LONGEST * self.cost.prompts.at(1)
        num_tokens, seconds = self._prompts_of([*prompts[leader], *self._first], self.max_tokens - len(own), longest)
        alone = self.cost.of_tokens(len(own), num_tokens) + seconds + self.cost.of_told(own)
        self._own_left, self._kept = num_tokens, min(num_tokens, self.max_tokens // 2)
        left, room = alone * len(clients), self.max_tokens - len(own) - self._kept
        self._longest = alone * max(2, len(clients) + 1)
        if self._is_trial(own, num_tokens):
            left = 0.0
        num_decodes = len(own)
        if self.is_mixed or not num_tokens:
            num_decodes, left = self._place(decodes, clients, num_tokens, left, room)
        if num_tokens or self.is_mixed:  # else prompts of others would take the step from the leader's decodes
            with_prompts = [client for client in clients if prompts[client] or client in starting]
            if with_prompts:
                self._allow_prompts(with_prompts, num_decodes, num_tokens, left)
        if num_decodes == len(running) and not waiting:
            self._all = list(running)
        self._has_newcomer = sum(map(bool, num_running.values())) < len(self.num_unfinished)
        return []

    def _allow_prompts(self, clients: list[str], num_rows: int, num_tokens: int, left: float) -> None:
        """Divide the time that is left in a step of so many rows and tokens of prompts among the prompts of other clients."""
        of_tokens = self.cost.of_tokens
        least = of_tokens(num_rows, max(1, num_tokens))
        left -= least - of_tokens(num_rows, num_tokens)  # that there are prompts at all
        most = self.cost.prompts.most(least + left) - num_rows - num_tokens
        self._left, self._of_token = dict.fromkeys(clients, left / len(clients)), left / max(1.0, most)

    def _starting(self, num_running: int, num_rows: Mapping[str, int]) -> Set[str]:
        """Clients that have a sequence that waits, and a row for it. `num_rows`: how many rows each has."""
        own_rows = max(1, self.num_rows // len(self.num_unfinished))  # who has fewer is given one: see `block_share.py`
        has_room = num_running < self.num_rows
        waiting = (client for client, count in self.num_unfinished.items() if count > num_rows[client])
        return {client for client in waiting if has_room or num_rows[client] < own_rows}

    def _first_of(self, client: str, num_free: int, num_own: int, waiting: Seq[Sequence]) -> list[Sequence]:
        """The sequences of a client that may start in this step, the first in order. `num_free`: rows; `num_own`: rows it has."""
        most = min(max(1, num_free), self.num_unfinished[client] - num_own, self.max_tokens)
        return list(islice((seq for seq in waiting if seq.request.client == client), most))

    def _prompts_of(self, seqs: Iterable[Sequence], budget: int, longest: float) -> tuple[int, float]:
        """The tokens of the next chunks of prompts in a step of so many tokens and so long, and what they add to it beside
        their number.
        """
        taken, seconds, cost = 0, 0.0, self.cost
        of_token = longest / max(1.0, cost.prompts.most(longest))
        cached: dict[Request, int] = {}  # tokens, of completions that begin alike
        room = self.blocks.num_free * self.blocks.block_size
        for seq in seqs:
            if taken >= budget:
                break
            start = seq.num_computed
            if seq.phase is Phase.WAITING:
                if taken and room <= 0:
                    break
                if seq.request not in cached:
                    cached[seq.request] = (self.blocks.find(seq) or 0) * self.blocks.block_size
                start = min(cached[seq.request], seq.num_tokens - 1)
                room -= seq.num_tokens - start
            count = min(seq.num_tokens - start, self.max_chunk, budget - taken)
            of_last = of_token + cost.of_chunk(seq, start + count, 1)
            count = min(count, max(int((longest - taken * of_token - seconds) / of_last), int(not taken)))
            if not count:
                break
            taken, seconds = taken + count, seconds + cost.of_chunk(seq, start, count)
        return taken, seconds

    def _is_trial(self, own: Seq[Sequence], num_tokens: int) -> bool:
        """Whether the step is made for the leader alone, to learn how long its rows take without others."""
        if self.accounts.clock is None or num_tokens or not self._is_sure():
            return False
        now, curve = self.accounts.clock(), self.cost.decodes
        if curve.is_known(len(own)) and curve.at(len(own)) > PART_OF_A_TRIAL * (now - self._last_trial):
            return False
        self._last_trial = now
        return True

    def _place(
        self, decodes: Mapping[str, list[Sequence]], clients: list[str], num_tokens: int, left: float, room: int
    ) -> tuple[int, float]:
        """Leave out decodes of clients for which a step of so many tokens of prompts has no time, or no room: in the next step
        they come first. Returns the number of decodes in the step, and the time that is left.
        """
        cost, of_told = self.cost, self.cost.of_told
        of_rows = partial(cost.of_tokens, prompt_tokens=num_tokens)
        num_rows = len(self._own)
        num_others = sum(len(decodes[client]) for client in clients if client in decodes)
        seconds = of_rows(num_rows + num_others) - of_rows(num_rows)
        seconds += sum([of_told(decodes[client]) for client in clients if client in decodes])
        if seconds <= left and num_others <= room:
            self._is_untouched = not num_others
            return num_rows + num_others, left - seconds
        clients = sorted(clients, key=lambda client: self.clocks[client])
        for place, client in enumerate(clients):
            if not decodes[client]:
                continue
            own = self._in_turn(client, decodes[client])
            share = len(clients) - place  # what a client leaves is for those behind it, and for prompts
            part, most, count, seconds = left / share, room // share, 0, 0.0
            for seq in own[:most]:
                more = of_rows(num_rows + count + 1) - of_rows(num_rows + count) + of_told([seq])
                if seconds + more > part:
                    break
                count, seconds = count + 1, seconds + more
            if count < len(own) and seconds * len(own) > count * (cost.of_tokens(len(own)) + of_told(own)):
                count, seconds = 0, 0.0  # all of them in a step of its own take less time for each
            num_rows += count
            self._turns[client] += count
            self._held += own[count:]
            room, left = room - count, left - seconds
        self._is_untouched = num_rows == len(self._own)
        return num_rows, left

    def _in_turn(self, client: str, decodes: list[Sequence]) -> list[Sequence]:
        """Those first that had no place in the steps before."""
        begin = self._turns[client] % len(decodes)
        return decodes[begin:] + decodes[:begin]

    def postponed(self, scheduler: Scheduler) -> Iterable[Sequence]:
        """The decodes that have no place; but one of them goes on if the leader may find no block."""
        return self._held if self._is_sure() or not self._is_untouched else self._held[1:]

    def _is_sure(self) -> bool:
        """Whether the leader has a decode that needs no block."""
        return any(seq.phase is Phase.DECODING and seq.num_computed < seq.num_slots for seq in self._own)

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
            return min(budget, self._own_left)
        client, affordable = seq.request.client, 0
        if client not in self._left:
            return 0
        if self._left[client] > 0.0:
            affordable = self._affordable(seq, self._affordable(seq, 0))
        if not affordable:
            self._left[client] = 0.0  # nor is there time for the next
        return max(min(budget - self._kept, affordable), int(self._is_untouched and not self._is_sure()))

    def _affordable(self, seq: Sequence, behind: int) -> int:
        """Tokens of a prompt for which there is time, if each costs as much as the one that is so many further."""
        of_next = self._of_token + self.cost.of_chunk(seq, seq.num_computed + behind, 1)
        return int(self._left[seq.request.client] / of_next)

    def took(self, seq: Sequence, count: int) -> None:
        if seq.request.client == self._leader:
            self._own_left, self._kept = self._own_left - count, max(0, self._kept - count)
        else:
            self._is_untouched = False
            of_chunk = self.cost.of_chunk(seq, seq.num_computed - count, count)
            self._left[seq.request.client] -= count * self._of_token + of_chunk

    def max_drafts(self, num_tokens: int, budget: int) -> int:
        """Drafts are no reason to let a step take longer than it may take with all that others add."""
        return min(budget, max(0, int(self.cost.decodes.most(self._longest)) - num_tokens))

    def complete(self, step: Step) -> None:
        self.accounts.charge(step, is_new=not self._num_alike)
        if self._first and not (step.runs or self._has_newcomer):  # there was no room for them
            self._all = step.decodes.copy()

    def after_step(self, step: Step, result: StepResult | BaseException, seqs: list[Sequence]) -> None:
        self.accounts.settle(step, result)

    def concerns(self, seq: Sequence) -> bool:
        return False
