"""What a run directory covers comes back as it was, or an error says what is wrong."""

import errno
import json
import os
import shutil
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core import FederatedData, Packed, RunDirError, run_dir
from fedjax_core.history import History
from fedjax_core.run_dir import RunDir

SEEDS, NAMES, ROUNDS = (3, 5), ('a,"b"', "two\nlines", " größe "), 6
CONFIG = {"record": {"rounds": 2, "x": 1}, "algorithm": {"rounds": 3}}
EVERY = {"evaluation": 2, "checkpoint": 3}


def drive(path: Path, rounds: int = ROUNDS, stop: int = ROUNDS, **config):
    """Runs a small system through what a driver does; returns its result."""
    recorder = RunDir(path, {"rounds": rounds} | CONFIG | config, resume=True)
    try:
        history, state = History(SEEDS, NAMES), {"w": jnp.ones((2, 3)), "b": np.ones(2)}
        history.load(recorder)
        if recorder.round:
            state = recorder.restore(state)
        for done in range(history.rounds + 1, min(rounds, stop) + 1):
            state = jax.tree.map(lambda x: x * 0.9 + 0.1, state)
            loss = np.asarray(state["w"]).mean(1) + done
            failure = np.zeros((1, 2, 3), int)
            failure[0, 1, done % 3] = done % 2
            history.add_rounds({"train_loss": loss[None], "failure": failure})
            if done % EVERY["evaluation"] == 0:
                per_client = {"loss/5": np.outer(loss, [1, 2, 3])}
                history.add_evaluation({"loss": loss + 1}, per_client)
            history.save(recorder)
            if done % EVERY["checkpoint"] == 0 or done == rounds:
                recorder.save(done, state)
        return history.result(state)
    finally:
        recorder.close()


def assert_same(a, b):
    a, b = (jax.tree.map(np.asarray, vars(result)) for result in (a, b))
    np.testing.assert_equal(a, b)


