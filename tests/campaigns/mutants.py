"""Whether the tests notice faults planted in ourselves: ``python -m tests.campaigns.mutants geometry --count 300``.

A mutant is one small change to the source of a part: a comparison, a sign, a number, a condition turned around, a
statement left out. Mutants are drawn with a seed from all that are possible, and each is run against the part's tests
until one fails, with the change in every process that they fork. What survives is printed as a difference, to be told
apart by a reader: a missing test, or a change that changes nothing that matters.
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

ROOT = Path(__file__).parents[2]

#: The folders of each part, and of the tests that are run against its mutants, the quickest first.
PARTS: dict[str, tuple[str, str]] = {
    "geometry": ("reshard/sharding", "tests/sharding tests/plan tests/planner/test_limits.py tests/api"),
    "planner": ("reshard/plan reshard/cost reshard/planner", "tests/plan tests/planner tests/cost tests/sharding tests/topology"),
    "executor": ("reshard/runtime reshard/planner/recovery.py", "tests/runtime tests/coordination tests/planner tests/api"),
    "scheduler": ("scheduler", "tests/scheduler"),
}  # fmt: skip
LIMIT_SECONDS = 60.0
#: What one test may take.
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
    """One change: the ``at``-th place of a file where something can be changed."""

    path: Path
    at: int


class _Mutator(ast.NodeTransformer):
    """Counts the places of a file, and changes one of them."""

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0

    def _is_it(self) -> bool:
        self.count += 1
        return self.count - 1 == self.at

    def visit_Raise(self, node: ast.Raise) -> Any:
        return node  # texts of errors

    def visit_Assert(self, node: ast.Assert) -> Any:
        return node  # says what holds

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
        node.body = docstring + [self.visit(one) for one in node.body[len(docstring) :]]
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _visit_function  # noqa: N815

    def visit_keyword(self, node: ast.keyword) -> Any:
        return node if node.arg == "strict" else self.generic_visit(node)  # of zip, says what holds

    def visit_Compare(self, node: ast.Compare) -> Any:
        self.generic_visit(node)
        for i, op in enumerate(node.ops):
            if type(op) in _COMPARISONS and self._is_it():
                node.ops[i] = _COMPARISONS[type(op)]()
        return node

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        self.generic_visit(node)
        if type(node.op) in _OPERATORS and self._is_it():
            node.op = _OPERATORS[type(node.op)]()
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        self.generic_visit(node)
        if self._is_it():
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        self.generic_visit(node)
        if isinstance(node.op, (ast.Not, ast.USub)) and self._is_it():
            return node.operand
        return node

    def visit_Constant(self, node: ast.Constant) -> Any:
        if isinstance(node.value, bool):
            return ast.Constant(not node.value) if self._is_it() else node
        if isinstance(node.value, (int, float)):
            return ast.Constant(node.value + 1) if self._is_it() else node
        return node

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        if ast.unparse(node.test) != "TYPE_CHECKING" and self._is_it():
            node.test = ast.UnaryOp(ast.Not(), node.test)
        return node

    def visit_Expr(self, node: ast.Expr) -> Any:
        self.generic_visit(node)
        return ast.Pass() if isinstance(node.value, ast.Call) and self._is_it() else node

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        self.generic_visit(node)
        return ast.Pass() if self._is_it() else node

    def visit_Continue(self, node: ast.Continue) -> Any:
        return ast.Break() if self._is_it() else node

    def visit_Break(self, node: ast.Break) -> Any:
        return ast.Continue() if self._is_it() else node


def change(source: str, at: int) -> tuple[str, int]:
    """The source with its ``at``-th place changed (none for -1), and how many places it has."""
    mutator = _Mutator(at)
    tree = ast.fix_missing_locations(mutator.visit(copy.deepcopy(ast.parse(source))))
    return ast.unparse(tree) + "\n", mutator.count


def _files(part: str) -> list[Path]:
    folders = [ROOT / name for name in PARTS[part][0].split()]
    found = [path for folder in folders for path in (sorted(folder.rglob("*.py")) if folder.is_dir() else [folder])]
    return [path for path in found if path.name != "__init__.py"]


def _tests(part: str) -> list[str]:
    paths = [ROOT / name for name in PARTS[part][1].split()]
    found = [path for one in paths for path in (sorted(one.rglob("test_*.py")) if one.is_dir() else [one])]
    return [str(path.relative_to(ROOT)) for path in found]


def draw(part: str, count: int, seed: int) -> list[Mutant]:
    """So many mutants of a part, drawn from all that are possible."""
    every = [Mutant(path, at) for path in _files(part) for at in range(change(path.read_text(), -1)[1])]
    return random.Random(seed).sample(every, min(count, len(every)))


def _module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("reshard", *parts) if parts[0] == "scheduler" else parts)


class _Finder:
    """Loads one module from a changed source, whoever would load it otherwise."""

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


class _Teller:
    """Writes the first test that fails, or does not end, into a pipe."""

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
    """In a process of its own, which has not imported the package: 0 if all tests pass."""
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
        return int(pytest.main([*chosen, *tests], plugins=[_Teller(pipe)]))


@dataclass(frozen=True)
class Ending:
    """How a mutant ended: killed, timed out, or survived; how long that took; and the test that failed, if one did."""

    how: str
    seconds: float
    test: str = ""


def _run(tests: list[str], mutant: Mutant | None, limit: float = LIMIT_SECONDS) -> Ending:
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
        os.killpg(pid, signal.SIGKILL)  # what it has forked
    os.set_blocking(reader, False)
    told = b""
    with contextlib.suppress(BlockingIOError):
        told = os.read(reader, 500)
    os.close(reader)
    return Ending(how, time.monotonic() - begun, told.decode(errors="replace"))


def _difference(mutant: Mutant) -> str:
    source = mutant.path.read_text()
    before, after = change(source, -1)[0].splitlines(), change(source, mutant.at)[0].splitlines()
    lines = [line for line in difflib.unified_diff(before, after, lineterm="", n=1) if line[:3] not in ("---", "+++")]
    return "\n".join(lines)


def _mark(mutant: Mutant) -> str:
    """Of the changed source, so that an ending is known to be of the same one."""
    return hashlib.sha256(change(mutant.path.read_text(), mutant.at)[0].encode()).hexdigest()[:16]


def _read_killed(rows: Path | None) -> dict[str, Ending]:
    """By mark, what an earlier run killed."""
    found = [json.loads(line) for line in rows.read_text().splitlines()] if rows else []
    return {row["mark"]: Ending(row["how"], row["seconds"], row["test"]) for row in found if row["how"] != "survived"}


def _campaign(
    part: str, mutants: list[Mutant], jobs: int, limit: float, killed: dict[str, Ending]
) -> Iterator[tuple[Mutant, Ending]]:
    """Each mutant and its ending; files of tests that import its module, or have killed others of it, go first."""
    killers: dict[Path, Counter[str]] = defaultdict(Counter)
    texts = {name: (ROOT / name).read_text() for name in _tests(part)}

    def run(mutant: Mutant) -> Ending:
        if (earlier := killed.get(_mark(mutant))) is not None:
            return earlier
        known = Counter(killers[mutant.path])
        imports = f"from {_module_of(mutant.path)} import"
        ending = _run(sorted(texts, key=lambda name: (-known[name], imports not in texts[name])), mutant, limit)
        if ending.test:
            killers[mutant.path][ending.test.split("::")[0]] += 1
        return ending

    with ThreadPoolExecutor(jobs) as pool:
        yield from zip(mutants, pool.map(run, mutants), strict=True)


def main() -> int:
    """Print what survived and how many were killed; 1 if that is less than nine of ten."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.mutants", description=__doc__)
    parser.add_argument("part", choices=sorted(PARTS))
    parser.add_argument("--count", type=int, default=300, help="mutants (300)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="at once (as many as processors)")
    parser.add_argument("--out", type=Path, help="write each mutant and how it ended as JSON lines")
    parser.add_argument(
        "--killed", type=Path, help="such lines of an earlier run: what it killed, if still the same, is not run again"
    )
    options = parser.parse_args()
    for heavy in ("numpy", "pytest", "torch", "torch.distributed"):  # once, for all that are forked
        importlib.import_module(heavy)
    alone = _run(_tests(options.part), None, 10 * LIMIT_SECONDS)
    if alone.how != "survived":
        print(f"the tests of {options.part} fail without any change: {alone.test or alone.how}", file=sys.stderr)
        return 2
    print(f"{options.part}: the tests take {alone.seconds:.0f} s", flush=True)
    limit = max(LIMIT_SECONDS, 3 * alone.seconds)  # so that none is cut off for being slow beside another
    ended: Counter[str] = Counter()
    mutants, killed = draw(options.part, options.count, options.seed), _read_killed(options.killed)
    with (options.out or Path(os.devnull)).open("w") as out:
        for mutant, ending in _campaign(options.part, mutants, options.jobs, limit, killed):
            ended[ending.how] += 1
            where = f"{mutant.path.relative_to(ROOT)}, place {mutant.at}"
            row = {
                "where": where,
                "mark": _mark(mutant),
                "how": ending.how,
                "seconds": round(ending.seconds, 1),
                "test": ending.test,
            }
            print(json.dumps(row), file=out, flush=True)
            if ending.how == "survived":
                print(f"\n{where}\n{_difference(mutant)}", flush=True)
    total = sum(ended.values())
    share = 1 - ended["survived"] / total
    print(
        f"\n{options.part}: {total - ended['survived']} of {total} killed ({share:.1%}), {ended['timed out']} by time"
    )
    return 0 if share >= 0.9 else 1


if __name__ == "__main__":
    sys.exit(main())
