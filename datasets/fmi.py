"""Finnish weather: temperatures of past days or hours, to predict the next.

Observations of the Finnish Meteorological Institute (FMI), as its site hands them out
(CSV files of one or more stations) or in one table for many, as the courses of Jung's
book have them: hourly (207 stations, 96 hours at New Year 2024), daily (202 stations,
93 days of 2025 and 2026), windows (192 stations, 10 windows of 2025 each).

Client key: the stations, by name. `coordinates` gives their places, for graphs.

Features: the last `window` values of every series, in degrees Celsius, series after
series, oldest first; 5 days of highest, then of lowest temperature, say. The target is
the next value of one of the series. Windows with a gap or with a missing time are left
out.

Normalisation: features are standardised with the mean and deviation of all stations'
train rows; the target stays in degrees.

Licence: CC BY 4.0, to be credited to the Finnish Meteorological Institute.

References:
  Finnish Meteorological Institute, open data, https://en.ilmatieteenlaitos.fi/open-data.

  Jung, "Federated Learning: From Theory to Practice", arXiv:2505.19183 (stations as the
  nodes of a graph).
"""

import datetime
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_core import check
from fedjax_core.data.packed import FederatedData
from fedjax_core.data.readers import csv_files, files
from fedjax_core.data.readers.files import DataFileError
from fedjax_core.datasets import tables

SOURCE = "https://en.ilmatieteenlaitos.fi/download-observations"

_WINDOW = 5  # of the ready windows
_OTHER_NAMES = {  # of columns, in lower case
    **{"observation station": "station", "name": "station"},
    **{"latitude": "lat", "longitude": "lon"},
    **{"timestamp": "time", "temp": "temperature_c", "time [local time]": "clock"},
    **{"m": "month", "d": "day"},
}


class _Series(NamedTuple):
    """Values over time: rows in the order of a file, all stations of one layout."""

    station: np.ndarray  # [n] str
    minute: np.ndarray  # [n] int64, since 1970
    values: dict[str, np.ndarray]  # series -> [n] float64, NaN for a gap


def load(
    path: Path | str,
    window: int = _WINDOW,
    target: str | None = None,
    test_fraction: float = 0.2,
    standardize: bool = True,
) -> FederatedData:
    """Loads windows of weather by station; arguments and errors as in `tables`.

    The header of a file tells its layout, in any case of letters. Station, lat, lon,
    time and temperature_c may also be called Name, Latitude, Longitude, Timestamp and
    temp:

    ======================  ==========================================================
    site                    Observation station, Year, Month, Day, Time [Local time],
                            then parameters with their units; "-" is a gap
    site, older             Year, m, d, Time, Time zone, then parameters; the station is
                            the file's name without its ending
    hourly                  station, time, temperature_c; rows in any order
    daily                   station, day, tmin, tmax; rows in any order
    windows                 station, tmax_1 to tmax_5, tmin_1 to tmin_5, y_tmax, y_tmin
    windows as lists        station, Tmax and Tmin as "[0.3, -1.9, -1.2, 5.4, 7.7]",
                            y_Tmax, y_Tmin
    ======================  ==========================================================

    - path: a file, gzipped or not, or a folder of site files (``*.csv``, ``*.csv.gz``),
      which are read together and have the same parameters.
    - window: number of past values, >= 1; ready windows have 5.
    - target: the series to predict, by default the first: "tmax" or "tmin" (daily and
      windows), "temperature_c" (hourly), or a parameter with "temperature" in its name
      (site). These are also the series that features are made from.
    - test_fraction: share of every station's windows that goes to test: the last ones
      in time; of ready windows, which tell no time, the last rows.

    One client per station, ``{"x": [n, window * num_series] float32, "y": [n]
    float32}``. A station without any whole window is left out. Where no station has
    one, the error says how long a window may be.
    """
    check.positive_int(window=window)
    path = Path(path)
    found = [path] if path.is_file() else []
    if path.is_dir():
        ends = "*.csv", "*.csv.gz"
        found = sorted(file for end in ends for file in files.visible_files(path, end))
    if not found:
        fetch = f"fetch observations from {SOURCE} and put them there"
        raise FileNotFoundError(f"no file {path} or *.csv in such a folder; {fetch}.")
    names = _columns(found[0])
    if "y_tmax" in names and not path.is_dir():
        check.one_of((_WINDOW,), window=window)
        check.one_of(("tmax", "tmin", None), target=target)
        station, x, y = _read_windows(path, names, target or "tmax")
    else:
        if path.is_dir():
            series = _merge([(file, _read_site(file)) for file in found])
        elif {"time", "temperature_c"} <= names.keys():
            series = _read_table(path, names, "time", ["temperature_c"])
        elif "tmin" in names:
            series = _read_table(path, names, "day", ["tmax", "tmin"])
        else:
            series = _read_site(path)
        check.one_of((*series.values, None), target=target)
        column = list(series.values).index(target) if target else 0
        station, x, y = _cut(found[0], series, window, column)
    test = tables.hold_out_last(station, test_fraction)
    return tables.population(station, test, x, y, standardize)


