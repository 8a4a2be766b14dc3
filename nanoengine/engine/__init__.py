"""Policy: who runs, how many tokens, which blocks. Nothing in this package imports torch."""
