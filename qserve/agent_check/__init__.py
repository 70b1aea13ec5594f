"""`qserve agent-check`: agent tasks over the three chat APIs of a server."""
