"""Products of rows with weights in native code."""
