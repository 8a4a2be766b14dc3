"""How large a model may say that it is: beyond it, a file is broken or hostile."""

MAX_POSITIONS = 2**24
"""Longest sequence in tokens: tables are made for all of a sequence's blocks."""

MAX_LAYERS = 4096
MAX_PARAMETERS = 2**44
"""Beyond it the sizes of tensors in bytes come near to what 64 bits can say."""
