"""Speculative decoding: a drafter proposes tokens, and one step of the model verifies them."""