def coordinates(path: Path | str, stations: Sequence[str]) -> np.ndarray:
    """Where the stations are, [N, 2] latitude and longitude in degrees (WGS 84).

    `path` is a CSV file with columns station, lat and lon, or Name, Latitude and
    Longitude, as all but those of the site have them; `stations` are names,
    ``data.client_ids`` of what `load` returned. Those that the file does not have are
    at NaN, one that is listed at several places (it moved) at the last of them.
    """
    file = files.find(Path(path).parent, [Path(path).name], SOURCE)
    names = _columns(file)
    fields = {
        "station": csv_files.name,
        "lat": csv_files.optional(_degrees(90), ""),
        "lon": csv_files.optional(_degrees(180), ""),
    }
    table = _read(file, names, fields)
    rows = zip(*(table[c].tolist() for c in fields), strict=True)
    place = {name: where for name, *where in rows}
    return np.array([place.get(s, [math.nan] * 2) for s in stations]).reshape(-1, 2)


def _columns(file: Path) -> dict[str, str]:
    """Columns of a file under one name for all layouts -> as they are in the header."""
    first = files.read_bytes(file).split(b"\n", 1)[0]
    text = first.decode("utf-8-sig", errors="replace")
    header = [column.strip().strip('"') for column in text.split(",")]
    spelled = {c.lower(): c for c in header}
    return {_OTHER_NAMES.get(c, c): name for c, name in spelled.items()} | spelled


def _read(
    file: Path, names: dict[str, str], fields: dict[str, csv_files.Field]
) -> dict[str, np.ndarray]:
    """Columns by their names for all layouts."""
    table = csv_files.read(file, {names.get(c, c): f for c, f in fields.items()})
    return {c: table[names.get(c, c)] for c in fields}


def _degrees(limit: int) -> csv_files.Field:
    def parse(text: str) -> float:
        value = csv_files.number(text)
        if abs(value) > limit:
            raise ValueError(f"expected -{limit} to {limit} degrees")
        return value

    return parse


def _temperature(text: str) -> float:
    return math.nan if text in ("-", "") else csv_files.number(text)


def _minutes(text: str) -> int:
    """Minutes since 1970."""
    try:
        time = datetime.datetime.fromisoformat(text)
        if time.tzinfo is not None:
            time = time.astimezone(datetime.UTC).replace(tzinfo=None)
        return (time - datetime.datetime(1970, 1, 1)) // datetime.timedelta(minutes=1)
    except (ValueError, OverflowError):
        raise ValueError("expected a date, as 2023-12-28 (11:00:00)") from None


def _clock(text: str) -> int:
    """Minutes since midnight of "4:00" or "04:00"."""
    found = re.fullmatch(r"(\d\d?):(\d\d)(:00)?", text, re.ASCII)
    if not found or int(found[1]) > 23 or int(found[2]) > 59:
        raise ValueError("expected a time of day, as 04:00")
    return 60 * int(found[1]) + int(found[2])


def _list(text: str) -> list[float]:
    values = text.removeprefix("[").removesuffix("]").split(",")
    if len(values) != _WINDOW or len(text) != len(",".join(values)) + 2:
        raise ValueError(f"expected a list of {_WINDOW} numbers, as [0.3, -1.9, ...]")
    return [csv_files.number(value.strip()) for value in values]


def _read_table(
    file: Path, names: dict[str, str], time: str, series: list[str]
) -> _Series:
    fields = {"station": csv_files.name, time: _minutes}
    table = _read(file, names, fields | dict.fromkeys(series, _temperature))
    order = np.argsort(table[time], kind="stable")
    values = {c: table[c][order] for c in series}
    return _Series(table["station"][order], table[time][order], values)


