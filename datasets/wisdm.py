"""WISDM v1.1: what a person is doing, from the phone in the pocket.

About 5,420 windows of ten seconds (200 readings of a three-axis accelerometer) of 36
people, 60 to 273 each. Which activities a person did differs widely.

Client key: the people, by the number they have in the file, "1" to "36".

Features: 43 of a window: for each axis the shares of readings in ten equal bins, then
per axis the average, the time between peaks (ms), the mean absolute deviation and the
standard deviation, and the mean length of the acceleration vector. Windows without a
clear peak have gaps there (7 % for x, 2 % for y and z); they get the train mean.

Normalisation: features are standardised with the mean and deviation of all people's
train rows.

Licence: free for use with citation (WISDM Lab, Fordham University).

References:
  Kwapisz, Weiss & Moore, "Activity Recognition using Cell Phone Accelerometers",
  SensorKDD 2010, https://www.cis.fordham.edu/wisdm/dataset.php.
"""

from pathlib import Path

import numpy as np

from fedjax_core.data.packed import FederatedData
from fedjax_core.data.readers import csv_files, files
from fedjax_core.data.readers.files import DataFileError, read_bytes
from fedjax_core.datasets import tables

ACTIVITIES = (*("Walking", "Jogging", "Upstairs", "Downstairs", "Sitting", "Standing"),)
"""Name of class 0, 1, ..., the most frequent first."""

SOURCE = "https://www.cis.fordham.edu/wisdm/dataset.php (WISDM_ar_v1.1.tar.gz)"
FEATURES = (
    *(f"{axis}{i}" for axis in "xyz" for i in range(10)),
    *(f"{a}{of}" for of in ("avg", "peak", "absoldev", "standdev") for a in "xyz"),
    "resultant",
)
_ARFF = "WISDM_ar_v1.1_transformed.arff"


def load(
    path: Path | str,
    test_fraction: float = 0.25,
    seed: int = 0,
    standardize: bool = True,
) -> FederatedData:
    """Loads the windows by person; arguments and errors as in `tables`.

    The file is ``WISDM_ar_v1.1_transformed.arff``, the original, or
    ``wisdm_activity.csv.gz`` (header user, x0, ..., resultant, activity). One client
    per person, ``{"x": [n, 43] float32, "y": [n] int32}``, y as in `ACTIVITIES`. Gaps
    are filled even if features are not scaled.
    """
    file = files.find(path, [_ARFF, "wisdm_activity.csv.gz"], SOURCE)
    arff = file.suffix == ".arff"
    label = "class" if arff else "activity"
    gap = "?" if arff else ""
    table = csv_files.read(
        file,
        {
            "user": csv_files.integer,
            **dict.fromkeys(FEATURES, csv_files.optional(csv_files.number, gap)),
            label: csv_files.category(ACTIVITIES),
        },
        header=("unique_id", "user", *FEATURES, "class") if arff else None,
        comment="%" if arff else None,
        skip=_header_lines(file) if arff else 0,
    )
    test = tables.hold_out(table["user"], test_fraction, seed)
    x = tables.fill_gaps(np.stack([table[c] for c in FEATURES], 1), ~test)
    return tables.population(table["user"], test, x, table[label], standardize)


def _header_lines(file: Path) -> int:
    """How many lines the ARFF header has; checks the attributes it declares.

    SciPy's ARFF reader refuses the file: the type of ``user`` is missing in it.
    """
    declared = []
    lines = read_bytes(file).splitlines()
    for i, line in enumerate(lines):
        words = line.decode("latin-1").split(maxsplit=2)
        keyword = words[0].lower() if words else ""
        if keyword == "@attribute":
            declared.append(words[1].strip("\"'").lower() if words[1:] else "")
        elif keyword == "@data":
            # Bins are found by their place; the rest goes by several spellings.
            wanted = ["unique_id", "user", *FEATURES[:30]]
            if declared[:32] != wanted or declared[45:] != ["class"]:
                wanted = "the attributes UNIQUE_ID, user, X0 to Z9, 13 more and class"
                found = f"{len(declared)}: {', '.join(declared)[:100]!r}"
                raise DataFileError(file, f"lines 1 to {i + 1}", wanted, found)
            return i + 1
    raise DataFileError(file, f"line {len(lines)}", "expected @data, found the end.")
