"""Every example runs to its end."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("example", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_example_runs(example: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As a script without arguments, but in this process: it has imported torch already."""
    if example.startswith("ray_"):
        name = "ray.data" if example == "ray_batch.py" else "ray"
        pytest.importorskip(name, reason=f"{name} is not installed", exc_type=ImportError)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [example])
    monkeypatch.syspath_prepend(ROOT / "examples")  # as Python does with the folder of a script
    runpy.run_path(str(ROOT / "examples" / example), run_name="__main__")
    assert capsys.readouterr().out.strip()
