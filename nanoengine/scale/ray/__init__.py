"""Ray: replicas on many machines, and a deployment of Ray Serve."""

from nanoengine.scale.ray.deployment import deployment

__all__ = ["deployment"]
