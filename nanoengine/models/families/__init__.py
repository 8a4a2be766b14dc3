"""A file for each family of decoders: how its config.json says what it is, and in what it differs from Llama."""
