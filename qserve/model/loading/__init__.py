"""Reading, rounding and slicing the weights of a model for its builder."""
