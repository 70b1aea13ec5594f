"""Requests that wait for a grammar, an adapter or remote KV pages before they can be scheduled."""
