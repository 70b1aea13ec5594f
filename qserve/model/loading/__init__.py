"""Reads, rounds and shards the weights of a model for its builder."""
