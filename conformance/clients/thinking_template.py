"""Prints the chat template of a GGUF file, changed so that the model thinks where a request asks for it.

Usage: thinking_template.py FILE, with the interpreter that has nanoengine.
"""

import sys
from pathlib import Path

from nanoengine.models.gguf.file import GGUFFile

THINKS = "{%- if add_generation_prompt %}{{- '<think>\\n' if enable_thinking else '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"

print(GGUFFile.open(Path(sys.argv[1])).metadata["tokenizer.chat_template"] + THINKS, end="")
