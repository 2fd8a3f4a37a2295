"""MNIST and Fashion-MNIST: small files in the format, and the real ones where there."""

from pathlib import Path

import numpy as np
import pytest
from tests.datasets import idx_files
from tests.datasets.mutations import survives

from fedjax_core.data.readers.files import DataFileError
from fedjax_core.datasets import fashion_mnist, idx, mnist

REAL = Path(__file__).parents[2].parent / "shared" / "data" / "mnist_by_writer"

RNG = np.random.default_rng(0)
IMAGES = {"train": RNG.integers(0, 256, (12, 28, 28), np.uint8)}
IMAGES["test"] = RNG.integers(0, 256, (5, 28, 28), np.uint8)
LABELS = {k: RNG.integers(0, 10, len(v)).astype(np.uint8) for k, v in IMAGES.items()}
WRITERS = {"train": [7, 2100, 7, 7, 12] * 2 + [12, 7], "test": [2599, 8, 8, 8, 2599]}


def write(folder: Path, end: str = ".gz") -> Path:
    """MNIST in small, with QMNIST's labels; those of test go on, as in QMNIST."""
    for part, prefix in (("train", "train-"), ("test", "t10k-")):
        idx_files.write_pair(folder, prefix, IMAGES[part], LABELS[part], end)
        rows = np.zeros((len(IMAGES[part]) + 3 * (part == "test"), 8), np.int32)
        rows[: len(IMAGES[part]), 0] = LABELS[part]
        rows[: len(IMAGES[part]), 2] = WRITERS[part]
        idx_files.write(folder / f"qmnist-{part}-labels-idx2-int{end}", rows)
    return folder


def write_npz(path: Path) -> Path:
    parts = ("train", "test")
    np.savez(
        path,
        **{f"x_{p}": IMAGES[p] for p in parts},  # pyright: ignore
        **{f"y_{p}": LABELS[p] for p in parts},
        **{f"writer_{p}": np.array(WRITERS[p], np.uint16) for p in parts},
    )
    return path


def check_split(split, num_images=None):
    x, y = split["x"], split["y"]
    assert list(split) == ["x", "y"]
    assert (x.dtype, y.dtype) == (np.float32, np.int32)
    assert x.shape == (len(y), 28, 28, 1)
    assert num_images in (None, len(y))
    assert x.min() >= 0
    assert x.max() <= 1
    assert y.min() >= 0
    assert y.max() <= 9


@pytest.mark.parametrize("module", [mnist, fashion_mnist])
@pytest.mark.parametrize("end", ["", ".gz"])
def test_pooled_images_from_idx(tmp_path, module, end):
    dataset = module.load(write(tmp_path, end), complete=False)
    for part, split in dataset.splits.items():
        check_split(split, len(IMAGES[part]))
        np.testing.assert_array_equal(
            split["x"][..., 0], IMAGES[part] / np.float32(255)
        )
        np.testing.assert_array_equal(split["y"], LABELS[part])


@pytest.mark.parametrize("module", [mnist, fashion_mnist])
def test_test_is_no_copy_of_train(tmp_path, module):
    for prefix in ("train-", "t10k-"):
        idx_files.write_pair(tmp_path, prefix, IMAGES["test"], LABELS["test"])
    message = r"t10k-images.*content: expected .* a copy of .*train-images"
    with pytest.raises(DataFileError, match=message):
        module.load(tmp_path, complete=False)


def test_pooled_images_from_npz(tmp_path):
    for path in (write_npz(tmp_path / "mnist.npz"), tmp_path):
        dataset = mnist.load(path, complete=False)
        for part, split in dataset.splits.items():
            check_split(split, len(IMAGES[part]))
            np.testing.assert_array_equal(split["y"], LABELS[part])


@pytest.mark.parametrize("module", [mnist, fashion_mnist])
def test_a_part_must_be_asked_for(tmp_path, module):
    with pytest.raises(DataFileError, match=r"\[60000, 28, 28\], found \[12, 28, 28\]"):
        module.load(write(tmp_path))


def test_a_part_of_an_npz_must_be_asked_for(tmp_path):
    path = write_npz(tmp_path / "mnist_by_writer.npz")
    with pytest.raises(DataFileError, match=r"\[60000, 28, 28\], found \[12, 28, 28\]"):
        mnist.load(path)
    with pytest.raises(DataFileError, match=r"\[10000, 28, 28\], found \[5, 28, 28\]"):
        mnist.load_by_writer(path, "test")


