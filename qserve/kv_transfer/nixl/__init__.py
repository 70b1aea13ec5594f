"""Connector `nixl`: exchanges KV pages between engines through NIXL, also across hosts."""
