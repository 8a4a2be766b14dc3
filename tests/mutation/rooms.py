"""All mutants, by the part of the engine that they break."""

from __future__ import annotations

from tests.mutation import (
    attention,
    front,
    gguf,
    kernels,
    kv,
    models,
    policy,
    quantization,
    request,
    runner,
    sampling,
    server,
    speculation,
)
from tests.mutation.mutant import Mutant

MOVED = frozenset(
    {
        "stop-string-across-tokens-is-missed",
        "stop-string-stays-in-the-text",
        "later-stop-string-wins",
        "beginning-of-a-stop-string-is-released",
        "held-text-forgets-a-shorter-beginning",
        "tokens-are-decoded-without-context",
        "incomplete-character-is-lost-at-the-end",
        "top-p-drops-the-token-that-reaches-it",
        "top-k-keeps-one-more",
        "top-p-is-a-share-of-all",
        "noise-ignores-the-position",
        "noise-is-subtracted",
        "temperature-is-multiplied",
        "none-left-is-called-nan",
        "query-does-not-see-itself",
        "window-is-one-too-wide",
        "decode-window-is-one-too-narrow",
        "chunk-is-no-border",
        "slot-ignores-the-block-table",
        "padding-is-written",
        "sinks-are-weighed-as-tokens",
        "several-queries-see-each-other-late",
        "int8-scales-are-mixed-up",
        "drafted-runs-are-cut-by-their-number",
        "chunks-count-from-the-start-of-the-step",
        "shared-blocks-are-read-out-of-sight",
        "varlen-window-is-one-too-wide",
        "keys-are-written-unrotated",
        "norms-of-q-and-k-are-swapped",
        "padding-has-a-slot",
        "slot-is-off-by-one",
        "token-of-another-row-goes-on",
        "residual-is-normed-alone",
        "native-zero-point-is-of-another-row",
        "native-fifth-bit-is-lost",
        "rotation-turns-the-wrong-way",
        "rotation-pairs-neighbours",
        "projections-overlap",
        "norm-offset-is-forgotten",
        "misshapen-tensor-passes",
        "unexpected-tensor-passes",
        "index-names-files-anywhere",
        "special-tokens-are-added-always",
    }
)
"""Mutants of code that has moved into `nanoengine/core` or was written anew: they do not apply until they are restated there."""

_ALL: dict[str, tuple[Mutant, ...]] = {
    "policy": policy.MUTANTS,
    "kv": kv.MUTANTS,
    "speculation": speculation.MUTANTS,
    "request": request.MUTANTS,
    "runner": runner.MUTANTS,
    "sampling": sampling.MUTANTS,
    "attention": attention.MUTANTS,
    "kernels": kernels.MUTANTS,
    "models": models.MUTANTS,
    "gguf": gguf.MUTANTS,
    "quantization": quantization.MUTANTS,
    "server": server.MUTANTS,
    "front": front.MUTANTS,
}

ROOMS = {room: tuple(own for own in mutants if own.name not in MOVED) for room, mutants in _ALL.items()}
