"""Events: what an answer says, piece by piece."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of what the user is told."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of what the model thinks before."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool, whole. `index` counts from 0; `arguments` is the JSON text of an object."""

    index: int
    name: str
    arguments: str


Event = Text | Reasoning | Call
