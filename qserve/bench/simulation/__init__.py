"""Simulation of servers and a router on a virtual clock."""
