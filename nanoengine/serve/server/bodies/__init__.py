"""Bodies: what clients send, as types: how it is read, and the prompt and sampling parameters that it stands for."""
