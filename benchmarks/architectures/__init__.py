"""Every text-generation architecture of the installed transformers, tiny and random, judged against transformers."""
