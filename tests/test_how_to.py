"""The blocks of the how-to pages run, in order."""

import re
from pathlib import Path

import pytest

PAGES = sorted(Path(__file__).parent.parent.joinpath("docs", "how-to").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_runs(page: Path, x64: None) -> None:
    blocks = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.S)
    assert blocks
    exec(compile("\n".join(blocks), page.name, "exec"), {})
