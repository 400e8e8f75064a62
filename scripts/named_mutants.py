"""Can the tests see a small change of the host core? Every mutant of its files, each against the kill suite.

    python scripts/mutate.py --jobs 2 --output docs/measurements/mutants.json --check
    python scripts/mutate.py jpaged/scheduler.py --tests tests.jpaged.simulation:simulate@0-20 --only 50
    python scripts/mutate.py --folder tests/mutants/tpu --named --check --limit 600
    python scripts/mutate.py --show jpaged/scheduler.py:113:12:comparison:0

Files, stages of the suite, libraries, named mutants and the arguments for survivors are data in tests/mutants. A
stage is `module:function@first-last`, called with every number of that range, or arguments of pytest. What a mutant
is: mutations.py; how one is run: mutant_suite.py.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import sys
import time
import tomllib
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

from mutant_suite import NamedMutant, Result, Suite
from mutations import Mutant, mutants_of

ROOT = Path(__file__).parents[1]
MIN_KILL_RATE = 0.95


def load_named(root: Path, path: Path) -> list[NamedMutant]:
    """The named mutants; one whose old text is not in its file exactly once is an error, never left out."""
    named = []
    for entry in tomllib.loads(path.read_text())["mutant"] if path.is_file() else []:
        source = (root / entry["file"]).read_text()
        if source.count(entry["old"]) != 1:
            raise SystemExit(f"{entry['name']}: its old text is {source.count(entry['old'])} times in {entry['file']}")
        if entry["expect"] not in ("killed", "passes"):
            raise SystemExit(f"{entry['name']}: expect is {entry['expect']!r}; it is 'killed' or 'passes'")
        text = source.replace(entry["old"], entry["new"])
        named.append(NamedMutant(entry["name"], entry["file"], text, entry["expect"]))
    return named


def load_arguments(path: Path) -> dict[tuple[Any, ...], str]:
    """Why each of these survivors is no gap in the tests, by the mutant's lasting key."""
    entries = tomllib.loads(path.read_text()).get("survivor", []) if path.is_file() else []
    names = ("file", "function", "kind", "original", "mutated")
    return {(*(entry[name] for name in names), entry.get("ordinal", 0)): entry["why"] for entry in entries}


def run_and_tell(suite: Suite, mutants: list[Any], progress: Path | None, resume: bool) -> dict[str, Result]:
    """Run them all, saying how far it is; `progress` keeps what is done for a run that resumes."""
    results: dict[str, Result] = {}
    sources = {file: hashlib.sha256((suite.root / file).read_bytes()).hexdigest() for file in suite.files}
    if progress and resume and progress.is_file():
        first, *lines = progress.read_text().splitlines()
        about = json.loads(first)
        if about["stages"] != suite.stages:
            raise SystemExit(f"{progress} is about other stages: run without --resume")
        unchanged = {file for file in sources if about["sources"].get(file) == sources[file]}
        kept = [result for line in lines if (result := Result(**json.loads(line))).id.split(":")[0] in unchanged]
        results = {result.id: result for result in kept}
    if progress:
        progress.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(vars(result)) for result in results.values()]
        progress.write_text("\n".join([json.dumps({"sources": sources, "stages": suite.stages}), *lines]) + "\n")
    started = time.monotonic()
    for result in suite.run([mutant for mutant in mutants if mutant.id not in results]):
        results[result.id] = result
        if progress:
            with progress.open("a") as file:
                file.write(json.dumps({**vars(result), "output": ""}) + "\n")
        if len(results) % 50 == 0:
            num_survivors = sum(result.stage is None for result in results.values())
            minutes = (time.monotonic() - started) / 60
            print(f"{len(results)} of {len(mutants)}, {num_survivors} survive, {minutes:.1f} min", flush=True)
    return {mutant.id: results[mutant.id] for mutant in mutants}


