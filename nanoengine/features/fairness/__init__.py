"""Fairness among clients: the prompts of one client do not delay the requests of the others."""
