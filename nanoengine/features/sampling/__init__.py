"""Sampling beyond the core: penalties, bias, allowed tokens, masks, stop strings, log probabilities, thinking budgets."""
