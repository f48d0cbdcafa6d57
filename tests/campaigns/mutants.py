"""Mutation testing: ``python -m tests.campaigns.mutants geometry --count 300``.

A mutant is one small change to the source of a part: a comparison, a sign, a number, a negated condition or a removed
statement. Mutants are sampled with a seed from all possible ones. Each runs against the tests of its part until one
fails; processes that the tests fork run the mutant too. Survivors are printed as diffs. A survivor shows either a missing
test or a change without effect.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import difflib
import hashlib
import importlib.util
import io
import json
import os
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from tqdm import tqdm

ROOT = Path(__file__).parents[2]

#: Source paths of each part, and the tests that run against its mutants, fastest first.
PARTS: dict[str, tuple[str, str]] = {
    "geometry": ("reshard/sharding", "tests/sharding tests/plan tests/planner/test_size_limits.py tests/api"),
    "planner": ("reshard/plan reshard/cost reshard/planner", "tests/plan tests/planner tests/cost tests/sharding tests/topology"),
    "executor": ("reshard/runtime reshard/planner/recovery_plans.py", "tests/runtime tests/coordination tests/planner tests/api"),
    "scheduler": ("scheduler", "tests/scheduler"),
}  # fmt: skip
LIMIT_SECONDS = 60.0
#: Time limit of one test.
TEST_SECONDS = 40
_TIMED_OUT = 99

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One mutant: the change at mutation point ``at`` of a file."""

    path: Path
    at: int


class _Mutator(ast.NodeTransformer):
    """Counts the mutation points of a file, and changes one of them."""

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0

    def _is_target(self) -> bool:
        self.count += 1
        return self.count - 1 == self.at

    def visit_Raise(self, node: ast.Raise) -> Any:
        return node  # mutants of error texts are irrelevant

    def visit_Assert(self, node: ast.Assert) -> Any:
        return node  # an assertion is a check itself

    def visit_JoinedStr(self, node: ast.JoinedStr) -> Any:
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_arguments(self, node: ast.arguments) -> Any:
        return node

    def _visit_function(self, node: Any) -> Any:
        docstring = node.body[:1] if ast.get_docstring(node) is not None else []
        node.body = docstring + [self.visit(item) for item in node.body[len(docstring) :]]
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _visit_function  # noqa: N815

    def visit_keyword(self, node: ast.keyword) -> Any:
        return node if node.arg == "strict" else self.generic_visit(node)  # strict= of zip is a check itself

    def visit_Compare(self, node: ast.Compare) -> Any:
        self.generic_visit(node)
        for i, op in enumerate(node.ops):
            if type(op) in _COMPARISONS and self._is_target():
                node.ops[i] = _COMPARISONS[type(op)]()
        return node

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        self.generic_visit(node)
        if type(node.op) in _OPERATORS and self._is_target():
            node.op = _OPERATORS[type(node.op)]()
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        self.generic_visit(node)
        if self._is_target():
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        self.generic_visit(node)
        if isinstance(node.op, (ast.Not, ast.USub)) and self._is_target():
            return node.operand
        return node

    def visit_Constant(self, node: ast.Constant) -> Any:
        if isinstance(node.value, bool):
            return ast.Constant(not node.value) if self._is_target() else node
        if isinstance(node.value, (int, float)):
            return ast.Constant(node.value + 1) if self._is_target() else node
        return node

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        if ast.unparse(node.test) != "TYPE_CHECKING" and self._is_target():
            node.test = ast.UnaryOp(ast.Not(), node.test)
        return node

    def visit_Expr(self, node: ast.Expr) -> Any:
        self.generic_visit(node)
        return ast.Pass() if isinstance(node.value, ast.Call) and self._is_target() else node

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        self.generic_visit(node)
        return ast.Pass() if self._is_target() else node

    def visit_Continue(self, node: ast.Continue) -> Any:
        return ast.Break() if self._is_target() else node

    def visit_Break(self, node: ast.Break) -> Any:
        return ast.Continue() if self._is_target() else node


def change(source: str, at: int) -> tuple[str, int]:
    """The source with mutation point ``at`` changed (none if -1), and its number of mutation points."""
    mutator = _Mutator(at)
    tree = ast.fix_missing_locations(mutator.visit(copy.deepcopy(ast.parse(source))))
    return ast.unparse(tree) + "\n", mutator.count


