"""Where this user's files are kept between runs."""

from __future__ import annotations

import os
import pwd
import tempfile
from pathlib import Path
from typing import Any

import pytest

from nanoengine.caches import cache_folder


def test_the_cache_is_where_the_user_wants_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert cache_folder("kernels") == tmp_path / "elsewhere" / "nanoengine" / "kernels"
    for unset in (None, "", "relative/to/anything"):
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        if unset is not None:
            monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert cache_folder("models") == tmp_path / "home" / ".cache" / "nanoengine" / "models"


def test_without_a_home_nothing_is_looked_for_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container whose user has no name: `~` stays as it is. Whoever made this folder could have put libraries there."""

    def unknown(user: int) -> Any:
        raise KeyError(f"uid not found: {user}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    assert os.path.expanduser("~/.cache") == "~/.cache"
    folder = cache_folder("kernels")
    assert folder.is_relative_to(tempfile.gettempdir())
    assert str(os.geteuid()) in folder.parts[-2]
