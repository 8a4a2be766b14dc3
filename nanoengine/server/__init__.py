"""The engine as an HTTP server with the interface of OpenAI's."""
