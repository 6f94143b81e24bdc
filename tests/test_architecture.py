"""The architecture's rules, one test each: imports, the wheel's content, sizes, names of tests' folders."""

from __future__ import annotations

import ast
import functools
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sources import PACKAGES, ROOT, SOURCES, TESTS, name_of, parse, violations

FOLDERS = PACKAGES[1:]
SERVING = ("tools", "serving")  # this folder is the package specrt.serving

# What the files of a package may import of specrt, anywhere in them.
ARROWS = {
    "specrt": {"engines", "runtime"},
    "engines": {"engines", "__version__"},
    "runtime": {"runtime", "engines", "__version__"},
    "exporter": {"exporter", "engines", "__version__"},
    "serving": {"serving", "runtime", "engines", "__version__"},
    "tools": {"tools", "serving", "exporter", "runtime", "engines", "__version__"},
}
# One arrow for one purpose: the exporter tries the tokenizer with the runtime's own class.
TRIES_TOKENIZER, TOKENIZER_CLASS = "exporter/tokenizer.py", "specrt.runtime.text.codec.TextCodec"
EXPORT_LIBRARIES = {"torch", "transformers", "optimum", "onnx", "onnxscript", "onnx_ir", "accelerate", "gguf"}
LAB = ROOT / "tools" / "lab"  # experiments: in the repository, not in the wheel

MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 60
MAX_FOLDER_FILES = 16


def arrow_from(path: Path) -> str:
    """The package whose arrows hold for the file: ``tools/serving/x.py`` -> ``serving``."""
    return "".join(package_of(path)[1:2]) or "specrt"


def package_of(path: Path, root: Path = ROOT) -> list[str]:
    """Parts of the package that holds the file: ``exporter/passes/x.py`` -> specrt, exporter, passes."""
    parts = list(path.relative_to(root).parent.parts)
    if parts[:2] == [*SERVING]:
        parts = parts[1:]
    return parts if parts[0] == "specrt" else ["specrt", *parts]


def imported_by(node: ast.AST, package: list[str]) -> list[str]:
    """Absolute names that a node imports; a string that names a module of specrt counts, as for ``import_module``."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = package[: len(package) + 1 - node.level] if node.level else []
        module = ".".join([*base, *filter(None, [node.module])])
        return [f"{module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value] if re.fullmatch(r"specrt(\.[a-z_]\w*)+", node.value) else []
    return []


@functools.cache
def imports(path: Path) -> list[str]:
    return [name for node in statements(parse(path)) for name in imported_by(node, package_of(path))]


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Every statement below ``node``. Expressions, most of the nodes, hold none."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield child
            yield from statements(child)


def nodes_run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below ``node`` but those in function bodies and under ``if TYPE_CHECKING``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        yield child
        yield from nodes_run_at_import(child)


def arrow_of(name: str) -> str | None:
    """The package of specrt that ``name`` is in: ``specrt.engines.contract.LOGITS`` -> ``engines``."""
    root, _, rest = name.partition(".")
    return rest.split(".")[0] if root == "specrt" else None


def test_the_build_maps_each_folder_to_its_package() -> None:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = {name_of(path.parent) for path in SOURCES if not path.is_relative_to(LAB)}
    assert {".".join(package_of(ROOT / folder / "x.py")): folder for folder in folders} == table["package-dir"]
    assert set(table["packages"]) == set(table["package-dir"])


def test_arrows_point_one_way() -> None:
    def wrong(path: Path) -> list[str]:
        allowed = ARROWS[arrow_from(path)]
        names = set(imports(path)) - ({TOKENIZER_CLASS} if name_of(path) == TRIES_TOKENIZER else set())
        return sorted({name for name in names if (arrow := arrow_of(name)) and arrow not in allowed})

    assert violations(wrong) == {}


def test_only_the_exporter_and_tools_know_torch() -> None:
    free = [path for path in SOURCES if arrow_from(path) not in ("exporter", "tools")]
    heavy = violations(lambda path: sorted({n for n in imports(path) if n.split(".")[0] in EXPORT_LIBRARIES}), free)
    assert heavy == {}


def test_tools_import_what_is_heavy_inside_the_command() -> None:
    def heavy(path: Path) -> list[str]:
        nodes = nodes_run_at_import(parse(path))
        names = {name for node in nodes for name in imported_by(node, package_of(path))}
        return sorted(n for n in names if n.split(".")[0] in EXPORT_LIBRARIES or arrow_of(n) == "exporter")

    assert violations(heavy, sorted((ROOT / "tools").rglob("*.py"))) == {}


def test_no_command_needs_an_experiment() -> None:
    others = [path for path in SOURCES if not path.is_relative_to(LAB)]
    assert violations(lambda path: [n for n in imports(path) if n.startswith("specrt.tools.lab")], others) == {}


def test_folders_are_imported_by_their_package_names() -> None:
    paths, by_path = [*SOURCES, *TESTS], "specrt.tools.serving"

    def wrong(path: Path) -> list[str]:
        return sorted({n for n in imports(path) if n.split(".")[0] in FOLDERS or f"{n}.".startswith(f"{by_path}.")})

    assert violations(wrong, [path for path in paths if path != Path(__file__).resolve()]) == {}


NOT_THE_SERVER = {*EXPORT_LIBRARIES, "specrt.exporter", "specrt.tools"}
BLOCKED = sorted({*NOT_THE_SERVER, "specrt.serving"})
IMPORT_ALL = """
import importlib, pkgutil, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if any(name == b or name.startswith(b + ".") for b in BLOCKED):
            raise ImportError(f"{name} is blocked")

