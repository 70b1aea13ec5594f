"""Several models in one server: their settings, the choice of a model, the sharing of memory."""
