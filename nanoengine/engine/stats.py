"""EngineStats: counters of what the engine has done, read by progress bars and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, fields

from nanoengine.engine.messages import Phase


@dataclass(slots=True)
class EngineStats:
    """Totals over the engine's life. Times in seconds; tokens are those computed, so prefix hits are not among them."""

    prefill_tokens: int = 0
    prefill_time: float = 0.0
    decode_tokens: int = 0
    decode_time: float = 0.0
    num_decode_steps: int = 0

    def record(self, phase: Phase, num_tokens: int, seconds: float) -> None:
        if phase is Phase.PREFILL:
            self.prefill_tokens += num_tokens
            self.prefill_time += seconds
        else:
            self.decode_tokens += num_tokens
            self.decode_time += seconds
            self.num_decode_steps += 1

    def since(self, before: EngineStats) -> EngineStats:
        """What was counted after the copy `before` was made."""
        return EngineStats(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(self)))

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens computed per second of prefill steps."""
        return self.prefill_tokens / self.prefill_time if self.prefill_time else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens generated per second of decode steps."""
        return self.decode_tokens / self.decode_time if self.decode_time else 0.0
