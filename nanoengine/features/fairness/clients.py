"""Clients: counts the requests of each client, and has the shares of time and blocks ready while there are several."""

from __future__ import annotations

from collections import Counter

from nanoengine.core.seams import PolicyPart
from nanoengine.core.sequence import Request, Sequence
from nanoengine.features.fairness.block_share import BlockShare
from nanoengine.features.fairness.time_share import TimeShare


class Clients(PolicyPart):
    """Counts the sequences of each client. While there is one client, the shares are idle parts of the policy.

    Args:
        num_unfinished: what is counted.
        time, blocks: what shares out.
        parts: all of the policy. The shares are the last, since they decide about what others let pass.
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
