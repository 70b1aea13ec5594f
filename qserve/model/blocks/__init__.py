"""What decoders are made of, one noun a file. A block knows its weights, and no checkpoint."""
