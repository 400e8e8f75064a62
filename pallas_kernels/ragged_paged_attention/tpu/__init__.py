"""The attention backend of Pallas TPU kernels."""
