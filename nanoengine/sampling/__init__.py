"""More ways to choose tokens than the core's: penalties, bias, allowed tokens, bad words, masks; and log probabilities."""
