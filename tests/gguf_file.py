"""Writes small GGUF files for tests with the `gguf` package's own writer."""

import gguf
from gguf import GGUFValueType


def write_gguf(path, metadata=(), tensors=(), *, architecture="llama"):
    """Write the file `path` and return `path`; entries whose value is None are left out.

    A metadata value may be a pair (value, GGUFValueType), and a tensor a pair (bytes as uint8, GGMLQuantizationType).
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in dict(metadata).items():
        if value is not None:
            value, kind = value if isinstance(value, tuple) else (value, GGUFValueType.get_type(value))
            writer.add_key_value(key, value, kind)
    for name, tensor in dict(tensors).items():
        if tensor is not None:
            data, kind = tensor if isinstance(tensor, tuple) else (tensor, None)
            writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
