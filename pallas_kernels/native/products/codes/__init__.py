"""Products of rows with quantized matrices in native code."""
