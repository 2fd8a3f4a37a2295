r"""Populations drawn from known distributions: regression, softmax and mixtures.

Each function returns the data and the truth it was drawn from, so that an estimate can
be compared with it:

- `linear_clusters`: linear regression, the clients of a cluster share their weights.
- `fedprox`, `fedprox_iid`: synthetic(alpha, beta) and synthetic IID of Li et al.
- `gaussian_mixture`: Gaussian classes, in shares of the client's own.

Client key: the client's number. What client k holds depends on the seed and k, and not
on how many clients there are; two functions given one seed draw independently. A
client's first examples are its train split. NumPy's global generator is neither read
nor changed.

All functions take `num_clients` N >= 1, `sizes` (examples per client, train and test
together: one int or [N] ints, >= 0; None draws them as `fedprox` does), `test_fraction`
(share of a client's examples in test, rounded up to whole ones) and `seed`, an int >=
0. ValueError names a number out of its range or of another shape, TypeError one that is
no int.

Licence: none needed, the data is generated.

References:
  Jung, "Federated Learning: From Theory to Practice", arXiv:2505.19183 (clusters of
  linear regression tasks).

  Gauthier et al., "Personalized Graph Federated Learning with Differential Privacy",
  IEEE Transactions on Signal and Information Processing over Networks 9, 2023,
  https://doi.org/10.1109/TSIPN.2023.3325963 (clusters' tasks differ by a factor).

  Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, section
  5.1; https://github.com/litian96/FedProx, folder data.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from fedjax_core import check
from fedjax_core.data.packed import FederatedData
from fedjax_core.datasets.partition import _common as common

Truth = dict[str, np.ndarray]
_Client = Callable[
    [np.random.Generator, int, int], tuple[np.ndarray, np.ndarray, Truth]
]

_FEATURES, _CLASSES = 60, 10  # of Li et al.
_STD = np.arange(1, _FEATURES + 1) ** -0.6  # variance j^-1.2


def linear_clusters(
    num_clients: int,
    weights: ArrayLike,
    sizes: ArrayLike | None = 50,
    noise: float = 0.1,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> tuple[FederatedData, Truth]:
    r"""Linear regression where the clients of a cluster share their true weights.

    Client k belongs to cluster k mod Q, and for its examples

    .. math::

      x \sim \mathcal{N}(0, I_d), \qquad y = w_{k \bmod Q}^\top x + e, \qquad
      e \sim \mathcal{N}(0, \mathrm{noise}^2) .

    Unrelated clusters, as in Jung's book, come with
    ``weights=np.random.default_rng(0).standard_normal((Q, d))``; related ones, as in
    Gauthier et al., with ``w0 * (1 + rng.uniform(-0.15, 0.15, (Q, 1)))`` for a `w0`
    of shape [d].

    `weights` are [Q, d] finite numbers, `noise` >= 0. Returns data of ``x`` [n, d]
    float32 and ``y`` [n] float32, and the truth: ``weights`` [N, d] float64,
    ``cluster`` [N] int32.
    """
    check.non_negative(noise=noise)
    of_cluster = _matrix("weights", weights)
    num_clusters, dim = of_cluster.shape

    def draw(rng, n, k):
        cluster = k % num_clusters
        w = of_cluster[cluster]
        x = rng.standard_normal((n, dim)).astype(np.float32)
        y = (x @ w + noise * rng.standard_normal(n)).astype(np.float32)
        return x, y, {"weights": w, "cluster": np.int32(cluster)}

    return _population(draw, num_clients, sizes, test_fraction, [seed, 101])


def fedprox(
    num_clients: int = 30,
    alpha: float = 1.0,
    beta: float = 1.0,
    sizes: ArrayLike | None = None,
    test_fraction: float = 0.1,
    seed: int = 0,
) -> tuple[FederatedData, Truth]:
    r"""Synthetic(alpha, beta) of Li et al.: softmax models that differ by client.

    For every client, of 60 features and 10 classes,

    .. math::

      u &\sim \mathcal{N}(0, \alpha^2), & W_{jc}, b_c &\sim \mathcal{N}(u, 1), \\
      B &\sim \mathcal{N}(0, \beta^2), & v_j &\sim \mathcal{N}(B, 1), \\
      x_j &\sim \mathcal{N}(v_j, j^{-1.2}), & y &= \arg\max_c (x^\top W + b)_c .

    alpha is meant to say how much models differ, beta how much features do. But u adds
    the same to the scores of all classes, so alpha changes the weights and never the
    labels; and with alpha = beta = 0 clients still have models and means of their own:
    only `fedprox_iid` is IID.

    Where the paper's text and its code differ, this follows the code: alpha and beta
    are standard deviations (the text's N(0, alpha) reads as a variance; for 0 and 1 it
    is the same, for 0.5 not), and sizes are 50 + floor(exp(N(4, 2^2))), where the text
    says power law. One number u serves all entries of W and b, as in the code.

    `alpha` and `beta` are >= 0. Sizes drawn as above have the median 104, and one
    client in 1,000 has over 26,000. Returns data of ``x`` [n, 60] float32 and ``y`` [n]
    int32 in 0..9, and the truth: ``weights`` [N, 60, 10], ``bias`` [N, 10] and ``mean``
    [N, 60], float64.
    """
    check.non_negative(alpha=alpha, beta=beta)

    def draw(rng, n, k):
        model = _softmax_model(rng, alpha * rng.standard_normal())
        mean = beta * rng.standard_normal() + rng.standard_normal(_FEATURES)
        return _softmax_examples(rng, n, model, mean)

    return _population(draw, num_clients, sizes, test_fraction, [seed, 102])


def fedprox_iid(
    num_clients: int = 30,
    sizes: ArrayLike | None = None,
    test_fraction: float = 0.1,
    seed: int = 0,
) -> tuple[FederatedData, Truth]:
    """Synthetic IID of Li et al.: one softmax model for all, features of mean 0.

    As `fedprox`, but W and b have standard normal entries and are the same for all
    clients, and v = 0. Sizes still differ. Arguments, results and errors are those of
    `fedprox`.
    """

    def draw(rng, n, k):
        model = _softmax_model(np.random.default_rng([seed, 104]), 0.0)
        return _softmax_examples(rng, n, model, np.zeros(_FEATURES))

    return _population(draw, num_clients, sizes, test_fraction, [seed, 103])


def gaussian_mixture(
    num_clients: int,
    means: ArrayLike,
    alpha: float | None = None,
    shift: float = 0.0,
    sizes: ArrayLike | None = 50,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> tuple[FederatedData, Truth]:
    r"""Classes that are Gaussians, in shares and around means of the client's own.

    For every client,

    .. math::

      p \sim \mathrm{Dir}(\alpha \mathbf{1}_K), \qquad
      s \sim \mathcal{N}(0, \mathrm{shift}^2 I_d), \qquad
      y \sim p, \qquad x \sim \mathcal{N}(\mu_y + s, I_d) .

    With two classes at distance :math:`\delta = |\mu_1 - \mu_0|`, the error of the best
    classifier for a client (which knows p and s) is

    .. math::

      p_0 \Phi(-\delta/2 - t) + p_1 \Phi(-\delta/2 + t), \qquad
      t = \log(p_0 / p_1) / \delta .

    Small `alpha` > 0 means few classes per client, None gives all classes equal shares;
    `means` are [K, d] finite numbers, `shift` >= 0. Returns data of ``x`` [n, d]
    float32 and ``y`` [n] int32 in 0..K-1, and the truth: ``means`` [N, K, d], shifts
    included, and ``shares`` [N, K], float64.
    """
    check.non_negative(shift=shift)
    if alpha is not None:
        check.positive(alpha=alpha)
    centres = _matrix("means", means)
    num_classes, dim = centres.shape

    def draw(rng, n, k):
        shares = np.full(num_classes, 1 / num_classes)
        if alpha is not None:
            shares = common.softmax(common.log_gamma(rng, alpha, num_classes))
        own = centres + shift * rng.standard_normal(dim)
        y = rng.choice(num_classes, n, p=shares).astype(np.int32)
        x = (own[y] + rng.standard_normal((n, dim))).astype(np.float32)
        return x, y, {"means": own, "shares": shares}

    return _population(draw, num_clients, sizes, test_fraction, [seed, 105])


def _softmax_model(rng: np.random.Generator, u: float) -> Truth:
    """W [60, 10] and b [10] with entries N(u, 1)."""
    shapes = {"weights": (_FEATURES, _CLASSES), "bias": (_CLASSES,)}
    return {name: u + rng.standard_normal(shape) for name, shape in shapes.items()}


def _softmax_examples(
    rng: np.random.Generator, n: int, model: Truth, mean: np.ndarray
) -> tuple[np.ndarray, np.ndarray, Truth]:
    x = (mean + _STD * rng.standard_normal((n, _FEATURES))).astype(np.float32)
    y = np.argmax(x @ model["weights"] + model["bias"], axis=1).astype(np.int32)
    return x, y, {**model, "mean": mean}


def _matrix(name: str, values: ArrayLike) -> np.ndarray:
    matrix = np.asarray(values, np.float64)
    if matrix.ndim != 2 or 0 in matrix.shape or not np.isfinite(matrix).all():
        raise ValueError(f"{name} must be a matrix of finite numbers, got {values!r}.")
    return matrix


def _population(
    draw: _Client,
    num_clients: int,
    sizes: ArrayLike | None,
    test_fraction: float,
    stream: list[int],
) -> tuple[FederatedData, Truth]:
    """Draws client by client, each from a generator of its own.

    `stream` is the user's seed and a number of the function's own.
    """
    check.positive_int(num_clients=num_clients)
    check.in_range(0, 1, test_fraction=test_fraction)
    check.seed(seed=stream[0])
    given = None if sizes is None else common.ints_of("sizes", sizes, num_clients, 0)
    train, test, truths = [], [], []
    for k in range(num_clients):
        rng = np.random.default_rng([*stream, k])
        n = 50 + int(rng.lognormal(4, 2)) if given is None else int(given[k])
        x, y, truth = draw(rng, n, k)
        # Rounded to 9 places, or 10 * (1 - 0.9) would leave train without its example.
        cut = int(round((1 - test_fraction) * n, 9))
        train.append({"x": x[:cut], "y": y[:cut]})
        test.append({"x": x[cut:], "y": y[cut:]})
        truths.append(truth)
    stacked = {name: np.stack([t[name] for t in truths]) for name in truths[0]}
    return FederatedData.from_lists(train, test), stacked