if REFUSE:
    sys.meta_path.insert(0, Refuse())
import specrt
for name in PACKAGES:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(getattr(package, "__path__", []), name + "."):
        importlib.import_module(module.name)
print(*sorted(m for m in sys.modules if any(m == b or m.startswith(b + ".") for b in BLOCKED)))
"""


def loaded(blocked: list[str], packages: list[str], refuse: bool) -> list[str]:
    """Which of ``blocked`` a fresh interpreter holds after importing every module of ``packages``."""
    settings = f"BLOCKED, PACKAGES, REFUSE = {blocked!r}, {packages!r}, {refuse!r}\n"
    command = [sys.executable, "-c", settings + IMPORT_ALL]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT / "docs")
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("refuse", [False, True], ids=["installed", "blocked"])
def test_the_runtime_imports_without_the_exporter_and_its_libraries(refuse: bool) -> None:
    assert loaded(BLOCKED, ["specrt.engines", "specrt.runtime"], refuse) == []


def test_the_server_imports_without_the_exporter_and_other_tools() -> None:
    """Those of the extra ``ray`` are left out, since it may not be installed."""
    modules = [f"specrt.serving.{name}" for name in ("app", "batch", "protocol", "server", "source")]
    assert loaded(sorted(NOT_THE_SERVER), modules, True) == []


def test_the_command_line_imports_without_the_exporter_and_its_libraries() -> None:
    blocked = sorted({*EXPORT_LIBRARIES, "specrt.exporter"})
    command = f"import sys, specrt.tools.cli; print(*sorted({set(blocked)!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, check=False, cwd=ROOT / "docs"
    )
    assert (done.stdout.split(), done.stderr) == ([], "")


def test_importing_specrt_alone_imports_nothing_heavy() -> None:
    assert loaded([*BLOCKED, "numpy", "onnxruntime", "tokenizers", "jinja2", "click", "rich"], [], False) == []


def test_the_wheel_holds_the_tree(tmp_path: Path) -> None:
    """Every file of the packages, data files included, and no other; experiments stay out."""
    tree = tmp_path / "tree"
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    files = {
        Path(*package_of(path, tree), path.name).as_posix(): path.read_bytes()
        for name in PACKAGES
        for path in (tree / name).rglob("*")
        if path.is_file() and not path.is_relative_to(tree / "tools" / "lab")
    }
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--no-index", "--wheel-dir", str(tmp_path), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("specrt-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        content = {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}
    assert sorted(content) == sorted(files)
    assert content == files


def test_files_and_functions_are_short() -> None:
    def long(path: Path) -> dict[str, int]:
        functions = [n for n in ast.walk(parse(path)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        lengths = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in functions}
        too_long = {name: lines for name, lines in lengths.items() if lines > MAX_FUNCTION_LINES}
        num_lines = len(path.read_text(encoding="utf-8").splitlines())
        return {**too_long, **({"the file": num_lines} if num_lines > MAX_FILE_LINES else {})}

    assert violations(long, [*SOURCES, *TESTS]) == {}


def test_an_option_is_defined_once() -> None:
    """What several commands have is in ``tools/terminal/options.py``. Experiments are free."""

    def options(path: Path) -> list[str]:
        calls = [node for node in ast.walk(parse(path)) if isinstance(node, ast.Call)]
        return [ast.unparse(c) for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "option"]

    written = Counter(text for path in SOURCES if not path.is_relative_to(LAB) for text in options(path))
    assert len(written) > 50
    assert [text for text, count in written.items() if count > 1] == []


def test_folders_are_small() -> None:
    counts = Counter(name_of(path.parent) for path in [*SOURCES, *TESTS])
    assert {folder: count for folder, count in counts.items() if count > MAX_FOLDER_FILES} == {}


def test_tests_mirror_the_folders() -> None:
    """A folder of tests is named as the folder, or the file, that it tests."""
    folders = {path.parent.relative_to(ROOT / "tests") for path in TESTS if path.name.startswith("test_")}
    unknown = [str(f) for f in folders if not (ROOT / f).is_dir() and not any((ROOT / f).parent.glob(f"{f.name}.*"))]
    assert unknown == []
