"""CalCOFI bottle data: sea water off California, by depth, since 1949.

864,863 samples in the release of 2018. The rearranged excerpt has 317,143 samples of
the years 1970 to 2020, of the 73 stations with 50 or more casts.

Client key: the stations, "line station", such as "090.0 030.0". The full file has
thousands, most with a few casts only;
``data.subset(np.flatnonzero(data.train.sizes >= 200))`` keeps the large ones.

Features: 5: depth (m), temperature (°C) or salinity (practical salinity), whichever is
not the target, oxygen (ml/l), and sine and cosine of the season (a year is a turn,
January 1/24 of it). Samples with a gap in the target or a feature are dropped, and
their number is logged.

Normalisation: features are standardised with the mean and deviation of all stations'
train rows; the target keeps its unit.

Licence: public data; the programme asks to be named.

References:
  California Cooperative Oceanic Fisheries Investigations (CalCOFI), bottle database,
  https://calcofi.org/data/oceanographic-data/bottle-database/.
"""

import re
from pathlib import Path
from typing import Literal

import numpy as np

from fedjax_core import check
from fedjax_core.data.packed import FederatedData
from fedjax_core.data.readers import csv_files, files, npz
from fedjax_core.data.readers.files import DataFileError
from fedjax_core.datasets import tables

SOURCE = "https://calcofi.org/data/oceanographic-data/bottle-database/"

_MEASURED = ("depth_m", "temperature_c", "salinity", "oxygen_ml_l")
_BOTTLE_NAMES = ("Depthm", "T_degC", "Salnty", "O2ml_L")


def load(
    path: Path | str,
    target: Literal["salinity", "temperature_c"] = "salinity",
    test_fraction: float = 0.2,
    seed: int = 0,
    standardize: bool = True,
) -> FederatedData:
    """Loads the samples by station; arguments and errors as in `tables`.

    The file is ``bottle.csv`` (Latin-1, the original) or ``calcofi_bottle.npz`` (an
    array per column). One client per station, ``{"x": [n, 5] float32, "y": [n]
    float32}``, y the `target`. Samples of one cast are close to each other, so a cast
    is not split: `test_fraction` is a share of casts.
    """
    check.one_of(("salinity", "temperature_c"), target=target)
    file = files.find(path, ["bottle.csv", "calcofi_bottle.npz"], SOURCE)
    table = _read_npz(file) if file.suffix == ".npz" else _read_bottle(file)
    gap = np.any([np.isnan(table[c]) for c in _MEASURED], axis=0)
    table = tables.drop_rows(file, table, gap)
    turn = 2 * np.pi * (table["month"] - 0.5) / 12
    measured = [table[c] for c in _MEASURED if c != target]
    x = np.stack([*measured, np.sin(turn), np.cos(turn)], 1)
    test = tables.hold_out(table["station"], test_fraction, seed, table["cast"])
    return tables.population(table["station"], test, x, table[target], standardize)


def _month(depth_id: str) -> int:
    """The month in a text like "19-4903CR-HY-060-0930-...": March 1949."""
    found = re.match(r"\d\d-\d\d(0[1-9]|1[0-2])", depth_id, re.ASCII)
    if not found:
        raise ValueError("expected century, year and month as in '19-4903'")
    return int(found[1])


def _read_bottle(file: Path) -> dict[str, np.ndarray]:
    fields = {
        **dict.fromkeys(_BOTTLE_NAMES, csv_files.optional(csv_files.number, "")),
        "Cst_Cnt": csv_files.integer,
        "Sta_ID": csv_files.name,
        "Depth_ID": _month,
    }
    table = csv_files.read(file, fields, encoding="latin-1")
    names = (*_MEASURED, "cast", "station", "month")
    return {c: table[b] for c, b in zip(names, fields, strict=True)}


def _read_npz(file: Path) -> dict[str, np.ndarray]:
    columns: dict[str, npz.Expected] = {
        **dict.fromkeys(("station", "cast", "date"), (np.integer, (None,))),
        **dict.fromkeys(_MEASURED, (np.floating, (None,))),
    }
    names = npz.read(file, {"station_names": (np.str_, (None,))})["station_names"]
    table = tables.read_npz(file, columns)
    station = table["station"]
    if station.min() < 0 or station.max() >= len(names):
        problem = f"expected 0 to {len(names) - 1}, found {station.min()} to"
        raise DataFileError(file, "array 'station'", f"{problem} {station.max()}.")
    # Days that fit int32 don't overflow as dates.
    days = table["date"].astype(np.int32).astype("datetime64[D]")
    return {
        "cast": table["cast"],
        "station": names[station],
        "month": days.astype("datetime64[M]").astype(np.int64) % 12 + 1,
        **{c: table[c].astype(np.float64) for c in _MEASURED},
    }
