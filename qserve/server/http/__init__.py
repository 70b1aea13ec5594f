"""HTTP itself: connections, limits, middleware, bodies, event streams, errors."""
