"""FMI weather: every layout written by the test, and the real stations."""

import collections
import csv
import datetime
import gzip
from pathlib import Path

import numpy as np
import pytest
from tests.datasets.mutations import survives

from fedjax_core.data.readers.files import DataFileError
from fedjax_core.datasets import fmi

REAL = Path(__file__).parents[2].parent / "shared" / "data" / "fmi_weather"

SITE = (
    '"Observation station","Year","Month","Day","Time [Local time]",'
    '"Average temperature [°C]","Wind speed [m/s]"\n'
)


def site(station="Åbo", values=(1, 2, 3, 4, 5), start=1):
    rows = [
        f'"{station}",2023,1,{start + i},"00:00",{value},-'
        for i, value in enumerate(values)
    ]
    return SITE + "\n".join(rows) + "\n"


DAILY = "station,lat,lon,day,tmin,tmax\n" + "".join(
    f"{station},60,25,2023-02-{day + 26:02d},{10 * k + day},{100 + 10 * k + day}\n"
    if day < 3
    else f"{station},60,25,2023-03-{day - 2:02d},{10 * k + day},{100 + 10 * k + day}\n"
    for k, station in enumerate("BA")
    for day in range(6)
)
HOURLY = "station,lat,lon,time,temperature_c\n" + "".join(
    f"A,60.5,25,2023-12-{28 + hour // 24} {hour % 24:02d}:00:00,{hour / 2}\n"
    for hour in range(30)
)
WINDOWS = (
    "station,lat,lon,tmax_1,tmax_2,tmax_3,tmax_4,tmax_5,"
    "tmin_1,tmin_2,tmin_3,tmin_4,tmin_5,y_tmax,y_tmin\n"
    "B,60,25,1,2,3,4,5,-1,-2,-3,-4,-5,6,-6\n"
    "B,60,25,2,3,4,5,6,-2,-3,-4,-5,-6,7,-7\n"
    "A,,,0,0,0,0,0,-9,-9,-9,-9,-9,9,-8\n"
)


def check(data):
    for split in data.splits.values():
        x, y = split.examples["x"], split.examples["y"]
        assert x.dtype == y.dtype == np.float32
        assert x.ndim == 2
        assert y.ndim == 1
        assert np.isfinite(x).all()
        assert np.isfinite(y).all()


def load(path, content, **options):
    path.write_text(content, encoding="utf-8")
    options = {"window": 2, "test_fraction": 0, "standardize": False} | options
    data = fmi.load(path, **options)
    check(data)
    return data


def test_a_file_of_the_site(tmp_path):
    content = site(values=(1, 2, "-", 4, 5.5, -6, 7)) + site("Vasa").removeprefix(SITE)
    data = load(tmp_path / "a.csv", content)
    assert data.client_ids == ("Vasa", "Åbo")
    assert data.train.client(0)["x"].tolist() == [[1, 2], [2, 3], [3, 4]]
    assert data.train.client(0)["y"].tolist() == [3, 4, 5]
    assert data.train.client(1)["x"].tolist() == [[4, 5.5], [5.5, -6]]
    assert data.train.client(1)["y"].tolist() == [-6, 7]


def test_an_older_file_of_the_site(tmp_path):
    content = "Year,m,d,Time,Time zone,Air temperature (degC)\n" + "".join(
        f"2021,4,{22 + hour // 24},{hour % 24}:00,UTC,{hour}\n"
        for hour in range(22, 27)
    )
    data = load(tmp_path / "Turku.csv.gz", content)
    assert data.client_ids == ("Turku",)
    assert data.train.examples["x"].tolist() == [[22, 23], [23, 24], [24, 25]]
    assert data.train.examples["y"].tolist() == [24, 25, 26]


