"""Several engines behind one: requests go where their prompts are cached, and move when their engine dies."""
