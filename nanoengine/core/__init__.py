"""The whole minimal engine. It imports nothing else of the package; all the rest extends it."""
