"""What the README and the docs show is what happens."""

from __future__ import annotations

import ast
import builtins
import contextlib
import dataclasses
import importlib
import importlib.util
import io
import os
import re
import runpy
import shlex
import subprocess
import sys

import pytest

from reshard.cli.main import main
from reshard.codecs.formats import FORMATS
from reshard.errors import ArgumentError
from reshard.planner.strategy_registry import STRATEGIES, find_strategy
from reshard.testing import run_processes
from reshard.topology import MACHINES, Topology
from tests.support.pages import DOCS, PAGES, ROOT, code_blocks, table

#: Imported here once, so that forked processes need not import them.
for _name in ("torch.distributed.tensor", "torch.distributed.device_mesh", "torch._dynamo"):
    importlib.import_module(_name)


def _write_example(folder):
    """Write the script of the README. Returns its path, and what its ranks print."""
    script = folder / "rows.py"
    script.write_text(code_blocks(ROOT / "README.md", "python")[0])
    command, _, expected = code_blocks(ROOT / "README.md", "console")[0].partition("\n")
    assert command == "$ torchrun --nproc-per-node 4 rows.py"
    return script, expected.splitlines()


def _run_script(rank, port, script):
    """Run a script with the variables that torchrun sets. Returns what it prints."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(script), run_name="__main__")
    return printed.getvalue()


def test_the_readme_example_prints_what_it_says(tmp_path):
    script, expected = _write_example(tmp_path)
    assert "".join(run_processes(_run_script, 4, script, init_group=False)).splitlines() == expected


@pytest.mark.slow
def test_the_readme_example_runs_under_torchrun(tmp_path):
    script, expected = _write_example(tmp_path)
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(script)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    # not by lines: ranks print into one pipe
    assert sorted(re.findall(r"rank \d has \[.*?\]", run.stdout)) == expected


def test_the_readme_plan_is_what_the_command_prints(capsys):
    command, _, expected = code_blocks(ROOT / "README.md", "console")[1].partition("\n")
    assert main(shlex.split(command)[2:]) == 0
    assert capsys.readouterr().out == expected


@pytest.mark.integration
@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.stem)
def test_code_on_the_pages_runs(page):
    for block in code_blocks(page, "python"):
        exec(compile(block, str(page), "exec"), {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_scripts_on_the_pages_import_what_they_use(page):
    """Scripts that need several jobs or another system, and so do not run here."""
    for block in code_blocks(page, "py"):
        nodes = list(ast.walk(ast.parse(block)))
        known = {alias.asname or alias.name.split(".")[0] for node in nodes for alias in getattr(node, "names", ())}
        known |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        known |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        known |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        used = {node.id for node in nodes if isinstance(node, ast.Name)}
        assert used - known - {*dir(builtins), "__name__"} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


PUBLIC = (
    "reshard",
    "reshard.compression",
    "reshard.cupy",
    "reshard.parallel",
    "reshard.ray",
    "reshard.scheduler",
    "reshard.scheduler.autoparallel",
    "reshard.sglang",
    "reshard.testing",
    "reshard.weights",
)


def test_the_reference_has_every_public_name():
    text = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    documented = set(re.findall(r"^::: (\S+)$", text, flags=re.M))
    exported = set()
    if importlib.util.find_spec("ray") is None:
        documented = {name for name in documented if not name.startswith("reshard.ray.")}
    for module in PUBLIC:
        if module != "reshard.ray" or importlib.util.find_spec("ray") is not None:
            exported |= {f"{module}.{name}" for name in importlib.import_module(module).__all__ if name[0] != "_"}
    assert documented == exported
    for name in documented:
        module, _, attribute = name.rpartition(".")
        assert getattr(importlib.import_module(module), attribute) is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_import_public_modules_only(page):
    if page.parent.name not in ("decisions", "benchmarks"):
        code = "".join(code_blocks(page, "python"))
        modules = set(re.findall(r"^(?:from|import) (reshard[\w.]*)", code, flags=re.M))
        assert modules <= {*PUBLIC, "reshard.planner", "reshard.scheduler.training"}


def test_every_error_is_on_its_page():
    import reshard

    text = (ROOT / "docs" / "errors.md").read_text()
    for name in reshard.__all__:
        if name.endswith("Error"):
            assert f"`{name}`" in text or f"reshard.{name}`" in text


def test_examples_in_docstrings_run():
    import doctest

    import reshard.api.one_process
    import reshard.sharding.mesh

    for module in (reshard.api.one_process, reshard.sharding.mesh):
        result = doctest.testmod(module)
        assert result.attempted
        assert not result.failed


def test_every_strategy_is_in_the_help_and_in_the_table_of_the_docs(monkeypatch, capsys):
    rows = table(DOCS / "concepts.md", "| name | what it does |")
    names = {name for cell, *_ in rows[:-1] for name in re.findall(r"`(\w+)`", cell)}
    assert names == set(STRATEGIES), "docs/concepts.md"
    monkeypatch.setitem(STRATEGIES, "brand_new", STRATEGIES["send_recv"])
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert "brand_new" in capsys.readouterr().out
    with pytest.raises(ArgumentError, match="did you mean 'brand_new'"):
        find_strategy("brand_mew")


def test_tables_list_every_lossless_format_and_every_number_of_a_topology():
    rows = table(DOCS / "compression.md", "| format | what travels | when it pays |")
    assert {name.strip("`") for name, *_ in rows} == set(FORMATS)
    rows = table(DOCS / "concepts.md", "| key of the topology | meaning |")
    numbers = {field.name for field in dataclasses.fields(Topology) if field.name.endswith(("_seconds", "_bytes"))}
    assert numbers <= {name.strip("`") for name, _ in rows}


def test_the_page_of_concepts_names_every_preset_of_a_machine():
    page = (ROOT / "docs" / "concepts.md").read_text()
    assert [name for name in MACHINES if f"`{name}`" not in page] == []


def test_the_glossary_has_each_term_once_in_alphabetical_order():
    terms = [term.rstrip(" *").casefold() for term, _ in table(DOCS / "glossary.md", "| term | meaning |")]
    assert terms == sorted(set(terms))


#: Folders to which paths in CONTRIBUTING may be relative.
_RELATIVE_TO = (
    "",
    "reshard",
    "reshard/coordination",
    "reshard/planner/strategies",
    "reshard/topology",
    "scheduler",
    "tests/scheduler",
    "native/pipeline",
)


def test_files_that_contributing_names_exist():
    named = re.findall(r"`([\w/]+\.(?:py|pyi|h|cpp|md|toml))`", (ROOT / "CONTRIBUTING.md").read_text())
    lost = [name for name in named if not any((ROOT / folder / name).exists() for folder in _RELATIVE_TO)]
    assert len(named) > 60
    assert lost == []


def test_names_that_contributing_says_a_file_has_are_there():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`([\w.]+)`\s+(?:in|of)\s+`([\w/]+\.(?:py|h|cpp))`", text)
    assert len(named) > 35
    for name, file in named:
        path = next(path for folder in _RELATIVE_TO if (path := ROOT / folder / file).exists())
        assert set(name.split(".")) <= set(re.findall(r"\w+", path.read_text())), f"{name} in {file}"


def test_contributing_names_the_tests_that_import_each_package():
    packages = {f"reshard.{path.parent.name}" for path in (ROOT / "reshard").glob("*/__init__.py")}
    packages |= {f"reshard.scheduler.{path.parent.name}" for path in (ROOT / "scheduler").glob("*/__init__.py")}
    named = set()
    for cell, tests in table(ROOT / "CONTRIBUTING.md", "| package | its tests |"):
        places = re.findall(r"`(tests/[^`]*)`", tests)
        assert all((ROOT / path).exists() for path in places)
        names = re.findall(r"`([\w.]+)`", cell)
        prefix = names[0].rpartition(".")[0] if names else ""
        for name in names if prefix in ("reshard", "reshard.scheduler") else []:
            whole = name if name.startswith("reshard") else f"{prefix}{name}"
            own = [f"{places[0]}{whole.rpartition('.')[2]}"] if "and the name" in tests else places
            for path in (ROOT / place for place in own):
                text = "".join(file.read_text() for file in ([path] if path.suffix else path.glob("test_*.py")))
                assert re.search(rf"(from|import) {re.escape(whole)}\b", text), (whole, path)
            named.add(whole)
    assert named == packages
