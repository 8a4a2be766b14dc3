"""A chat with a model, in a terminal or as a filter."""
