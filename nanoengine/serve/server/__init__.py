"""The server: an engine behind the HTTP interface of OpenAI, with the fields, errors and metrics that vLLM has made common."""
