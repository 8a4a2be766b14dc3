"""OpenAI's interface, with the fields that vLLM has added."""
