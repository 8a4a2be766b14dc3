"""How tests draw their cases with Hypothesis."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

FAST = settings(max_examples=60, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
