"""Codecs of the formats that we write (GPTQ, AWQ, compressed-tensors), and of their relatives."""
