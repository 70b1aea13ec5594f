"""The OpenAI-compatible HTTP server. It owns no GPU; the engine runs in another process."""
