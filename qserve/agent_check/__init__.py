"""`qserve agent-check`: runs agent tasks over three APIs of a server."""
