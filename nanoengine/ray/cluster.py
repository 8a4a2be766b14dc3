"""The Ray cluster that this process uses."""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any

from nanoengine.errors import InvalidConfig, MissingPackage

logger = logging.getLogger("nanoengine")


def package(name: str = "ray") -> ModuleType:
    """Ray, or a part of it such as "ray.data"; raises MissingPackage."""
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as error:
        raise MissingPackage(f"{name} is not installed ({error}): pip install 'nanoengine[ray]'") from error


def connect(address: str | None) -> None:
    """Connect to a cluster; what is connected stays so.

    Args:
        address: see `RayOptions.ray_address`.

    Raises:
        MissingPackage: Ray is not installed.
        InvalidConfig: no cluster is there.
    """
    ray = package()
    if ray.is_initialized():
        return
    try:
        ray.init(address=address, log_to_driver=True, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise InvalidConfig(f"ray_address is {address}, where no Ray cluster answers: {error}") from error


def nodes() -> list[dict[str, float]]:
    """What each node of the cluster has in all, by Ray's names."""
    found: list[dict[str, Any]] = package().nodes()
    return [node["Resources"] for node in found if node["Alive"]]
