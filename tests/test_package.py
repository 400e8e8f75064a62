"""The layout's promises: rooms in the wheel, one copy of each module, imports in one direction, nothing eager."""

import ast
import functools
import graphlib
import re
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
# Folder → the folders that it may import besides itself.
ALLOWED = {
    "jpaged": {"models", "pallas_kernels", "sharding"},
    "models": {"pallas_kernels", "sharding"},
    "pallas_kernels": set(),
    "sharding": set(),
}
# Within a room, outermost first: a part may import only parts of the rows below its own, and itself. A part is a module
# or a folder, by its name in the room; a module belongs to the longest name that fits. "" is the room's __init__.
LAYERS = {
    "jpaged": (
        ("generate", "serve"),
        ("__main__",),
        ("commands",),
        ("",),
        ("llm",),
        ("serving",),
        ("cluster",),
        ("async_engine",),
        ("remote",),
        ("research",),
        ("research.distillation",),
        ("engine",),
        ("research.calls",),
        ("research.trainer",),
        ("research.rollouts", "research.scores"),
        ("core.batch", "core.core_thread", "core.step_thread"),
        ("core.engine_loop",),
        ("research.arrays", "research.checkpoints", "research.distilled", "research.draws", "research.sleeping"),
        ("research.weight_updates",),
        ("startup",),
        ("core",),
        ("intake",),
        ("step", "text.output_processor", "text.parsed_outputs", "text.prompts", "text"),
        ("text.prompt_params",),
        ("text.grammar",),
        ("text.schemas",),
        ("text.answers",),
        ("text.chat",),
        ("text.tokenizing",),
        ("scheduling",),
        ("kv_cache",),
        ("request",),
        ("codec",),
        ("config", "messages", "outputs"),
        ("sampling",),
        ("structured_outputs",),
        ("checks",),
        ("errors", "json_lines", "limits", "not_available"),
    ),
    "models": (
        ("opening",),
        ("own_model",),
        ("served",),
        ("weights",),
        ("decoders",),
        ("decoder", "dense"),
        ("experts",),
        ("layers", "inputs", "checked_cache", "traces", "rope", "kv_ranges"),
        ("recipe",),
        ("families",),
        ("family",),
        ("sources",),
        ("config",),
        ("formats",),
        ("fields",),
        ("errors", ""),
    ),
}
# No module of these parts may load any of those packages: the host core's tests need no device and take milliseconds.
HOST_CORE = ("request", "kv_cache", "scheduling")
HOST_CORE_NEVER = {"jax", "numpy", "flax", "transformers"}
FRONT = (
    "async_engine", "codec", "config", "core.core_thread", "intake", "messages", "outputs", "remote", "serving", "text",
)  # fmt: skip
"""Parts that a process without a device can run: they check what callers give, and make text of tokens."""


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


def module_of(path: Path) -> str:
    """Return the name that a file of a room is imported by."""
    room, *inner = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([ROOMS[room], *(part for part in inner if part != "__init__")])


MODULES = {module_of(path): path for room in ROOMS for path in (ROOT / room).rglob("*.py")}


