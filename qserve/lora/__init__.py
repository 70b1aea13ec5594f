"""Adapters beside a served model: what a request names, what the device holds, who gets a slot."""
