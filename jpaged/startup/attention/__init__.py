"""Which attention backend serves, and the check of it at start."""
