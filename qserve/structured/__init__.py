"""Structured output: a request's grammar, and the tokens that it allows next."""
