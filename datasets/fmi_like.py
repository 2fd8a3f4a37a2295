r"""Weather as of Finnish stations, drawn at random: no file needed.

Stations lie anywhere between 60 and 70 degrees north and 20 and 31 degrees east. The
temperature of station i at hour t of the year is

.. math::

  T_i(t) = 4 - 0.9\,(\mathrm{lat}_i - 60)
    + (11 + 0.4\,(\mathrm{lat}_i - 60)) \sin\frac{2\pi (t - 2688)}{8766}
    + a_i \sin\frac{2\pi (t - 9)}{24} + 4 x_i(t),

where the swing :math:`a_i` of a day is 2 degrees in the south-west and 5 in the
north-east, and x, of variance 1, is the first coordinate of an autoregressive process
in the plane that turns with a period of :math:`P_i` hours,

.. math::

  z_i(t) = \rho e^{2\pi \mathrm{i} / P_i} z_i(t-1) + \sqrt{1 - \rho^2}\, e_i(t),
  \qquad \mathrm{E}\, e_i(t) e_j(t) = \exp(-\mathrm{dist}_{ij} / 40\,\mathrm{km}) ,

for either coordinate of e. Warm and cold days alternate within ten days in the
south-west and three in the north-east, with a memory of :math:`\rho` = 0.985 an hour:
the best way to predict tomorrow changes slowly from place to place. The numbers are
choices of ours; nothing is fitted to observations.

Client key: the station's number.

Licence: none needed, the data is generated. NumPy's global generator is neither read
nor changed.

References:
  Jung, "Federated Learning: From Theory to Practice", arXiv:2505.19183: stations of
  the Finnish Meteorological Institute as nodes of a graph, and Exercise 9.5.
"""

import numpy as np

from fedjax_core import check
from fedjax_core.data.packed import FederatedData
from fedjax_core.datasets import tables

COLUMNS = (
    *("mean temperature", "max temperature", "min temperature", "relative humidity"),
    *("wind speed", "max wind speed", "wind direction", "gust speed", "precipitation"),
    *("pressure", "hour"),
)
"""What `hourly` has, x1 to x11 of Jung's Exercise 9.5."""

_PAST = 5  # days that features are made of
_MEMORY = 0.985  # of weather, an hour
_KM_PER_DEGREE = 111.2  # of latitude


def daily(
    num_stations: int = 100,
    num_windows: int = 30,
    first_day: int = 60,
    test_fraction: float = 0.2,
    standardize: bool = True,
    seed: int = 0,
) -> tuple[FederatedData, np.ndarray]:
    """Draws stations and windows of days, in the form of `fmi.load`.

    Arguments beside those of `tables`:

    - num_stations: N >= 1; the time to draw grows with N^2.
    - num_windows: windows per station, >= 1, of six days each, one after the other; the
      last ones are the test split, but never all.
    - first_day: day of the year on which the first window starts, >= 0.

    Returns:
      Train and, unless test_fraction is 0, test of one client per station, each ``{"x":
      [n, 10] float32, "y": [n] float32}``: the highest temperatures of five days, then
      the lowest, oldest first; and the highest of the next day, in degrees Celsius.

      The coordinates ``[N, 2]`` float64, latitude and longitude in degrees.
    """
    check.positive_int(num_stations=num_stations, num_windows=num_windows)
    check.non_negative(first_day=first_day)
    check.seed(seed=seed)
    rng = np.random.default_rng([seed, 201])
    place = np.column_stack(
        [rng.uniform(60, 70, num_stations), rng.uniform(20, 31, num_stations)]
    )
    hours = 24 * first_day + np.arange(24 * num_windows * (_PAST + 1))
    days = _temperature(rng, place, hours).T.reshape(-1, _PAST + 1, 24)
    highest, lowest = days.max(2), days.min(2)  # [N * num_windows, 6]
    x, y = np.hstack([highest[:, :-1], lowest[:, :-1]]), highest[:, -1]
    station = np.repeat(np.arange(num_stations), num_windows)
    test = tables.hold_out_last(station, test_fraction)
    return tables.population(station, test, x, y, standardize), place