@functools.cache
def imports(path: Path) -> set[str]:
    """Return the absolute names of the modules that a file of a room imports, for type checkers only or inside of
    functions too."""
    room = path.relative_to(ROOT).parts[0]
    inner = path.parent.relative_to(ROOT / room).parts
    package = [*ROOMS[room].split("."), *inner]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = {f"{module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else module for name in names}
    return found


def imported_modules(module: str) -> set[str]:
    """Return the modules of ours that a module imports."""
    return (imports(MODULES[module]) & MODULES.keys()) - {module}


def part_of(module: str, room: str) -> str | None:
    """Return the part of a room that a module belongs to, as LAYERS names it; None if no part is so named."""
    name = module.removeprefix(ROOMS[room]).removeprefix(".")
    names = (part for row in LAYERS[room] for part in row)
    fitting = [part for part in names if name == part or (part and name.startswith(f"{part}."))]
    return max(fitting, key=len, default=None)


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
        for path in (*(ROOT / room).rglob("*.py"), *(ROOT / room).rglob("*.json"), *(ROOT / room).rglob("*.html")):
            assert f"{folder}/{path.relative_to(ROOT / room)}" in names
    assert "jpaged/py.typed" in names
    assert {name.split("/")[0] for name in names if not name.startswith("jpaged-")} == {"jpaged"}


@pytest.mark.parametrize("room", ["models", "pallas_kernels", "sharding"])
def test_a_bare_room_cannot_be_imported_as_a_second_copy(room: str) -> None:
    assert run(f"try:\n import {room}\nexcept ImportError as error:\n print(error)").startswith(f"import jpaged.{room}")


@pytest.mark.parametrize("room", ROOMS)
def test_imports_between_rooms_go_one_way(room: str) -> None:
    for path in (ROOT / room).rglob("*.py"):
        # The three inner rooms live in the package `jpaged`, whose __init__ they may not use either.
        rooms = {room_of(module) for module in imports(path)} - {None, room}
        assert rooms <= ALLOWED[room], f"{path.relative_to(ROOT)} imports {rooms - ALLOWED[room]}"


@pytest.mark.parametrize(("room", "part"), [(room, part) for room in LAYERS for row in LAYERS[room] for part in row])
def test_parts_of_a_room_import_only_parts_below_them(room: str, part: str) -> None:
    rows = LAYERS[room]
    row = next(index for index, parts in enumerate(rows) if part in parts)
    allowed = {part, *(below for parts in rows[row + 1 :] for below in parts)}
    modules = [module for module in MODULES if room_of(module) == room and part_of(module, room) == part]
    assert modules, "a layer without a module"
    for module in modules:
        parts = {part_of(other, room) for other in imported_modules(module) if room_of(other) == room}
        assert parts <= allowed, f"{module} imports {sorted(parts - allowed)}"


def test_every_module_belongs_to_a_layer() -> None:
    modules = [(module, room) for module in MODULES if (room := room_of(module)) in LAYERS]
    assert [module for module, room in modules if part_of(module, room) is None] == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {module: imported_modules(module) for module in MODULES}
    graphlib.TopologicalSorter(graph).prepare()  # Raises CycleError, which names the circle.


@pytest.mark.parametrize("part", HOST_CORE)
def test_the_host_core_loads_neither_arrays_nor_models(part: str) -> None:
    modules = ", ".join(
        module for module in MODULES if room_of(module) == "jpaged" and part_of(module, "jpaged") == part
    )
    code = f"import sys, {modules}; print(sorted({HOST_CORE_NEVER!r} & set(sys.modules)))"
    assert run(code) == "[]"


@pytest.mark.parametrize("part", FRONT)
def test_the_front_half_loads_no_jax(part: str) -> None:
    modules = ", ".join(
        module for module in MODULES if room_of(module) == "jpaged" and part_of(module, "jpaged") == part
    )
    assert run(f"import sys, {modules}; print('jax' in sys.modules)") == "False"


def test_no_room_but_the_cluster_imports_ray() -> None:
    packages = {"ray", "pyarrow", "grpc"}
    using = {module for module in MODULES if packages & {name.partition(".")[0] for name in imports(MODULES[module])}}
    assert using
    assert all(module.startswith("jpaged.cluster.") for module in using)


def test_a_command_without_its_flag_loads_no_module_of_the_cluster() -> None:
    code = (
        "import sys, jpaged.commands.cli, jpaged.commands.generate as generate\n"
        "assert generate.main(['--max-tokens', '0', 'x']) == 1\n"
        "print([name for name in sys.modules if name.partition('.')[0] == 'ray' or 'cluster' in name.split('.')])"
    )
    assert run(code) == "[]"


@pytest.mark.parametrize(
    "module",
    [
        "jpaged",
        "jpaged.async_engine",
        "jpaged.models",
        "jpaged.pallas_kernels",
        "jpaged.remote.thread_client",
        "jpaged.research.distilled",
        "jpaged.sampling.sampling_params",
    ],
)
def test_importing_a_room_loads_no_engine(module: str) -> None:
    never = "'jpaged.engine', 'jax', 'zmq'"  # The last one comes with an extra.
    assert run(f"import sys, {module}; print([name for name in ({never}) if name in sys.modules])") == "[]"


def test_an_engine_is_put_together_without_the_kernels_it_may_not_need() -> None:
    """Importing Pallas and what is written in it would be part of every start, and most serve without."""
    code = "import sys, jpaged.startup.build_engine; print(*sys.modules, sep='\\n')"
    kernels = "jpaged.pallas_kernels.ragged_paged_attention."
    modules = run(code).splitlines()
    assert kernels + "interface" in modules
    never = ("jax.experimental.pallas", kernels + "tpu", kernels + "gpu")
    assert [name for name in modules if name.startswith(never)] == []


def test_exports_are_what_the_package_says() -> None:
    import jpaged

    for name in jpaged.__all__:
        assert getattr(jpaged, name).__name__ == name
    assert set(jpaged.__all__) <= set(dir(jpaged))
    with pytest.raises(AttributeError, match="LoRARequest"):
        jpaged.LoRARequest  # noqa: B018


def test_no_source_uses_pickle_or_torch() -> None:
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            found = {name.split(".")[0] for name in imports(path)}
            assert not found & {"pickle", "cloudpickle", "dill", "torch", "shelve", "marshal"}, path
            assert "allow_pickle=True" not in path.read_text(), path


def test_only_dates_come_from_the_clock_that_may_jump() -> None:
    """Whatever waits, or is given up after a while, has a clock that goes on evenly."""
    dates = re.compile(r"time\.time\b|time_ns|datetime\.now|utcnow|date\.today|from time import")
    found = {str(path.relative_to(ROOT)) for path in (ROOT / "jpaged").rglob("*.py") if dates.search(path.read_text())}
    assert found == {
        "jpaged/commands/bench/report.py",
        "jpaged/commands/bench/tune.py",
        "jpaged/serving/http/generation.py",  # `created`
        "jpaged/serving/http/server_state.py",  # Of models, `created` too.
        "jpaged/serving/protocols/encoder.py",  # `completed_at`
        "jpaged/startup/builtin_model.py",  # The age of a file.
        "jpaged/text/chat/template_environment.py",  # `strftime_now`
    }


def test_base_dependencies_are_all_that_the_package_imports() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # Extras that the package imports where they are needed.
    extras = [
        name for extra in ("structured", "serve", "otel", "ray") for name in project["optional-dependencies"][extra]
    ]
    requirements = [*project["dependencies"], *extras]
    declared = {re.split("[>[]", name)[0].lower().replace("-", "_") for name in requirements}
    used = {name.split(".")[0] for room in ROOMS for path in (ROOT / room).rglob("*.py") for name in imports(path)}
    foreign = {name for name in used if name not in sys.stdlib_module_names and name != "jpaged"}
    # A namespace that several packages share, and modules of other names than their packages.
    packages = {"opentelemetry": "opentelemetry_sdk", "zmq": "pyzmq", "grpc": "grpcio"}
    foreign = {packages.get(name, name) for name in foreign}
    # safetensors and the others import under the names they are installed by.
    assert {name.lower() for name in foreign} <= declared
