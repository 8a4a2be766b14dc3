"""What others have collected, held against structured outputs. Programs run by hand: their data is not in the repository."""