def _files(part: str) -> list[Path]:
    folders = [ROOT / name for name in PARTS[part][0].split()]
    found = [path for folder in folders for path in (sorted(folder.rglob("*.py")) if folder.is_dir() else [folder])]
    return [path for path in found if path.name != "__init__.py"]


def _tests(part: str) -> list[str]:
    paths = [ROOT / name for name in PARTS[part][1].split()]
    found = [path for item in paths for path in (sorted(item.rglob("test_*.py")) if item.is_dir() else [item])]
    return [str(path.relative_to(ROOT)) for path in found]


def draw(part: str, count: int, seed: int) -> list[Mutant]:
    """A random sample of all possible mutants of a part."""
    every = [Mutant(path, at) for path in _files(part) for at in range(change(path.read_text(), -1)[1])]
    return random.Random(seed).sample(every, min(count, len(every)))


def _module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("reshard", *parts) if parts[0] == "scheduler" else parts)


class _Finder:
    """An import hook that loads one module from the mutated source."""

    def __init__(self, module: str, source: str, path: Path) -> None:
        self.module, self.source, self.path = module, source, path

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self.module:
            return None
        return importlib.util.spec_from_loader(name, self, origin=str(self.path))  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: Any) -> None:
        module.__file__ = str(self.path)
        exec(compile(self.source, str(self.path), "exec"), module.__dict__)


