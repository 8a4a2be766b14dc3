"""Ray as a capability: it gives the replicas another carrier."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from nanoengine.core.capability import Capability
from nanoengine.core.errors import InvalidConfig
from nanoengine.scale.ray.options import RayOptions
from nanoengine.scale.replicas.options import num_replicas_of

if TYPE_CHECKING:
    from nanoengine.core.startup import Startup


class Ray(Capability):
    """It must come before the replicas, which take the model away from all others."""

    options = RayOptions

    def describe(self, startup: Startup) -> None:
        config = startup.config
        own = config.of(RayOptions)
        if not own.ray:
            return
        if not num_replicas_of(config):
            raise InvalidConfig("ray is given, but replicas is 0: say how many replicas Ray shall place, 1 or more")
        from nanoengine.scale.ray.carrier import RayCarrier
        from nanoengine.scale.ray.cluster import connect, nodes
        from nanoengine.scale.ray.room import config_of_each, room_of_each

        connect(own.ray_address)
        room = room_of_each(config, nodes())

        def new_carrier(hash_seed: int) -> RayCarrier:
            told = dataclasses.replace(config, block_size=startup.block_size)  # as where their blocks are looked up
            return RayCarrier(config_of_each(told, room), room, hash_seed)

        startup.new_carrier = new_carrier