def _read_site(file: Path) -> _Series:
    names = _columns(file)
    series = [c for c in names.values() if "temperature" in c.lower()]
    if not series:
        wanted = "the header of one of FMI's layouts with a temperature"
        found = ", ".join(names.values())
        raise DataFileError(file, "line 1", wanted, repr(found[:100]))
    new = "station" in names
    clock = "clock" if new else "time"
    fields = {
        **({"station": csv_files.name} if new else {}),
        **dict.fromkeys(("year", "month", "day"), csv_files.integer),
        clock: _clock,
    }
    names |= {c: c for c in series}
    spelled = {"year": "Year", "month": "Month", "day": "Day"}  # for the error
    table = _read(file, spelled | names, fields | dict.fromkeys(series, _temperature))
    days = []
    dates = np.stack([table[c] for c in ("year", "month", "day")], 1).tolist()
    for i, (year, month, day) in enumerate(dates, 1):
        problem = f"expected a date, found {year}-{month}-{day}."
        with files.named(file, f"row {i} of data", problem=problem):
            days.append(_minutes(f"{year:04d}-{month:02d}-{day:02d}"))
    # file.stem would leave the .csv of .csv.gz.
    alone = np.full(len(days), file.name.split(".csv")[0])
    return _Series(
        table["station"] if new else alone,
        np.array(days) + table[clock],
        {c: table[c] for c in series},
    )


def _merge(parts: list[tuple[Path, _Series]]) -> _Series:
    """Files of one folder: the same series, and no station in two of them."""
    first, series = parts[0]
    owner: dict[str, Path] = {}
    for file, part in parts:
        if list(part.values) != list(series.values):
            wanted = f"the temperatures of {first}, {', '.join(series.values)}"
            raise DataFileError(file, "line 1", wanted, ", ".join(part.values))
        for name in np.unique(part.station).tolist():
            if name in owner:
                problem = f"{name!r} is also in {owner[name]}."
                raise DataFileError(file, "stations", problem)
            owner[name] = file
    return _Series(
        np.concatenate([part.station for _, part in parts]),
        np.concatenate([part.minute for _, part in parts]),
        {c: np.concatenate([p.values[c] for _, p in parts]) for c in series.values},
    )


def _cut(
    file: Path, series: _Series, window: int, column: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Windows of consecutive times: station [n], x [n, window * k], y [n]."""
    names, client = np.unique(series.station, return_inverse=True)
    order = np.argsort(client, kind="stable")
    client, minute = client[order], series.minute[order]
    values = np.stack(list(series.values.values()), 1)[order]
    same = np.concatenate([[False], client[1:] == client[:-1]])
    steps = np.diff(minute, prepend=0)
    back = np.flatnonzero(same & (steps < 0))
    if back.size:
        station = names[client[back[0]]]
        problem = "expected rows in the order of time."
        raise DataFileError(file, f"station '{station}'", problem)
    # A repeated time is no step: local clocks have the hour twice in October.
    lengths, counts = np.unique(steps[same & (steps > 0)], return_counts=True)
    step = lengths[counts.argmax()] if len(lengths) else 0
    whole = np.asarray(~np.isnan(values).any(1))
    # A gap opens a run, so within a run only the first row can be one.
    run = np.cumsum(~same | (steps != step) | ~whole)
    start = np.flatnonzero((run[window:] == run[:-window]) & whole[:-window])
    if not len(start):
        longest = int(np.bincount(run[whole]).max(initial=0))
        most = f"window can be {longest - 1} at most"
        wanted = f"{window + 1} consecutive values somewhere"
        fits = most if longest > 1 else "no window fits"
        found = f"nowhere more than {longest}; {fits}"
        raise DataFileError(file, "all rows", wanted, found)
    cut = np.lib.stride_tricks.sliding_window_view(values, window + 1, axis=0)[start]
    x = cut[:, :, :-1].reshape(len(start), -1)
    return names[client[start]], x, cut[:, column, -1]


def _read_windows(
    file: Path, names: dict[str, str], target: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    fields = {"station": csv_files.name}
    fields |= dict.fromkeys(("y_tmax", "y_tmin"), csv_files.number)
    if "tmax_1" in names:
        lags = [f"{c}_{i + 1}" for c in ("tmax", "tmin") for i in range(_WINDOW)]
        fields |= dict.fromkeys(lags, csv_files.number)
    else:
        lags = ["tmax", "tmin"]
        fields |= dict.fromkeys(lags, _list)
    table = _read(file, names, fields)
    x = np.column_stack([table[c] for c in lags])
    return table["station"], x, table[f"y_{target}"]
