"""Ray as a capability: replicas start as actors of a Ray cluster."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from nanoengine.core.capability import Capability
from nanoengine.core.errors import InvalidConfig
from nanoengine.scale.ray.options import RayOptions
from nanoengine.scale.replicas.options import num_replicas_of

if TYPE_CHECKING:
    from nanoengine.core.startup import Startup
    from nanoengine.scale.replicas.carrier import Carrier


class Ray(Capability):
    """Ray at start-up. It must come before `Replicas`, which uses the carrier."""

    options = RayOptions

    def describe(self, startup: Startup) -> None:
        config = startup.config
        options = config.of(RayOptions)
        if not options.ray:
            return
        if not num_replicas_of(config):
            raise InvalidConfig("ray is given, but replicas is 0: say how many replicas Ray shall place, 1 or more")
        from nanoengine.scale.ray.carrier import RayCarrier
        from nanoengine.scale.ray.cluster import connect, nodes
        from nanoengine.scale.ray.resources import config_of_each, resources_of_each

        connect(options.ray_address)
        resources = resources_of_each(config, nodes())

        def new_carrier(hash_seed: int) -> Carrier:
            sized = dataclasses.replace(config, block_size=startup.block_size)  # equal hashes of blocks here and there
            return RayCarrier(config_of_each(sized, resources), resources, hash_seed)

        startup.new_carrier = new_carrier
