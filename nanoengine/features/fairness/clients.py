"""Clients: counts the sequences of each client, and activates the fair shares while there are several clients."""

from __future__ import annotations

from collections import Counter

from nanoengine.core.seams import PolicyPart
from nanoengine.core.sequence import Request, Sequence
from nanoengine.features.fairness.block_share import BlockShare
from nanoengine.features.fairness.time_share import TimeShare


class Clients(PolicyPart):
    """Counts the sequences of each client. While there is one client, the fair shares are idle.

    Args:
        num_unfinished: the counts.
        time, blocks: the fair shares.
        parts: all parts of the policy. The fair shares are the last: they choose among the candidates of the others.
    """

    def __init__(self, num_unfinished: Counter[str], time: TimeShare, blocks: BlockShare, parts: list[PolicyPart]):
        self.num_unfinished, self.time, self.blocks, self.parts = num_unfinished, time, blocks, parts

    def submitted(self, request: Request) -> None:
        clients = self.num_unfinished
        if request.client not in clients:
            self.time.join(request.client)
        clients[request.client] += len(request.sequences)
        if len(clients) > 1:
            self.time.is_idle = self.blocks.is_idle = False
            if self.time not in self.parts:
                self.parts += [self.time, self.blocks]

    def finished(self, seq: Sequence) -> None:
        clients, client = self.num_unfinished, seq.request.client
        clients[client] -= 1
        if not clients[client]:
            del clients[client]
            if len(clients) == 1:
                self.blocks.is_idle = True
                self.time.others_left()
