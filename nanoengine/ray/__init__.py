"""Ray: replicas on many machines, batch inference of Ray Data, and a deployment of Ray Serve."""

from nanoengine.ray.batch import batch
from nanoengine.ray.deployment import deployment

__all__ = ["batch", "deployment"]
