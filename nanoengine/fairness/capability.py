"""Fairness as a capability of the engine."""

from __future__ import annotations

from nanoengine.core.startup import Capability, Startup
from nanoengine.fairness.fair_share import FairShare
from nanoengine.fairness.options import FairnessOptions


class Fairness(Capability):
    """One object that is a gate of the scheduler and a listener of the engine."""

    options = FairnessOptions

    def policy(self, startup: Startup) -> None:
        shares = FairShare(startup.config.of(FairnessOptions).max_client_share, startup.num_rows)
        startup.gates.append(shares)
        startup.listeners.append(shares)
