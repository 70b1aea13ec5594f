"""Structured output: compiles a request's grammar, and masks the tokens that it forbids."""
