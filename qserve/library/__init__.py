"""Parts of the Python API behind LLM and AsyncLLM: prompts in, outputs out."""
