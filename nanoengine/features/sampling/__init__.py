"""More ways to choose tokens than the core's: penalties, bias, allowed tokens, masks; and log probabilities."""
