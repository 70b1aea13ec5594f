"""The gated delta net: a layer whose past is a state of one size, not keys and values."""