def test_a_folder_of_the_site(tmp_path):
    (tmp_path / "b.csv").write_text(site("B"), encoding="utf-8")
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(site("A", range(9)).encode()))
    data = fmi.load(tmp_path, window=2, test_fraction=0.25, standardize=False)
    assert data.client_ids == ("A", "B")
    assert data.train.sizes.tolist() == [5, 2]
    # The last windows in time are for testing.
    assert data.splits["test"].client(0)["y"].tolist() == [7, 8]
    assert data.splits["test"].client(1)["y"].tolist() == [5]
    (tmp_path / "c.csv").write_text(site("B"), encoding="utf-8")
    with pytest.raises(
        DataFileError, match=r"c\.csv, stations: 'B' is also in .*b\.csv"
    ):
        fmi.load(tmp_path)
    other = site("C").replace("Average temp", "Ground temp")
    (tmp_path / "c.csv").write_text(other, encoding="utf-8")
    with pytest.raises(
        DataFileError, match=r"c\.csv, line 1: expected the temperatures"
    ):
        fmi.load(tmp_path)


def test_daily_windows_stop_at_missing_days(tmp_path):
    path = tmp_path / "daily.csv"
    data = load(path, DAILY, window=5)
    assert data.client_ids == ("A", "B")
    # tmax of five days, then tmin, over the end of February.
    expected = [*range(110, 115), *range(10, 15)]
    assert data.train.client(0)["x"].tolist() == [expected]
    assert data.train.client(0)["y"].tolist() == [115]
    assert load(path, DAILY, target="tmin").train.client(0)["y"].tolist() == [
        *(12, 13, 14, 15),
    ]
    gap = DAILY.replace("A,60,25,2023-02-28,12,112\n", "")
    assert load(path, gap).train.client(0)["y"].tolist() == [115]
    gap = DAILY.replace(",12,112\n", ",,112\n")
    assert load(path, gap).train.client(0)["y"].tolist() == [115]


def test_hourly(tmp_path):
    data = load(tmp_path / "hourly.csv", HOURLY, window=24)
    np.testing.assert_array_equal(data.train.examples["x"][5], np.arange(5, 29) / 2)
    assert data.train.examples["y"].tolist() == [12, 12.5, 13, 13.5, 14, 14.5]


@pytest.mark.parametrize(
    ("target", "expected"), [("tmax", [9, 6, 7]), ("tmin", [-8, -6, -7])]
)
def test_ready_windows(tmp_path, target, expected):
    data = load(tmp_path / "w.csv", WINDOWS, window=5, target=target)
    assert data.client_ids == ("A", "B")
    assert data.train.examples["y"].tolist() == expected
    assert data.train.examples["x"][1].tolist() == [1, 2, 3, 4, 5, -1, -2, -3, -4, -5]


def test_the_hourly_table_of_the_course_has_its_rows_in_any_order(tmp_path):
    rows = [
        f"60.5,25,2023-12-28 {hour:02d}:00:00,{sign * hour / 2},{name}\n"
        for name, sign in (("B", 1), ("A", -1))
        for hour in range(6)
    ]
    order = np.random.default_rng(0).permutation(len(rows))
    header = "Latitude,Longitude,Timestamp,temp,name\n"
    path = tmp_path / "course.csv"
    data = load(path, header + "".join(rows[i] for i in order), window=4)
    assert data.client_ids == ("A", "B")
    assert data.train.client(0)["x"].tolist() == [
        [0, -0.5, -1, -1.5],
        [-0.5, -1, -1.5, -2],
    ]
    assert data.train.client(1)["y"].tolist() == [2, 2.5]
    np.testing.assert_array_equal(fmi.coordinates(path, ["A"]), [[60.5, 25]])


def test_windows_as_lists_are_those_in_columns(tmp_path):
    text = "Name,Latitude,Longitude,Tmax,Tmin,y_Tmax,y_Tmin\n"
    for line in WINDOWS.splitlines()[1:]:
        name, lat, lon, *lags, y_tmax, y_tmin = line.split(",")
        tmax, tmin = (f'"[{", ".join(part)}]"' for part in (lags[:5], lags[5:]))
        text += f"{name},{lat},{lon},{tmax},{tmin},{y_tmax},{y_tmin}\n"
    for target in ("tmax", "tmin"):
        options = {"window": 5, "target": target, "test_fraction": 0.5}
        lists = load(tmp_path / "lists.csv", text, **options)
        columns = load(tmp_path / "columns.csv", WINDOWS, **options)
        for name, split in columns.splits.items():
            for key, values in split.examples.items():
                np.testing.assert_array_equal(lists.splits[name].examples[key], values)
    places = fmi.coordinates(tmp_path / "lists.csv", ["B", "A"])
    np.testing.assert_array_equal(places, [[60, 25], [np.nan] * 2])
    for wrong in ("[0, 0, 0, 0]", "0, 0, 0, 0, 0", "[0, 0, 0, 0, x]"):
        with pytest.raises(DataFileError, match="line 4, column 'Tmax': expected a"):
            load(
                tmp_path / "lists.csv", text.replace("[0, 0, 0, 0, 0]", wrong), window=5
            )


