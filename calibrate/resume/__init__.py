"""Resume an interrupted run: its identity, and its finished layers on disk."""
