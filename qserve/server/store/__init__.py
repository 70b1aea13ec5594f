"""Response store: responses and conversations in a SQLite file, which clients refer to by id."""
