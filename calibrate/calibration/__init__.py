"""Run calibration data through the layers, and collect statistics of their inputs."""
