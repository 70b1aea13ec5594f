"""Pages for browsers, and the OpenAPI document."""
