"""KV pages that leave an engine: connectors, which keep them by key. Knows no requests."""
