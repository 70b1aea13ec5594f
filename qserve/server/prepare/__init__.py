"""Where bodies become jobs: on the event loop, in threads, in worker processes."""
