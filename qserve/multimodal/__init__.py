"""Images and videos in prompts: reading, decoding, processing and encoding them."""
