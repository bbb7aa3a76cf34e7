"""Imports run one way (DESIGN section 3), and importing the package touches no GPU library."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import python

ROOT = Path(__file__).resolve().parents[2]

# Folders of cudnngraph in the order of the road; "" has the modules beside them. A folder imports
# those before it, and its own modules in one direction. docs/layout.md says what each is for.
FOLDERS = (
    *(
        "",
        "device",
        "ir",
        "ops",
        "graph",
        "partition",
        "grad",
        "rewrite",
        "backend",
        "kernels",
        "executor",
    ),
    *("select", "cache", "runtime", "explain", "sweep", "functional", "models", "nn", "bench"),
    "cli",
)
ABOVE = ("__init__", "__main__")  # modules beside the folders that may import all of them
STRANGERS = (  # that do not import each other in either direction
    {"graph", "partition"},
    {"grad", "rewrite"},
    {"explain", "functional"},
)
# The one way up, inside of a function: (importing, imported).
LATE = {("graph", "runtime")}
# Which modules of plans_cache a part may import; a part that is not here may import none.
MAY_USE_STORE = {
    "backend": {"findings"},
    "select": {"gate"},
    "cache": {"gate", "launches", "lock", "measurements", "record", "rejections", "store"},
    "runtime": {"workspace"},
    "explain": {""},
    "cli": {"", "measurements", "record", "store"},
}
# Within plans_cache: a module may import those of lower layers. "" is the package itself.
STORE_LAYERS = (
    ("fields", "files", "workspace"),
    ("gate", "lock", "record"),
    ("entries", "findings", "measurements", "memory", "rejections"),
    ("journal", "launches"),
    ("directory",),
    ("store",),
    ("",),
)
STORE_LAYER = {part: number for number, parts in enumerate(STORE_LAYERS) for part in parts}


def _files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def _imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Every module that a file imports, by absolute name, and whether inside a function."""
    inside = path.relative_to(ROOT).with_suffix("").parts
    here = inside[:-1]

    def visit(node: ast.AST, late: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.Import):
            yield from ((alias.name, late) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(here[: len(here) - node.level + 1]) if node.level else ""
            base = ".".join(word for word in (base, node.module) if word)
            names = [f"{base}.{alias.name}" for alias in node.names]
            modules = [name for name in names if _is_module(name)]
            yield from ((name, late) for name in modules or [base])
        elif isinstance(node, ast.Call) and "import_module" in ast.dump(node.func):
            yield from (
                (argument.value, late)
                for argument in node.args
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
            )
        late = late or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for child in ast.iter_child_nodes(node):
            yield from visit(child, late)

    yield from visit(ast.parse(path.read_text()), False)


def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def _folder(module: str) -> str | None:
    """``cudnngraph.backend.env`` → ``backend``, ``cudnngraph.errors`` → "", all else → None."""
    words = module.split(".")
    if words[0] != "cudnngraph" or (len(words) == 2 and words[1] in ABOVE) or len(words) == 1:
        return None
    return words[1] if (ROOT / "cudnngraph" / words[1]).is_dir() else ""


def _name(path: Path) -> str:
    words = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(words[:-1] if words[-1] == "__init__" and len(words) > 2 else words)


@pytest.mark.parametrize("path", _files("cudnngraph"), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_imports_only_what_lies_before_it(path: Path) -> None:
    mine = _folder(_name(path))
    if mine is None:
        return
    assert mine in FOLDERS, f"{mine} has no place: give it one in this test and in docs/layout.md"
    for module, late in _imports(path):
        theirs = _folder(module)
        if module.split(".")[0] != "cudnngraph" or theirs == mine:
            continue
        assert theirs is not None, "the package itself"
        allowed = FOLDERS.index(theirs) < FOLDERS.index(mine) and {mine, theirs} not in STRANGERS
        assert allowed or (late and (mine, theirs) in LATE), f"{mine} imports {module}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_modules_of_a_folder_import_one_way(folder: str) -> None:
    paths = [path for path in _files("cudnngraph") if _folder(_name(path)) == folder]
    assert paths
    reads = {
        _name(path): {
            module
            for module, late in _imports(path)
            if not late and _folder(module) == folder and module != _name(path)
        }
        for path in paths
    }
    while reads:
        first = {name for name, others in reads.items() if not others & reads.keys()}
        assert first, f"a cycle among {sorted(reads)}"
        reads = {name: others for name, others in reads.items() if name not in first}


def test_the_layout_page_has_the_folders_in_this_order() -> None:
    page = (ROOT / "docs" / "layout.md").read_text()
    named = re.findall(
        r"^\| \[`([a-z_]+)/`\]\(\.\./cudnngraph(?:/([a-z_]+))?\)", page, re.MULTILINE
    )
    assert tuple(folder for _, folder in named) == FOLDERS


def test_no_file_is_long_without_a_reason() -> None:
    page = (ROOT / "docs" / "layout.md").read_text()
    excused = set(re.findall(r"^\| \[`[^`]+`\]\(\.\./([^)]+\.py)\)", page, re.MULTILINE))
    lines = {
        path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines())
        for package in ("cudnngraph", "plans_cache")
        for path in _files(package)
    }
    assert {name for name, count in lines.items() if count > 500} == excused
    assert max(lines.values()) <= 700


def test_no_file_of_the_tests_has_more_than_700_lines() -> None:
    """Generated text is no Python here: tests/golden/*.txt."""
    lines = {path: len(path.read_text().splitlines()) for path in _files("tests")}
    assert {str(path.relative_to(ROOT)): n for path, n in lines.items() if n > 700} == {}


def test_few_modules_stand_beside_the_folders() -> None:
    assert len(list((ROOT / "cudnngraph").glob("*.py"))) <= 6


@pytest.mark.parametrize("path", _files("cudnngraph"), ids=lambda p: str(p.relative_to(ROOT)))
def test_only_the_backend_imports_cudnn_and_only_kernels_cuda_too(path: Path) -> None:
    folder = path.relative_to(ROOT).parts[1]
    roots = {module.split(".")[0] for module, _ in _imports(path)}
    assert folder == "backend" or "cudnn" not in roots
    assert folder in ("backend", "kernels") or "cuda" not in roots


@pytest.mark.parametrize("folder", ["backend", "kernels"])
def test_they_import_it_late(folder: str) -> None:
    """The rule above is not empty: both do import it, inside a function."""
    found = [
        late
        for path in _files(f"cudnngraph/{folder}")
        for module, late in _imports(path)
        if module.split(".")[0] in ("cudnn", "cuda")
    ]
    assert found
    assert all(found)


def _of_store(module: str) -> str | None:
    """``plans_cache.store`` → ``store``, the package itself → "", any other module → None."""
    package, _, rest = module.partition(".")
    return rest if package == "plans_cache" else None


@pytest.mark.parametrize("path", _files("cudnngraph"), ids=lambda p: str(p.relative_to(ROOT)))
def test_few_folders_touch_the_store(path: Path) -> None:
    used = {_of_store(module) for module, _ in _imports(path)} - {None}
    assert used <= MAY_USE_STORE.get(_folder(_name(path)) or "", set())


@pytest.mark.parametrize("folder", MAY_USE_STORE)
def test_the_rule_above_is_not_empty(folder: str) -> None:
    paths = _files(f"cudnngraph/{folder}")
    assert {_of_store(module) for path in paths for module, _ in _imports(path)} - {
        None
    } == MAY_USE_STORE[folder]


@pytest.mark.parametrize("path", _files("plans_cache"), ids=lambda p: str(p.relative_to(ROOT)))
def test_the_modules_of_the_store_import_one_way(path: Path) -> None:
    mine = "" if path.stem == "__init__" else path.stem
    assert mine in STORE_LAYER, f"{mine} has no layer: give it one in this test"
    for module, _ in _imports(path):
        theirs = _of_store(module)
        if theirs is not None:
            assert STORE_LAYER[theirs] < STORE_LAYER[mine], f"{mine} imports {module}"


@pytest.mark.parametrize("path", _files("plans_cache"), ids=lambda p: str(p.relative_to(ROOT)))
def test_the_cache_package_imports_the_standard_library_alone(path: Path) -> None:
    roots = {module.split(".")[0] for module, _ in _imports(path)}
    assert roots - set(sys.stdlib_module_names) <= {"plans_cache"}


PROBE = """
import json, sys
import torch

calls = []

def record(owner, name):
    real = getattr(owner, name)
    def wrapper(*args, **kwargs):
        calls.append(name)
        return real(*args, **kwargs)
    setattr(owner, name, wrapper)

for name in dir(torch._C):
    if name.startswith("_cuda_") and callable(getattr(torch._C, name)):
        record(torch._C, name)
for name in ("_lazy_init", "init", "is_available", "current_device", "device_count"):
    record(torch.cuda, name)
before = set(sys.modules)
import cudnngraph as cg
modules_are_late = not {"cudnngraph.nn", "cudnngraph.functional"} & set(sys.modules)
at_import = sorted({name.split(".")[0] for name in set(sys.modules) - before})
calls_at_import = list(calls)
g = cg.Graph("g")
g.output("y", g.input("x", (2, 3), torch.float32).relu())
y = g.compile("cpu")(x=torch.ones(2, 3))
conv = cg.FusedConvBlock(1, 1, 1)(torch.ones(2, 1, 2, 2))
cg.functional.conv2d(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 1, 1))
print(json.dumps({
    "at_import": at_import,
    "ever": sorted({name.split(".")[0] for name in set(sys.modules) - before}),
    "calls_at_import": calls_at_import,
    "calls": calls,
    "initialized": torch.cuda.is_initialized(),
    "sum": float(y.sum()),
    "modules_are_late": modules_are_late,
    "compiler": "torch._dynamo" in sys.modules,
}))
"""


@pytest.fixture(scope="module")
def probe() -> dict[str, object]:
    done = python.run("-c", PROBE, cwd=ROOT, check=True)
    result: dict[str, object] = json.loads(done.stdout)
    return result


def test_importing_the_package_imports_neither_cudnn_nor_cuda(probe: dict[str, list[str]]) -> None:
    assert "cudnngraph" in probe["at_import"]
    assert not {"cudnn", "cuda", "rich", "matplotlib"} & set(probe["at_import"])


def test_importing_the_package_makes_no_cuda_call(probe: dict[str, object]) -> None:
    assert probe["calls_at_import"] == []
    assert probe["initialized"] is False


def test_running_on_the_cpu_needs_no_cuda_either(probe: dict[str, object]) -> None:
    assert probe["sum"] == 6.0
    assert probe["calls"] == []
    assert not {"cudnn", "cuda"} & set(probe["ever"])  # type: ignore[call-overload]


def test_modules_are_imported_when_asked_for_and_bring_no_compiler(
    probe: dict[str, object],
) -> None:
    assert probe["modules_are_late"] is True
    assert probe["compiler"] is False
