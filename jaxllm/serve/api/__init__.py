"""OpenAI's HTTP API: request and response schemas, and one module for each endpoint."""
