"""Request models of the Anthropic Messages API, and their conversion to a chat."""
