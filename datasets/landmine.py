"""Landmine detection: radar features of 29 fields, mine or clutter.

14,820 points of interest, 445 to 690 a field, 904 of them mines: accuracy says little,
use the area under the ROC curve.

Client key: the fields, "0" to "28" in the order of the file; 0 to 14 were foliated, 15
to 28 bare earth or desert.

Features: 9 from images of a synthetic-aperture radar (moments, correlations, energy
ratio, spatial variance).

Normalisation: features are standardised with the mean and deviation of all fields'
train rows.

Licence: none stated (Duke University); research use.

References:
  Xue, Liao, Carin & Krishnapuram, "Multi-Task Learning for Classification with
  Dirichlet Process Priors", JMLR 8, 2007 (the file LandmineData.mat).
"""

from pathlib import Path

import numpy as np

from fedjax_core.data.packed import FederatedData
from fedjax_core.data.readers import files
from fedjax_core.data.readers.files import DataFileError
from fedjax_core.datasets import matlab, tables

SOURCE = "https://people.ee.duke.edu/~lcarin/LandmineData.zip"
NUM_FEATURES = 9


def load(
    path: Path | str,
    test_fraction: float = 0.25,
    seed: int = 0,
    standardize: bool = True,
) -> FederatedData:
    """Loads the points by field; arguments and errors as in `tables`.

    The file is ``LandmineData.mat`` (cell arrays feature and label, a cell per field)
    or ``landmine.npz`` (x [n, 9], y [n], field [n]). One client per field, ``{"x": [n,
    9] float32, "y": [n] int32}``, y = 1 for a mine. Mines and clutter of a field are
    held out apart, a `test_fraction` of each.
    """
    file = files.find(path, ["LandmineData.mat", "landmine.npz"], SOURCE)
    x, y, field = matlab.read_tasks(
        file, ("feature", "label"), "field", NUM_FEATURES, np.integer
    )
    if not np.isin(y, (0, 1)).all():
        found = y[~np.isin(y, (0, 1))][0]
        raise DataFileError(file, "labels", f"expected 0 and 1, found {found}.")
    y = y.astype(np.int32)
    both = np.char.add(field.astype(str), np.where(y == 1, " mine", " clutter"))
    test = tables.hold_out(both, test_fraction, seed)
    return tables.population(field, test, x, y, standardize)
