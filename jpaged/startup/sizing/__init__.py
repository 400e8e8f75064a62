"""Sizes of an engine: steps, pages, and the memory that they take."""
