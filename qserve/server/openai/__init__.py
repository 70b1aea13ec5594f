"""The endpoints of OpenAI, vLLM, Cohere and Jina: replies and routes."""
