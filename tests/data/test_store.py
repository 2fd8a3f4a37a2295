"""A store gives back what was put in, and nothing else passes for one."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.test_packed import assert_clients_equal, make_clients, make_packed
from tests.datasets.mutations import mutations

from fedjax_core import FederatedData, LocalWork, Packed, models, run_dir, simulate
from fedjax_core.algorithms import fedavg
from fedjax_core.data import memmap, sources, store
from fedjax_core.data.readers.files import DataFileError


def assert_same(data, expected):
    assert data.client_ids == expected.client_ids
    assert list(data.splits) == list(expected.splits)
    for name, split in expected.splits.items():
        clients = [split.client(i) for i in range(expected.num_clients)]
        assert_clients_equal(data.splits[name], clients)


def population():
    clients = make_clients([3, 0, 2, 4])
    return FederatedData.from_lists(
        clients,
        test=make_clients([0, 1, 2, 0]),
        client_ids=["ä/..", "", "\ud800\n", "3"],
    )


sizes = st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any)


@settings(deadline=None, max_examples=30)
@given(sizes, sizes, st.booleans())
def test_what_is_saved_or_built_is_opened(tmp_path_factory, train, test, build):
    n = max(len(train), len(test))
    train, test = (s + [0] * (n - len(s)) for s in (train, test))
    data = FederatedData(make_packed(train), make_packed(test))
    path = tmp_path_factory.mktemp("store") / "a"
    if build:
        clients = (
            (str(i), {name: split.client(i) for name, split in data.splits.items()})
            for i in range(n)
        )
        assert_same(store.build(path, clients), data)
    else:
        store.save(data, path)
    assert_same(store.open(path, verify=True), data)
    assert [p.name for p in path.parent.iterdir()] == ["a"]  # nothing left beside it


def test_arrays_are_read_only_memory_maps(tmp_path):
    store.save(population(), tmp_path / "a")
    x = store.open(tmp_path / "a").train.examples["x"]
    assert isinstance(x, np.memmap)
    assert not x.flags.writeable
    assert x.ctypes.data % 64 == 0


def test_files_are_plain_npy(tmp_path):
    store.save(population(), tmp_path / "a")
    for array in ("x", "y"):
        loaded = np.load(tmp_path / "a" / f"train.{array}.npy", allow_pickle=False)
        np.testing.assert_array_equal(
            loaded, population().train.examples[array], strict=True
        )
    offsets = np.load(tmp_path / "a" / "train-offsets.npy")
    assert offsets.tolist() == [0, 3, 3, 5, 9]


@pytest.mark.parametrize(
    "array",
    [
        np.array([True, False]),
        np.array([1, 2], ">i2"),
        np.array(["a", "\u4e16\u754c"]),
        np.array([b"a", b"bc"]),
        np.array(["2020-01-01", "NaT"], "M8[D]"),
        np.array([1, 2], np.complex64),
        np.zeros((2, 0)),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    ],
    ids=lambda a: a.dtype.str,
)
@pytest.mark.parametrize(
    "name", ["x", "offsets", "../x", "x" * 100, "\u4e16/\u754c", "\ud800"]
)
def test_any_array_under_any_name(tmp_path, array, name):
    data = FederatedData(Packed({name: array}, np.array([0, 2])))
    store.save(data, tmp_path / "a")
    built = store.build(tmp_path / "b", [("0", {name: array})])
    for got in (store.open(tmp_path / "a", verify=True), built):
        stored = got.train.examples[name]
        np.testing.assert_array_equal(stored, array)
        assert stored.dtype == array.dtype.newbyteorder("<")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize("dtype", [jax.numpy.bfloat16, [("a", "f4")]])
def test_dtypes_that_would_come_back_as_others_are_refused(tmp_path, dtype):
    data = FederatedData(Packed({"x": np.empty(0, dtype)}, np.array([0, 0])))
    with pytest.raises(
        TypeError, match=r"x must have a dtype that \.npy files hold, got"
    ):
        store.save(data, tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_a_store_larger_than_one_block(tmp_path, monkeypatch):
    monkeypatch.setattr(memmap, "BLOCK", 16)
    data = FederatedData(make_packed([7, 0, 30]))
    store.save(data, tmp_path / "a")
    assert_same(store.open(tmp_path / "a", verify=True), data)
    store.save(store.open(tmp_path / "a"), tmp_path / "b")  # from a memory map
    assert_same(store.open(tmp_path / "b", verify=True), data)


def test_building_agrees_with_packing_in_memory(tmp_path):
    def clients():
        yield "b", {}
        yield "a", {"y": np.array([1, 2])}
        yield "c", {"test": {"y": np.array([3])}}
        yield "d", {"train": {"y": np.zeros(0, "f4")}, "test": {}}

    built = store.build(tmp_path / "a", clients())
    assert_same(built, sources.from_iterator(clients()))


def test_a_folder_of_npz_files_becomes_a_store(tmp_path):
    for i, client in enumerate(make_clients([2, 3])):
        np.savez(tmp_path / f"{i}.npz", **client)
    built = store.build(tmp_path / "store", sources.npz_clients(tmp_path))
    assert_same(built, sources.from_npz(tmp_path))


@pytest.mark.parametrize(
    ("clients", "error", "message"),
    [
        ([], ValueError, "got 0 clients without"),
        ([("a", {"y": []})], ValueError, "got 1 clients without"),
        ([("a", {"y": [1]}), ("a", {"y": [1]})], ValueError, "got 'a' twice"),
        ([(1, {"y": [1]})], TypeError, "must be strs, got 1"),
        (
            [("a", {"y": [1], "x": []})],
            ValueError,
            "client 'a': arrays must have equal",
        ),
        ([("a", {"y": [None]})], TypeError, "client 'a': y must not hold Python"),
        (
            [("a", {"y": [1]}), ("b", {"y": [1.5]})],
            ValueError,
            r"y must .* int64\[\] for train of client 'a' and float64\[\] for train of",
        ),
        (
            [("a", {"y": [1]}), ("b", {"test": {"y": [1.5]}})],
            ValueError,
            r"y must .* int64\[\] for train of client 'a' and .* test of client 'b'",
        ),
        (
            [("a", {"y": [1]}), ("b", {"test": {"z": [1]}})],
            ValueError,
            r"must be the same, got \['y'\] for train .*\['z'\] for test of client 'b'",
        ),
        ([("a", {"y" * 300: [1]})], ValueError, "makes a file name of 310 bytes; 255"),
        ([("a", [1, 2])], TypeError, r"must be a dict of arrays, got \[1, 2\]"),
        (
            [("a", {"y": ["ab"]}), ("b", {"y": ["c"]}), ("c", {"y": ["abc"]})],
            ValueError,
            "y must be text no wider than that of client 'a', <U2, got <U3 for client",
        ),
    ],
)
def test_bad_clients_leave_nothing_behind(tmp_path, clients, error, message):
    with pytest.raises(error, match=message):
        store.build(tmp_path / "a", clients)
    assert not list(tmp_path.iterdir())


def test_what_is_there_is_not_overwritten(tmp_path):
    path = tmp_path / "a"
    path.mkdir()  # empty: as good as absent
    store.save(population(), path)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        store.save(population(), path)
    other = FederatedData(make_packed([1]))
    store.save(other, path, overwrite=True)
    assert_same(store.open(path, verify=True), other)

    def fails():
        yield "a", {"y": [1]}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.build(path, fails(), overwrite=True)
    assert_same(store.open(path, verify=True), other)
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    (thesis / "chapter.tex").write_text("ten years of work")
    with pytest.raises(FileExistsError, match=r"is no store, .* not overwritten"):
        store.save(other, thesis, overwrite=True)
    with pytest.raises(FileExistsError, match="is no store"):
        store.save(other, thesis / "chapter.tex", overwrite=True)
    assert {p.name for p in tmp_path.iterdir()} == {"a", "thesis"}


BUILDER = """
import sys, numpy as np
from fedjax_core.data import store

