"""What tests of native kernels are marked with: a compiler, or a library that it made, need not be there."""

from __future__ import annotations

import os

import pytest
import torch

from nanoengine.kernels.native.compiler import CannotCompile, find_compiler
from nanoengine.kernels.native.support import unsupported_reason

REASON = unsupported_reason(torch.device("cpu"), torch.float32)
needs_kernels = pytest.mark.skipif(REASON is not None, reason=f"no native kernels: {REASON}")

try:
    COMPILER = find_compiler()
except CannotCompile as no_compiler:
    COMPILER = str(no_compiler)
needs_compiler = pytest.mark.skipif(not os.path.isabs(COMPILER), reason=COMPILER)
