"""Replies, errors and routes of the Anthropic Messages API."""
