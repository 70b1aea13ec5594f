"""Responses and conversations in a SQLite file, for clients that refer to them by id."""
