"""Writes docs/datasets: a page per data set, from the docstrings, and an index.

    python docs/generate_datasets.py

Modules are parsed, not imported, so nothing but Python is needed. A module of
`datasets/` is a data set if its docstring has a paragraph "Licence:".
"""

import ast
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "datasets"

_MARK = "<!-- Written by docs/generate_datasets.py from {}. -->\n\n"
_SECTIONS = "Args|Attributes|Examples?|Notes?|Raises|References|Returns|Yields"

_HOW_TO_ADD = """\
## How to add a data set

1. **Reader.** `datasets/NAME.py` with `load(path, ...)`. It returns a `Dataset` of
   pooled examples, or `FederatedData` where the data has clients of its own. Images are
   `x` float32 [n, H, W, C] in [0, 1], tables `x` float32 [n, d], text int32 ids; `y` is
   int32 for classes and float32 for numbers. Nothing is ever downloaded: `files.find`
   says what to fetch, from where, into which path. Packages that the reader needs and
   others don't are imported inside the function.
2. **Docstring of the module.** One line of summary, which stands in the table above;
   what it is, with counts; then a paragraph each for `Client key:`, `Polarity:` or
   `Normalisation:`, `Licence:`, and last `References:`. The functions say shapes,
   dtypes, units and errors, as everywhere.
3. **Errors.** Whatever is wrong with a file is a `files.DataFileError` that names the
   file, the place in it, and what was expected there. Sizes that a header states are
   checked before anything is allocated, and nothing is unpickled.
4. **Tests.** `tests/datasets/test_NAME.py` writes a small file in the format, byte by
   byte, and compares all of what `load` returns. `survives` of
   `tests/datasets/mutations.py` reads it again after each of many random mutations.
5. **Page.** `python docs/generate_datasets.py` writes the page of the data set and its
   row above. `tests/test_docs.py` fails while they are out of date.
"""


def docstrings() -> dict[Path, str]:
    """Docstring of every module and package of `datasets/`, in alphabetical order."""
    folder = ROOT / "datasets"
    paths = sorted([*folder.glob("*.py"), *folder.glob("*/__init__.py")])
    return {
        path: ast.get_docstring(ast.parse(_read(path), path)) or "" for path in paths
    }


def is_data_set(docstring: str) -> bool:
    """Whether a module with this docstring gets a page."""
    return re.search(r"^Licence:", docstring, re.M) is not None


def pages() -> dict[str, str]:
    """Content of every file of docs/datasets, by file name."""
    data_sets = [path for path, doc in docstrings().items() if is_data_set(doc)]
    files = {f"{path.stem}.md": _page(path) for path in data_sets}
    return {"README.md": _index(), **files}


def to_markdown(docstring: str) -> str:
    """A Google docstring with reStructuredText in it, as GitHub's Markdown."""
    # Text and titles of sections alternate.
    prose, *sections = re.split(rf"^({_SECTIONS}):\n", docstring, flags=re.M)
    parts = [_prose(prose)]
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        body = textwrap.dedent(body).strip("\n")
        if title == "References":
            body = "\n".join(
                "- " + textwrap.indent(paragraph, "  ").lstrip()
                for paragraph in re.split(r"\n{2,}", body)
            )
        elif title in ("Args", "Attributes", "Raises"):
            body = re.sub(r"^([\w*][^:\n]*):", r"- `\1`:", body, flags=re.M)
        parts.append(f"**{title}**\n\n{_prose(body)}")
    return "\n\n".join(filter(None, parts)) + "\n"


def _read(path: Path) -> str:
    return path.read_text("utf-8")


def _page(path: Path) -> str:
    module, source = path.stem, _read(path)
    tree = ast.parse(source)
    parts = [f"# {module}\n", to_markdown(ast.get_docstring(tree) or "")]
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_":
            parts.append(f"## `{module}.{node.name}`\n")
            if isinstance(node, ast.FunctionDef):
                parts.append(f"```python\n{_signature(node, source)}\n```\n")
            parts.append(to_markdown(ast.get_docstring(node) or ""))
    return _MARK.format(f"datasets/{module}.py") + "\n".join(parts)


def _index() -> str:
    rows, helpers = [], []
    for path, doc in docstrings().items():
        summary = doc.split("\n\n")[0].replace("\n", " ")
        if is_data_set(doc):
            client_key = _first("Client key|Clients", doc, r"[.;](\s|$)")
            licence = _first("Licence", doc, r"\.(\s|$)")
            cells = (f"[{path.stem}]({path.stem}.md)", summary, client_key, licence)
            escaped = (_inline(cell).replace("|", r"\|") for cell in cells)
            rows.append(f"| {' | '.join(escaped)} |\n")
        else:
            name = path.parent.name if path.stem == "__init__" else path.stem
            link = f"[{name}](../../{path.relative_to(ROOT).as_posix()})"
            helpers.append(f"- {link}: {_inline(summary)}\n")
    return (
        f"{_MARK.format('datasets/*.py')}# Data sets\n\n"
        "Each is a module of `fedjax_core.datasets`.\n\n"
        "| module | summary | client key | licence |\n| --- | --- | --- | --- |\n"
        f"{''.join(rows)}\n"
        "## Formats and tools\n\nWhat the data sets share, and what splits them.\n\n"
        f"{''.join(helpers)}\n{_HOW_TO_ADD}"
    )


def _first(label: str, docstring: str, end: str) -> str:
    """The start of the paragraph "LABEL: ...", as far as the first `end`."""
    found = re.search(rf"^(?:{label}):(.*?)(?:\n\n|\Z)", docstring, re.M | re.S)
    return re.split(end, " ".join(found[1].split()))[0] if found else "see the page"


def _prose(text: str) -> str:
    paragraphs = re.split(r"\n{2,}", text.strip("\n"))
    done: list[str] = []
    for paragraph in paragraphs:
        if paragraph.startswith("==="):  # a table
            done.append(f"```text\n{paragraph}\n```")
        elif done and done[-1] == ".. math::":
            done[-1] = f"```math\n{_aligned(textwrap.dedent(paragraph))}\n```"
        else:
            label = r"^([A-Z][a-z]+(?: [a-z]+)?:)(?=\s)"
            done.append(_inline(re.sub(label, r"**\1**", paragraph)))
    return "\n\n".join(done)


def _inline(text: str) -> str:
    # A wrapped line may start with what Markdown takes for a quote, heading or list.
    text = re.sub(r"^( *)([>#+])", r"\1\\\2", text, flags=re.M)
    text = re.sub(r":math:`([^`]*)`", r"$\1$", text)
    return re.sub(r":\w+:`([^`]*)`", r"`\1`", text)


def _aligned(formula: str) -> str:
    if r"\\" not in formula or r"\begin" in formula:
        return formula
    return f"\\begin{{aligned}}\n{formula}\n\\end{{aligned}}"


def _signature(function: ast.FunctionDef, source: str) -> str:
    """As it stands in the source, with its line breaks."""
    lines = source.splitlines()[function.lineno - 1 : function.body[0].lineno - 1]
    return "\n".join(lines).removeprefix("def ").removesuffix(":")


def main() -> None:
    """Writes the pages and deletes those of data sets that are gone."""
    PAGES.mkdir(exist_ok=True)
    new = pages()
    for path in PAGES.glob("*.md"):
        if path.name not in new:
            path.unlink()
    for name, content in new.items():
        (PAGES / name).write_text(content, "utf-8")


if __name__ == "__main__":
    main()