def hourly(num_hours: int = 720, first_day: int = 90, seed: int = 0) -> np.ndarray:
    """Draws the hours of one station, the table of Exercise 9.5.

    `num_hours` >= 1 rows, 720 are the April of the exercise, from the `first_day` >= 0
    of the year: ``[num_hours, 11]`` float64, columns as in `COLUMNS`. The hour is 1 to
    24, and shows in temperature, humidity and wind. Precipitation is mostly 0.
    """
    check.positive_int(num_hours=num_hours)
    check.non_negative(first_day=first_day)
    check.seed(seed=seed)
    rng = np.random.default_rng([seed, 202])
    hour = np.arange(num_hours) % 24 + 1
    place = np.array([[60.7, 21.0]])  # Kustavi Isokari
    mean = _temperature(rng, place, 24.0 * first_day + np.arange(num_hours))[:, 0]
    spread = np.abs(rng.standard_normal((2, num_hours))) * 0.4
    day = np.sin(2 * np.pi * (hour - 9) / 24)
    weather = _red_noise(rng, num_hours, 3, 0.97)
    humidity = np.clip(80 - 8 * day + 8 * weather[0], 20, 100)
    wind = np.abs(6 + day + 2.5 * weather[1] + 0.7 * rng.standard_normal(num_hours))
    fastest = wind * (1.1 + 0.2 * rng.random(num_hours))
    return np.column_stack(
        [
            mean,
            mean + spread[0],
            mean - spread[1],
            humidity,
            wind,
            fastest,
            (220 + np.cumsum(15 * rng.standard_normal(num_hours))) % 360,
            fastest * (1.1 + 0.3 * rng.random(num_hours)),
            np.maximum(0, rng.gamma(0.5, 1, num_hours) * (weather[0] > 1)),
            1010 + 10 * weather[2],
            hour,
        ]
    )


def _temperature(
    rng: np.random.Generator, place: np.ndarray, hours: np.ndarray
) -> np.ndarray:
    """Degrees Celsius ``[T, N]`` at hours ``[T]`` of the year."""
    north = place[:, 0] - 60
    inland = np.clip(north / 20 + (place[:, 1] - 20) / 22, 0, 1)  # 1: the north-east
    year = np.sin(2 * np.pi * (hours - 2688) / 8766)
    day = np.sin(2 * np.pi * (hours - 9) / 24)
    smooth = 4 - 0.9 * north + year[:, None] * (11 + 0.4 * north)
    swing = day[:, None] * (2 + 3 * inland)

    # On a plane, which is good enough for a country.
    km = _KM_PER_DEGREE * place * [1, np.cos(np.radians(65))]
    away = np.linalg.norm(km[:, None] - km[None], axis=2)
    # The jitter is for stations at one place.
    root = np.linalg.cholesky(np.exp(-away / 40) + 1e-9 * np.eye(len(km)))
    # A rotating vector that is shaken: its first coordinate has the period's rhythm.
    turn = _MEMORY * np.exp(2j * np.pi / (24 * (10 - 7 * inland)))
    shake = rng.standard_normal((len(hours), 2, len(km))) @ root.T
    weather = shake[:, 0] + 1j * shake[:, 1]
    for t in range(1, len(hours)):
        fresh = np.sqrt(1 - _MEMORY**2) * weather[t]
        weather[t] = turn * weather[t - 1] + fresh
    return smooth + swing + 4 * weather.real


def _red_noise(
    rng: np.random.Generator, num: int, series: int, memory: float
) -> np.ndarray:
    """AR(1) processes of variance 1, ``[series, num]``."""
    out = rng.standard_normal((series, num))
    for t in range(1, num):
        out[:, t] = memory * out[:, t - 1] + np.sqrt(1 - memory**2) * out[:, t]
    return out
