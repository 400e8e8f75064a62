"""Weights that change while an engine runs: a trainer's tree of arrays, checked and turned into them on the devices."""
