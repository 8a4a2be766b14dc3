"""EngineStats: tokens and seconds of all steps so far."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class EngineStats:
    """Totals over the engine's life. Times in seconds; tokens are those computed, so prefix hits are not among them, nor are
    rejected drafts, nor samples of sequences that had ended before.

    The time of a step that computes prompts and decodes is shared out by their tokens.
    """

    prefill_tokens: int = 0
    prefill_time: float = 0.0
    decode_tokens: int = 0
    decode_time: float = 0.0
    num_prefill_steps: int = 0
    num_mixed_steps: int = 0
    num_decode_steps: int = 0

    def record(self, num_prompt: int, num_decode: int, num_generated: int, seconds: float) -> None:
        """Count a step.

        Args:
            num_prompt: tokens of prompts that it computed.
            num_decode: other tokens that it computed, drafts included.
            num_generated: tokens that its decodes brought.
        """
        if not num_prompt + num_decode:
            return
        share = num_decode / (num_prompt + num_decode)
        self.decode_tokens += num_generated
        self.decode_time += share * seconds
        self.prefill_tokens += num_prompt
        self.prefill_time += (1 - share) * seconds
        if not num_prompt:
            self.num_decode_steps += 1
        elif num_decode:
            self.num_mixed_steps += 1
        else:
            self.num_prefill_steps += 1

    def since(self, before: EngineStats) -> EngineStats:
        """What was counted after the copy `before` was made."""
        return EngineStats(*(getattr(self, own.name) - getattr(before, own.name) for own in fields(self)))

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens computed per second of prefill steps."""
        return self.prefill_tokens / self.prefill_time if self.prefill_time else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens generated per second of decode steps."""
        return self.decode_tokens / self.decode_time if self.decode_time else 0.0
