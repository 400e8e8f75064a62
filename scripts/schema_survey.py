"""Compiles the JSON schemas that Pydantic, zod and MCP servers write, and says which are refused, and where.

    python scripts/schema_survey.py -o docs/measurements/schema_survey.json                # the first time 5 minutes
    python scripts/schema_survey.py --versus DIR -o docs/measurements/schema_survey.json   # and with the checkout DIR

The packages themselves make the schemas: `scripts/schemas/pydantic_schemas.py` and `zod_schemas.mjs` print those of
models and types, and MCP servers are asked for their tools. Each source has its packages in a folder of its own in the
user's cache (`~/.cache/jpaged/schemas/NAME`, 0.5 GB together), which is kept. It needs node 20 and npm. The report has
each refusal, and counts by the keyword at its place. With `--versus`, exit status 1 says that a schema is refused which
the other checkout takes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "schemas"
PYDANTIC = {"pydantic 2.14": "pydantic[email]==2.14.4", "pydantic 2.12": "pydantic[email]==2.12.5"}
ZOD = {"zod 4.6": "zod@4.6.7", "zod 4.1": "zod@4.1.12"}
PYTHON_SERVERS = {
    "mcp-server-fetch": "mcp-server-fetch==2026.10.24",
    "mcp-server-git": "mcp-server-git==2026.10.19",
    "mcp-server-time": "mcp-server-time==2026.10.19",
}
NODE_SERVERS = {
    "server-filesystem": "@modelcontextprotocol/server-filesystem@2026.8.31",
    "server-everything": "@modelcontextprotocol/server-everything@2026.8.31",
    "server-memory": "@modelcontextprotocol/server-memory@2026.8.31",
    "server-sequential-thinking": "@modelcontextprotocol/server-sequential-thinking@2026.8.31",
    "server-github": "@modelcontextprotocol/server-github@2025.4.8",
    "server-gitlab": "@modelcontextprotocol/server-gitlab@2025.4.25",
    "playwright-mcp": "@playwright/mcp@0.0.83",
    "notion-mcp-server": "@notionhq/notion-mcp-server@2.5.2",
    "context7-mcp": "@upstash/context7-mcp@4.1.1",
}
TOKENS = {name: "none" for name in ("GITHUB_PERSONAL_ACCESS_TOKEN", "GITLAB_PERSONAL_ACCESS_TOKEN", "NOTION_TOKEN")}
"""What servers want before they list their tools; none is used."""
INSTALL_S, ANSWER_S = 900.0, 60.0
PLACE = re.compile(r"at (#\S*?)[:,]")
"""Where in a schema an error says that it is refused."""


def installed(name: str, package: str, *, is_node: bool) -> Path:
    """Return the folder with a package; install it if it is not there."""
    from jpaged.startup.user_cache import make_private, user_cache

    folder = user_cache("schemas", name.replace(" ", "-"))
    stamp = folder / "installed"
    if stamp.is_file() and stamp.read_text() == package:
        return folder
    print(f"installing {package}", file=sys.stderr, flush=True)
    make_private(folder)
    if is_node:
        (folder / "package.json").write_text("{}")
        commands = [["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", package]]
    else:
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        commands = [[sys.executable, "-m", "venv", str(folder)], [*pip, package]]
    for command in commands:
        subprocess.run(command, cwd=folder, check=True, timeout=INSTALL_S, stdout=sys.stderr)
    stamp.write_text(package)
    return folder


def printed(command: Sequence[str | Path]) -> dict[str, Any]:
    """Return the schemas that a program prints."""
    output = subprocess.run(list(map(str, command)), check=True, capture_output=True, timeout=INSTALL_S).stdout
    schemas: dict[str, Any] = json.loads(output)["schemas"]
    return schemas


def tools(command: Sequence[str | Path]) -> dict[str, Any]:
    """Return the schema of each tool of an MCP server, which a command starts."""
    with tempfile.TemporaryDirectory() as folder:
        server = subprocess.Popen(
            [*map(str, command)], cwd=folder, env={**os.environ, **TOKENS}, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert server.stdin is not None
        assert server.stdout is not None
        timer = threading.Timer(ANSWER_S, server.kill)
        timer.start()

        def send(message: Mapping[str, Any]) -> None:
            server.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
            server.stdin.flush()

        client = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "survey", "version": "1"}}
        try:
            send({"id": 1, "method": "initialize", "params": client})
            for line in server.stdout:
                message = json.loads(line) if line.startswith(b"{") else {}
                if message.get("id") == 1 and "result" in message:
                    send({"method": "notifications/initialized"})
                    send({"id": 2, "method": "tools/list", "params": {}})
                elif message.get("id") == 2 and "result" in message:
                    return {tool["name"]: tool["inputSchema"] for tool in message["result"]["tools"]}
        finally:
            timer.cancel()
            server.kill()
            server.wait()
    raise RuntimeError(f"{command[0]} has not listed its tools within {ANSWER_S} s")


def all_schemas() -> dict[str, dict[str, Any]]:
    """Return the schemas of each source: {source: {name: schema}}."""
    found = {}
    for name, package in PYDANTIC.items():
        folder = installed(name, package, is_node=False)
        found[name] = printed([folder / "bin" / "python", SCRIPTS / "pydantic_schemas.py"])
    for name, package in ZOD.items():
        folder = installed(name, package, is_node=True)
        script = folder / "zod_schemas.mjs"  # node looks for packages beside the script.
        script.write_bytes((SCRIPTS / "zod_schemas.mjs").read_bytes())
        found[name] = printed(["node", script])
    for name, package in PYTHON_SERVERS.items():
        found[name] = tools([installed(name, package, is_node=False) / "bin" / name])
    for name, package in NODE_SERVERS.items():
        module = installed(name, package, is_node=True) / "node_modules" / package.rpartition("@")[0]
        programs = json.loads((module / "package.json").read_text())["bin"]
        folder = [tempfile.gettempdir()] if name == "server-filesystem" else []
        found[name] = tools(["node", module / next(iter(programs.values())), *folder])
    return found


def compile_schemas(path: str) -> None:
    """Print what the checkout on the import path says of each schema in a file: an error, or an empty text."""
    from jpaged.errors import InvalidRequestError
    from jpaged.structured_outputs import StructuredOutputsParams
    from tests.jpaged.text.grammar.grammar_walks import grammars_of
    from tests.jpaged.text.tokenizing.published_tokenizers import byte_tokenizer

    grammars = grammars_of(byte_tokenizer())
    results: dict[str, dict[str, str]] = {}
    for source, schemas in json.loads(Path(path).read_text()).items():
        results[source] = {}
        for name, schema in schemas.items():
            try:
                grammars.grammar_of(StructuredOutputsParams(json=schema))
                results[source][name] = ""
            except InvalidRequestError as error:
                results[source][name] = str(error)
    json.dump(results, sys.stdout)


def compiled(checkout: Path, path: str) -> dict[str, dict[str, str]]:
    """Return what a checkout says of each schema in a file."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    program = f"import runpy; runpy.run_path({str(Path(__file__).resolve())!r})['compile_schemas']({path!r})"
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, cwd=checkout, env=environment, check=True, stdout=subprocess.PIPE)
    results: dict[str, dict[str, str]] = json.loads(run.stdout)
    return results


