"""Parameters of a request: sampling, beam search, options."""
