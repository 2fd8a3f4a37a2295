"""LEAF's JSON: files the tests write, and a sample with real values."""

import json
from pathlib import Path

import numpy as np
import pytest
from tests.datasets.mutations import survives

from fedjax_core.data.readers.files import DataFileError
from fedjax_core.datasets import leaf

SAMPLE = Path(__file__).parents[2].parent / "shared" / "data" / "leaf_format_sample"


def write(folder, split, of_user, number=0, **members):
    """Writes one file; `of_user` is user -> (x, y)."""
    path = folder / split / f"all_data_{number}_niid_0_keep_0_{split}_9.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "users": list(of_user),
        "num_samples": [len(y) for _, y in of_user.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in of_user.items()},
        **members,
    }
    path.write_text(json.dumps(content))
    return path


def write_both(folder, of_user, **members):
    """Test has each user's examples twice, and so is no copy of train."""
    twice = {user: (2 * x, 2 * y) for user, (x, y) in of_user.items()}
    counts = members.pop("num_samples", [len(y) for _, y in of_user.values()])
    return [
        write(folder, split, content, num_samples=[k * n for n in counts], **members)
        for split, k, content in (("train", 1, of_user), ("test", 2, twice))
    ]


def images(*values):
    return [[value] * 784 for value in values]


# The sample.


@pytest.fixture
def sample():
    if not SAMPLE.is_dir():
        pytest.skip(f"needs the data in {SAMPLE}")
    return SAMPLE


def test_sample_of_femnist(sample):
    data = leaf.femnist(sample / "femnist_like")
    assert data.client_ids == tuple(f"f000{i}_00" for i in range(6))
    assert data.train.sizes.tolist() == [32] * 6
    assert data.splits["test"].sizes.tolist() == [8] * 6
    x = data.train.examples["x"]
    assert (x.dtype, x.shape) == (np.float32, (192, 28, 28, 1))
    # Ink is 1: the border is empty, the middle is not.
    assert x[:, :2].mean() < 0.01 < 0.2 < x[:, 10:18, 10:18].mean()
    stored = json.loads(next((sample / "femnist_like/train").iterdir()).read_text())
    first = np.array(stored["user_data"]["f0003_00"]["x"][5], np.float32)
    np.testing.assert_array_equal(data.train.client(3)["x"][5].ravel(), 1 - first)
    assert data.train.client(0)["y"][:5].tolist() == [0, 1, 2, 3, 4]


def test_sample_of_shakespeare(sample):
    data = leaf.shakespeare(sample / "shakespeare")
    assert data.num_clients == 8
    assert data.train.sizes.tolist() == [116, 145, 101, 99, 106, 117, 132, 94]
    assert data.splits["test"].sizes.tolist() == [13, 17, 12, 11, 12, 14, 15, 11]
    got = data.train.client(0)
    assert (got["x"].dtype, got["x"].shape) == (np.int32, (116, 80))
    text = "".join(leaf.CHARACTERS[i] for i in got["x"][0])
    assert text.startswith("Over hill, over dale, Thorough bush, thorough brier")
    assert "".join(leaf.CHARACTERS[i] for i in got["y"][:5]) == "udu,a"
    groups = leaf.hierarchies(sample / "shakespeare")
    assert tuple(groups) == data.client_ids
    assert groups["A_WINTER_S_TALE_DION"] == "A-WINTER-S-TALE"


# The families.


def test_hidden_files_beside_the_data_are_not_read(tmp_path):
    for path in write_both(tmp_path, {"f1_00": (images(0.25), [10])}):
        path.with_name(f"._{path.name}").write_bytes(b"\0\5\x16\7 of macOS")
    assert leaf.femnist(tmp_path).client_ids == ("f1_00",)


def test_femnist_is_inverted_and_users_of_all_files_are_sorted(tmp_path):
    write_both(tmp_path, {"f2_00": (images(1.0, 0), [61, 0])})
    write_both(tmp_path, {"f1_00": (images(0.25), [10])}, number=1)
    data = leaf.femnist(tmp_path)
    assert data.client_ids == ("f1_00", "f2_00")
    assert data.train.sizes.tolist() == [1, 2]
    assert data.train.examples["x"][:, 5, 5, 0].tolist() == [0.75, 0, 1]
    assert data.train.examples["y"].tolist() == [10, 61, 0]
    assert data.train.examples["y"].dtype == np.int32


