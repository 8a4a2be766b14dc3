"""Options of the front: durations as Ollama writes them."""

from __future__ import annotations

import math

import pytest

from nanoengine.errors import InvalidConfig
from nanoengine.serve.front.config import FrontConfig, duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(
            (0, 0.0),
            (300, 300.0),
            (1.5, 1.5),
            ("0", 0.0),
            ("90", 90.0),
            ("5m", 300.0),
            ("1h30m", 5400.0),
            ("250ms", 0.25),
        ),
        *((-1, math.inf), ("-1", math.inf), ("-1m", math.inf), ("100000h", math.inf), (1e9, math.inf)),
    ],
)
def test_durations(text: str | float, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "-", "m", "5 m", "5m ago", "1h30", "1e3", "٣m", "nan", "inf", "1h" * 40, "9" * 30]
)
def test_what_is_no_duration_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidConfig, match="keep_alive is"):
        duration(text)


@pytest.mark.parametrize(
    ("option", "value"), [("max_loaded_models", 0), ("load_timeout", 0), ("keep_alive", "soon"), ("models_dir", 5)]
)
def test_what_cannot_work_is_refused_by_name(option: str, value: object) -> None:
    with pytest.raises(InvalidConfig, match=option):
        FrontConfig(**{option: value})  # type: ignore[arg-type]
