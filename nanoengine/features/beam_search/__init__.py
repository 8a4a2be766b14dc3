"""Beam search: a client of the engine. Each beam is a request of one token in each step."""
