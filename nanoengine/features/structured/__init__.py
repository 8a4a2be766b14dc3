"""Structured outputs: JSON schemas and grammars that the tokens of an answer must follow, by llguidance."""
