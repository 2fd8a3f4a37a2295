"""What chapter II of Hahn's dissertation prints, by table, setting and method."""

from collections.abc import Sequence

import numpy as np

NOISES = ("pair 0.1", "pair 0.4", "symmetric 0.2", "symmetric 0.6")
SCHEMES = ("MM", "LM")
OURS = tuple(f"SuPerFed-{name}" for name in SCHEMES)
BEST = ", best on test"
NAMES = ("FedAvg", "FedProx", "SCAFFOLD", "LG-FedAvg", "FedPer", "APFL", "pFedMe")
NAMES += ("Ditto", "FedRep", *OURS)

# Top-1 accuracies in % and, behind each, its deviation over clients: a line for each of
# `NAMES`, columns for MNIST and CIFAR-10 with 50, 100 and 500 clients.
TABLE_23 = """\
95.69 2.39 89.78 11.30 96.04 4.74 43.09 24.56 36.19 29.54 47.90 25.05
95.13 2.67 93.25 6.12 96.50 4.52 49.01 19.87 38.56 28.11 48.60 25.71
95.50 2.71 90.58 10.13 96.60 4.26 43.81 24.30 36.31 29.42 40.27 26.90
98.21 1.28 97.52 2.11 96.05 5.02 89.03 4.53 70.25 35.66 78.52 11.22
99.23 0.66 99.14 0.93 98.67 2.61 89.10 5.41 87.99 5.70 82.35 9.85
99.40 0.58 99.19 0.92 98.98 2.22 92.83 3.47 91.73 4.61 87.38 9.39
81.10 8.52 82.48 7.62 81.96 12.28 92.97 3.07 92.07 5.05 88.30 8.53
97.07 1.38 97.13 2.06 97.20 3.72 85.53 6.22 83.01 5.62 84.45 10.67
99.11 0.63 99.04 1.02 97.94 3.37 82.00 5.41 81.27 7.90 80.66 11.00
99.45 0.46 99.38 0.93 99.24 2.12 94.05 3.18 93.25 3.80 90.81 9.35
99.48 0.54 99.31 1.09 98.83 3.02 93.88 3.55 93.20 4.19 89.63 11.11
"""
# Top-5 of CIFAR-100 and of TinyImageNet, for concentrations 1, 10 and 100.
TABLE_24 = """\
58.12 7.06 59.04 7.19 58.49 5.27 46.61 5.64 48.90 5.50 48.90 5.40
57.71 6.79 58.24 5.94 58.75 5.56 47.37 5.94 47.73 5.94 48.97 5.02
51.16 6.79 51.40 5.22 52.90 4.89 46.54 5.49 48.77 5.49 48.27 5.32
28.88 5.64 21.25 4.64 20.05 4.61 14.70 3.84 9.86 3.13 9.25 2.89
46.78 7.63 35.73 6.80 35.52 6.58 21.90 4.71 11.10 3.19 9.63 3.12
61.13 6.86 56.90 7.05 55.43 5.45 41.98 5.94 34.74 5.14 34.23 5.07
19.00 5.37 17.94 4.72 18.28 3.41 6.05 2.84 8.01 2.92 7.69 2.41
60.04 6.82 58.55 7.12 58.73 5.39 46.36 5.44 43.84 5.44 43.11 5.35
38.49 6.65 26.61 5.20 24.50 4.21 18.67 4.66 9.23 2.84 8.09 2.83
60.14 6.24 58.32 6.25 59.08 5.12 50.07 5.73 49.86 5.03 49.73 4.84
62.50 6.34 61.64 6.23 59.05 5.59 47.28 5.19 48.98 4.79 49.29 4.82
"""
# Top-1 and top-5 of FEMNIST with 62 classes and of Shakespeare with 80 characters.
TABLE_25 = """\
80.12 12.01 98.74 2.97 50.90 7.85 80.15 7.87
80.23 11.88 98.73 2.94 51.33 7.54 80.31 6.95
80.03 11.78 98.85 2.77 50.76 8.01 80.43 7.09
50.84 20.97 75.11 21.49 33.88 10.28 62.84 13.16
73.79 14.10 86.39 14.70 45.82 8.10 75.68 9.25
84.85 8.83 98.83 2.73 54.08 8.31 83.32 6.22
5.98 4.55 24.64 9.43 32.29 6.64 63.12 8.00
64.61 31.49 81.14 28.56 49.04 10.22 78.14 12.61
59.27 15.72 70.42 15.82 38.15 9.54 68.65 12.50
85.20 8.40 99.16 2.13 54.52 7.54 84.27 6.00
83.36 9.61 98.81 2.58 54.52 7.54 83.97 5.72
"""
# These for each of `NOISES`, of MNIST.
NOISY = ("ece", "mce", "accuracy")
TABLE_26 = """\
.17 .58 82.40 .38 .67 41.01 .29 .66 66.94 .42 .75 49.52
.17 .58 82.05 .38 .78 41.39 .29 .66 67.15 .42 .74 49.98
.16 .58 60.86 .45 .77 44.92 .29 .59 70.51 .44 .73 51.46
.23 .66 73.65 .50 .81 37.69 .34 .71 61.54 .45 .75 47.79
.17 .57 82.43 .40 .78 40.75 .28 .66 68.44 .40 .73 52.41
.18 .60 80.18 .42 .78 40.43 .28 .67 67.83 .40 .79 52.15
.23 .66 72.05 .46 .80 37.89 .33 .72 59.80 .44 .76 45.79
.22 .66 72.39 .42 .79 38.20 .31 .69 60.62 .41 .77 45.11
.20 .62 77.95 .53 .81 35.88 .30 .68 66.58 .43 .74 51.30
.16 .53 83.67 .28 .69 46.41 .27 .64 71.99 .30 .69 56.07
.14 .49 84.78 .35 .77 46.82 .27 .66 69.23 .32 .72 54.69
"""
# And of CIFAR-10.
TABLE_26_CIFAR = """\
.46 .80 45.08 .57 .87 20.90 .52 .81 38.62 .59 .84 30.18
.47 .80 44.31 .70 .87 21.58 .53 .81 36.91 .59 .84 29.50
.46 .76 47.54 .65 .86 22.72 .53 .79 38.85 .61 .83 30.18
.59 .83 30.22 .69 .89 17.44 .63 .85 25.68 .66 .87 22.04
.54 .81 39.81 .70 .87 20.37 .60 .82 32.82 .65 .85 26.82
.45 .78 45.27 .60 .86 23.42 .51 .81 37.85 .56 .83 31.46
.58 .83 29.62 .66 .88 17.94 .60 .85 26.01 .64 .87 21.36
.54 .84 29.41 .60 .88 18.17 .56 .85 26.39 .58 .87 21.72
.62 .82 33.10 .76 .87 17.80 .66 .83 29.22 .71 .85 22.94
.28 .69 48.79 .27 .63 26.64 .31 .71 42.66 .28 .68 35.74
.29 .68 51.44 .40 .80 28.51 .36 .70 42.81 .37 .76 34.10
"""
# Top-1 and loss by share of the rounds that is warm-up, MM before LM.
STARTS = (0.0, 0.2, 0.4, 0.6, 0.8)
TABLE_27 = """\
89.87 4.73 1.36 0.58
92.67 4.04 0.72 0.40
92.69 3.86 0.78 0.31
92.50 4.14 0.74 0.88
91.29 6.28 2.53 0.72
91.55 4.26 1.43 0.81
92.41 3.93 1.18 0.60
92.69 3.66 0.94 0.45
92.60 3.86 0.63 0.33
90.59 9.93 6.28 1.76
"""


