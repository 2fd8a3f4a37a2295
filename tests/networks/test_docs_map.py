"""docs/networks.md names every system of the book, and only what exists."""

import ast
import functools
import importlib
import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "networks.md").read_text("utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.splitlines()
    if re.match(r"\| S\d+ \|", line)
]
NAMED = re.compile(r"`([\w/]+)\.py: ([\w, ]+)`")
TESTS = re.compile(r"`([\w/]+\.py)::(\w+)`")
NO_CODE = {"S82"}


def test_every_system_once() -> None:
    assert [row[0] for row in ROWS] == [f"S{i:02d}" for i in range(1, 110)]
    assert all(len(row) == 5 and all(row) for row in ROWS)


def test_systems_without_code_are_the_known_ones() -> None:
    assert {row[0] for row in ROWS if row[3].startswith("no code")} == NO_CODE
    for ident, _, _, code, tests in ROWS:
        # Nothing that the other tests would not read.
        left = TESTS.sub("", NAMED.sub("", code + tests)).replace(",", "").strip()
        assert bool(left) == (ident in NO_CODE), ident


def test_code_exists() -> None:
    for ident, _, _, code, _ in ROWS:
        for path, names in NAMED.findall(code):
            folder = "" if path.startswith("algorithms/") else "fedjax_core/"
            assert (ROOT / folder / f"{path}.py").is_file(), (ident, path)
            module = importlib.import_module("fedjax_core." + path.replace("/", "."))
            for name in names.split(", "):
                assert callable(getattr(module, name, None)), (ident, path, name)
                assert not name.startswith("_"), (ident, path, name)


def test_tests_exist_and_use_the_code() -> None:
    for ident, _, _, code, tests in ROWS:
        used = set()
        for path, name in TESTS.findall(tests):
            functions, words = _parsed(path)
            assert name in functions, (ident, path, name)
            used |= words
        for path, names in NAMED.findall(code):
            # `make` is everywhere: its module or family must be named as well.
            assert set(names.split(", ")) <= used, (ident, path)
            assert used.intersection(path.split("/")), (ident, path)


def test_excerpt_of_fedrelax_is_its_code() -> None:
    excerpt = next(
        block
        for block in re.findall(r"```python\n(.*?)```", PAGE, re.S)
        if "def update" in block
    )
    code = (ROOT / "algorithms" / "networks" / "fedrelax.py").read_text("utf-8")
    assert textwrap.indent(excerpt, "    ") in code


@pytest.mark.parametrize("folder", ["networks", "networks/theory"])
def test_every_module_of_networks_is_listed(folder: str) -> None:
    modules = {path.stem for path in (ROOT / "fedjax_core" / folder).glob("*.py")}
    table = PAGE.split(f"| module of `fedjax_core/{folder}/` |")[1].split("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", table)) == modules - {"__init__"}


@functools.cache
def _parsed(path: str) -> tuple[set[str], set[str]]:
    """The test functions of a file, and the words of its code."""
    source = (ROOT / "tests" / path).read_text("utf-8")
    functions = {
        node.name
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    return functions, set(re.findall(r"\w+", source))
