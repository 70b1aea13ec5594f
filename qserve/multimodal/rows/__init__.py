"""Rows of the table of vision-language architectures, by how images become tokens."""
