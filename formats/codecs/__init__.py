"""Codecs of formats that this project writes (GPTQ, AWQ, compressed-tensors), and related ones."""
