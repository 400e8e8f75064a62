"""Ragged paged attention: mixed prefill and decode over pages, one interface for every backend."""
