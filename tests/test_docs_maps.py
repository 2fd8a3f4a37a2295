"""The maps of the docs name every system of a book, and only what exists."""

import ast
import dataclasses
import functools
import importlib
import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NAMED = re.compile(r"`([\w/]+)\.py: ([\w, ]+)`")
TESTS = re.compile(r"`([\w/]+\.py)::(\w+)`")


@dataclasses.dataclass(frozen=True)
class Map:
    """A page whose tables have a row for each system of a book.

    Attributes:
      name: of the page in docs/.
      idents: of the systems, in the order of the page.
      no_code: those of them that have no code, and say why.
    """

    name: str
    idents: tuple[str, ...]
    no_code: frozenset[str]

    def __str__(self) -> str:
        return self.name

    @functools.cached_property
    def text(self) -> str:
        return (ROOT / "docs" / f"{self.name}.md").read_text("utf-8")

    @functools.cached_property
    def rows(self) -> list[list[str]]:
        """Ident, system, where in the book, code and tests."""
        return [
            [cell.strip() for cell in line.strip("|").split(" | ")]
            for line in self.text.splitlines()
            if re.match(r"\| [A-Z]+-?\d+ \|", line)
        ]


def numbered(form: str, first: int, last: int) -> tuple[str, ...]:
    return tuple(form.format(i) for i in range(first, last + 1))


NETWORKS = Map("networks", numbered("S{:02d}", 1, 109), frozenset({"S82"}))
SATTLER = Map(
    "sattler",
    numbered("ENV-{}", 1, 16)
    + numbered("FW-{}", 0, 7)
    + numbered("CMP-{}", 1, 21)
    + numbered("CFD-{}", 1, 12)
    + numbered("CFL-{}", 1, 18)
    + numbered("AUX-{}", 1, 18)
    + numbered("MET-{}", 1, 11),
    frozenset({"CFL-18"}),
)
GAUTHIER = Map(
    "gauthier",
    numbered("S{:02d}", 1, 76),
    frozenset({"S10", "S30", "S58", "S73", "S75"}),
)
HAHN = Map(
    "hahn",
    numbered("A{}", 1, 6)
    + numbered("B{}", 1, 5)
    + ("B22",)
    + numbered("BL-{}", 1, 8)
    + numbered("MET-{}", 1, 5)
    + numbered("PART-{}", 1, 3)
    + ("NAMED-1",)
    + numbered("A{}", 7, 12)
    + ("A15",)
    + numbered("B{}", 6, 14)
    + numbered("BL-{}", 9, 14)
    + numbered("MET-{}", 6, 10)
    + numbered("A{}", 13, 14)
    + numbered("B{}", 15, 21)
    + numbered("BL-{}", 15, 16)
    + numbered("MET-{}", 11, 14),
    frozenset({"NAMED-1"}),
)
of_all = pytest.mark.parametrize("page", [NETWORKS, SATTLER, GAUTHIER, HAHN], ids=str)


@of_all
def test_every_system_once(page: Map) -> None:
    assert tuple(row[0] for row in page.rows) == page.idents
    assert all(len(row) == 5 and all(row) for row in page.rows)


@of_all
def test_systems_without_code_are_the_known_ones(page: Map) -> None:
    without = {row[0] for row in page.rows if row[3].startswith("no code")}
    assert without == page.no_code
    for ident, _, _, code, tests in page.rows:
        # Nothing that the other tests would not read.
        left = TESTS.sub("", NAMED.sub("", code + tests)).replace(",", "").strip()
        assert bool(left) == (ident in page.no_code), (ident, left)


@of_all
def test_code_exists(page: Map) -> None:
    for ident, _, _, code, _ in page.rows:
        for path, names in NAMED.findall(code):
            assert (ROOT / "fedjax_core" / f"{path}.py").is_file(), (ident, path)
            module = importlib.import_module("fedjax_core." + path.replace("/", "."))
            for name in names.split(", "):
                assert callable(getattr(module, name, None)), (ident, path, name)
                assert not name.startswith("_"), (ident, path, name)


@of_all
def test_tests_exist_and_use_the_code(page: Map) -> None:
    for ident, _, _, code, tests in page.rows:
        used = set()
        for path, name in TESTS.findall(tests):
            functions, words = _parsed(path)
            assert name in functions, (ident, path, name)
            used |= words
        for path, names in NAMED.findall(code):
            # `make` is everywhere: its module or family must be named as well.
            assert set(names.split(", ")) <= used, (ident, path)
            assert used.intersection(path.split("/")), (ident, path)


@of_all
def test_tests_named_between_the_tables_exist(page: Map) -> None:
    for path, name in TESTS.findall(page.text):
        assert name in _parsed(path)[0], (path, name)


@pytest.mark.parametrize(
    ("page", "count"), [(SATTLER, 5), (GAUTHIER, 4), (HAHN, 3)], ids=str
)
def test_commands_of_a_thesis_exist(page: Map, count: int) -> None:
    commands = re.findall(r"`fedjax-core run (\w+)`", page.text)
    assert len(commands) == len(set(commands)) == count
    for line in page.text.splitlines():
        for command in re.findall(r"^\| `fedjax-core run (\w+)`", line):
            module = importlib.import_module(f"fedjax_core.experiments.{command}")
            presets = set(re.findall(r"`(\w+)`", line.split(" | ")[2]))
            assert presets == module.PRESETS.keys(), command


def test_excerpt_of_fedrelax_is_its_code() -> None:
    excerpt = next(
        block
        for block in re.findall(r"```python\n(.*?)```", NETWORKS.text, re.S)
        if "def update" in block
    )
    code = (ROOT / "algorithms" / "networks" / "fedrelax.py").read_text("utf-8")
    assert textwrap.indent(excerpt, "    ") in code


@pytest.mark.parametrize("folder", ["networks", "networks/theory"])
def test_every_module_of_networks_is_listed(folder: str) -> None:
    modules = {path.stem for path in (ROOT / "fedjax_core" / folder).glob("*.py")}
    heading = f"| module of `fedjax_core/{folder}/` |"
    table = NETWORKS.text.split(heading)[1].split("\n\n")[0]
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