class _FailureReporter:
    """A pytest plugin that writes the id of a failed or hanging test into a pipe."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        def give_up(*_: object) -> None:
            os.write(self.pipe, nodeid.encode()[:500])
            os._exit(_TIMED_OUT)

        signal.signal(signal.SIGALRM, give_up)
        signal.alarm(TEST_SECONDS)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            os.write(self.pipe, report.nodeid.encode()[:500])


def _try_tests(tests: list[str], mutant: Mutant | None, pipe: int) -> int:
    """Run the tests in a forked process that has not imported the package; returns 0 if all tests pass."""
    import pytest

    if mutant is not None:
        source, _ = change(mutant.path.read_text(), mutant.at)
        sys.meta_path.insert(0, _Finder(_module_of(mutant.path), source, mutant.path))  # type: ignore[arg-type]
    os.chdir(ROOT)
    chosen = [
        "-x",
        "-q",
        "--import-mode=importlib",
        "-p",
        "no:cacheprovider",
        "--no-header",
        "-k",
        "not cli and not golden_file",
    ]
    chosen.append("--hypothesis-profile=unshrunk")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return int(pytest.main([*chosen, *tests], plugins=[_FailureReporter(pipe)]))


@dataclass(frozen=True)
class Outcome:
    """Outcome of a mutant: ``how`` is "killed", "timed out" or "survived"; ``test`` is the failed test, if any."""

    how: str
    seconds: float
    test: str = ""


def _run(tests: list[str], mutant: Mutant | None, limit: float = LIMIT_SECONDS) -> Outcome:
    begun = time.monotonic()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setpgid(0, 0)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            status = _try_tests(tests, mutant, writer)
        finally:
            os._exit(min(status, _TIMED_OUT - 1))
    os.close(writer)
    how = "timed out"
    while time.monotonic() < begun + limit:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            how = {0: "survived", _TIMED_OUT: "timed out"}.get(os.waitstatus_to_exitcode(status), "killed")
            break
        time.sleep(0.05)
    else:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # forked descendants
    os.set_blocking(reader, False)
    failed_test = b""
    with contextlib.suppress(BlockingIOError):
        failed_test = os.read(reader, 500)
    os.close(reader)
    return Outcome(how, time.monotonic() - begun, failed_test.decode(errors="replace"))


def _diff(mutant: Mutant) -> str:
    source = mutant.path.read_text()
    before, after = change(source, -1)[0].splitlines(), change(source, mutant.at)[0].splitlines()
    lines = [line for line in difflib.unified_diff(before, after, lineterm="", n=1) if line[:3] not in ("---", "+++")]
    return "\n".join(lines)


def _mark(mutant: Mutant) -> str:
    """Hash of the mutated source, to recognize the mutant in the records of an earlier run."""
    return hashlib.sha256(change(mutant.path.read_text(), mutant.at)[0].encode()).hexdigest()[:16]


def _read_killed(rows: Path | None) -> dict[str, Outcome]:
    """Outcomes of the mutants that an earlier run killed, by mark."""
    found = [json.loads(line) for line in rows.read_text().splitlines()] if rows else []
    return {row["mark"]: Outcome(row["how"], row["seconds"], row["test"]) for row in found if row["how"] != "survived"}


def _campaign(
    part: str, mutants: list[Mutant], jobs: int, limit: float, killed: dict[str, Outcome]
) -> Iterator[tuple[Mutant, Outcome]]:
    """Run all mutants. Test files that killed mutants of the same file run first, then those that import its module."""
    killers: dict[Path, Counter[str]] = defaultdict(Counter)
    texts = {name: (ROOT / name).read_text() for name in _tests(part)}

    def run(mutant: Mutant) -> Outcome:
        if (earlier := killed.get(_mark(mutant))) is not None:
            return earlier
        known = Counter(killers[mutant.path])
        imports = f"from {_module_of(mutant.path)} import"
        outcome = _run(sorted(texts, key=lambda name: (-known[name], imports not in texts[name])), mutant, limit)
        if outcome.test:
            killers[mutant.path][outcome.test.split("::")[0]] += 1
        return outcome

    with ThreadPoolExecutor(jobs) as pool:
        yield from zip(mutants, pool.map(run, mutants), strict=True)


def main() -> int:
    """Print the surviving mutants and the share of killed ones; returns 1 if fewer than 90 % were killed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaigns.mutants",
        description=__doc__,
        epilog="example: python -m tests.campaigns.mutants planner --count 50 --jobs 4 --out mutants.jsonl",
    )
    parser.add_argument("part", choices=sorted(PARTS), help="part of the package to mutate")
    parser.add_argument("--count", type=int, default=300, help="number of mutants (300)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample (0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="parallel mutants (number of CPUs)")
    parser.add_argument("--out", type=Path, help="write each mutant and its outcome as JSON lines to this file")
    parser.add_argument(
        "--killed", type=Path, help="--out file of an earlier run; skip mutants that it killed and that are unchanged"
    )
    options = parser.parse_args()
    for heavy in ("numpy", "pytest", "torch", "torch.distributed"):  # import once; the forked processes inherit it
        importlib.import_module(heavy)
    alone = _run(_tests(options.part), None, 10 * LIMIT_SECONDS)
    if alone.how != "survived":
        print(f"the tests of {options.part} fail without a mutant: {alone.test or alone.how}", file=sys.stderr)
        return 2
    print(f"{options.part}: the tests take {alone.seconds:.0f} s", flush=True)
    limit = max(LIMIT_SECONDS, 3 * alone.seconds)  # parallel jobs slow each other down
    counts: Counter[str] = Counter()
    mutants, killed = draw(options.part, options.count, options.seed), _read_killed(options.killed)
    with (options.out or Path(os.devnull)).open("w") as out:
        outcomes = _campaign(options.part, mutants, options.jobs, limit, killed)
        # disable=None: a bar on a terminal only. This process must not import reshard, which its forks mutate.
        for mutant, outcome in tqdm(outcomes, total=len(mutants), unit="mutant", leave=False, disable=None):
            counts[outcome.how] += 1
            where = f"{mutant.path.relative_to(ROOT)}, place {mutant.at}"
            row = {
                "where": where,
                "mark": _mark(mutant),
                "how": outcome.how,
                "seconds": round(outcome.seconds, 1),
                "test": outcome.test,
            }
            print(json.dumps(row), file=out, flush=True)
            if outcome.how == "survived":
                tqdm.write(f"\n{where}\n{_diff(mutant)}")
                sys.stdout.flush()
    total = sum(counts.values())
    share = 1 - counts["survived"] / total
    killed_count = total - counts["survived"]
    print(f"\n{options.part}: {killed_count} of {total} killed ({share:.1%}), {counts['timed out']} of them by timeout")
    return 0 if share >= 0.9 else 1


if __name__ == "__main__":
    sys.exit(main())
