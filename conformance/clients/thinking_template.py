"""Prints the chat template of a GGUF file, changed so that the model thinks where a request asks for it.

Usage: thinking_template.py FILE, with the interpreter that has nanoengine.
"""

import sys
from pathlib import Path

from nanoengine.models.gguf.file import GGUFFile

THINKS = "{%- if add_generation_prompt and enable_thinking %}{{- '<think>\\n' }}{%- endif %}"
"""No end of a thought stands in it: without the wish the model is one that does not think."""

print(GGUFFile.open(Path(sys.argv[1])).metadata["tokenizer.chat_template"] + THINKS, end="")