@pytest.mark.parametrize(
    "content",
    ["Station,lat,lon\nB,60.1,25.2\n", "station_id,station,lat,lon\n7,B,60.1,25.2\n"],
)
def test_tables_of_stations_say_where_they_are(tmp_path, content):
    path = tmp_path / "stations.csv"
    path.write_text(content, encoding="utf-8")
    np.testing.assert_array_equal(fmi.coordinates(path, ["B"]), [[60.1, 25.2]])


@pytest.mark.parametrize("gap", [True, False])
def test_the_error_says_the_longest_window_that_fits(tmp_path, gap):
    # Five days, as in the course's exercise; or six, of which the first has a gap.
    first = 1 if gap else 0
    rows = [
        f"A,60,25,2026-01-{day:02d},{'' if day == first else day},{-day}\n"
        for day in range(1, 6 + first)
    ]
    path = tmp_path / "five.csv"
    content = "station,lat,lon,day,tmax,tmin\n" + "".join(rows)
    with pytest.raises(DataFileError, match="more than 5; window can be 4 at most"):
        load(path, content, window=5)
    data = load(path, content, window=4)
    assert data.train.examples["y"].tolist() == [5 + first]
    with pytest.raises(DataFileError, match="no window fits"):
        load(path, "station,day,tmax,tmin\nA,2026-01-01,1,2\n", window=1)


def test_hidden_files_of_a_folder_are_not_read(tmp_path):
    (tmp_path / "a.csv").write_text(site("A"), encoding="utf-8")
    (tmp_path / "._a.csv").write_bytes(b"\0\5\x16\7")
    (tmp_path / "._a.csv.gz").write_bytes(b"\0\5\x16\7")
    assert fmi.load(tmp_path, window=2).client_ids == ("A",)


def test_features_are_standardised_with_train_rows(tmp_path):
    path = tmp_path / "a.csv"
    raw = load(path, site(values=(1, 5, 2, 8, 3, 9)), test_fraction=0.5)
    data = fmi.load(path, window=2, test_fraction=0.5)
    train = raw.train.examples["x"]
    for name, split in data.splits.items():
        expected = (raw.splits[name].examples["x"] - train.mean(0)) / train.std(0)
        np.testing.assert_allclose(split.examples["x"], expected, 1e-5)
        np.testing.assert_array_equal(
            split.examples["y"], raw.splits[name].examples["y"]
        )


def test_the_hour_that_comes_twice_in_october_ends_a_window(tmp_path):
    rows = [
        f"A,2023,10,29,{t},{i},-"
        for i, t in enumerate(("02:00", "03:00", "03:00", "04:00", "05:00"))
    ]
    data = load(tmp_path / "a.csv", SITE + "\n".join(rows))
    assert data.train.examples["y"].tolist() == [4]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "line 1: expected the header of one of FMI's layouts"),
        ("a,b\n1,2\n", "line 1: expected the header of one of FMI's layouts"),
        ("a,temperature\n1,2\n", "line 1: expected a header with 'Year' once"),
        (SITE, "line 1: expected rows of data, found none"),
        (
            site().replace(",2023,1,3,", ",2023,2,30,"),
            "row 3 of data: .*found 2023-2-30",
        ),
        (
            site().replace("00:00", "24:00"),
            r"'Time \[Local time\]': expected a time of",
        ),
        (
            site(values=(1, "cold")),
            r"line 3, column 'Average temperature .*found 'cold'",
        ),
        (site().replace(",-\n", "\n", 1), "line 2: expected 7 fields, found 6"),
        (
            site() + site(start=3).removeprefix(SITE),
            "station 'Åbo': expected rows in the order",
        ),
        (site(values=(1, 2)), "expected 3 consecutive values somewhere, found nowhere"),
        (HOURLY.replace("28 00", "32 00"), "line 2, column 'time': expected a date"),
        (DAILY.replace("02-27", "27.02."), "line 3, column 'day': expected a date"),
    ],
)
def test_errors_name_the_line_and_the_column(tmp_path, content, message):
    with pytest.raises(DataFileError, match=message) as raised:
        load(tmp_path / "a.csv", content)
    assert "a.csv" in str(raised.value)


