"""The engine process: messages, client and supervisor."""