@pytest.mark.parametrize("source", ["idx", "npz"])
@pytest.mark.parametrize("part", ["train", "test"])
def test_writers_are_clients(tmp_path, part, source):
    path = tmp_path / "mnist_by_writer.npz"
    path = write(tmp_path) if source == "idx" else write_npz(path)
    data = mnist.load_by_writer(path, part, test_fraction=0.4, complete=False)
    writers = np.array(WRITERS[part])
    assert data.client_ids == tuple(f"{w:04d}" for w in np.unique(writers))
    assert data.test is not None
    for i, writer in enumerate(np.unique(writers)):
        mine = np.flatnonzero(writers == writer)
        train, test = data.train.client(i), data.test.client(i)
        assert len(test["y"]) == round(0.4 * len(mine))
        # Which of the writer's images each row is: train and test have all, in order.
        x = IMAGES[part] / np.float32(255)
        found = [
            [next(m for m in mine if np.array_equal(x[m], image)) for image in split]
            for split in (train["x"][..., 0], test["x"][..., 0])
        ]
        assert all(rows == sorted(rows) for rows in found)
        assert sorted(found[0] + found[1]) == mine.tolist()
        np.testing.assert_array_equal(train["y"], LABELS[part][found[0]])
        np.testing.assert_array_equal(test["y"], LABELS[part][found[1]])


def test_the_split_of_the_writers_images(tmp_path):
    path = write_npz(tmp_path / "mnist_by_writer.npz")

    def ys(**options):
        data = mnist.load_by_writer(path, complete=False, **options)
        return [split.examples["x"] for split in data.splits.values()]

    for a, b in zip(ys(seed=3), ys(seed=3), strict=True):
        np.testing.assert_array_equal(a, b)
    different = [ys(seed=s, test_fraction=0.5)[1] for s in range(5)]
    assert not all(np.array_equal(different[0], d) for d in different)
    assert [len(x) for x in ys(test_fraction=0)] == [12, 0]
    assert [len(x) for x in ys(test_fraction=1)] == [0, 12]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"part": "validation"}, "part must be one of 'train', 'test'"),
        ({"test_fraction": 1.5}, "test_fraction must be in"),
        ({"seed": -1}, "seed must be >= 0"),
        ({"seed": 1.5}, "seed must be an int, got 1.5"),
    ],
)
def test_wrong_arguments(tmp_path, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        mnist.load_by_writer(tmp_path, **options)


def test_groups_are_told_from_the_ids():
    got = mnist.groups(["0000", "2099", "2100", "2599"])
    np.testing.assert_array_equal(got, [0, 0, 1, 1])


def test_absent_files_are_named(tmp_path):
    for load in (mnist.load, fashion_mnist.load, mnist.load_by_writer):
        with pytest.raises(
            FileNotFoundError, match=r"train-images-.*fetch it from http"
        ):
            load(tmp_path)
    write(tmp_path)
    (tmp_path / "qmnist-train-labels-idx2-int.gz").unlink()
    with pytest.raises(FileNotFoundError, match=r"qmnist-train-.*facebookresearch"):
        mnist.load_by_writer(tmp_path, complete=False)
    with pytest.raises(FileNotFoundError, match=r"no file .*nothing.npz\.$"):
        mnist.load(tmp_path / "nothing.npz")


def negate_writers(rows):
    return rows * np.array([1, 1, -1, 1, 1, 1, 1, 1], np.int32)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("train-labels-idx1-ubyte", lambda a: a[1:], "one label for each of 12 images"),
        ("train-labels-idx1-ubyte", lambda a: a + 200, "expected labels 0 to 9, found"),
        ("train-images-idx3-ubyte", lambda a: a[:, 1:], r"shape \[n, 28, 28\], found"),
        ("qmnist-train-labels-idx2-int", lambda a: a[1:], "a row for each of the 12"),
        (
            "qmnist-train-labels-idx2-int",
            lambda a: a[:, :7],
            r"\[n, 8\], found \[12, 7",
        ),
        (
            "qmnist-train-labels-idx2-int",
            lambda a: a[::-1],
            "row .*, column 0: expected",
        ),
        (
            "qmnist-train-labels-idx2-int",
            negate_writers,
            "column 2: .* 0 to 9999, found -",
        ),
        ("qmnist-train-labels-idx2-int", lambda a: a.byteswap(), "in little-endian"),
    ],
)
def test_files_that_do_not_belong_together(tmp_path, name, change, message):
    write(tmp_path)
    path = tmp_path / f"{name}.gz"
    idx_files.write(path, change(idx.read(path)))
    with pytest.raises(DataFileError, match=f"{name}.gz, .*{message}"):
        mnist.load_by_writer(tmp_path, complete=False)


def test_the_test_images_given_as_the_training_ones(tmp_path):
    write(tmp_path)
    for kind in ("images-idx3", "labels-idx1"):
        source = tmp_path / f"t10k-{kind}-ubyte.gz"
        (tmp_path / f"train-{kind}-ubyte.gz").write_bytes(source.read_bytes())
    with pytest.raises(DataFileError, match="a row for each of the 5 images"):
        mnist.load_by_writer(tmp_path, complete=False)


