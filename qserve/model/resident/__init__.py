"""Resident weights: every tensor of a loaded model, new contents for them, and their memory."""
