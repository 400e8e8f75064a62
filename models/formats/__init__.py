"""The file formats of weights: bytes on one side, named tensors on the other. Knows no model."""
