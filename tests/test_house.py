"""The layout of the code: packages and their order, cycles, public names, import time."""

from __future__ import annotations

import ast
import functools
import itertools
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import networkx as nx
import pytest

from tests.support.own_package import find_wrong_package

ROOT = Path(__file__).parent.parent


@functools.cache
def _modules():
    """``{dotted name: path}`` of all modules, ``scheduler/`` as it is installed."""
    found = {}
    for folder in ("reshard", "scheduler", "microbench"):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = (("reshard", *parts) if folder == "scheduler" else parts)[: -1 if path.stem == "__init__" else None]
            found[".".join(parts)] = path
    return found


@functools.cache
def _nodes(path):
    """All nodes of the syntax tree of a file, the module first."""
    return list(ast.walk(ast.parse(path.read_text())))


def modules_of_package():
    """Dotted names of the modules that are installed, without those that run a command."""
    return [name for name in _modules() if name.split(".")[0] == "reshard" and not name.endswith("__main__")]


def _name(node):
    """The last part of a dotted name: ``import_module`` of ``importlib.import_module``."""
    return getattr(node, "attr", getattr(node, "id", None))


def _imports(name, path, modules, *, for_types=False):
    """The modules of ours that a module imports, also by ``import_module``.

    Args:
        for_types: also those under ``if TYPE_CHECKING``.
    """
    types_only = {
        id(inner)
        for node in _nodes(path)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    for node in _nodes(path):
        if id(node) in types_only and not for_types:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and _name(node.func) == "import_module":
            names = [given.value for given in node.args if isinstance(given, ast.Constant)]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *filter(None, [node.module])])
            names = [full if (full := f"{base}.{alias.name}") in modules else base for alias in node.names]
        else:
            continue
        yield from (imported for imported in names if imported in modules and imported != name)


@pytest.fixture(scope="module")
def graph():
    modules = _modules()
    edges = ((name, imported) for name, path in modules.items() for imported in _imports(name, path, modules))
    found = nx.DiGraph(edges)
    found.add_nodes_from(modules)
    return found


def _layers():
    """The packages of the table in docs/design.md, from the bottom up."""
    page = (ROOT / "docs" / "design.md").read_text()
    return re.findall(r"^\| `((?:reshard|microbench)[a-z_.]*)` \|", page, flags=re.M)


def _layer_of(module, layers):
    """The longest package of the table that a module is in. The root holds single modules only."""
    if module == "reshard":
        return 0
    holds = [layer for layer in layers if layer != "reshard" and f"{module}.".startswith(f"{layer}.")]
    if not holds and module.count(".") == 1:
        return 0
    return layers.index(max(holds, key=len)) if holds else None


def test_imports_point_down_the_table_of_layers(graph):
    layers = _layers()
    assert {name for name in graph if _layer_of(name, layers) is None} == set()
    for module, imported in graph.edges:
        if module != "reshard.scheduler":  # which exports the names of the packages inside it
            above, below = _layer_of(module, layers), _layer_of(imported, layers)
            assert below <= above, f"{module} imports {imported}"


def test_no_files_import_each_other_in_a_circle(graph):
    assert [circle for circle in nx.strongly_connected_components(graph) if len(circle) > 1] == []


def test_a_folder_and_its_subfolder_are_layers():
    modules = _modules()
    pairs = set()
    for name, path in modules.items():
        for imported in _imports(name, path, modules, for_types=True):
            folders = [
                item if modules[item].stem == "__init__" else item.rpartition(".")[0] for item in (name, imported)
            ]
            if "reshard" not in folders:  # whose modules every package may import
                pairs.add(tuple(folders))
    mutual = {inner for outer, inner in pairs if inner.startswith(f"{outer}.") and (inner, outer) in pairs}
    assert mutual == set()


