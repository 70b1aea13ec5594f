"""The engine in its own process: messages, client, supervisor."""
