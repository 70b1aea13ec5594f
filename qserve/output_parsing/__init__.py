"""What a model's text is made of: its reasoning, its content, and its calls of tools."""
