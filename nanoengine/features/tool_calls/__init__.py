"""Tools: how models ask for functions to be called, and how they are made to. Clients of the engine: text alone."""
