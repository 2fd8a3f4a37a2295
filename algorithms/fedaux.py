r"""FedAUX: a federation of models distilled by an ensemble weighted by certainty.

Before training the server pre-trains extractors on auxiliary data, and every client
releases once, with differential privacy, how to tell its own data from public negatives
(`prepare`, Algorithm 14). What that makes of a public example :math:`x` is its score
:math:`s_i(x)`.

In a round every client trains the model of its prototype P, an architecture. The server
averages the models of each prototype and trains the mean for an epoch on public data to
say what all clients' models together do, with logits :math:`F_i`:

.. math::

  \theta^P \leftarrow \theta^P + \frac{\sum_{i \in S_P} n_i (\theta_i - \theta^P)}
  {\sum_{i \in S_P} n_i}, \qquad
  A(x) = \mathrm{softmax} \frac{\sum_{i \in S} s_i(x) F_i(x)}{\sum_{i \in S} s_i(x)},
  \qquad \min_{\theta^P} \sum_x \mathrm{KL}(A(x) \| p_{\theta^P}(x)) .

With equal scores and one prototype it is FedDF. The server's data,
``FederatedData.public``, are the inputs "x" ``[n, ...]``, the table "scores" ``[N, n]``
and, of several prototypes, "prototype" ``[N]``, int32. Of logits only the sum over
clients is kept. Scores are > 0; a client with one that is not finite is left out.

References:
  Sattler et al., "FedAUX: Leveraging Unlabeled Auxiliary Data in Federated Learning",
  TNNLS 2021; Sattler, dissertation, TU Berlin, 2021, Algorithms 14 and 15.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.typing import ArrayLike

from fedjax_core import check, distillation, random, server
from fedjax_core.algorithms.feddf import State
from fedjax_core.arrays import num_bytes
from fedjax_core.data.packed import FederatedData
from fedjax_core.data.padded import pad
from fedjax_core.distillation import (
    LogitsFn,
    ensemble,
    predict,
    public_inputs,
    weighted,
    with_outputs,
)
from fedjax_core.local import init_bytes, local_sgd
from fedjax_core.map import disjoint_passes, map_clients
from fedjax_core.metrics import Bytes
from fedjax_core.pretrain import on_features
from fedjax_core.privacy.logistic import Certainty, CertaintyConfig, certainty
from fedjax_core.reduce import mean, total
from fedjax_core.types import (
    Algorithm,
    ClientProgram,
    Key,
    LossFn,
    Params,
    Positive,
    trained,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(distillation.Config):
    """Hyper-parameters of FedAUX, with those of `fedjax_core.distillation.Config`.

    Attributes:
      scores: name of the table of scores among the server's data.
    """

    distil_lr: Positive = 5e-5
    scores: str = "scores"


def prepare(
    config: CertaintyConfig,
    features: Callable[[np.ndarray], np.ndarray],
    data: FederatedData,
    negatives: ArrayLike,
    queries: ArrayLike,
    key: Key,
) -> Certainty:
    """Scores of the public examples by every client, once before training.

    Args:
      config: of the release.
      features: ``[n, ...] -> [n, H]``, see `fedjax_core.pretrain.features`.
      data: the clients' ``train["x"]``.
      negatives: ``[n', ...]`` public examples to tell clients' own from.
      queries: ``[n, ...]`` other public examples, to distil with.
      key: of the noise.
    """
    own, mask = pad(on_features(features, data).train)
    against, asked = (features(np.asarray(x)) for x in (negatives, queries))
    return certainty(config, key, own["x"], mask, against, asked)


def preparation_bytes(extractor: Params, width: int, negatives: int) -> tuple[int, int]:
    """What a client receives and sends once before training, in bytes.

    The extractor :math:`h_0`, without a head, and so many negatives as float32 features
    of that width come; what goes is as wide.
    """
    check.positive_int(width=width, negatives=negatives)
    return num_bytes(extractor) + 4 * width * negatives, 4 * width


def make(
    config: Config, loss_fn: LossFn, *, logits: LogitsFn | None = None, **parts: Any
) -> Algorithm:
    """Builds FedAUX for the given loss; arguments as in `feddf.make`."""
    several = make_mixed(config, [loss_fn], logits=logits and [logits], **parts)

    def round(state, cohort, key):
        new, metrics = several.round(State((state.params,)), cohort, key)
        return State(new.params[0]), metrics

    return dataclasses.replace(
        several,
        init=lambda params, num_clients: State(params),
        round=round,
        client_bytes=lambda params: several.client_bytes((params,)),
    )


def make_mixed(
    config: Config,
    losses: Sequence[LossFn],
    *,
    logits: Sequence[LogitsFn] | None = None,
    client_optimizer: optax.GradientTransformation | None = None,
    distil_optimizer: optax.GradientTransformation | None = None,
) -> Algorithm:
    """Builds FedAUX for several prototypes; the state's params are a tuple of models.

    Losses and logits are those of `make`, one for each prototype.
    """
    parts = [
        distillation.plugs(
            Config, config, loss_fn, client_optimizer, distil_optimizer, own
        )
        for loss_fn, own in zip(losses, logits or [None] * len(losses), strict=True)
    ]

    def client(loss_fn: LossFn, plugs: distillation.Plugs) -> ClientProgram:
        def outputs(params, received):
            (_, inputs), scores = received
            return weighted(predict(plugs.logits, params, inputs), scores)

        local = local_sgd(loss_fn, plugs.client)
        return with_outputs(local, outputs, params=lambda received: received[0][0])

    clients = list(map(client, losses, parts))

    def needs(model, data):
        distillation.needs(config.num_classes)(model, data)
        check.one_of(data.public, scores=config.scores)
        scores = np.asarray(data.public[config.scores])
        n = len(public_inputs(data)["x"])
        check.rows(data.num_clients, scores=scores)
        normal = scores >= np.finfo(np.float32).tiny  # others count as 0
        if scores.shape[1:] != (n,) or not normal.all():
            raise ValueError(
                f"scores must be > 0 for each of {n} public inputs, got shape "
                f"{scores.shape} and a least one of {scores.min()}."
            )
        if len(clients) > 1:
            of = data.public.get("prototype")
            check.rows(data.num_clients, prototype=of)
            check.each_in_range(0, len(clients) - 1, prototype=of)

    def round(state, cohort, key):
        inputs, prototypes = public_inputs(cohort), range(len(clients))
        groups = [cohort] * len(clients)
        if len(clients) > 1:
            of = cohort.public["prototype"][cohort.client_id]
            groups = [cohort.only(cohort.client_mask & (of == p)) for p in prototypes]
        passes = [
            map_clients(
                clients[p],
                (state.params[p], inputs),
                groups[p],
                random.stream(key, f"prototype {p}") if p else key,
                reduce={"update": mean("examples"), "outputs": total()},
                each=cohort.public[config.scores][cohort.client_id],
            )
            for p in prototypes
        ]
        outputs = (results.update["outputs"] for results in passes)
        teacher = jax.nn.softmax(ensemble(functools.reduce(operator.add, outputs)))
        students, metrics = [], []
        for p in prototypes:
            update, params = passes[p].update["update"], state.params[p]
            student, loss = parts[p].distil(
                server.move(params, trained(update), update),
                inputs,
                teacher,
                random.stream(key, f"distil {p}" if p else "distil"),
            )
            students.append(student)
            # Public data are the server's own: a client receives the model alone.
            received = Bytes.of(num_bytes(params)) * groups[p].client_mask.sum()
            metrics.append(
                passes[p].metrics | {"downlink_bytes": received, "distil_loss": loss}
            )
        return State(tuple(students)), disjoint_passes(metrics)

    return Algorithm(
        name="fedaux",
        config=config,
        work=config.work,
        init=lambda params, num_clients: State(tuple(params)),
        round=round,
        client_bytes=lambda params: max(map(init_bytes(parts[0].client), params)),
        parts=parts[0].names,
        needs=needs,
    )
