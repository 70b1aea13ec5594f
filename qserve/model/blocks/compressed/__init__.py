"""Compressed attention and hyper-connections (DeepSeek-V4)."""
