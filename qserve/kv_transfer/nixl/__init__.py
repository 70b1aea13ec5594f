"""Connector `nixl`: KV pages between engines through NIXL, also of other hosts."""
