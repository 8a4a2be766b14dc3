"""Tool calling: prompts with tools, grammars that force calls, and parsers of answers. It works on text, without tensors."""