def test_other_encodings_are_refused(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(site(), encoding="latin-1")
    with pytest.raises(DataFileError, match=r"line 1, byte \d+: expected utf-8 text"):
        fmi.load(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window must be >= 1"),
        ({"test_fraction": -1}, "test_fraction must be in"),
        ({"target": "rain"}, "target must be one of 'Average temperature"),
    ],
)
def test_wrong_arguments(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "a.csv", site(), **options)
    with pytest.raises(ValueError, match="window must be one of 5"):
        load(tmp_path / "w.csv", WINDOWS, window=4)


def test_missing_files_say_where_to_get_them(tmp_path):
    for path in (tmp_path, tmp_path / "none.csv"):
        with pytest.raises(FileNotFoundError, match="fetch observations from"):
            fmi.load(path)
    with pytest.raises(FileNotFoundError, match=r"none\.csv; fetch it from"):
        fmi.coordinates(tmp_path / "none.csv", ["A"])


def test_coordinates_follow_the_clients(tmp_path):
    path = tmp_path / "w.csv"
    path.write_text(WINDOWS, encoding="utf-8")
    got = fmi.coordinates(path, ["B", "A", "elsewhere"])
    np.testing.assert_array_equal(got, [[60, 25], [np.nan] * 2, [np.nan] * 2])
    path.write_text(WINDOWS.replace("B,60", "B,91"), encoding="utf-8")
    with pytest.raises(DataFileError, match="line 2, column 'lat': expected -90 to 90"):
        fmi.coordinates(path, ["B"])


@pytest.mark.parametrize(
    "content", [site("A", range(9)), HOURLY, DAILY, WINDOWS], ids=["s", "h", "d", "w"]
)
def test_damaged_files_give_named_errors_or_good_data(tmp_path, content):
    path = tmp_path / "a.csv"
    path.write_text(content, encoding="utf-8")
    assert survives(path, lambda: fmi.load(path), check) > 30


def real(name):
    if not REAL.is_dir():
        pytest.skip(f"no {REAL}")
    data = fmi.load(REAL / name)
    check(data)
    places = fmi.coordinates(REAL / name, data.client_ids)
    unknown = np.isnan(places).any(1)
    # Within Finland.
    assert np.all((places > [59, 19]) & (places < [71, 32]), axis=1)[~unknown].all()
    return data, unknown.sum()


def test_the_real_windows():
    data, unknown = real("fmi_windows_2025.csv.gz")
    assert (data.num_clients, unknown) == (192, 0)
    assert set(data.train.sizes) == {8}
    assert set(data.splits["test"].sizes) == {2}


@pytest.mark.parametrize(
    ("name", "column", "hours"),
    [("fmi_daily.csv.gz", "day", 24), ("fmi_hourly_2023_12.csv.gz", "time", 1)],
)
def test_the_real_series(name, column, hours):
    data, _ = real(name)
    # Counted here with the standard library: a time and the five before it are there.
    times = collections.defaultdict(set)
    with gzip.open(REAL / name, "rt", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            time = datetime.datetime.fromisoformat(row[column])
            times[row["station"]].add(time)
    step = datetime.timedelta(hours=hours)
    windows = {
        station: sum(all(t - i * step in seen for i in range(6)) for t in seen)
        for station, seen in times.items()
    }
    sizes = np.sum([split.sizes for split in data.splits.values()], axis=0)
    assert dict(zip(data.client_ids, sizes.tolist(), strict=True)) == {
        station: count for station, count in windows.items() if count
    }
