"""Runs over several machines, by Ray. Nothing outside of this room imports Ray, and nothing imports it without need."""
