"""The engine: requests, KV pages, the scheduler, and the loop of steps."""
