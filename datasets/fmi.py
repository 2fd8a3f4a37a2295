"""Finnish weather: temperatures of past days or hours, to predict the next.

Observations of the Finnish Meteorological Institute (FMI), as its site hands them out
(CSV files of one or more stations) or rearranged in one table for many: hourly (207
stations, 96 hours at New Year 2024), daily (202 stations, 93 days of 2025 and 2026),
windows (192 stations, 10 windows of 2025 each).

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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_core import check
from fedjax_core.data.packed import FederatedData
from fedjax_core.data.readers import csv_files, files
from fedjax_core.data.readers.files import DataFileError, read_bytes
from fedjax_core.datasets import tables

SOURCE = "https://en.ilmatieteenlaitos.fi/download-observations"

_WINDOW = 5  # of the rearranged windows


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
    """Loads windows of weather by station.

    The header of a file tells its layout:

    ======================  ==========================================================
    site                    Observation station, Year, Month, Day, Time [Local time],
                            then parameters with their units; "-" is a gap
    site, older             Year, m, d, Time, Time zone, then parameters; the station is
                            the file's name without its ending
    hourly                  station, lat, lon, time, temperature_c
    daily                   station, lat, lon, day, tmin, tmax
    windows                 station, lat, lon, tmax_1 to tmax_5, tmin_1 to tmin_5,
                            y_tmax, y_tmin
    ======================  ==========================================================

    Args:
      path: a file, gzipped or not, or a folder of site files (``*.csv``,
        ``*.csv.gz``), which are read together and have the same parameters.
      window: number of past values, >= 1; the windows layout has 5.
      target: the series to predict, by default the first: "tmax" or "tmin" (daily and
        windows), "temperature_c" (hourly), or a parameter with "temperature" in its
        name (site). These are also the series that features are made from.
      test_fraction: share of every station's windows that goes to test: the last ones
        in time; in the windows layout, which tells no time, the last rows.
      standardize: scale the features as the module says.

    Returns:
      Train and, unless test_fraction is 0, test of one client per station, each
      ``{"x": [n, window * num_series] float32, "y": [n] float32}``. A station without
      any whole window is left out.

    Raises:
      FileNotFoundError: no file; says where to get it.
      DataFileError: a file is not as it should be; names the line and the column.
      ValueError: window, target or test_fraction out of range.
      TypeError: window is not an int.
    """
    check.positive_int(window=window)
    check.in_range(0, 1, test_fraction=test_fraction)
    path = Path(path)
    if path.is_dir():
        found = sorted([*path.glob("*.csv"), *path.glob("*.csv.gz")])
    else:
        found = [path] if path.is_file() else []
    if not found:
        raise FileNotFoundError(
            f"no file {path} and no *.csv in such a folder; fetch observations from "
            f"{SOURCE} and put them there."
        )
    header = _header(found[0])
    if "tmax_1" in header and not path.is_dir():
        check.one_of((_WINDOW,), window=window)
        check.one_of(("tmax", "tmin", None), target=target)
        station, x, y = _read_windows(path, target or "tmax")
    else:
        if path.is_dir():
            series = _merge([(file, _read_site(file)) for file in found])
        elif "temperature_c" in header:
            series = _read_hourly(path)
        elif "tmin" in header:
            series = _read_daily(path)
        else:
            series = _read_site(path)
        names = list(series.values)
        check.one_of((*names, None), target=target)
        column = names.index(target) if target else 0
        station, x, y = _cut(found[0], series, window, column)
    test = _last(station, test_fraction)
    if standardize:
        x = tables.standardize(x, ~test)
    return tables.by_client(
        station, test, {"x": x.astype(np.float32), "y": y.astype(np.float32)}
    )


def coordinates(path: Path | str, stations: Sequence[str]) -> np.ndarray:
    """Where the stations are.

    Args:
      path: a CSV file with columns station, lat and lon, such as the rearranged ones.
      stations: names, ``data.client_ids`` of what `load` returned.

    Returns:
      [N, 2] float64, latitude and longitude in degrees (WGS 84), NaN where the file has
      none. A station listed at several places (it moved) is at the last of them.

    Raises:
      FileNotFoundError: there is no such file.
      DataFileError: the file is not as it should be; names the line and the column.
    """
    path = Path(path)
    table = csv_files.read(
        files.find(path.parent, [path.name], SOURCE),
        {
            "station": csv_files.name,
            "lat": csv_files.optional(_degrees(90), ""),
            "lon": csv_files.optional(_degrees(180), ""),
        },
    )
    columns = (table["station"].tolist(), table["lat"], table["lon"])
    place = {name: (lat, lon) for name, lat, lon in zip(*columns, strict=True)}
    return np.array([place.get(s, (math.nan, math.nan)) for s in stations]).reshape(
        -1, 2
    )


def _degrees(limit: int) -> csv_files.Field:
    def parse(text: str) -> float:
        value = csv_files.number(text)
        if abs(value) > limit:
            raise ValueError(f"expected -{limit} to {limit} degrees")
        return value

    return parse


def _header(file: Path) -> list[str]:
    first = read_bytes(file).split(b"\n", 1)[0]
    text = first.decode("utf-8-sig", errors="replace")
    return [column.strip().strip('"') for column in text.split(",")]


def _minutes(parse: Callable[[str], datetime.datetime]) -> csv_files.Field:
    """Minutes since 1970 of a date that `parse` reads."""

    def field(text: str) -> int:
        try:
            return _since_1970(parse(text))
        except (ValueError, OverflowError):
            raise ValueError("expected a date, as 2023-12-28 (11:00:00)") from None

    return field


def _since_1970(time: datetime.datetime) -> int:
    if time.tzinfo is not None:
        time = time.astimezone(datetime.UTC).replace(tzinfo=None)
    return (time - datetime.datetime(1970, 1, 1)) // datetime.timedelta(minutes=1)


def _read_hourly(file: Path) -> _Series:
    time = _minutes(datetime.datetime.fromisoformat)
    fields = {
        "station": csv_files.name,
        "time": time,
        "temperature_c": csv_files.optional(csv_files.number, ""),
    }
    table = csv_files.read(file, fields)
    values = {"temperature_c": table["temperature_c"]}
    return _Series(table["station"], table["time"], values)


def _read_daily(file: Path) -> _Series:
    day = _minutes(lambda text: datetime.datetime.strptime(text, "%Y-%m-%d"))
    gap = csv_files.optional(csv_files.number, "")
    fields = {"station": csv_files.name, "day": day, "tmax": gap, "tmin": gap}
    table = csv_files.read(file, fields)
    values = {c: table[c] for c in ("tmax", "tmin")}
    return _Series(table["station"], table["day"], values)


def _clock(text: str) -> int:
    """Minutes since midnight of "4:00" or "04:00"."""
    found = re.fullmatch(r"(\d\d?):(\d\d)(:00)?", text, re.ASCII)
    if not found or int(found[1]) > 23 or int(found[2]) > 59:
        raise ValueError("expected a time of day, as 04:00")
    return 60 * int(found[1]) + int(found[2])


def _read_site(file: Path) -> _Series:
    header = _header(file)
    new = "Observation station" in header
    year, month, day, clock = (
        ("Year", "Month", "Day", "Time [Local time]")
        if new
        else ("Year", "m", "d", "Time")
    )
    series = [c for c in header if "temperature" in c.lower()]
    if not series:
        raise DataFileError(
            file,
            "line 1",
            "expected the header of one of FMI's layouts with a temperature, found "
            f"{', '.join(header)[:100]!r}.",
        )
    table = csv_files.read(
        file,
        {
            **({"Observation station": csv_files.name} if new else {}),
            **dict.fromkeys((year, month, day), csv_files.integer),
            clock: _clock,
            **dict.fromkeys(series, _gap_number),
        },
    )
    dates = zip(*(table[c].tolist() for c in (year, month, day)), strict=True)
    days = []
    for i, date in enumerate(dates):
        try:
            days.append(_since_1970(datetime.datetime(*date)))
        except (ValueError, OverflowError):
            raise DataFileError(
                file,
                f"row {i + 1} of data",
                f"expected a date, found {'-'.join(map(str, date))}.",
            ) from None
    # file.stem would leave the .csv of .csv.gz.
    names = np.full(len(days), file.name.split(".csv")[0])
    return _Series(
        table["Observation station"] if new else names,
        np.array(days) + table[clock],
        {c: table[c] for c in series},
    )


def _gap_number(text: str) -> float:
    return math.nan if text in ("-", "") else csv_files.number(text)


def _merge(parts: list[tuple[Path, _Series]]) -> _Series:
    """Files of one folder: the same series, and no station in two of them."""
    first, series = parts[0]
    owner: dict[str, Path] = {}
    for file, part in parts:
        if list(part.values) != list(series.values):
            raise DataFileError(
                file,
                "line 1",
                f"expected the temperatures of {first}, {', '.join(series.values)}; "
                f"found {', '.join(part.values)}.",
            )
        for name in np.unique(part.station).tolist():
            if name in owner:
                raise DataFileError(
                    file, "stations", f"{name!r} is also in {owner[name]}."
                )
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
    stations, xs, ys = [], [], []
    values = np.stack(list(series.values.values()), 1)
    names, client = np.unique(series.station, return_inverse=True)
    rows_of = np.split(
        np.argsort(client, kind="stable"), np.cumsum(np.bincount(client))[:-1]
    )
    steps = np.concatenate([np.diff(series.minute[rows]) for rows in rows_of])
    for name, rows in zip(names, rows_of, strict=True):
        if np.any(np.diff(series.minute[rows]) < 0):
            raise DataFileError(
                file, f"station '{name}'", "expected rows in the order of time."
            )
    # A repeated time is no step: local clocks have the hour twice in October.
    lengths, counts = np.unique(steps[steps > 0], return_counts=True)
    step = lengths[counts.argmax()] if len(lengths) else 0
    for name, rows in zip(names, rows_of, strict=True):
        if len(rows) <= window:
            continue
        runs = np.cumsum(np.diff(series.minute[rows], prepend=0) != step)
        cut = np.lib.stride_tricks.sliding_window_view(values[rows], window + 1, axis=0)
        whole = (runs[window:] == runs[:-window]) & ~np.isnan(cut).any((1, 2))
        stations.append(np.full(whole.sum(), name))
        xs.append(cut[whole, :, :-1].reshape(-1, values.shape[1] * window))
        ys.append(cut[whole, column, -1])
    if not sum(map(len, ys)):
        raise DataFileError(
            file,
            "all rows",
            f"expected {window + 1} consecutive values somewhere, found nowhere.",
        )
    return np.concatenate(stations), np.concatenate(xs), np.concatenate(ys)


def _read_windows(file: Path, target: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    lags = [f"{c}_{i + 1}" for c in ("tmax", "tmin") for i in range(_WINDOW)]
    fields = dict.fromkeys([*lags, "y_tmax", "y_tmin"], csv_files.number)
    table = csv_files.read(file, {"station": csv_files.name, **fields})
    return table["station"], np.stack([table[c] for c in lags], 1), table[f"y_{target}"]


def _last(station: np.ndarray, fraction: float) -> np.ndarray:
    """[n] bool: the last rows of every station, but never all of them."""
    test = np.zeros(len(station), bool)
    for name in np.unique(station):
        rows = np.flatnonzero(station == name)
        count = min(round(fraction * len(rows)), len(rows) - 1)
        test[rows[len(rows) - count :]] = True
    return test
