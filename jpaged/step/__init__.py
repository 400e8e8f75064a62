"""One device step: lists become padded arrays, compiled programs compute them, results come back."""
