"""KV transfer: connectors that exchange KV pages between engines by key."""
