"""Native CPU code: LLVM functions that XLA calls, for matrix products and norms."""
