"""Guesses at the tokens to come: who makes them, how good they have been, and how many are worth verifying."""
