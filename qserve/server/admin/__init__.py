"""Routes for operators: health, metrics, profiles, the prefix cache, adapters."""
