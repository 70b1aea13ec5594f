"""One model over several processes: what they exchange, and how it is shared out."""
