"""Connector `peer`: exchanges KV pages between engines of one host, GPU to GPU or on CPUs."""
