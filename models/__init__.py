"""The room of layers, weights and checkpoints. Knows no request, no schedule, no HTTP."""

if __name__ != "jpaged.models":
    raise ImportError("import jpaged.models: a bare `models` would be a second copy of the same classes")
