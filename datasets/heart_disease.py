"""UCI Heart Disease: patients of four hospitals, heart disease or not.

920 patients: Cleveland 303, Budapest ("hungarian") 294, Zurich and Basel
("switzerland") 123, VA Long Beach ("va") 200. Other hospitals measured other things:
the columns slope, ca and thal are mostly empty outside Cleveland. Prepared as in
FLamby, without these columns and then without rows that have gaps, 740 are left:
303, 261, 46 and 130, of which 199, 172, 30 and 85 are for training.

Client key: the hospitals.

Features: 13, in FLamby's order: age (years), sex (1 male), resting blood pressure
(mmHg), cholesterol (mg/dl), fasting blood sugar above 120 mg/dl, maximal heart rate
(1/min), exercise-induced angina, ST depression (mm); then without their first levels,
as zeros and ones, chest pain type (2, 3, 4) and resting ECG (1, 2).

Normalisation: age, pressure, cholesterol, heart rate and ST depression are standardised
with the mean and deviation of all hospitals' train rows; FLamby leaves them as they
are.

Licence: CC BY 4.0.

References:
  Janosi, Steinbrunn, Pfisterer & Detrano, "Heart Disease", UCI Machine Learning
  Repository, 1988, https://doi.org/10.24432/C52P4X.

  Ogier du Terrail et al., "FLamby: Datasets and Benchmarks for Cross-Silo Federated
  Learning in Realistic Healthcare Settings", NeurIPS 2022 (Fed-Heart-Disease).
"""

from pathlib import Path

import numpy as np

from fedjax_core import check
from fedjax_core.data.packed import FederatedData
from fedjax_core.data.readers import csv_files, files
from fedjax_core.data.readers.files import DataFileError
from fedjax_core.datasets import tables

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
SOURCE = "https://archive.ics.uci.edu/dataset/45/heart+disease"

_FIELDS: dict[str, csv_files.Field] = {
    "age": csv_files.number,
    "sex": csv_files.level(0, 1),
    "cp": csv_files.level(1, 2, 3, 4),
    "trestbps": csv_files.number,
    "chol": csv_files.number,
    "fbs": csv_files.level(0, 1),
    "restecg": csv_files.level(0, 1, 2),
    "thalach": csv_files.number,
    "exang": csv_files.level(0, 1),
    "oldpeak": csv_files.number,
    "slope": csv_files.level(0, 1, 2, 3),
    "ca": csv_files.number,
    "thal": csv_files.number,
    "num": csv_files.level(0, 1, 2, 3, 4),
}
COLUMNS = tuple(_FIELDS)
"""The 14 columns of the files, "num" is the diagnosis: 0 healthy, 1 to 4 ill."""

_MEASURED = ("age", "trestbps", "chol", "thalach", "oldpeak")


def load(path: Path | str, seed: int = 43, standardize: bool = True) -> FederatedData:
    """Loads the four hospitals as FLamby prepares them.

    Arguments and errors as in `tables`, but `path` is a folder with
    ``processed.<hospital>.data`` of all four, and `seed` in 0..2**32 - 1 chooses the
    train rows: 66 % of every hospital, with its share of ill patients where it has more
    than two of each kind. 43 is FLamby's split.

    Train and test of 4 clients, each ``{"x": [n, 13] float32, "y": [n] int32}``, y = 1
    for heart disease (num > 0). Rows keep the order of the files.
    """
    from sklearn.model_selection import train_test_split  # slow to import

    check.seed(seed=seed)
    check.in_range(0, 2**32 - 1, seed=seed)
    wanted = [i for i, c in enumerate(COLUMNS) if c not in ("slope", "ca", "thal")]
    blocks, is_test = [], []
    for hospital, rows in read(path).items():
        rows = rows[:, wanted]
        rows = rows[~np.isnan(rows).any(1)]
        counts = np.bincount(rows[:, -1] > 0, minlength=2)
        if len(rows) < 2:
            file, wanted = _find(path, hospital), "at least 2 without gaps"
            raise DataFileError(file, "all rows", wanted, len(rows))
        test = train_test_split(
            np.arange(len(rows)),
            train_size=0.66,
            test_size=1 - 0.66,
            random_state=seed,
            stratify=rows[:, -1] > 0 if counts.min() > 2 else None,
        )[1]
        blocks.append(rows)
        is_test.append(np.isin(np.arange(len(rows)), test))
    names = [COLUMNS[i] for i in wanted]
    column = dict(zip(names, np.concatenate(blocks).T, strict=True))
    kept = [c for c in column if c not in ("cp", "restecg", "num")]
    levels = [column["cp"] == v for v in (2, 3, 4)]
    levels += [column["restecg"] == v for v in (1, 2)]
    return tables.population(
        np.repeat(HOSPITALS, [len(b) for b in blocks]),
        np.concatenate(is_test),
        np.stack([*(column[c] for c in kept), *levels], 1),
        (column["num"] > 0).astype(np.int32),
        standardize,
        [kept.index(c) for c in _MEASURED],
    )


def read(path: Path | str) -> dict[str, np.ndarray]:
    """The files as they are: hospital -> [n, 14] float64, NaN where a value is missing.

    Errors as `load`; also if two files have equal content.
    """
    found = {hospital: _find(path, hospital) for hospital in HOSPITALS}
    fields = {c: csv_files.optional(f, "?") for c, f in _FIELDS.items()}
    fields["num"] = _FIELDS["num"]
    hospitals: dict[str, np.ndarray] = {}
    for hospital, file in found.items():
        table = csv_files.read(file, fields, header=COLUMNS)
        rows = np.stack([table[c] for c in COLUMNS], 1)
        for other, known in hospitals.items():
            if np.array_equal(known, rows, equal_nan=True):
                raise DataFileError(file, "all rows", f"the same as in {found[other]}.")
        hospitals[hospital] = rows
    return hospitals


def _find(path: Path | str, hospital: str) -> Path:
    return files.find(path, [f"processed.{hospital}.data"], SOURCE)
