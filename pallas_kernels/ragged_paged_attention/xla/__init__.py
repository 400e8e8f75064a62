"""The attention backend in plain XLA."""
