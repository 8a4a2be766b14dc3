"""LeastPriority: the smallest priority that requests may have."""

from __future__ import annotations

from nanoengine.core.errors import InvalidRequest
from nanoengine.core.seams import PolicyPart
from nanoengine.core.sequence import Request


class LeastPriority(PolicyPart):
    """Refuses requests of smaller priority, which would pass all others.

    Args:
        least: the smallest that is allowed; smaller ones start first, and are preempted last.
    """

    def __init__(self, least: int):
        self.least = least

    def made(self, request: Request) -> None:
        if request.priority < self.least:
            raise InvalidRequest("priority", f" is {request.priority}: at least {self.least} is allowed (min_priority)")
