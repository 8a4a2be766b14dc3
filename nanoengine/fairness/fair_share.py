"""FairShare: while several clients have prompts to compute, each gets a share of the prompt tokens and of the rows.

First come first served is fair to requests, not to those who send them: behind one very long prompt, or a thousand short ones,
all others would wait until everything before them is done. Two rules prevent that. Both count clients and ignore priorities,
because any client can give its requests any priority.

Tokens: one client takes at most `max_share` of the prompt tokens of a step. What the others leave stays empty: the step is over
sooner.

Rows: the part of each client is `num_rows` divided by the number of clients that have requests. While a client waits, the rows
that it lacks up to its part are kept for it. If too few rows are free, sequences of clients that have more than their part are
preempted, the last in order first; they resume later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq

from nanoengine.core.seams import PolicyPart
from nanoengine.core.sequence import Phase, Request, Sequence


class FairShare(PolicyPart):
    """Says whose prompts go on, and who must give rows back, while several clients have requests. It costs a look at each running
    sequence, and at the waiting ones up to the last that may start.

    Args:
        max_share: most of the prompt tokens of a step that one client takes: above 0 and below 1.
        num_rows: most sequences that run at once.
        num_unfinished: sequences of each client that has any.
    """

    def __init__(self, max_share: float, num_rows: int, num_unfinished: Counter[str]):
        self.max_share, self.num_rows, self.num_unfinished = max_share, num_rows, num_unfinished
        # The rest is of the step that is made.
        self._is_shared = False  # whether several clients have prompts that can be computed
        self._prefilling: set[Sequence] = set()  # running sequences whose prompts were begun before
        self._rows: dict[str, int] = {}  # of each client
        self._part = num_rows
        self._num_spare = 0  # free rows that are kept for nobody
        self._num_waiting: dict[str, int] = {}  # waiting sequences of each client that `candidates` has not come to
        self._num_open = 0  # sequences of them whose clients may start more
        self._closed: set[str] = set()  # the other clients
        self._taken: dict[str, int] = {}  # prompt tokens of each client
        self._most = 0  # prompt tokens of one client

    def make_way(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> list[Sequence]:
        """Count who has what; returns the sequences that must give their rows back."""
        self._prefilling = {seq for seq in running if seq.phase is Phase.PREFILLING}
        sharers = {seq.request.client for seq in self._prefilling}
        victims: list[Sequence] = []
        self._closed, self._num_waiting, self._num_open = set(), {}, 0
        if waiting:
            self._rows = dict.fromkeys(self.num_unfinished, 0)
            for seq in running:
                self._rows[seq.request.client] += 1
            self._part = max(1, self.num_rows // len(self._rows))
            lacks = (min(count, self._part) - self._rows[client] for client, count in self.num_unfinished.items())
            num_free, num_kept = self.num_rows - len(running), sum(lack for lack in lacks if lack > 0)
            if num_kept > num_free:
                victims = self._victims(running, num_kept - num_free)
                num_free += len(victims)
            self._num_spare = num_free - num_kept
            self._num_waiting = {client: count - self._rows[client] for client, count in self.num_unfinished.items()}
            self._num_open = sum(self._num_waiting.values())
            if self._num_spare <= 0:
                self._close_all_with_their_part()
            if num_free:  # otherwise no prompt can start
                sharers.update(client for client, count in self._num_waiting.items() if count)
        self._is_shared = len(sharers) > 1
        return victims

    def _victims(self, running: Seq[Sequence], count: int) -> list[Sequence]:
        """The last sequences of clients that have more rows than their part."""
        victims: list[Sequence] = []
        for seq in reversed(running):
            client = seq.request.client
            if self._rows[client] > self._part and seq.phase is not Phase.ENDING:
                self._rows[client] -= 1
                self._prefilling.discard(seq)
                victims.append(seq)
                if len(victims) == count:
                    break
        return victims

    def begin_prefill(self, budget: int) -> None:
        self._taken = dict.fromkeys(self.num_unfinished, 0) if self._is_shared else {}
        self._most = max(1, int(self.max_share * budget))

    def candidates(self, waiting: Iterable[Sequence]) -> Iterator[Sequence]:
        """Without the sequences of clients that have had their share of the step, or of the rows."""
        closed = self._closed
        for seq in waiting:
            if not self._num_open:
                return
            client = seq.request.client
            if client not in closed:
                self._num_waiting[client] -= 1
                self._num_open -= 1
                yield seq

    def allowed(self, seq: Sequence, budget: int) -> int:
        return min(budget, self._most - self._taken[seq.request.client]) if self._is_shared else budget

    def took(self, seq: Sequence, count: int) -> None:
        client = seq.request.client
        if self._is_shared:
            self._taken[client] += count
            if self._taken[client] == self._most:
                self._close(client)
        if self._num_waiting and seq not in self._prefilling:  # it was started in this step
            self._rows[client] += 1
            if self._rows[client] > self._part:
                self._num_spare -= 1
                if self._num_spare == 0:
                    self._close_all_with_their_part()
            elif self._rows[client] == self._part and self._num_spare <= 0:
                self._close(client)

    def _close_all_with_their_part(self) -> None:
        for client, num_rows in self._rows.items():
            if num_rows >= self._part:
                self._close(client)

    def _close(self, client: str) -> None:
        if client not in self._closed:
            self._closed.add(client)
            self._num_open -= self._num_waiting.get(client, 0)


class Clients(PolicyPart):
    """Counts the sequences of each client. While there are several clients, the shares are parts of the policy.

    Args:
        num_unfinished: what is counted.
        shares: the parts that share out.
        parts: all of the policy.
    """

    def __init__(self, num_unfinished: Counter[str], shares: list[PolicyPart], parts: list[PolicyPart]):
        self.num_unfinished, self.shares, self.parts = num_unfinished, shares, parts

    def submitted(self, request: Request) -> None:
        clients = self.num_unfinished
        clients[request.client] += len(request.sequences)
        if len(clients) > 1 and self.shares[0] not in self.parts:
            self.parts.extend(self.shares)

    def finished(self, seq: Sequence) -> None:
        clients, client = self.num_unfinished, seq.request.client
        clients[client] -= 1
        if not clients[client]:
            del clients[client]
            if len(clients) == 1:
                for share in self.shares:
                    self.parts.remove(share)
