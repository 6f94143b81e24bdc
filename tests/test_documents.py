"""What is written by hand: exit codes and the error tree as documented, links, and no path of somebody's machine."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from specrt.engines import errors
from tests.sources import DOCUMENTS, ROOT, SOURCES, TEXTS, parse, violations


def error_codes() -> dict[str, int]:
    """Name and exit code of every class of the error tree."""
    classes = [errors.SpecrtError]
    for kind in classes:
        classes += [c for c in kind.__subclasses__() if c.__module__ == errors.__name__]
    return {kind.__name__: kind.exit_code for kind in classes}


def test_each_error_has_its_own_exit_code() -> None:
    codes = [0, *error_codes().values(), *errors.OTHER_EXIT_CODES.values()]
    assert len(codes) == len(set(codes)), codes


def test_exit_codes_are_documented() -> None:
    text = (ROOT / "docs" / "exit-codes.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| ([^|]+?) \| [^|]+ \|$", text, re.MULTILINE)
    expected = {str(code): f"`{name}`" for name, code in error_codes().items()}
    others = {str(code): name for name, code in errors.OTHER_EXIT_CODES.items()}
    assert dict(rows) == {"0": "success", **expected, **others}
    assert len(rows) == len(dict(rows))


def test_the_error_tree_is_drawn_as_it_is() -> None:
    drawn = re.findall(r"(\w+Error) +(\d+)", errors.__doc__ or "")
    assert {name: int(code) for name, code in drawn} == error_codes()


def test_errors_are_added_to_the_tree_only_where_it_is_drawn() -> None:
    names = set(error_codes())

    def grown(path: Path) -> list[str]:
        classes = [node for node in ast.walk(parse(path)) if isinstance(node, ast.ClassDef)]
        return [c.name for c in classes if any(ast.unparse(base).split(".")[-1] in names for base in c.bases)]

    assert violations(grown, [path for path in SOURCES if path != ROOT / "engines" / "errors.py"]) == {}


def prose(path: Path) -> str:
    """The document without its code blocks."""
    return re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_in_the_documents_lead_somewhere() -> None:
    def broken(path: Path) -> list[str]:
        found = []
        for target in re.findall(r"\]\(\s*<?([^)\s>]+)", prose(path)):
            if re.match(r"[a-z][a-z+.-]*:", target):
                continue
            name, _, anchor = target.partition("#")
            file = (path.parent / name).resolve() if name else path
            if not file.is_relative_to(ROOT) or not file.exists() or (anchor and anchor not in anchors(file)):
                found.append(target)
        return found

    assert violations(broken, DOCUMENTS) == {}


def test_no_file_names_a_folder_of_a_machine() -> None:
    """Home folders, and where this repository is. The image's user has a home of its own."""
    places = [re.escape(place) for place in (str(Path.home()), str(ROOT)) if len(place) > 1]
    folder = re.compile(rf"(?<![\w.~-])(?:/root|/home/(?!specrt\b)\w+|/Users/\w+|{'|'.join(places)})/")
    for found in ("root", "home/ann", "Users/ann", str(ROOT)[1:]):
        assert folder.search(f'"/{found}/x.json"')
    assert violations(lambda path: folder.findall(path.read_text(encoding="utf-8", errors="replace")), TEXTS) == {}
