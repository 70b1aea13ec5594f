"""Hub names in the settings of commands and engines, and the local paths that they become."""
