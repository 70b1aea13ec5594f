"""Routes and replies of the OpenAI, vLLM, Cohere and Jina APIs."""
