"""Media items of a prompt."""