@pytest.mark.parametrize(
    "name", ["train-labels-idx1-ubyte", "qmnist-train-labels-idx2-int"]
)
def test_random_damage_to_idx(tmp_path, name):
    write(tmp_path, end="")

    def check(data):
        assert data.num_clients >= 1
        for split in data.splits.values():
            check_split(split.examples)

    path = tmp_path / name
    assert survives(path, lambda: mnist.load_by_writer(tmp_path, complete=False), check)


def test_random_damage_to_npz(tmp_path):
    path = write_npz(tmp_path / "mnist_by_writer.npz")

    def check(data):
        for split in data.splits.values():
            check_split(split.examples)

    assert survives(path, lambda: mnist.load_by_writer(path, complete=False), check)


@pytest.fixture
def real() -> Path:
    if not REAL.is_dir():
        pytest.skip("shared/data/mnist_by_writer is absent")
    return REAL


def test_the_real_images(real):
    dataset = mnist.load(real)
    for split, count in zip(dataset.splits.values(), (60_000, 10_000), strict=True):
        check_split(split, count)
    # The published first labels and class counts.
    assert dataset.train["y"][:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert np.bincount(dataset.train["y"]).tolist() == counts
    assert dataset.train["x"].mean() == pytest.approx(0.1307, abs=1e-4)
    assert dataset.train["x"].std() == pytest.approx(0.3081, abs=1e-4)

    test = idx.read(real / "t10k-images-idx3-ubyte.gz", (10_000, 28, 28), np.uint8)
    np.testing.assert_array_equal(
        dataset.test["x"][..., 0], test / np.float32(255), strict=True
    )
    for part, split in dataset.splits.items():
        name = {"train": "train", "test": "t10k"}[part]
        labels = idx.read(real / f"{name}-labels-idx1-ubyte.gz", dtype=np.uint8)
        np.testing.assert_array_equal(split["y"], labels)


@pytest.fixture(scope="module")
def by_writer():
    """Part -> the real images of its writers."""
    if not REAL.is_dir():
        pytest.skip("shared/data/mnist_by_writer is absent")
    return {part: mnist.load_by_writer(REAL, part) for part in ("train", "test")}


def test_the_real_writers(real, by_writer):
    train, test = by_writer.values()
    assert (train.num_clients, test.num_clients) == (539, 297)
    assert not {*train.client_ids} & {*test.client_ids}
    for data, smallest, median, largest in ((train, 19, 116, 131), (test, 8, 21, 130)):
        assert data.test is not None
        sizes = data.train.sizes + data.test.sizes
        assert (sizes.min(), np.median(sizes), sizes.max()) == (
            smallest,
            median,
            largest,
        )
        assert np.abs(data.test.sizes - 0.2 * sizes).max() <= 0.5

    qmnist = idx.read(real / "qmnist-train-labels-idx2-int.gz", (60_000, 8), np.int32)
    series, writers = qmnist[:, 1], qmnist[:, 2]
    assert set(series.tolist()) == {0, 4}
    of_writer = dict(zip(writers.tolist(), (series == 4).tolist(), strict=True))
    expected = [of_writer[int(w)] for w in train.client_ids]
    np.testing.assert_array_equal(mnist.groups(train.client_ids), expected)
    names, sizes = np.unique(writers, return_counts=True)
    assert train.test is not None
    assert train.client_ids == tuple(f"{w:04d}" for w in names)
    np.testing.assert_array_equal(train.train.sizes + train.test.sizes, sizes)


@pytest.mark.parametrize("part", ["train", "test"])
def test_the_real_writers_from_idx(tmp_path, real, by_writer, part):
    # Original files, but for the training images and QMNIST's labels of the test part.
    with np.load(real / "mnist_by_writer.npz", allow_pickle=False) as arrays:
        rows = np.zeros((60_000, 8), np.int32)
        rows[:10_000, 0] = arrays["y_test"]
        rows[:10_000, 2] = arrays["writer_test"]
        idx_files.write(tmp_path / "qmnist-test-labels-idx2-int", rows)
        if part == "train":
            idx_files.write(tmp_path / "train-images-idx3-ubyte", arrays["x_train"])
    for file in real.glob("*-idx*.gz"):
        (tmp_path / file.name).symlink_to(file)
    a, b = mnist.load_by_writer(tmp_path, part), by_writer[part]
    assert a.client_ids == b.client_ids
    for name in a.splits:
        np.testing.assert_array_equal(a.splits[name].offsets, b.splits[name].offsets)
        for key, array in a.splits[name].examples.items():
            np.testing.assert_array_equal(array, b.splits[name].examples[key])
