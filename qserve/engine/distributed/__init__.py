"""Run one model on several ranks: worker group, rank processes, executors."""
