"""Child processes, messages between processes, and logs."""
