"""Converts request bodies to jobs, on the event loop, in threads or in worker processes."""
