"""Layouts: the tokens that an image or a video becomes, and which of them have embeddings."""