def assert_same_files(a: Path, b: Path):
    for pattern in ("*.csv", "*.npz", "config.json"):
        names = sorted(path.name for path in b.glob(pattern))
        assert sorted(path.name for path in a.glob(pattern)) == names
        for name in names:
            assert (a / name).read_bytes() == (b / name).read_bytes(), name


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run with checkpoints of rounds 3 and 6, and its result."""
    path = tmp_path_factory.mktemp("runs") / "run"
    return drive(path), path


@pytest.fixture
def copy(finished, tmp_path):
    return shutil.copytree(finished[1], tmp_path / "copy")


# ---- death at any moment ----


def test_death_at_any_write_is_survived(finished, tmp_path, monkeypatch):
    """A copy of the directory at every write, torn, is what a death there leaves."""
    write, save = run_dir._write, RunDir.save
    copies = []

    def leave():
        copies.append(tmp_path / f"death {len(copies)}")
        shutil.copytree(tmp_path / "run", copies[-1])

    def torn_write(path, mode, content):
        before = path.read_bytes() if "a" in mode and path.exists() else b""
        path.write_bytes(before + content[: 2 * len(content) // 3])
        leave()
        path.write_bytes(before)
        write(path, mode, content)

    def save_after_death(self, round, tree):
        leave()
        save(self, round, tree)

    monkeypatch.setattr(run_dir, "_write", torn_write)
    monkeypatch.setattr(RunDir, "save", save_after_death)
    whole = drive(tmp_path / "run")
    assert_same(whole, finished[0])
    monkeypatch.undo()
    # config, versions; six rounds, three evaluations with client metrics, three rounds
    # that exclude someone; two checkpoints, their client metrics and what they cover.
    assert len(copies) == 2 + 6 + 2 * 3 + 3 + 3 * 2
    for copy in copies:
        assert_same(drive(copy), whole)
        assert_same_files(copy, tmp_path / "run")


# ---- damage ----


def flip(path: Path, place: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1 << int(place * 64) % 8
    path.write_bytes(content)


def test_no_flipped_bit_gives_another_result(finished, tmp_path):
    whole, path = finished
    files = [file for file in (path / "checkpoints/6").rglob("*") if file.is_file()]
    assert len(files) >= 10
    damaged = tmp_path
    for i, file in enumerate(sorted(files)):
        damaged = shutil.copytree(path, tmp_path / f"{i}")
        name = file.relative_to(path)
        flip(damaged / name, (i + 0.5) / len(files))
        with pytest.raises(RunDirError, match=f"{name} is damaged") as error:
            drive(damaged)
        assert f"remove {damaged}/checkpoints/6 to go on from round 3" in str(
            error.value
        )
    shutil.rmtree(damaged / "checkpoints/6")
    assert_same(drive(damaged), whole)
    assert_same_files(damaged, path)


def test_numbers_of_another_checkpoint_are_noticed(copy, tmp_path):
    drive(tmp_path / "other", stop=3, rounds=3)
    shutil.rmtree(copy / "checkpoints/6/default")
    other = tmp_path / "other/checkpoints/3/default"
    shutil.copytree(other, copy / "checkpoints/6/default")
    with pytest.raises(RunDirError, match=r"checkpoints/6/default/.* is damaged"):
        drive(copy)


def test_without_another_checkpoint_the_error_says_so(tmp_path):
    drive(tmp_path, stop=3)
    for file in (tmp_path / "checkpoints/3/default").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(RunDirError, match="put it back from a copy or name a new dir"):
        drive(tmp_path)


def lines(change):
    def damage(path):
        path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))

    return damage


@pytest.mark.parametrize("table", ["metrics", "evaluations", "excluded"])
@pytest.mark.parametrize(
    "damage",
    [
        Path.unlink,
        lambda path: path.write_bytes(b""),
        lines(lambda rows: rows[:-1]),
        lines(lambda rows: [*rows[:-1], rows[-1][:-2]]),
        lines(lambda rows: rows[1:]),
        lines(lambda rows: [*rows[:2], *rows[1:]]),
        lines(lambda rows: [rows[0], rows[2], rows[1], *rows[3:]]),
        lines(lambda rows: [rows[0].replace(b"seed", b"sead"), *rows[1:]]),
        lines(lambda rows: [*rows[:-1], rows[-1].replace(b"5", b"6", 1)]),
    ],
    ids=[
        "missing",
        "empty",
        "short",
        "torn",
        "headless",
        "doubled",
        "swapped",
        "header",
        "value",
    ],
)
def test_a_damaged_table_is_an_error(table, damage, copy):
    damage(copy / f"{table}.csv")
    before = {p: p.read_bytes() for p in copy.glob("*.csv")}
    with pytest.raises(RunDirError, match=rf"{table}\.csv .*(copy|from round 3)"):
        drive(copy)
    assert before == {p: p.read_bytes() for p in copy.glob("*.csv")}


def test_damage_after_an_earlier_checkpoint_can_be_passed_by(copy, finished):
    lines(lambda rows: rows[:-1])(copy / "metrics.csv")
    with pytest.raises(RunDirError, match=r"6 to go on from round 3, whose"):
        drive(copy)
    shutil.rmtree(copy / "checkpoints/6")
    assert_same(drive(copy), finished[0])
    assert_same_files(copy, finished[1])


def test_client_metrics_are_cut_back_with_the_tables(copy, tmp_path):
    expected = drive(tmp_path / "cut", stop=3)
    assert expected.evaluated.tolist() == [2]
    shutil.rmtree(copy / "checkpoints/6")
    assert_same(drive(copy, stop=3), expected)
    assert_same_files(copy, tmp_path / "cut")


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"PK")])
def test_client_metrics_are_put_back(damage, copy, finished):
    damage(copy / "client_metrics.npz")
    assert_same(drive(copy), finished[0])
    assert_same_files(copy, finished[1])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b'{"rounds": 6', r"config\.json is not JSON .* from a copy"),
        ("config.json", b"[]", r"config\.json is not JSON .* no dict"),
        ("versions.json", b"[{", r"versions\.json is not JSON .* remove it"),
        ("versions.json", b"{}", r"versions\.json is not JSON .* no list"),
    ],
)
def test_damaged_json_is_an_error(name, content, message, copy):
    (copy / name).write_bytes(content)
    with pytest.raises(RunDirError, match=message):
        drive(copy)


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"7", b'{"crc32": %d}'])
def test_a_damaged_list_of_what_a_checkpoint_covers_is_an_error(content, copy):
    if b"%d" in content:  # whole, but it covers nothing
        content %= zlib.crc32(b"{}")
    (copy / "checkpoints/6/covered.json").write_bytes(content)
    with pytest.raises(
        RunDirError, match=r"covered\.json is damaged.*remove .*/6 to go"
    ):
        drive(copy)


@pytest.mark.parametrize("name", ["6.bak", "6 (copy)", "old"])
def test_copies_of_a_checkpoint_may_lie_beside_it(name, copy, finished):
    aside = shutil.copytree(copy / "checkpoints/6", copy / "checkpoints" / name)
    (aside / "covered.json").unlink()
    assert_same(drive(copy), finished[0])
    shutil.copy(copy / "checkpoints/6/covered.json", aside)
    assert_same(drive(copy), finished[0])


@pytest.mark.parametrize("inside", ["", "run"])
def test_a_file_is_no_run_directory(inside, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(RunDirError, match=r"is no directory|Not a directory"):
        drive(tmp_path / "file" / inside)


def test_clients_may_have_any_name(tmp_path):
    names = ("a\r", "\rb,\n\r\n", '"\ud800\x00', "", " c\t", "\x85\u2028")
    history = History((0,), names)
    recorder = RunDir(tmp_path, {}, resume=True)
    for at in range(2):
        failure = np.eye(6, dtype=int)[None, at::2].max(1, keepdims=True)
        history.add_rounds({"loss": np.zeros((1, 1)), "failure": failure})
        history.save(recorder)
    recorder.save(2, {"w": np.zeros(2)})
    recorder.close()
    again, recorder = History((0,), names), RunDir(tmp_path, {}, resume=True)
    again.load(recorder)
    recorder.close()
    assert again.excluded == history.excluded
    assert {e.client_id for e in again.excluded} == set(names)


def test_a_run_does_not_start_over_where_its_checkpoints_are_gone(copy):
    shutil.rmtree(copy / "checkpoints")
    before = (copy / "metrics.csv").read_bytes()
    with pytest.raises(RunDirError, match=r"checkpoints is missing; put it back"):
        drive(copy)
    assert (copy / "metrics.csv").read_bytes() == before


# ---- no room, no permission ----


@pytest.mark.parametrize("bytes_left", [40, 300, 600])
def test_a_full_disk_is_one_error_and_the_run_goes_on(bytes_left, finished, tmp_path):
    resource = pytest.importorskip("resource")  # not on Windows
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_left, limits[1]))
    try:
        with pytest.raises(RunDirError, match=r"can't be written: .*resume=True"):
            drive(tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_same(drive(tmp_path / "run"), finished[0])


@pytest.fixture
def read_only(monkeypatch):
    """Makes every folder as if it lay on read-only storage, for any user."""

    def refuse(path, mode="r", *args, real=open, **kwargs):
        if set(mode) & set("wax+"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, mode, *args, **kwargs)

    def locked():
        monkeypatch.setattr("builtins.open", refuse)

    return locked


def test_a_finished_run_is_read_from_read_only_storage(copy, finished, read_only):
    before = {p: p.stat().st_mtime_ns for p in copy.rglob("*")}
    read_only()
    assert_same(drive(copy), finished[0])
    assert before == {p: p.stat().st_mtime_ns for p in copy.rglob("*")}
    with pytest.raises(RunDirError, match="can't be written to: Read-only file system"):
        drive(copy, rounds=7, stop=7)


# ---- what is there ----


def test_a_directory_of_something_else_is_left_alone(tmp_path):
    table = tmp_path / "metrics.csv"
    table.write_text("round,loss\n1,0.5\n")
    with pytest.raises(RunDirError, match="no run directory"):
        drive(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.csv"]
    assert table.read_text() == "round,loss\n1,0.5\n"


def test_a_directory_is_not_overwritten(copy):
    with pytest.raises(RunDirError, match="not empty; pass resume=True"):
        RunDir(copy, {"rounds": ROUNDS} | CONFIG, resume=False)


def test_two_runs_do_not_share_a_directory(tmp_path):
    first = RunDir(tmp_path, CONFIG, resume=False)
    with pytest.raises(RunDirError, match="in use"):
        RunDir(tmp_path, CONFIG, resume=True)
    first.close()
    RunDir(tmp_path, CONFIG, resume=True).close()


@pytest.mark.parametrize("row", [0, 30_001, 59_999])
def test_any_other_value_is_other_data(row):
    labels = np.zeros(60_000, np.int32)
    other = labels.copy()
    other[row] = 1
    first, second = (
        run_dir.fingerprint(FederatedData(Packed({"y": y}, np.array([0, 60_000]))))
        for y in (labels, other)
    )
    assert first["checksum"] != second["checksum"]


def test_versions_are_noted_where_they_change(copy):
    path = copy / "versions.json"
    path.write_text(path.read_text().replace(jax.__version__, "0.0.1"))
    for _ in range(2):
        drive(copy)
    first, second = json.loads(path.read_text())
    assert (first["jax"], second["jax"]) == ("0.0.1", jax.__version__)


# ---- what is compared ----


def test_settings_of_jax_are_part_of_a_run(copy, finished):
    with (
        jax.default_prng_impl("rbg"),
        pytest.raises(
            RunDirError,
            match=r"settings\.jax_default_prng_impl = 'threefry2x32', got 'rbg'",
        ),
    ):
        drive(copy)
    with (
        jax.enable_x64(True),
        pytest.raises(RunDirError, match=r"settings\.jax_enable_x64 = False, got True"),
    ):
        drive(copy)
    assert_same(drive(copy), finished[0])


def test_the_rounds_of_a_run_may_change(copy, finished):
    assert_same(drive(copy, record={"rounds": 3, "x": 1}), finished[0])
    assert drive(copy, rounds=7, stop=7).rounds == 7


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"record": {"rounds": 2, "x": 2}}, r"record\.x = 1, got 2"),
        ({"algorithm": {"rounds": 4}}, r"algorithm\.rounds = 3, got 4"),
        ({"rounds": 5}, "holds 6 rounds, more than rounds=5"),
        ({"more": list(range(99))}, r"more = nothing, got \[0, 1, .*\.\.\.; resume"),
    ],
)
def test_nothing_else_may_change(config, message, copy):
    before = (copy / "config.json").read_bytes()
    with pytest.raises(RunDirError, match=message):
        drive(copy, **config)
    assert (copy / "config.json").read_bytes() == before


def test_what_can_not_be_recorded_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(TypeError, match=r"config\.record\.x must be a value to record"):
        RunDir(tmp_path / "run", {"record": {"x": (i for i in "ab")}}, resume=False)
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_another_state_names_the_leaf(copy):
    recorder = RunDir(copy, {"rounds": ROUNDS} | CONFIG, resume=True)
    state = {"w": jnp.ones((2, 3)), "b": np.ones(2)}
    for other, found in [
        (
            state | {"w": jnp.ones((2, 4))},
            r"\['w'\] is float32\[2, 3\], got float32\[2, 4\]",
        ),
        (
            state | {"b": np.ones(2, np.float32)},
            r"\['b'\] is float64\[2\], got float32",
        ),
        (
            state | {"w": jnp.ones((2, 4))},
            r"\['w'\] is float32\[2, 3\], got float32\[2, 4\]",
        ),
        (
            state | {"b": np.ones(2, np.float32)},
            r"\['b'\] is float64\[2\], got float32\[2\]",
        ),
        (state | {"c": np.ones(2)}, r"\['c'\] is nothing, got float64\[2\]"),
    ]:
        with pytest.raises(RunDirError, match=f"another model.*: {found}"):
            recorder.restore(other)
    recorder.close()


def test_leaves_of_every_kind_come_back(tmp_path):
    state = {
        "key": jax.random.key(3),
        "half": jnp.array([1.5, -2], jnp.bfloat16),
        "flag": np.array(True),
        "list": [jnp.int32(4), (np.arange(3, dtype=np.uint8),)],
    }
    recorder = RunDir(tmp_path, {}, resume=False)
    recorder.save(1, state)
    recorder.close()
    recorder = RunDir(tmp_path, {}, resume=True)
    back = recorder.restore(state)
    recorder.close()
    assert jax.tree.structure(back) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True):
        assert a.dtype == b.dtype
        a, b = (
            jax.random.key_data(x) if x is state["key"] or x is back["key"] else x
            for x in (a, b)
        )
        np.testing.assert_array_equal(a, b)