def test_characters_are_those_of_leaf():
    assert len(leaf.CHARACTERS) == len(set(leaf.CHARACTERS)) == 80
    x = [leaf.CHARACTERS, "\ud800#\x7f\x80\N{GRINNING FACE}" + "~" * 75]
    data = leaf.shakespeare_examples({"x": x, "y": ["}", "*"]})
    assert data["x"][0].tolist() == list(range(80))
    assert (data["x"][1] == leaf.UNKNOWN_CHARACTER).all()
    assert data["y"].tolist() == [79, leaf.UNKNOWN_CHARACTER]
    assert leaf.NUM_CHARACTER_IDS == 81


def test_sent140_as_text_and_as_ids(tmp_path):
    tweet = ["1", "Mon Apr 06", "NO_QUERY", "ann", "It's not good, not at all!"]
    write_both(tmp_path, {"ann": ([tweet], [1]), "bob": ([[*tweet[:4], ""]], [0])})
    data = leaf.sent140(tmp_path)
    assert data.train.examples["x"].tolist() == [tweet[4], ""]
    assert data.train.examples["y"].tolist() == [1, 0]
    data = leaf.sent140(tmp_path, ["not", "good", "!"], length=10)
    assert data.train.examples["x"].dtype == np.int32
    assert data.train.examples["x"].tolist() == [
        [3, 0, 1, 3, 0, 3, 3, 2, 3, 3],  # It's not good , not at all !
        [3] * 10,
    ]
    with pytest.raises(ValueError, match="vocabulary must hold distinct words"):
        leaf.sent140(tmp_path, ["not", "not"])


def test_celeba_gives_file_names(tmp_path):
    write_both(tmp_path, {"7": (["000001.jpg", "2.jpg"], [1.0, 0])})
    got = leaf.celeba(tmp_path).train.examples
    assert got["x"].tolist() == ["000001.jpg", "2.jpg"]
    assert (got["y"].dtype, got["y"].tolist()) == (np.int32, [1, 0])


def test_synthetic(tmp_path):
    write_both(tmp_path, {"0": ([[1, 2.5]], [4.0]), "1": ([[0, 0], [1, 1]], [3, 2])})
    got = leaf.synthetic(tmp_path).train.examples
    assert (got["x"].dtype, got["x"].tolist()) == (
        np.float32,
        [[1, 2.5], [0, 0], [1, 1]],
    )
    assert (got["y"].dtype, got["y"].tolist()) == (np.int32, [4, 3, 2])


def test_reddit_comes_as_lists(tmp_path):
    x, y = [[["<BOS>", "hi"]]], [{"subreddit": "a", "score": 1}]
    write(tmp_path, "train", {"u": (x, y)})
    assert list(leaf.iterate(tmp_path, "train")) == [("u", {"x": x, "y": y})]


# Splits and parts.


def test_a_split_by_user_is_two_populations(tmp_path):
    write(tmp_path, "train", {"a": (images(0), [1]), "b": (images(0), [2])})
    write(tmp_path, "test", {"c": (images(0), [3])})
    with pytest.raises(DataFileError, match=r"'a': is in one .* load split='train'"):
        leaf.femnist(tmp_path)
    train, test = (leaf.femnist(tmp_path, split) for split in ("train", "test"))
    assert (train.client_ids, test.client_ids) == (("a", "b"), ("c",))
    assert list(test.splits) == ["train"]
    with pytest.raises(ValueError, match="split must be one of"):
        leaf.femnist(tmp_path, "held_out")


