"""The repository layout, the installed layout and the direction of imports agree."""

import ast
import builtins
import graphlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import fedjax_core

ROOT = Path(__file__).resolve().parent.parent
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
FOLDERS = {"algorithms", "datasets", "experiments"}  # installed as sub-packages
GROUND = {"arrays", "check", "linalg", "metrics", "random", "types"}
# What a room may import besides itself; modules outside a folder are the ground or the
# engine.
BELOW = {
    "ground": set(),
    "data": {"ground"},
    "models": {"ground"},
    "engine": {"ground", "data", "models"},
    "compress": {"ground", "engine"},
    "privacy": {"ground", "engine"},
    "robust": {"ground", "engine"},
    "attacks": {"ground", "engine", "privacy"},
    "clusters": {"ground", "engine"},
    "fair": {"ground", "engine"},
    "networks": {"ground", "engine", "privacy", "robust", "attacks"},
    "networks.theory": {"ground", "networks"},
    "algorithms": {"ground", "engine", "data", "compress", "robust", "privacy"}
    | {"attacks", "clusters", "fair", "networks", "networks.theory"},
    "datasets": {"ground", "engine", "data", "models", "networks", "networks.theory"},
    "experiments": {"ground", "engine", "data", "models", "compress", "robust"}
    | {"privacy", "attacks", "clusters", "fair", "networks", "networks.theory"}
    | {"algorithms", "datasets"},
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


@pytest.mark.parametrize("room", BELOW)
def test_a_room_imports_only_from_below(room: str) -> None:
    seen = 0
    for path in files():
        if not module_of(path) or room_of(module_of(path)) != room:
            continue  # the package's own __init__ gathers from all rooms but networks
        seen += 1
        for name in imports(path):
            assert room_of(name) in BELOW[room] | {room}, (path, name)
    assert seen


def test_no_cycle_between_rooms() -> None:
    assert list(graphlib.TopologicalSorter(BELOW).static_order())


def test_the_package_loads_no_network() -> None:
    code = "import sys, fedjax_core; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert "fedjax_core.simulate" in loaded
    assert not [name for name in loaded if name.startswith("fedjax_core.networks")]
    assert not [
        name for name in loaded if name.startswith("fedjax_core.data.readers.c")
    ]


def test_names_of_the_package_shadow_nothing() -> None:
    names = set(fedjax_core.__all__)
    assert not names & (sys.stdlib_module_names | set(dir(builtins)))
    assert all(hasattr(fedjax_core, name) for name in names)


def files() -> list[Path]:
    """Every module, by its real path."""
    return [
        path
        for folder in SETUPTOOLS["package-dir"].values()
        for top in (ROOT / folder).iterdir()
        if not top.is_symlink()
        for path in ([top] if top.suffix == ".py" else top.rglob("*.py"))
    ]


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(p for p in parts if p not in ("fedjax_core", "__init__"))


def room_of(module: str) -> str:
    if module.split(".")[0] in GROUND:
        return "ground"
    found = [room for room in BELOW if f"{module}.".startswith(f"{room}.")]
    return max(found, key=len, default="engine")


def imports(path: Path) -> set[str]:
    """Modules of this package that a file imports, without the package's name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "fedjax_core":
            # The package itself, or one of its modules.
            names = [f"fedjax_core.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}"]
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            assert name.split(".")[0] not in FOLDERS, (path, name)
            if name.startswith("fedjax_core."):
                found.add(name.removeprefix("fedjax_core."))
    return found
