"""The room of tiles, pages and attention backends. Imports nothing else of ours."""

if __name__ != "jpaged.pallas_kernels":
    raise ImportError("import jpaged.pallas_kernels: a bare `pallas_kernels` would be a second copy")
