"""Every notebook runs from top to bottom and is stored without outputs."""

from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

NOTEBOOKS = sorted(
    (Path(__file__).resolve().parent.parent / "notebooks").glob("*.ipynb")
)


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stripped(path: Path) -> None:
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


@pytest.fixture(scope="module")
def kernel() -> Iterator[KernelManager]:
    """One process for all notebooks: most of a short one's time is its imports."""
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel()
    yield manager
    manager.shutdown_kernel(now=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_from_top_to_bottom(
    path: Path, tmp_path: Path, kernel: KernelManager
) -> None:
    notebook = nbformat.read(path, as_version=4)
    # Nothing is left of the names of the one before.
    fresh = nbformat.v4.new_code_cell(f"%reset -f\n%cd -q {tmp_path}")
    notebook.cells.insert(0, fresh)
    client = NotebookClient(notebook, timeout=300, km=kernel)
    try:
        client.execute()
    finally:
        if client.kc is not None:
            client.kc.stop_channels()
