"""Doors: an asynchronous engine, the server, a chat, the command line."""
