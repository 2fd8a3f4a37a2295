"""Adult: does a person earn over $50,000 a year? US census of 1994.

32,561 train and 16,281 test rows, of which 30,162 and 15,060 have no gaps; only these
are kept. 24.9 % of the complete train rows are positive.

Client key: people with the same education (16 levels), occupation (14) or native
country (41), as the federated literature splits them, for example people with a
doctorate against the rest. The clients' names are those of the file.

Features: 105. First the 6 numbers age, fnlwgt (the census' weight), education-num,
capital-gain, capital-loss and hours-per-week; then 99 zeros and ones, a column for
every level of `LEVELS`, in that order. No level is left out, and the column the clients
are made from stays a feature.

Normalisation: the 6 numbers are standardised with the mean and deviation of all
clients' train rows.

Licence: CC BY 4.0.

References:
  Becker & Kohavi, "Adult", UCI Machine Learning Repository, 1996,
  https://doi.org/10.24432/C5XW20.

  Mohri, Sivek & Suresh, "Agnostic Federated Learning", ICML 2019 (clients by
  education).
"""

from pathlib import Path
from typing import Literal

import numpy as np

from fedjax_core import check
from fedjax_core.data.packed import FederatedData
from fedjax_core.data.readers import csv_files, files
from fedjax_core.datasets import tables

SOURCE = "https://archive.ics.uci.edu/dataset/2/adult"

LEVELS: dict[str, tuple[str, ...]] = {
    column: tuple(names.split())
    for column, names in {
        "workclass": """
            Private Self-emp-not-inc Self-emp-inc Federal-gov Local-gov
            State-gov Without-pay Never-worked
        """,
        "education": """
            Bachelors Some-college 11th HS-grad Prof-school Assoc-acdm Assoc-voc
            9th 7th-8th 12th Masters 1st-4th 10th Doctorate 5th-6th Preschool
        """,
        "marital-status": """
            Married-civ-spouse Divorced Never-married Separated Widowed
            Married-spouse-absent Married-AF-spouse
        """,
        "occupation": """
            Tech-support Craft-repair Other-service Sales Exec-managerial
            Prof-specialty Handlers-cleaners Machine-op-inspct Adm-clerical
            Farming-fishing Transport-moving Priv-house-serv Protective-serv
            Armed-Forces
        """,
        "relationship": "Wife Own-child Husband Not-in-family Other-relative Unmarried",
        "race": "White Asian-Pac-Islander Amer-Indian-Eskimo Other Black",
        "sex": "Female Male",
        "native-country": """
            United-States Cambodia England Puerto-Rico Canada Germany
            Outlying-US(Guam-USVI-etc) India Japan Greece South China Cuba Iran
            Honduras Philippines Italy Poland Jamaica Vietnam Mexico Portugal
            Ireland France Dominican-Republic Laos Ecuador Taiwan Haiti Columbia
            Hungary Guatemala Nicaragua Scotland Thailand Yugoslavia El-Salvador
            Trinadad&Tobago Peru Hong Holand-Netherlands
        """,
    }.items()
}
"""The levels of the eight columns without an order, as UCI's adult.names lists them."""

NUMBERS = (
    *("age", "fnlwgt", "education-num"),
    *("capital-gain", "capital-loss", "hours-per-week"),
)
COLUMNS = (
    *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status"),
    *("occupation", "relationship", "race", "sex", "capital-gain", "capital-loss"),
    *("hours-per-week", "native-country", "income"),
)
"""The 15 columns of the original files, which have no header."""

_CSV = "adult_income.csv.gz"
_CSV_NAMES = {  # where its header differs
    "workclass": "type_employer",
    "education-num": "education_num",
    "marital-status": "marital",
    "capital-gain": "capital_gain",
    "capital-loss": "capital_loss",
    "hours-per-week": "hr_per_week",
    "native-country": "country",
}
_INCOME = ("<=50K", ">50K")


def load(
    path: Path | str,
    client: Literal["education", "occupation", "country"] = "education",
    test_fraction: float | None = None,
    seed: int = 0,
    standardize: bool = True,
) -> FederatedData:
    """Loads the complete rows by client.

    Arguments and errors as in `tables`, but:

    - path: folder with ``adult.data`` and ``adult.test``, the original files, or with
      ``adult_income.csv.gz`` (a header with names such as "hr_per_week" and "country");
      or ``adult.data`` or ``adult_income.csv.gz`` itself.
    - client: what tells clients apart; "country" is the column native-country.
    - test_fraction: None tests on ``adult.test``; a number holds out that share of
      every client's train rows instead.

    Clients have ``{"x": [n, 105] float32, "y": [n] int32}``, y = 1 for over $50,000. A
    client that is in one split only is empty in the other.
    """
    check.one_of(("education", "occupation", "country"), client=client)
    key = "native-country" if client == "country" else client
    file = files.find(path, ["adult.data", _CSV], SOURCE)
    table = _read(file, {} if file.name == "adult.data" else _CSV_NAMES, _INCOME)
    if test_fraction is None:
        labels = tuple(f"{label}." for label in _INCOME)
        test_table = _read(files.find(file.parent, ["adult.test"], SOURCE), {}, labels)
        test = np.repeat([False, True], [len(t["income"]) for t in (table, test_table)])
        table = {c: np.concatenate([table[c], test_table[c]]) for c in COLUMNS}
    else:
        test = tables.hold_out(table[key], test_fraction, seed)
    numbers = np.stack([table[c] for c in NUMBERS], 1)
    levels = [np.eye(len(names))[table[c]] for c, names in LEVELS.items()]
    x = np.concatenate([numbers, *levels], 1)
    clients = np.array(LEVELS[key])[table[key]]
    scaled = slice(len(NUMBERS))
    return tables.population(clients, test, x, table["income"], standardize, scaled)


def _read(
    file: Path, renamed: dict[str, str], labels: tuple[str, ...]
) -> dict[str, np.ndarray]:
    """The complete rows: numbers as float64, categories as indices of their levels."""
    fields: dict[str, csv_files.Field] = {
        **dict.fromkeys(NUMBERS, csv_files.number),
        **{c: csv_files.category(names, missing="?") for c, names in LEVELS.items()},
        "income": csv_files.category(labels),
    }
    table = csv_files.read(
        file,
        {renamed.get(c, c): fields[c] for c in COLUMNS},
        header=None if renamed else COLUMNS,
        comment="|",
    )
    table = {c: table[renamed.get(c, c)] for c in COLUMNS}
    gap = np.any([table[c] < 0 for c in LEVELS], axis=0)
    return tables.drop_rows(file, table, gap)
