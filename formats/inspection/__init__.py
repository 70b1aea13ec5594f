"""`qserve inspect`: checks of a model folder, and their findings."""
