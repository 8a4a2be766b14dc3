"""Shares among clients as a capability of the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoengine.core.capability import Capability
from nanoengine.fairness.fair_share import Clients, FairShare
from nanoengine.fairness.options import FairnessOptions

if TYPE_CHECKING:
    from nanoengine.core.startup import Startup


class Fairness(Capability):
    """One object that is a listener of the engine, and a gate of the scheduler while several clients have requests."""

    options = FairnessOptions

    def policy(self, startup: Startup) -> None:
        share = startup.config.of(FairnessOptions).max_client_share
        if share < 1.0:
            startup.parts.append(Clients(FairShare(share, startup.num_rows), startup.parts))
