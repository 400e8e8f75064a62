"""The attention backend of Pallas Mosaic GPU kernels."""
