"""Fixtures of this folder."""

from tests.serve.front.fronts import make_front

__all__ = ["make_front"]
