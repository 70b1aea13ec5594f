"""Simulation of replicas and routers on a virtual clock."""
