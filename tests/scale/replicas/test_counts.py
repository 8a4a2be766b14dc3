"""The totals of replicas that are gone."""

from __future__ import annotations

from typing import Any

from nanoengine.scale.replicas.counts import ReplicaCounters


class Total(list[int]):
    """Stands for the metrics of an engine."""

    def after_end(self) -> Total:
        return self


def test_totals_go_on_with_each_replica_in_the_place_of_a_lost_one() -> None:
    counts = ReplicaCounters()
    for number in range(3):
        counts.remove(0)
        told: Any = Total([number]), None
        counts.update(0, told)
    assert counts.by_number() == {0: [2, 1, 0]}
