"""The house itself: layers, names, import time, sizes."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from pathlib import Path

import reshard

PACKAGE = Path(reshard.__file__).parent

#: From the bottom up: a module imports only modules that stand before it.
LAYERS = [
    "version", "errors", "forks", "descriptors", "names", "dtypes", "mesh", "notation", "dim_cuts", "layout", "apart", "shards", "tasks", "topology", "presets", "topology_json", "pod_bound", "bound", "transfers", "plan", "loads",
    "plan_text", "plan_parser", "plan_json", "messages", "order", "sharing", "fluid", "simulation", "plan_html", "routes", "senders", "trees", "exchanges", "greedy", "broadcasts", "search", "matching", "chunks", "lanes", "freight", "board", "dealer", "pod_dealer", "landing", "sequence", "schedule", "relays", "multicast", "strategies", "pricing", "portfolio", "planning", "owners", "parts", "staged", "check", "runs", "program", "remainder", "staging", "regions", "region_kernel", "rounds", "round_memory", "round_runner", "cupy", "streams", "digests", "works", "progress",
    "callers", "agreement", "stores", "nccl", "nccl_groups", "addresses", "control", "group", "beacon", "failures", "outcasts", "lookout", "monitor", "transport", "meeting", "channel", "arrays", "casts", "local", "options", "handles", "hosts", "dtensors", "mover_arrays", "mover", "survivors", "request", "records", "call", "launch", "ray_actor", "ray_asking", "ray_mesh", "ray", "cases", "demo", "doctor", "cli", "__main__",
]  # fmt: skip
#: Imports inside functions that go up on purpose: a plan prints itself and knows its bound.
UPWARD = {
    ("topology", "topology_json"),
    ("topology", "presets"),
    ("plan", "bound"),
    ("plan", "simulation"),
    ("plan", "plan_text"),
    ("plan", "plan_json"),
    ("bound", "plan"),
}


def _imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("reshard."):
            yield node.module.split(".")[1]


def test_imports_point_down_the_list_of_layers():
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    assert modules == set(LAYERS)
    for module in modules:
        for imported in _imports(PACKAGE / f"{module}.py"):
            if imported != "_native" and (module, imported) not in UPWARD:
                assert LAYERS.index(imported) < LAYERS.index(module), f"{module} imports {imported}"


def test_no_submodule_bears_a_public_name():
    assert not {path.stem for path in PACKAGE.glob("*.py")} & set(reshard.__all__)
    for name in reshard.__all__:
        assert getattr(reshard, name) is not None


def test_import_is_fast_and_light():
    code = (
        "import time, sys; begun = time.perf_counter(); import reshard; took = time.perf_counter() - begun; "
        "heavy = {'torch', 'ray', 'cupy', 'jax', 'scipy', 'networkx'} & set(sys.modules); "
        "print(took, *heavy)"
    )
    said = min(
        (
            subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
            for _ in range(3)
        ),
        key=lambda words: float(words[0]),
    )
    assert len(said) == 1, f"import reshard imports {said[1:]}"
    assert float(said[0]) < 0.3


def test_planning_needs_no_torch():
    code = (
        "import sys; from reshard import Layout, Mesh, make_plan, check_plan; "
        "check_plan(make_plan(Layout(Mesh.of('2'), 'S0'), Layout(Mesh.of('2', first_rank=2)), (8, 8), 'float32')); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_scheduler_is_installed_inside_the_package():
    begun = time.perf_counter()
    import reshard.scheduler

    assert reshard.scheduler.__doc__
    assert time.perf_counter() - begun < 5


def test_no_file_holds_two_ideas():
    root = PACKAGE.parent
    for folder in ("reshard", "scheduler", "native", "microbench"):
        for path in (root / folder).rglob("*"):
            if path.suffix in (".py", ".cpp"):
                assert len(path.read_text().splitlines()) <= 400, path