def _columns(
    text: str, names: Sequence[str], metrics: Sequence[str], rows: Sequence[str] = NAMES
) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Of a printed table: setting -> method -> metric -> its numbers."""
    numbers = np.array(text.split(), float)
    numbers = numbers.reshape(len(rows), len(names), len(metrics), -1).tolist()
    return {
        name: {
            row: dict(zip(metrics, cells[k], strict=True))
            for row, cells in zip(rows, numbers, strict=True)
        }
        for k, name in enumerate(names)
    }


_SHARDS = [f"{d}, {k} clients" for d in ("mnist", "cifar10") for k in (50, 100, 500)]
_ALPHA = [f"{d}, alpha {a}" for d in ("cifar100", "tinyimagenet") for a in (1, 10, 100)]
_BEGINS = [f"{name} from {start:g}" for name in SCHEMES for start in STARTS]
PRINTED = {
    "table 2.3": _columns(TABLE_23, _SHARDS, ("accuracy",)),
    "table 2.4": _columns(TABLE_24, _ALPHA, ("top5",)),
    "table 2.5": _columns(TABLE_25, ["writers", "roles"], ("accuracy", "top5")),
    "table 2.6": _columns(TABLE_26, [f"mnist, {n}" for n in NOISES], NOISY)
    | _columns(TABLE_26_CIFAR, [f"cifar10, {n}" for n in NOISES], NOISY),
    "table 2.7": _columns(TABLE_27, [""], ("accuracy", "loss"), _BEGINS),
}


def printed_of(part: str, method: str, setting: str, metric: str) -> tuple[float, ...]:
    """A printed number, mostly with its deviation over clients; or nothing."""
    if part == "table 2.4":  # CIFAR-10 stands for CIFAR-100
        setting = setting.replace("cifar10,", "cifar100,")
    elif part == "table 2.7":  # of one setting
        setting = ""
    scale = 100 if metric in ("accuracy", "top5") else 1
    cells = PRINTED.get(part, {}).get(setting, {}).get(method.removesuffix(BEST), {})
    return tuple(number / scale for number in cells.get(metric, ()))
