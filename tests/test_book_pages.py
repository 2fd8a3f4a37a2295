"""The blocks of the how-to pages on networks, privacy and data run, in order."""

import re
from pathlib import Path

import pytest

PAGES = Path(__file__).parent.parent / "docs" / "how-to"


@pytest.mark.parametrize(
    "name",
    [
        *("one-device", "trust", "privacy", "learn-a-graph", "flavours"),
        *("steps-on-a-network", "bring-your-data"),
    ],
)
def test_a_page_runs(
    name: str, x64: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (PAGES / f"{name}.md").read_text("utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert blocks
    exec(compile("\n".join(blocks), name, "exec"), {})
