"""KVAnnouncer: tells a listener once a step what has entered and left the cache, whatever the listener makes of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from nanoengine.engine.kv.block_manager import BlockManager
from nanoengine.engine.kv.events import KVEvent

logger = logging.getLogger("nanoengine")

Listener = Callable[[KVEvent], object]


class KVAnnouncer:
    """Between a block manager, which collects events while somebody listens, and the listener.

    Attributes:
        num_errors: times that a listener raised. It changes nothing: the listener is somebody else's.
    """

    def __init__(self, manager: BlockManager):
        self.manager = manager
        self.num_errors = 0
        self._listener: Listener | None = None

    def attach(self, listener: Listener | None) -> None:
        """From now on tell this one, and first all that is cached already; None ends it."""
        self.announce()
        self._listener = listener
        self.manager.collect_events = listener is not None
        if listener is not None:
            self._tell(listener, self.manager.cached_blocks())

    def announce(self) -> None:
        """Tell what has happened since the last time."""
        if self._listener is not None:
            self._tell(self._listener, self.manager.drain_events())

    def _tell(self, listener: Listener, events: Iterable[KVEvent]) -> None:
        for event in events:
            try:
                listener(event)
            except Exception as problem:
                self.num_errors += 1
                if self.num_errors == 1:
                    logger.warning("the listener of KV events raised %r; more of this is counted, not logged", problem)
