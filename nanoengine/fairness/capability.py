"""Shares among clients as a capability of the engine."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from nanoengine.core.capability import Capability
from nanoengine.fairness.block_share import BlockShare
from nanoengine.fairness.fair_share import Clients, FairShare
from nanoengine.fairness.least_priority import LeastPriority
from nanoengine.fairness.options import FairnessOptions

if TYPE_CHECKING:
    from nanoengine.core.startup import Startup


class Fairness(Capability):
    """Shares, which are a part of the policy while several clients have requests; and how far a request may go to the front."""

    options = FairnessOptions

    def policy(self, startup: Startup) -> None:
        options = startup.config.of(FairnessOptions)
        if options.max_client_share < 1.0:
            clients: Counter[str] = Counter()
            rows = FairShare(options.max_client_share, startup.num_rows, clients)
            startup.parts.append(Clients(clients, [BlockShare(startup.blocks, clients), rows], startup.parts))
        if options.min_priority is not None:
            startup.parts.append(LeastPriority(options.min_priority))
