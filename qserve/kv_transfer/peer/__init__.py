"""Connector `peer`: KV pages between engines of one host, from GPU to GPU or in shared memory."""
