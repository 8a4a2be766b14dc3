"""The Ray cluster that this process uses."""

from __future__ import annotations

import logging
import os
from types import ModuleType
from typing import Any

from nanoengine.errors import InvalidConfig, MissingPackage

logger = logging.getLogger("nanoengine")


def package(name: str = "ray") -> ModuleType:
    """The module `ray`, or a part of it such as "ray.serve"; raises MissingPackage."""
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as error:
        raise MissingPackage(f"{name} is not installed ({error}): pip install 'nanoengine[ray]'") from error


def connect(address: str | None) -> None:
    """Connect to a cluster, unless this process is connected already.

    Args:
        address: see `RayOptions.ray_address`.

    Raises:
        MissingPackage: Ray is not installed.
        InvalidConfig: no cluster answers.
    """
    ray = package()
    if ray.is_initialized():
        return
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"  # for the processes of a cluster that is started here
    try:
        ray.init(address=address, job_config=_job_config(), log_to_driver=True, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise InvalidConfig(f"ray_address is {address}, where no Ray cluster answers: {error}") from error
    finally:
        del os.environ["PYTHONSAFEPATH"]
        if before is not None:
            os.environ["PYTHONSAFEPATH"] = before


def _job_config() -> Any:
    """A job whose actors import nothing from the working folder of this process, which may be the folder of a model. Ray puts the
    working folder first in their paths, unless the job has a working folder itself.
    """

    class JobConfig(package("ray.job_config").JobConfig):  # type: ignore[misc]
        def _runtime_env_has_working_dir(self) -> bool:
            return True

    return JobConfig()


def nodes() -> list[dict[str, float]]:
    """Resources of each node of the cluster, by Ray's names."""
    return [node["Resources"] for node in package().nodes() if node["Alive"]]
