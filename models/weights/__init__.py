"""Weights: made of a checkpoint's tensors, at random, or of a trainer's arrays, and written again."""
