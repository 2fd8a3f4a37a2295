"""School: exam scores of pupils of 139 schools in inner London, 1985 to 1987.

15,362 pupils, 22 to 251 a school; a classic of multi-task learning.

Client key: the schools, "0" to "138" in the order of the file.

Features: 28 of the pupil and the school. Columns 3 and 4 (from 0) are the per cent of
pupils with free meals and in the top ability band; the rest (year, gender, ethnic
group, ...) are zeros and ones, and the last is constantly 1, for the intercept.

Normalisation: all features but the last are standardised with the mean and deviation of
all schools' train rows. Scores, 1 to 70, stay as they are.

Licence: none stated (Inner London Education Authority); research use.

References:
  Goldstein, "Multilevel modelling of survey data", The Statistician 40(2), 1991.

  Zhou, Chen & Ye, "MALSAR: Multi-task Learning via Structural Regularization",
  https://github.com/jiayuzhou/MALSAR (the file school.mat).
"""

from pathlib import Path

import numpy as np

from fedjax_core.data.packed import FederatedData
from fedjax_core.data.readers import files
from fedjax_core.data.readers.files import DataFileError
from fedjax_core.datasets import matlab, tables

SOURCE = "https://github.com/jiayuzhou/MALSAR (data/school.mat)"
NUM_FEATURES = 28


def load(
    path: Path | str,
    test_fraction: float = 0.25,
    seed: int = 0,
    standardize: bool = True,
) -> FederatedData:
    """Loads the pupils by school; arguments and errors as in `tables`.

    The file is ``school.mat`` (cell arrays X and Y, a cell per school) or
    ``school_exam.npz`` (x [n, 28], y [n], school [n]). One client per school,
    ``{"x": [n, 28] float32, "y": [n] float32}``.
    """
    file = files.find(path, ["school.mat", "school_exam.npz"], SOURCE)
    x, y, school = matlab.read_tasks(
        file, ("X", "Y"), "school", NUM_FEATURES, np.floating
    )
    if y.min() < 0:
        raise DataFileError(file, "scores", f"expected none below 0, found {y.min()}.")
    test = tables.hold_out(school, test_fraction, seed)
    return tables.population(school, test, x, y, standardize, slice(-1))
