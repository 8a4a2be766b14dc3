"""Clear words where there is no room for the weights of a model."""

from __future__ import annotations

import pytest
import torch

from nanoengine.errors import InvalidConfig
from nanoengine.models import placement as module
from nanoengine.models.placement import check_room_for_weights


def test_room_on_a_gpu_is_its_own_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_ram", lambda: 4000)
    check_room_for_weights(4000, torch.device("cpu"))
    check_room_for_weights(10**12, torch.device("cuda", 0))
    with pytest.raises(InvalidConfig, match=r"take 3\.907 KiB, but 3.906 KiB of RAM are available: "):
        check_room_for_weights(4001, torch.device("cpu"))
