"""The HTTP layer: connections, limits, middleware, request bodies, event streams, errors."""
