"""A deployment of Ray Serve: the server's endpoints behind the proxies of Serve, and replicas as `RayCarrier` starts them.

Serve has one replica, the front: requests, text and the router. Tokens pass from the engines to it on
sockets, and from it through Serve's proxies to the clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanoengine.scale.ray.cluster import package

if TYPE_CHECKING:
    from nanoengine.serve.server.served_model import ServedModel

SERVER_OPTIONS: Mapping[str, Any] = {"host": "0.0.0.0"}
"""Defaults of the server: requests come under any host name, since Serve's proxies listen and not this server."""


def deployment(
    model: str = "demo",
    *,
    replicas: int = 1,
    server: Mapping[str, Any] = {},
    front: Mapping[str, Any] = {},
    **options: Any,
) -> Any:
    """An application for `ray.serve.run`, or for `serve run MODULE:NAME`.

    Args:
        model: see `LLM`; every node must have it.
        replicas: engines, each on a node with room for it.
        server: options of the server (`ServerConfig`), such as {"api_key": ("secret",)}; host and port are Serve's.
        front: options of Serve's deployment, such as {"ray_actor_options": {"num_cpus": 2}}. Default: no CPU, so that the
            engines have all.
        options: of the engines, as for `LLM`; ray_cpus and ray_gpus are the resources of each.

    Raises:
        MissingPackage: Ray Serve is not installed.
    """
    serve = package("ray.serve")
    kind = serve.deployment(serve.ingress()(RayIngress), name="nanoengine", num_replicas=1, max_ongoing_requests=4096)
    kind = kind.options(**{"ray_actor_options": {"num_cpus": 0}, **front})
    return kind.bind(model, {"ray": True, "replicas": replicas, **options}, {**SERVER_OPTIONS, **server})


class RayIngress:
    """The class of the deployment: Serve runs one object of it."""

    def __init__(self, model: str, options: Mapping[str, Any], server: Mapping[str, Any]):
        from nanoengine.log import show_log
        from nanoengine.serve.server.config import ServerConfig
        from nanoengine.serve.server.serve import open_serving

        config = ServerConfig(**server)
        show_log(config.log_level, config.log_format)
        self.serving: ServedModel = open_serving(model, options, config)

    def __serve_build_asgi_app__(self) -> Any:
        from nanoengine.serve.server.http.app import make_app

        return make_app(self.serving)

    def check_health(self) -> None:
        """Raise RuntimeError once no engine is started any more: Serve then starts the front anew."""
        if self.serving.engine.error is not None:
            raise RuntimeError(self.serving.closed_because)
