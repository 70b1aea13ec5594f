"""The engine: requests, KV pages, the scheduler and the step loop."""