def clients():
    for i in range(10**9):
        yield str(i), {"y": np.zeros(10**4)}
        if i == 100:
            print("under way", flush=True)

store.build(sys.argv[1], clients())
"""


def test_a_killed_build_is_no_store(tmp_path):
    path = tmp_path / "a"
    child = subprocess.Popen(
        [sys.executable, "-c", BUILDER, str(path)],
        stdout=subprocess.PIPE,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline()
        child.send_signal(signal.SIGKILL)
    with pytest.raises(FileNotFoundError, match="no store at"):
        store.open(path)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".a.partial-")
    with pytest.raises(FileNotFoundError, match=r"has no header\.json"):
        store.open(left)
    store.save(population(), path)  # what is left is in nobody's way
    assert_same(store.open(path), population())


FILES = (
    "header.json",
    "client_ids.json",
    "train-offsets.npy",
    "train.x.npy",
    "train.y.npy",
    "test-offsets.npy",
    "test.x.npy",
    "test.y.npy",
)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    path = tmp_path_factory.mktemp("stored") / "a"
    store.save(population(), path)
    assert sorted(p.name for p in path.iterdir()) == sorted(FILES)
    return path


def outcome(path, **kwargs):
    """The population, or the text of the one error allowed."""
    try:
        return store.open(path, **kwargs), ""
    except DataFileError as error:
        return None, str(error)


@pytest.mark.parametrize("name", FILES)
def test_damage_to_any_file_is_noticed(stored, name):
    path, good = stored / name, (stored / name).read_bytes()
    expected = population()
    layout = {k: s.offsets.tolist() for k, s in expected.splits.items()}
    values_only = name.removesuffix(".npy")[-2:] in (".x", ".y")
    try:
        for bad in mutations(good):
            path.write_bytes(bad)
            data, error = outcome(stored, verify=True)
            assert str(path) in error if data is None else bad == good
            data, error = outcome(stored)
            if data is None:
                assert str(path) in error
            else:  # unverified, the numbers may be others, but only they
                assert bad == good or (values_only and len(bad) == len(good))
                assert data.client_ids == expected.client_ids
                assert layout == {k: s.offsets.tolist() for k, s in data.splits.items()}
    finally:
        path.write_bytes(good)


@pytest.mark.parametrize("name", FILES[1:])
def test_a_missing_file_is_named(stored, name):
    (stored / name).rename(stored / "away")
    try:
        with pytest.raises(DataFileError, match=rf"{name}, file: missing"):
            store.open(stored)
    finally:
        (stored / "away").rename(stored / name)


def test_files_of_two_stores_do_not_mix(tmp_path):
    data = population()
    store.save(data, tmp_path / "a")
    other = data.map(lambda e: {"x": e["x"] + 1, "y": e["y"]})
    store.save(other, tmp_path / "b")
    store.save(data.map(lambda e: {"x": e["x"][:, ::-1]}), tmp_path / "c")
    (tmp_path / "b" / "train.x.npy").replace(tmp_path / "a" / "train.x.npy")
    with pytest.raises(DataFileError, match=r"train\.x\.npy, .* must have the check"):
        store.open(tmp_path / "a", verify=True)
    (tmp_path / "c" / "header.json").replace(tmp_path / "a" / "header.json")
    with pytest.raises(DataFileError, match=r"train\.x\.npy"):
        store.open(tmp_path / "a", verify=True)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"version": 2}, r"header\.json, version: must be 1, got 2"),
        ({"format": "another"}, r"header\.json, format: must be 'fedjax_core store'"),
        ({"splits": {}}, r"header\.json, content: malformed"),
        ({"splits": {"train": {}}}, r"header\.json, content: malformed"),
        ({"splits": []}, r"header\.json, content: malformed"),
    ],
)
def test_headers_of_other_makes(tmp_path, edit, message):
    store.save(population(), tmp_path / "a")
    path = tmp_path / "a" / "header.json"
    header = json.loads(path.read_text()) | edit
    del header["crc32"]
    path.write_text(json.dumps({**header, "crc32": store._crc_of(header)}))
    with pytest.raises(DataFileError, match=message):
        store.open(tmp_path / "a")


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 999), max_size=60), st.booleans(), st.integers(0, 9))
def test_gather_copies_rows(stored_rows, rows, consecutive, skip):
    rows = np.array(rows, np.int64)
    if consecutive and len(rows):
        rows = np.concatenate([np.arange(r, min(r + 9, 1000)) for r in rows])
    memory, mapped = stored_rows
    for array in (mapped, mapped[skip:], memory, mapped[:, ::-1]):
        mine = rows[rows < len(array)]
        out = np.zeros((len(mine), 3), np.int32)
        memmap.gather(array, mine, out)
        np.testing.assert_array_equal(out, array[mine])


@pytest.fixture(scope="module")
def stored_rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "a"
    memory = np.arange(3000, dtype=np.int32).reshape(1000, 3)
    data = store.build(path, [("a", {"x": memory})])
    return memory, data.train.examples["x"]


def test_released_changes_are_not_lost(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros(4))
    for mode in ("c", "r+"):
        x = np.load(tmp_path / "x.npy", mmap_mode=mode)
        x[1:3] = 7
        memmap.release(x[1:])
        memmap.gather(x, np.array([0]), np.zeros(1))
        assert x.tolist() == [0, 7, 7, 0]
    memmap.release(np.zeros(3))


RESIDENT = Path("/proc/self/statm")


@pytest.mark.skipif(not RESIDENT.exists(), reason=f"needs {RESIDENT} to tell memory")
def test_what_was_gathered_does_not_stay_resident(tmp_path):
    def resident():
        return int(RESIDENT.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    rows = np.ones((2**11, 2**10), np.float32)  # 8 MiB
    clients = ((str(i), {"x": rows}) for i in range(8))
    x = store.build(tmp_path / "a", clients).train.examples["x"]
    out = np.zeros_like(rows)
    memmap.gather(x, np.arange(2**11), out)
    before = resident()
    for first in range(0, len(x), 2**11):
        memmap.gather(x, np.arange(first, first + 2**11), out)
    assert resident() - before < 2**24
    x.sum()
    assert resident() - before > 2**25  # else the test could not tell


MODEL = models.logistic_regression(4, 3)
ALGORITHM = fedavg.make(
    fedavg.Config(client_lr=0.1, work=LocalWork(batch_size=4)), MODEL.loss
)


def classification():
    rng = np.random.default_rng(0)

    def split(most):
        return [
            {
                "x": rng.standard_normal((n, 4)).astype(np.float32),
                "y": rng.integers(3, size=n),  # int64: narrowed, so all are looked at
            }
            for n in rng.integers(0, most, 12)
        ]

    return FederatedData.from_lists(split(20), split(5))


@pytest.mark.parametrize("feed", ["host", "device"])
def test_training_from_a_store_gives_the_same_bits(tmp_path, feed):
    data = classification()
    store.save(data, tmp_path / "a")
    opened = store.open(tmp_path / "a")
    runs = [
        simulate(
            ALGORITHM, d, MODEL, rounds=4, cohort_size=5, progress=False, feed=feed
        )
        for d in (data, opened)
    ]
    for a, b in zip(*(jax.tree.leaves(r.params) for r in runs), strict=True):
        np.testing.assert_array_equal(a, b)
    for name, values in runs[0].train.items():
        np.testing.assert_array_equal(values, runs[1].train[name])


def test_a_run_resumes_from_a_store(tmp_path):
    data = classification()
    store.save(data, tmp_path / "a")
    opened = store.open(tmp_path / "a")
    assert run_dir.fingerprint(opened) == run_dir.fingerprint(data)

    def run(d, rounds, **kwargs):
        return simulate(
            ALGORITHM,
            d,
            MODEL,
            rounds=rounds,
            cohort_size=5,
            progress=False,
            feed="host",
            **kwargs,
        )

    run(data, 2, run_dir=tmp_path / "run")
    resumed = run(opened, 4, run_dir=tmp_path / "run", resume=True)
    whole = run(data, 4)
    for a, b in zip(
        *(jax.tree.leaves(r.params) for r in (resumed, whole)), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_ints_that_do_not_fit_are_found_in_a_store(tmp_path, monkeypatch):
    monkeypatch.setattr(memmap, "BLOCK", 64)
    y = np.zeros(100, np.int64)
    y[70] = 2**40
    opened = store.build(tmp_path / "a", [("a", {"x": np.zeros((100, 4)), "y": y})])
    with pytest.raises(
        ValueError, match=r"'y' must fit int32, got values in \[0, 10995"
    ):
        simulate(ALGORITHM, opened, MODEL, rounds=1, cohort_size=1, feed="host")