#: Words that once named several things, or were short for something else, and what to say in their place.
RETIRED = {
    r"(\w+_)?coded(_\w+)?": "encoded, or compressed",
    r"codes_\w+|code_(tensor|sums|edges|pipelines)\w*": "compress, or encode",
    r"_?(MOST|LEAST)_\w+": "MAX_ or MIN_",
    r"row_of_stage|num_row_shards|row_shards": "pp_rank in schedules, sample in batches",
}


def test_retired_words_name_nothing():
    fields = ("id", "arg", "attr", "name")
    used = {
        getattr(node, field, None): name
        for name, path in _modules().items()
        for node in _nodes(path)
        for field in fields
    }
    for (word, name), (words, instead) in itertools.product(used.items(), RETIRED.items()):
        assert not (isinstance(word, str) and re.fullmatch(words, word)), f"{name}: {word}; say {instead}"


#: Classes that may share their names: the two kinds of transfers that users make look alike on purpose.
NAMED_ALIKE = {"Handle", "Mover"}


def test_no_two_classes_share_a_name():
    places = {}
    for name, path in _modules().items():
        for node in _nodes(path):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(name)
    assert {name: where for name, where in places.items() if len(where) > 1 and name not in NAMED_ALIKE} == {}


def test_type_aliases_of_one_name_are_equal():
    meanings = {}
    for name, path in _modules().items():
        for node in _nodes(path)[0].body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                alias, meaning = node.targets[0].id, ast.unparse(node.value)
                if name.startswith("reshard") and re.match(r"[A-Z][a-z]", alias) and re.search(r"[\[|]", meaning):
                    meanings.setdefault(alias, {}).setdefault(meaning, name)
    assert {alias: found for alias, found in meanings.items() if len(found) > 1} == {}
    assert len(meanings) > 60


#: File names that may occur twice: two packages have commands, and each of two packages has one file for what is not
#: public in torch.
FILES_NAMED_ALIKE = {"__main__.py", "torch_compat.py"}


def test_no_two_files_share_a_name():
    """A list of files, such as a search or a traceback, then tells which file is meant."""
    places = {}
    for folder in ("reshard", "scheduler", "microbench", "native"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".cpp", ".h") and path.stem != "__init__":
                places.setdefault(path.name, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in places.items() if len(paths) > 1 and name not in FILES_NAMED_ALIKE} == {}
    assert len(places) > 300


def test_no_two_limits_of_time_share_a_name():
    places = {}
    for name, path in _modules().items():
        for node in _nodes(path)[0].body:
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            for word in map(_name, targets):
                if str(word).endswith("_SECONDS"):
                    places.setdefault(word.lstrip("_"), []).append(name)
    assert {word: where for word, where in places.items() if len(where) > 1} == {}
    assert len(places) > 30


def test_modules_are_imported_by_name_only_where_the_name_is_data():
    calls = {
        name: ast.unparse(node.args[0])
        for name, path in _modules().items()
        for node in _nodes(path)
        if isinstance(node, ast.Call) and _name(node.func) in ("import_module", "__import__")
    }
    ours = {name for name, argument in calls.items() if name.startswith("reshard")}
    assert ours == {"reshard.public_api", "reshard.testing.processes"}


