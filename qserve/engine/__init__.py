"""The engine: requests, KV pages, the scheduler, one step after another. Knows no HTTP."""
