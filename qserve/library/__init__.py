"""Implementation of LLM and AsyncLLM: prompts, outputs, and control of the engine."""
