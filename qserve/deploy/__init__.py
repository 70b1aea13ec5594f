"""Run several engines as one service, on one or more machines, with Ray Serve."""
