"""The front: checks what callers give, and makes requests of it."""
