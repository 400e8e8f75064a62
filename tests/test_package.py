"""The layout's promises: rooms in the wheel, one copy of each module, imports in one direction, nothing eager."""

import ast
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = {
    "jpaged": "jpaged",
    "models": "jpaged.models",
    "pallas_kernels": "jpaged.pallas_kernels",
    "sharding": "jpaged.sharding",
}
# Who may import whom, besides themselves.
ALLOWED = {
    "jpaged": {"models", "pallas_kernels", "sharding"},
    "models": {"pallas_kernels", "sharding"},
    "pallas_kernels": set(),
    "sharding": set(),
}
# Within jpaged: a module may not import any of these, so that the host core is tested without a device.
HOST_CORE_NEVER = {"jax", "numpy", "flax", "transformers"}
HOST_CORE = ("request", "block_manager", "scheduler")


def packages_on_disk() -> set[str]:
    found = set()
    for room, name in ROOMS.items():
        for path in (ROOT / room).rglob("*.py"):
            inner = path.parent.relative_to(ROOT / room).parts
            found.add(".".join([name, *inner]))
    return found


def run(code: str, cwd: Path = ROOT) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def imports(path: Path) -> set[str]:
    """Absolute names of the modules that a file of a room imports."""
    room = path.relative_to(ROOT).parts[0]
    inner = path.parent.relative_to(ROOT / room).parts
    package = [*ROOMS[room].split("."), *inner]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            found.add(".".join([*base, *([node.module] if node.module else [])]))
    return found


def room_of(module: str) -> str | None:
    names = sorted(ROOMS.items(), key=lambda item: -len(item[1]))
    return next((room for room, name in names if module == name or module.startswith(name + ".")), None)


def test_every_package_on_disk_is_in_the_list_of_the_wheel() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert set(settings["packages"]) == packages_on_disk()
    assert {name: folder for folder, name in ROOMS.items()} == settings["package-dir"]


def test_the_wheel_holds_every_module_and_table_and_no_bare_room(tmp_path: Path) -> None:
    source = tmp_path / "source"  # A copy: setuptools leaves a build folder behind, and would read one it finds.
    for room in ROOMS:
        shutil.copytree(ROOT / room, source / room)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(command, check=True, timeout=300)
    names = set(zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist())
    for room, package in ROOMS.items():
        folder = package.replace(".", "/")
        for path in (*(ROOT / room).rglob("*.py"), *(ROOT / room).rglob("*.json")):
            assert f"{folder}/{path.relative_to(ROOT / room)}" in names
    assert "jpaged/py.typed" in names
    assert {name.split("/")[0] for name in names if not name.startswith("jpaged-")} == {"jpaged"}


@pytest.mark.parametrize("room", ["models", "pallas_kernels", "sharding"])
def test_a_bare_room_cannot_be_imported_as_a_second_copy(room: str) -> None:
    assert run(f"try:\n import {room}\nexcept ImportError as error:\n print(error)").startswith(f"import jpaged.{room}")


@pytest.mark.parametrize("room", ROOMS)
def test_imports_between_rooms_go_one_way(room: str) -> None:
    for path in (ROOT / room).rglob("*.py"):
        rooms = {room_of(module) for module in imports(path)} - {None, room}
        # The three inner rooms live in the package `jpaged`, whose __init__ they may not use either.
        assert rooms <= ALLOWED[room], f"{path.relative_to(ROOT)} imports {rooms - ALLOWED[room]}"


@pytest.mark.parametrize("module", HOST_CORE)
def test_the_host_core_imports_neither_arrays_nor_models(module: str) -> None:
    code = f"import sys, jpaged.{module}; print(sorted({HOST_CORE_NEVER!r} & set(sys.modules)))"
    assert run(code) == "[]"


@pytest.mark.parametrize("module", ["jpaged", "jpaged.models", "jpaged.pallas_kernels", "jpaged.sampling_params"])
def test_importing_a_room_loads_no_engine(module: str) -> None:
    assert run(f"import sys, {module}; print('jpaged.engine' in sys.modules, 'jax' in sys.modules)") == "False False"


def test_an_engine_is_put_together_without_the_kernels_it_may_not_need() -> None:
    """Importing Pallas and what is written in it would be part of every start, and many serve by XLA."""
    code = "import sys, jpaged.assembly; print(*sys.modules, sep='\\n')"
    kernels = "jpaged.pallas_kernels.ragged_paged_attention."
    modules = run(code).splitlines()
    assert kernels + "xla" in modules
    never = ("jax.experimental.pallas", kernels + "tpu", kernels + "gpu")
    assert [name for name in modules if name.startswith(never)] == []


def test_exports_are_what_the_package_says() -> None:
    import jpaged

    for name in jpaged.__all__:
        assert getattr(jpaged, name).__name__ == name
    assert set(jpaged.__all__) <= set(dir(jpaged))
    with pytest.raises(AttributeError, match="AsyncEngine"):
        jpaged.AsyncEngine  # noqa: B018


def test_no_source_uses_pickle_or_torch() -> None:
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            found = {name.split(".")[0] for name in imports(path)}
            assert not found & {"pickle", "cloudpickle", "dill", "torch", "shelve", "marshal"}, path
            assert "allow_pickle=True" not in path.read_text(), path


def test_base_dependencies_are_all_that_the_package_imports() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {name.split(">")[0].lower().replace("-", "_") for name in project["dependencies"]}
    used = {name.split(".")[0] for room in ROOMS for path in (ROOT / room).rglob("*.py") for name in imports(path)}
    foreign = {name for name in used if name not in sys.stdlib_module_names and name != "jpaged"}
    # safetensors and the others import under the names they are installed by.
    assert {name.lower() for name in foreign} <= declared
