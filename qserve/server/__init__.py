"""The OpenAI-compatible HTTP server. Owns no GPU; speaks to the engine process in messages."""