def test_a_part_of_the_users(tmp_path):
    for number, user in enumerate("cab"):
        write_both(tmp_path, {user: (images(0), [number])}, number=number)
    assert leaf.femnist(tmp_path, clients=["b", "c"]).client_ids == ("b", "c")
    # The first two of the files, then sorted; the last file is not opened.
    (tmp_path / "train" / "all_data_2_niid_0_keep_0_train_9.json").write_text("{")
    data = leaf.femnist(tmp_path, max_clients=2)
    assert data.client_ids == ("a", "c")
    assert data.splits["test"].examples["y"].tolist() == [1, 1, 0, 0]
    with pytest.raises(DataFileError, match="test, user 'z': not among the 3 users"):
        leaf.femnist(tmp_path, "test", clients=["a", "z"])


def test_test_is_no_copy_of_train(tmp_path):
    for split in ("train", "test"):
        write(tmp_path, split, {"a": (images(0, 1), [1, 2]), "b": (images(0), [2])})
    with pytest.raises(DataFileError, match=r"test: .* its own, found those of tra"):
        leaf.femnist(tmp_path)
    # The one thing that a user says in both is no copy of a file.
    assert leaf.femnist(tmp_path, clients=["b"]).num_clients == 1


def test_users_that_leaf_has_dropped(tmp_path):
    # A split by sample leaves users of one example in user_data, without examples, and
    # in hierarchies.
    users = {"a": (images(0), [1]), "dropped": ([], []), "b": (images(0), [2])}
    members = {"users": ["a", "b"], "num_samples": [1, 1]}
    write_both(tmp_path, users, **members, hierarchies=["play a", "-", "play b"])
    assert leaf.femnist(tmp_path).client_ids == ("a", "b")
    assert leaf.hierarchies(tmp_path) == {"a": "play a", "b": "play b"}
    write_both(tmp_path, {**users, "dropped": (images(0), [5])}, **members)
    with pytest.raises(DataFileError, match="'dropped': has data, but is not in users"):
        leaf.femnist(tmp_path)


# What is wrong is said, with its place.


def test_absent_files_say_how_to_get_them(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"train.*\.json.*preprocess\.sh"):
        leaf.femnist(tmp_path)


def test_a_user_occurs_once(tmp_path):
    one = {"a": (images(0), [1])}
    write(tmp_path, "test", one)
    write(tmp_path, "train", one)
    second = write(tmp_path, "train", one, number=1)
    with pytest.raises(
        DataFileError, match=rf"{second.name}, user 'a': occurs in .*_0_"
    ):
        leaf.femnist(tmp_path)
    second.unlink()
    write(tmp_path, "train", one, users=["a", "a"], num_samples=[1, 1])
    with pytest.raises(DataFileError, match="client 'a': occurs twice"):
        leaf.femnist(tmp_path)
    path = write(tmp_path, "train", one)
    member = json.dumps({"a": {"x": images(0), "y": [1]}})[1:-1]
    path.write_text(path.read_text().replace(member, f"{member}, {member}"))
    with pytest.raises(DataFileError, match="'a' occurs twice in one object"):
        leaf.femnist(tmp_path)


@pytest.mark.parametrize(
    ("members", "problem"),
    [
        ({"users": None}, "expected 'users' with a list, found NoneType"),
        ({"user_data": []}, "expected 'user_data' with a dict"),
        ({"user_data": {}}, "user 'a': expected x and y"),
        (
            {"user_data": {"a": {"x": []}}},
            "user 'a': expected 'y' with a list, found not",
        ),
        ({"users": [1]}, "client ids: expected text, found 1"),
        ({"num_samples": [2]}, "user 'a': expected 2 examples, found 1 x and 1 y"),
        ({"num_samples": [1, 1]}, "one entry per user, 1, found 2 num_samples"),
        ({"hierarchies": []}, "found 1 num_samples and 0 hierarchies"),
        ({"hierarchies": [0]}, "hierarchies: expected texts"),
    ],
)
def test_wrong_members(tmp_path, members, problem):
    write_both(tmp_path, {"a": (images(0), [1])}, **members)
    with pytest.raises(DataFileError, match=rf"_train_9\.json.*{problem}"):
        leaf.femnist(tmp_path)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "damaged"),
        (b"[]", "expected an object"),
        (b"\xff", "damaged"),
        (b"[" * 100_000, "damaged"),
        (b'{"users": [NaN]}', "NaN is not JSON"),
        (b"1" * 5000, "damaged"),
    ],
)
def test_wrong_json(tmp_path, content, problem):
    write(tmp_path, "train", {"a": (images(0), [1])}).write_bytes(content)
    with pytest.raises(DataFileError, match=rf"_train_9\.json, JSON: .*{problem}"):
        leaf.femnist(tmp_path, "train")


