"""Attention and page writes in native CPU code."""
