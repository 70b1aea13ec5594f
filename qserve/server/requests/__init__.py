"""Request models, and the jobs that their fields become."""
