"""KV transfer: connectors that store KV pages by key outside of an engine."""
