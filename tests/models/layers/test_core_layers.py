"""The layers of the core, with every implementation of their kernels."""

from tests.core.test_layers import *  # noqa: F403
