"""Tokenizer, chat template, and incremental detokenization."""
