"""FairShare: of the prompts of a step, one client takes no more than its share while others have requests too.

First come first served is fair to requests, not to those who send them: behind one very long prompt, or a thousand short ones,
everybody would wait until all of it is read. With a cap on what one client takes of each step, a newcomer finds room in the next
one. What the others leave of a step stays empty: it is over the sooner. A client who is alone has all of it.
"""

from __future__ import annotations

from collections import Counter


class FairShare:
    """Who has requests, and what each client has taken of a step.

    Args:
        max_share: most that one client takes of the prompt tokens of a step, above 0 and at most 1; a token at least.

    Attributes:
        num_unfinished: sequences of each client that has any.
        is_shared: whether more than one client had any when the step began.
    """

    def __init__(self, max_share: float):
        self.max_share = max_share
        self.num_unfinished: Counter[str] = Counter()
        self.is_shared = False
        self._taken: Counter[str] = Counter()  # tokens of this step, while it is shared
        self._most = 0

    def add(self, client: str) -> None:
        """One more sequence of a client."""
        self.num_unfinished[client] += 1

    def remove(self, client: str) -> None:
        """One of its sequences has ended."""
        self.num_unfinished[client] -= 1
        if not self.num_unfinished[client]:
            del self.num_unfinished[client]

    def begin_step(self, budget: int) -> None:
        """So many tokens of prompts the next step may have."""
        self.is_shared = len(self.num_unfinished) > 1
        if self.is_shared:
            self._taken.clear()
            self._most = max(1, int(self.max_share * budget))

    def left(self, client: str, budget: int) -> int:
        """How many tokens a client may take of those that are left of the step."""
        return min(budget, self._most - self._taken[client]) if self.is_shared else budget

    def take(self, client: str, count: int) -> None:
        """Count tokens of a client."""
        if self.is_shared:
            self._taken[client] += count
