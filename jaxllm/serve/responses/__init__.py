"""OpenAI's Responses API, `POST /v1/responses`, over the chat completions of this server."""
