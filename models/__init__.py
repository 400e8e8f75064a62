"""Models: layers, weights, configs and checkpoints. Nothing here knows requests, scheduling or HTTP."""

if __name__ != "jpaged.models":
    raise ImportError("import jpaged.models: a plain `import models` would make a second copy of its classes")
