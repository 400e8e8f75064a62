"""Decoders of families whose layers differ from those of the others."""
