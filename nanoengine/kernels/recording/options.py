"""Options of recordings."""

from __future__ import annotations

from dataclasses import dataclass

from nanoengine.options import Options


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingOptions(Options):
    """Options of recordings.

    Args:
        enforce_eager: record nothing: no CUDA graphs, no CPU step programs.
    """

    enforce_eager: bool = False
