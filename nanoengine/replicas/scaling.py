"""Scaling: how many replicas there should be, by the tokens that wait. No sockets, no clock of its own."""

from __future__ import annotations

UP_SECONDS = 3.0
"""So long too many tokens wait before a replica is added."""

DOWN_SECONDS = 60.0
"""So long there is little to do before one is taken away."""


class Scaling:
    """Not thread-safe. Seconds are of any clock that does not go back.

    Args:
        least: replicas that there are always.
        most: that there may be.
        tokens: that may wait for each replica. Fewer replicas would do where all that is to be done is half of that for each.
    """

    def __init__(self, least: int, most: int, tokens: int):
        self.least, self.most, self.tokens = least, most, tokens
        self._since: float | None = None  # when it was first seen that there are too few, or too many
        self._change = 0

    def change(self, now: float, count: int, num_waiting: int, num_reserved: int) -> int:
        """1: start another; -1: end one; 0: they are enough.

        Args:
            count: replicas that there are, or that are being started.
            num_waiting: tokens of prompts that are not computed, and of what is expected behind them.
            num_reserved: these, and those that running requests are expected to bring.
        """
        change = 0
        if count < self.most and num_waiting > self.tokens * count:
            change = 1
        elif count > self.least and 2 * num_reserved <= self.tokens * (count - 1):
            change = -1
        if change != self._change:
            self._change, self._since = change, now
        if not change or self._since is None or now - self._since < (UP_SECONDS if change > 0 else DOWN_SECONDS):
            return 0
        self._since = now  # the next one takes as long
        return change
