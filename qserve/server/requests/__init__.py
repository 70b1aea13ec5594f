"""Request models of all APIs, and their conversion to jobs."""