def test_tests_refuse_the_package_of_another_checkout(tmp_path):
    own, other, copy = tmp_path / "own", tmp_path / "other", tmp_path / "site-packages"
    for folder in (own, other):
        for name in ("reshard/__init__.py", "scheduler/pipeline.py"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("")
        (folder / "pyproject.toml").touch()
    shutil.copytree(own / "reshard", copy / "reshard")
    shutil.copytree(own / "scheduler", copy / "reshard" / "scheduler")
    init = "reshard/__init__.py"
    assert find_wrong_package(own / init, own) == find_wrong_package(copy / init, own) == ""
    assert f"imports reshard from the checkout {other}; run `make install` in {own}" in find_wrong_package(
        other / init, own
    )
    (own / "scheduler" / "pipeline.py").write_text("changed")
    assert "a copy in which scheduler/pipeline.py differs; run `make install`" in find_wrong_package(copy / init, own)


def test_the_top_level_holds_what_the_readme_names():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    folders = {"docs", "microbench", "native", "reshard", "scheduler", "tests"}
    texts = {"CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "README.md", "SECURITY.md"}
    settings = {"Makefile", "constraints-lowest.txt", "constraints.txt", "pyproject.toml"}
    top = {name.split("/")[0] for name in files}
    assert {name for name in top if not name.startswith(".")} == folders | texts | settings


def test_every_package_says_what_it_is_for():
    for folder in ("reshard", "scheduler", "microbench"):
        for path in (ROOT / folder).rglob("*/"):
            if any(path.glob("*.py")):
                assert len(ast.get_docstring(_nodes(path / "__init__.py")[0]) or "") > 20, path


def test_docstrings_begin_with_a_noun_or_a_verb():
    """A docstring that begins with a pronoun, such as "What ranks send", leaves open what the object is."""
    vague = {"As", "How", "It", "That", "They", "This", "Those", "What", "Which", "Who", "Why"}
    first = [
        (f"{name}: {docstring.splitlines()[0]}", docstring.split()[0])
        for name, path in _modules().items()
        for node in _nodes(path)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and (docstring := ast.get_docstring(node))
    ]
    assert len(first) > 3000
    assert [text for text, word in first if word in vague] == []


def test_packages_of_the_table_say_what_they_may_import():
    for layer in set(_layers()) - {"reshard", "reshard.scheduler", "microbench"}:
        folder = layer.replace("reshard.scheduler", "scheduler").replace(".", "/")
        doc = ast.get_docstring(_nodes(ROOT / folder / "__init__.py")[0])
        assert re.search(r"\bimports?\b", doc, flags=re.I), layer


def test_no_module_shares_its_name_with_a_public_name():
    import reshard.scheduler

    public = {*reshard.__all__, *reshard.scheduler.__all__}
    assert {name for name in _modules() if name.rpartition(".")[2] in public} <= {"reshard", "reshard.errors"}
    for name in reshard.__all__:
        assert getattr(reshard, name) is not None


def _pins(name):
    """``{package: version}`` of a file of constraints."""
    pins = dict(line.split("==") for line in (ROOT / name).read_text().split())
    return {re.sub("[-_.]+", "-", name).lower(): version for name, version in pins.items()}


def test_the_lowest_versions_that_pyproject_allows_are_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    required = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    required += itertools.chain(*project["project"]["optional-dependencies"].values())
    lowest = [re.match(r"([\w.-]+)(?:\[.*\])?>=([\d.]+)", requirement) for requirement in required]
    lowest = {re.sub("[-_.]+", "-", found[1]).lower(): found[2] for found in lowest if found is not None}
    # see docs/compatibility.md
    by_hand = {"torch", "triton", "jax", "ray", "cupy-cuda12x", "cupy-cuda13x", "safetensors"}
    page = (ROOT / "docs" / "compatibility.md").read_text()
    assert all(re.search(rf"\b{name}\s+{re.escape(lowest[name])}\b", page) for name in by_hand)
    # CI runs the fast tests with the one file, and everything else with the other
    pins = _pins("constraints.txt") | _pins("constraints-lowest.txt")
    assert {name: pins[name] for name in lowest.keys() - by_hand} == {
        name: version for name, version in lowest.items() if name not in by_hand
    }


def test_missing_packages_are_named_with_what_installs_them():
    code = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "ray"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
import reshard, reshard.scheduler, reshard.ray, reshard.testing
for package, name in ((reshard, "reshard"), (reshard.scheduler, "Pipe"), (reshard.testing, "run_processes")):
    try:
        getattr(package, name)
    except ModuleNotFoundError as error:
        print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = ("reshard.reshard", "reshard.scheduler.Pipe", "reshard.testing.run_processes")
    assert run.stdout.splitlines() == [f"{name} needs torch: pip install 'reshard[torch]'" for name in names]


def test_import_is_fast_and_light():
    code = (
        "import time, sys; begun = time.process_time(); import reshard; took = time.process_time() - begun; "
        "heavy = {'torch', 'ray', 'cupy', 'jax', 'scipy', 'networkx'} & set(sys.modules); "
        "print(took, *heavy)"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(3)]
    took, *heavy = min((run.stdout.split() for run in runs), key=lambda words: float(words[0]))
    assert not heavy, f"import reshard imports {heavy}"
    assert float(took) < 0.3


def test_planning_needs_no_torch():
    code = (
        "import sys; from reshard import Layout, Mesh, make_plan, check_plan; "
        "check_plan(make_plan(Layout(Mesh.of('2'), 'S0'), Layout(Mesh.of('2', first_rank=2)), (8, 8), 'float32')); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_stub_of_the_native_module_names_its_parameters():
    from reshard import _native

    declared, found = {}, {}
    for node in ast.parse((ROOT / "reshard" / "_native.pyi").read_text()).body:
        for item in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(item, ast.FunctionDef):
                names = [arg.arg for arg in item.args.args if arg.arg != "self"]
                declared[f"{node.name}.{item.name}" if item is not node else item.name] = names
    for name, made in vars(_native).items():
        if name.startswith("_"):
            continue
        parts = {f"{name}.{key}": item for key, item in vars(made).items()} if isinstance(made, type) else {name: made}
        for key, item in parts.items():
            if hasattr(item, "__nb_signature__"):
                found[key] = re.findall(r"(\w+): ", item.__nb_signature__[0][0])
    assert found == declared


#: Modules that may use private names of torch: one of the library and one of the engine, two that lie below both, and
#: one that derives classes from private ones.
PRIVATE_TORCH = {
    "reshard.runtime.torch_compat",
    "reshard.scheduler.torch_compat",
    "reshard.sharding.spec",
    "reshard.forks",
    "reshard.compression.fsdp_collectives",
}


def _dotted(node):
    """``a.b.c`` of an attribute of a name, or no text."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _private_torch_names(path):
    """Dotted names with a private part, of what a file imports from torch."""
    names, used = set(), set()
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            modules = [alias for alias in node.names if alias.name.split(".")[0] == "torch"]
            names |= {alias.asname or "torch" for alias in modules}
            used |= {alias.name for alias in modules}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names |= {alias.asname or alias.name for alias in node.names}
            used |= {f"{node.module}.{alias.name}" for alias in node.names}
    texts = {_dotted(node) for node in _nodes(path) if isinstance(node, ast.Attribute)}
    used |= {text for text in texts if text.split(".")[0] in names}
    return {name for name in used if re.search(r"(^|\.)_(?!_)", name)}


def test_private_names_of_torch_stay_in_modules_for_them():
    found = {name: _private_torch_names(path) for name, path in _modules().items() if name.startswith("reshard")}
    assert {name: used for name, used in found.items() if used and name not in PRIVATE_TORCH} == {}
    assert found["reshard.scheduler.torch_compat"]


def _documented(node):
    """The parameters of a function, or the fields of a class and the parameters of its constructor."""
    if isinstance(node, ast.ClassDef):
        fields = {item.target.id for item in node.body if isinstance(item, ast.AnnAssign)}
        return fields.union(*(_documented(item) for item in node.body if getattr(item, "name", None) == "__init__"))
    arguments = node.args
    return {each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}


def test_each_parameter_has_a_line_of_its_docstring():
    """The reference shows a line as one parameter, whatever further ones it describes."""
    hidden = []
    for name in modules_of_package():
        path, lines = _modules()[name], _modules()[name].read_text().splitlines()
        for node in _nodes(path):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or not ast.get_docstring(
                node
            ):
                continue
            names, docstring = _documented(node), node.body[0]
            for number in range(docstring.lineno, docstring.end_lineno):
                second = re.search(r"^ +(?:[\w*]+, )*[\w*]+: .*[.;)`] (\w+): ", lines[number])
                if second is not None and second[1] in names:
                    hidden.append(f"{path.relative_to(ROOT)}:{number + 1} {second[1]}")
    assert not hidden, "\n".join(hidden)
