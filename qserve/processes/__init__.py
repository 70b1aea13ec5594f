"""Child processes, messages between them, and their logs."""
