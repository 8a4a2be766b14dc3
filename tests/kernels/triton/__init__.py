"""Triton kernels: on a GPU, or else in Triton's interpreter (tests/conftest.py)."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed: it is made for Linux on x86-64 alone")