def keyword_at(error: str, schema: Any) -> str:
    """Return the keyword at the place that an error names, or what stands there."""
    place = PLACE.search(error)
    parts = place[1].split("/")[1:] if place else []
    keyword = parts[-1] if parts else ""
    for part in parts:
        if isinstance(schema, list) and part.isdigit():
            schema = schema[int(part)]
        elif isinstance(schema, dict):
            schema = schema.get(part.replace("~1", "/").replace("~0", "~"))
    if isinstance(schema, dict) and "pattern" in schema:
        return "pattern"
    return keyword


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versus", type=Path, metavar="DIR", help="another checkout, whose refusals are compared")
    parser.add_argument("-o", "--output", type=Path, help="the report, JSON")
    arguments = parser.parse_args()
    here = Path(__file__).parents[1]
    sys.path.insert(0, str(here))
    schemas = all_schemas()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "schemas.json")
        Path(path).write_text(json.dumps(schemas))
        results = compiled(here, path)
        others = compiled(arguments.versus.resolve(), path) if arguments.versus else None
    refused = [
        {"source": source, "schema": name, "keyword": keyword_at(error, schemas[source][name]), "error": error}
        for source, found in results.items()
        for name, error in found.items()
        if error
    ]
    report: dict[str, Any] = {
        "packages": {**PYDANTIC, **ZOD, **PYTHON_SERVERS, **NODE_SERVERS},
        "schemas": {source: len(found) for source, found in results.items()},
        "refused": {source: sum(map(bool, found.values())) for source, found in results.items()},
        "by_keyword": dict(Counter(one["keyword"] for one in refused).most_common()),
        "refusals": refused,
    }
    lost: list[str] = []
    if others is not None:
        was_refused = {source: {name for name, error in found.items() if error} for source, found in others.items()}
        report["refused_by_versus"] = {source: len(names) for source, names in was_refused.items()}
        keywords = Counter(
            keyword_at(others[source][name], schemas[source][name])
            for source, names in was_refused.items()
            for name in names
        )
        report["by_keyword_of_versus"] = dict(keywords.most_common())
        lost = [
            f"{one['source']}: {one['schema']}" for one in refused if one["schema"] not in was_refused[one["source"]]
        ]
        report["taken_by_versus_only"] = lost
    for one in refused:
        print(f"{one['source']}: {one['schema']}: {one['error']}")
    print(json.dumps({name: value for name, value in report.items() if name != "refusals"}, indent=1))
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
