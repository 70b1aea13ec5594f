"""Layouts: the tokens of an image or a video, and which of them have embeddings."""
