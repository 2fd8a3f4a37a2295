"""The generated pages say what the docstrings say, and these say what they must."""

import re

import pytest
from docs import generate_datasets

DATA_SETS = {
    path.stem: doc
    for path, doc in generate_datasets.docstrings().items()
    if generate_datasets.is_data_set(doc)
}


def test_pages_are_up_to_date() -> None:
    written = {p.name: p.read_text("utf-8") for p in generate_datasets.PAGES.glob("*")}
    expected = generate_datasets.pages()
    assert sorted(written) == sorted(expected), "run python docs/generate_datasets.py"
    for name, content in expected.items():
        assert written[name] == content, f"{name}: run python docs/generate_datasets.py"


@pytest.mark.parametrize("module", DATA_SETS)
def test_data_sets_name_licence_and_references(module: str) -> None:
    doc = DATA_SETS[module]
    assert re.search(r"^Licence: \S", doc, re.M)
    assert re.search(r"^References:\n  \S", doc, re.M)
    summary = doc.split("\n\n")[0]
    assert summary.endswith(".")
    assert "\n" not in summary


def test_tools_are_not_taken_for_data_sets() -> None:
    assert {"digits", "synthetic"} <= DATA_SETS.keys()
    assert not {"__init__", "files", "label_noise"} & DATA_SETS.keys()
    assert (
        "[partition](../../datasets/partition/__init__.py)"
        in (generate_datasets.pages()["README.md"])
    )


def test_docstrings_become_markdown() -> None:
    docstring = r"""Summary with :math:`\alpha_k`.

Client key: the `writer`.

=====  ===
flag   n
=====  ===
a        1
=====  ===

.. math::

  a &= b \\
  c &= d

Args:
  path: the file; size
    > 0, see below.
  *more: others.

Returns:
  ``x`` and y: [n].

Raises:
  ValueError: never.

References:
  One, "A: title",
  2001.

  Two, 2002.
"""
    expected = r"""Summary with $\alpha_k$.

**Client key:** the `writer`.

```text
=====  ===
flag   n
=====  ===
a        1
=====  ===
```

```math
\begin{aligned}
a &= b \\
c &= d
\end{aligned}
```

**Args**

- `path`: the file; size
  \> 0, see below.
- `*more`: others.

**Returns**

``x`` and y: [n].

**Raises**

- `ValueError`: never.

**References**

- One, "A: title",
  2001.
- Two, 2002.
"""
    assert generate_datasets.to_markdown(docstring) == expected
