"""Masks: which tokens a running sequence may be given, said from outside while it runs, as a grammar does."""

from __future__ import annotations

from nanoengine.core.errors import InvalidRequest, shown
from nanoengine.core.scheduler import Step
from nanoengine.core.seams import PolicyPart
from nanoengine.core.sequence import Phase, Request, Sequence

MASKS = "masks"
"""In `StepPlan.extras`: [(row, mask or None)]."""

MASK = "mask"
"""In `Sequence.state`: its mask. A sequence without one has no such key."""


def mask_bytes(vocab_size: int) -> int:
    """Bytes of a mask: a bit for each token, in words of 32 bits."""
    return -(-vocab_size // 32) * 4


class Masks(PolicyPart):
    """Masks reach the runner with the next step, and again when their sequence starts anew."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self._changed: dict[Sequence, None] = {}  # sequences whose mask the runner does not know yet, in order

    def set_mask(self, request: Request | None, mask: bytes | bytearray | memoryview | None, index: int = 0) -> None:
        """Let one completion of a running request sample only tokens whose bits are set; nothing happens if it has ended.

        The mask holds, until it is replaced, for every token that is sampled in a step scheduled from now on. Tokens of steps in
        flight are sampled without it: with overlap that is at most one more step, whose tokens come first.

        Args:
            mask: bits of the vocabulary, in little-endian words of 32. It is copied. None lifts it.

        Raises:
            InvalidRequest: no such completion is running, or the mask is not of this vocabulary.
        """
        if request is None or request.finished or type(index) is not int or not 0 <= index < len(request.sequences):
            raise InvalidRequest(f"no completion {shown(index)} of such a request is running")
        if mask is not None:
            if not isinstance(mask, bytes | bytearray | memoryview):
                raise InvalidRequest(f"a mask must be bytes or None, not {shown(mask)}")
            mask, expected = bytes(mask), mask_bytes(self.vocab_size)
            if len(mask) != expected:
                raise InvalidRequest(f"the mask has {len(mask)} bytes: {self.vocab_size} tokens take {expected}")
        seq = request.sequences[index]
        if seq.finished:
            return
        if mask is None:
            seq.state.pop(MASK, None)
        else:
            seq.state[MASK] = mask
        self._changed[seq] = None

    def complete(self, step: Step) -> None:
        told = dict.fromkeys(seq for seq in step.started if MASK in seq.state)
        if self._changed:
            # One that waits is told when it starts.
            told |= {seq: None for seq in self._changed if seq.phase not in (Phase.WAITING, Phase.FINISHED)}
            self._changed.clear()
        if told:
            step.plan.extras[MASKS] = [(seq.row, seq.state.get(MASK)) for seq in told]