def sample(mutants: list[Any], num: int | None) -> list[Any]:
    """So many of them, evenly spread; all, if there are no more or none is said."""
    if not num or num >= len(mutants):
        return mutants
    return [mutants[index * len(mutants) // num] for index in range(num)]


def report(
    suite: Suite, mutants: list[Mutant], results: dict[str, Result], arguments: dict[tuple[Any, ...], str]
) -> dict[str, Any]:
    killed = [mutant for mutant in mutants if results[mutant.id].stage]
    survivors = [mutant for mutant in mutants if not results[mutant.id].stage]
    stages = []
    for index, stage in enumerate(suite.stages):
        kills = [result for result in results.values() if result.stage == stage]
        stages.append(
            {
                "stage": stage,
                "unchanged_s": round(suite.baseline[index], 2),
                "kills": len(kills),
                "kills_by_time": sum(result.detail == "no end" for result in kills),
                "seconds_in_killed": round(sum(result.seconds for result in kills), 1),
            }
        )
    kinds = {}
    for kind, total in sorted(Counter(mutant.kind for mutant in mutants).items()):
        kinds[kind] = {"mutants": total, "killed": sum(mutant.kind == kind for mutant in killed)}
    files = {}
    for file, total in Counter(mutant.file for mutant in mutants).items():
        files[file] = {
            "sha256": hashlib.sha256((suite.root / file).read_bytes()).hexdigest(),
            "mutants": total,
            "killed": sum(mutant.file == file for mutant in killed),
        }
    argued: list[dict[str, Any]] = []
    unargued: list[dict[str, Any]] = []
    for mutant in survivors:
        names = ("id", "file", "line", "function", "kind", "original", "mutated", "ordinal")
        entry = {name: getattr(mutant, name) for name in names}
        if mutant.key in arguments:
            argued.append({**entry, "why": arguments[mutant.key]})
        else:
            unargued.append(entry)
    return {
        "mutants": len(mutants),
        "killed": len(killed),
        "kill_rate": round(len(killed) / max(len(mutants), 1), 4),
        "survivors": {"argued": argued, "unargued": unargued},
        "stages": stages,
        "seconds_in_survivors": round(sum(results[mutant.id].seconds for mutant in survivors), 1),
        "kinds": kinds,
        "files": files,
    }


def faults(summary: dict[str, Any], stale: list[tuple[Any, ...]]) -> list[str]:
    """What `--check` objects to."""
    found = [f"named: {entry['name']} {entry['got']}" for entry in summary["named"] if entry["got"] != entry["expect"]]
    if "kill_rate" in summary:
        if summary["kill_rate"] < MIN_KILL_RATE:
            found.append(f"kill rate {summary['kill_rate']:.1%} < {MIN_KILL_RATE:.0%}")
        found += [f"survives unargued: {entry['id']}" for entry in summary["survivors"]["unargued"]]
        found += [f"argued for, and no survivor: {' | '.join(map(str, key))}" for key in stale]
    return found


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", metavar="FILE", help="default: those of tests/mutants/suite.toml")
    parser.add_argument("--tests", action="append", metavar="STAGE", help="default: those of tests/mutants/suite.toml")
    parser.add_argument(
        "--folder", type=Path, default=Path("tests/mutants"), help="where suite, names and arguments are"
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to mutate")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=60, metavar="S", help="of a stage, at most")
    parser.add_argument("--output", type=Path, help="write the report here, as JSON")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep what a stopped run with the same --output found of files that are as they were",
    )
    parser.add_argument("--only", type=int, metavar="N", help="a sample: N of the mutants, evenly spread")
    parser.add_argument("--named", action="store_true", help="the named mutants alone")
    parser.add_argument("--show", metavar="ID", help="one mutant, with what the suite prints")
    parser.add_argument("--check", action="store_true", help="exit with 1 unless all is as the issue wants it")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    root, output = args.root.resolve(), args.output and args.output.resolve()
    folder = root / args.folder
    suite_data = tomllib.loads((folder / "suite.toml").read_text()) if (folder / "suite.toml").is_file() else {}
    files = args.files or suite_data["files"]
    named = load_named(root, folder / "named.toml") if args.named or not args.files else []
    mutants = [mutant for file in files for mutant in mutants_of((root / file).read_text(), file)]
    if args.named:
        named = sample(named, args.only)
    mutants = sample(mutants, args.only)
    started = time.monotonic()
    suite = Suite(root, args.tests or suite_data["tests"], limit_s=args.limit, jobs=args.jobs)
    suite.prepare(files, suite_data.get("libraries", []))
    print(f"unchanged: {sum(suite.baseline):.1f} s in {len(suite.stages)} stages", flush=True)
    if args.show:
        everything: list[Mutant | NamedMutant] = [*mutants, *named]
        for result in suite.run([mutant for mutant in everything if mutant.id == args.show]):
            print(f"{result.output}\n{result.id}: {result.detail or 'survives'} ({result.stage})")
        return 0
    summary: dict[str, Any] = {"what": f"mutants of {args.folder}, each against the kill suite"}
    stale: list[tuple[Any, ...]] = []
    if not args.named:
        arguments = load_arguments(folder / "survivors.toml")
        progress = output.with_suffix(".progress.jsonl") if output else None
        results = run_and_tell(suite, mutants, progress, args.resume)
        summary |= report(suite, mutants, results, arguments)
        survivors = {mutant.key for mutant in mutants if not results[mutant.id].stage}
        stale = [key for key in arguments if key not in survivors] if not (args.only or args.files) else []
        for entry in summary["survivors"]["unargued"]:
            print(f"survives: {entry['id']}  {entry['original']}  →  {entry['mutated']}")
        print(f"killed {summary['killed']} of {summary['mutants']} ({summary['kill_rate']:.1%})")
    summary["named"] = []
    expected = {mutant.id: mutant.expect for mutant in named}  # Told as they end, reported in the order of the file.
    for result in suite.run(named):
        expect, got = expected[result.id], "killed" if result.stage else "passes"
        entry = {"name": result.id, "expect": expect, "got": got, "stage": result.stage, "detail": result.detail}
        summary["named"].append(entry)
        wrong = "" if got == expect else f", NOT {expect}"
        print(f"{result.id}: {got}{wrong}, {result.seconds:.0f} s  {result.detail}", flush=True)
    summary["named"].sort(key=lambda entry: list(expected).index(entry["name"]))
    summary |= {
        "minutes": round((time.monotonic() - started) / 60, 1),
        "jobs": args.jobs,
        "machine": {"cpus": os.cpu_count(), "arch": platform.machine(), "python": platform.python_version()},
        "date": date.today().isoformat(),
    }
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
        output.with_suffix(".progress.jsonl").unlink(missing_ok=True)
    found = faults(summary, stale) if args.check else []
    print("".join(f"FAULT {fault}\n" for fault in found), end="")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