@pytest.mark.parametrize(
    ("family", "x", "y", "problem"),
    [
        ("femnist", [[0.5] * 783], [1], r"x must be numbers \[n, 784\], got .*783"),
        ("femnist", [[0.5] * 784, [1]], [1, 1], "x must hold rows of one length"),
        ("femnist", images("1.0"), [1], "x must be numbers"),
        ("femnist", images(1.5), [1], r"x must be in \[0, 1\]"),
        ("femnist", images(1), [62], r"y must hold whole numbers in 0\.\.61"),
        ("femnist", images(1), [0.5], "y must hold whole numbers"),
        ("femnist", images(1), [[1]], "y must be numbers"),
        ("femnist", images(1), [2**70], "y must be numbers"),
        ("shakespeare", ["a" * 79], ["b"], r"x\[0\] must be 80 characters"),
        ("shakespeare", ["a" * 80], [""], r"y\[0\] must be 1 characters"),
        ("shakespeare", [["a"] * 80], ["b"], r"x\[0\] must be 80 characters"),
        ("sent140", [["a", "b"]], [1], r"x\[0\] must be \[id, date"),
        ("sent140", [["", "", "", "", 1]], [1], r"text of x\[0\] must be text"),
        ("celeba", [3], [1], r"x\[0\] must be text"),
        ("celeba", ["3.jpg"], [-1], r"whole numbers in 0\.\.1"),
        ("synthetic", [[1e300]], [1], "x must hold finite float32"),
        ("synthetic", [1.0], [1], r"x must be numbers \[n, d\]"),
    ],
)
def test_wrong_examples(tmp_path, family, x, y, problem):
    write(tmp_path, "train", {"a": (x, y)})
    with pytest.raises(
        DataFileError, match=rf"_train_9\.json, client 'a': .*{problem}"
    ):
        getattr(leaf, family)(tmp_path, "train")


def test_users_must_have_one_number_of_features(tmp_path):
    write(tmp_path, "train", {"a": ([[1]], [0]), "b": ([[1, 2]], [0])})
    with pytest.raises(DataFileError, match="x must have one dtype and shape"):
        leaf.synthetic(tmp_path, "train")
    write(tmp_path, "train", {"a": ([[1]], [0])})
    write(tmp_path, "test", {"a": ([[1, 2]], [0])})
    with pytest.raises(DataFileError, match=r"for train and .* for test"):
        leaf.synthetic(tmp_path)


# Random damage.


def test_fuzz_numbers(tmp_path):
    users = {"a": (images(0.5, 0.123), [1, 61]), "b": (images(1), [3])}
    path = write_both(tmp_path, users, hierarchies=["p", "q"])[0]

    def check(data):
        x, y = (data.train.examples[name] for name in "xy")
        assert (x.dtype, y.dtype) == (np.float32, np.int32)
        assert x.shape == (len(y), 28, 28, 1)
        assert x.min(initial=0) >= 0
        assert x.max(initial=0) <= 1
        assert np.isin(y, np.arange(62)).all()

    assert survives(path, lambda: leaf.femnist(tmp_path, "train"), check) > 100


def test_fuzz_texts(tmp_path):
    users = {"a": (["To be, or" * 8 + " not to "], ["b"]), "b": (["?" * 80], ["\n"])}
    path = write_both(tmp_path, users, hierarchies=["p", "q"])[0]

    def check(data):
        x, y = (data.train.examples[name] for name in "xy")
        assert (x.dtype, y.dtype) == (np.int32, np.int32)
        assert x.shape == (len(y), 80)
        assert x.min(initial=0) >= 0
        assert x.max(initial=0) < leaf.NUM_CHARACTER_IDS

    assert survives(path, lambda: leaf.shakespeare(tmp_path, "train"), check) > 100
