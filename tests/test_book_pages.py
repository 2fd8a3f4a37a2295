"""The blocks of the how-to pages on the book run, in order."""

import re
from pathlib import Path

import pytest

PAGES = Path(__file__).parent.parent / "docs" / "how-to"


@pytest.mark.parametrize(
    "name",
    ["one-device", "trust", "privacy", "learn-a-graph", "steps-on-a-network"],
)
def test_a_page_runs(name: str, x64: None) -> None:
    text = (PAGES / f"{name}.md").read_text("utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert blocks
    exec(compile("\n".join(blocks), name, "exec"), {})
