"""The repository layout, the installed layout and the direction of imports agree."""

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
ABOVE = {  # what a folder must never import
    "fedjax_core": ("algorithms", "datasets", "experiments"),
    "algorithms": ("datasets", "experiments"),
    "datasets": ("algorithms", "experiments"),
    "experiments": (),
}


def test_every_folder_with_python_is_installed() -> None:
    found = {
        ".".join((package, *path.parent.relative_to(ROOT / folder).parts))
        for package, folder in SETUPTOOLS["package-dir"].items()
        for path in (ROOT / folder).rglob("*.py")
        if not (ROOT / folder / path.relative_to(ROOT / folder).parts[0]).is_symlink()
    }
    assert found == set(SETUPTOOLS["packages"])


def test_datasets_stays_a_namespace_package() -> None:
    # An __init__.py here would hide Hugging Face `datasets` from code run at the root.
    assert not (ROOT / "datasets" / "__init__.py").exists()


@pytest.mark.parametrize("folder", ABOVE)
def test_imports_point_downwards(folder: str) -> None:
    top = (p for p in (ROOT / folder).iterdir() if not p.is_symlink())
    for path in (q for p in top for q in ([p] if p.is_file() else p.rglob("*"))):
        if path.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                for above in ABOVE[folder]:
                    assert not name.startswith(f"fedjax_core.{above}"), (path, name)
                    assert name.split(".")[0] != above, (path, name)
