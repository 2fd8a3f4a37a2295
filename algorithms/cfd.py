r"""CFD: federated distillation with soft labels of few bits, both ways.

Clients of the cohort S train a common :math:`\theta` to :math:`\theta^i` and send
quantised labels of the n public inputs, entropy coded, perhaps against what they said
last. The server keeps a model :math:`\theta_S`, which learns their mean and goes on
learning; what that says is quantised and sent, and everyone learns it from a common
:math:`\theta_0` (dual distillation):

.. math::

  Y &= \frac{1}{|S|} \sum_{i \in S} Q_{up}(\mathrm{softmax} f_{\theta^i}(X_{pub})),
  \qquad \theta_S \leftarrow \mathrm{distil}(\theta_S, X_{pub}, Y), \\
  Y_S &= Q_{down}(\mathrm{softmax} f_{\theta_S}(X_{pub})),
  \qquad \theta \leftarrow \mathrm{distil}(\theta_0, X_{pub}, Y_S) .

As they share the seed of all that is random, clients end with the same parameters to
the bit, so that :math:`\theta` is made once. A client may miss rounds: labels are coded
against those that it received last, which the server knows. (One message for everyone,
coded against the last round, could be read by those alone who were there.)

Without dual distillation :math:`Y_S = Q_{down}(Y)`, and with 32 bits nothing is
quantised: that is federated distillation, `fedjax_core.algorithms.fd`. The public
inputs are ``FederatedData.public["x"]``, in a fixed order.

References:
  Sattler et al., "CFD: Communication-Efficient Federated Distillation via Soft-Label
  Quantization and Delta Coding", IEEE TNSE 2022; Sattler, TU Berlin 2021, Algorithm 8.
"""

import dataclasses
import functools
import math
from typing import Annotated, Any, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from fedjax_core import check, distillation, random
from fedjax_core.arrays import num_bytes, repeat_rows
from fedjax_core.compress.labels import num_label_vectors, soft_labels
from fedjax_core.distillation import Parts, first_inputs, labelling_clients, predict
from fedjax_core.local import init_bytes
from fedjax_core.map import map_clients
from fedjax_core.metrics import Bits
from fedjax_core.reduce import select
from fedjax_core.transform import (
    Message,
    Transform,
    dense_bits,
    identity,
    with_transform,
)
from fedjax_core.types import Algorithm, ClientProgram, LossFn, Params, PositiveInt

LabelBits = Annotated[int, functools.partial(check.one_of, (*range(1, 17), 32))]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(distillation.Config):
    r"""Hyper-parameters, with those of `fedjax_core.distillation.Config`.

    Attributes:
      num_public: n, the first public inputs, which are labelled.
      up_bits: :math:`b_{up}` of a label, 1 to 16; 32 sends floats.
      down_bits: :math:`b_{down}`, likewise.
      delta: code what is quantised against the last labels of the same client.
      start: "dual" distillation; or clients start from their "previous" parameters,
        which they have only where all take part in every round; or from the "initial"
        ones.
      charge_first_download: count labels as received in the first round too, in a code
        of fixed length, when there are none and clients start from :math:`\theta_0`.
    """

    num_public: PositiveInt = 1000
    up_bits: LabelBits = 1
    down_bits: LabelBits = 1
    delta: bool = False
    start: Literal["dual", "previous", "initial"] = "dual"
    charge_first_download: bool = False


class State(NamedTuple):
    """What survives a round."""

    params: Params  # theta_S, or what clients start from without it
    student: Any  # theta; () without dual distillation
    initial: Any  # theta_0, or () where nobody starts there
    labels: jax.Array  # [n, K] float32, Y_S
    clients: Any  # [N, ...], last labels received and sent, 8 bits where they do


def receiving(
    program: ClientProgram, down: Transform, first_bits: Bits
) -> ClientProgram:
    """The program with labels received, third of what it is sent, counted as `down`.

    `first_bits` is what is counted while there are none yet, in the first round.
    """

    def finish(received, carry, row, turn):
        update, _, metrics = program.finish(received, carry, (), turn)
        message = Message(received[2], dense_bits(received[2]))
        sent, new = down.apply(message, row, random.stream(turn.key, "downlink"))
        there = received[2].any()
        bits, row = select(there, (sent.bits, new), (first_bits, row))
        metrics["received_bytes"] = bits.as_bytes()
        return update, row, metrics

    return program._replace(finish=finish)


def make(config: Config, loss_fn: LossFn, **parts: Unpack[Parts]) -> Algorithm:
    """Builds CFD for a loss that is the cross-entropy of a class.

    Its `parts` are `fedjax_core.distillation.Parts`.
    """
    plugs = distillation.plugs(Config, config, loss_fn, **parts)
    up, down = (
        identity() if bits == 32 else soft_labels(bits, delta=config.delta)
        for bits in (config.up_bits, config.down_bits)
    )
    program = labelling_clients(loss_fn, plugs.client, plugs.logits)
    of_label = 32.0 * config.num_classes
    if config.down_bits < 32:
        of_label = math.log2(num_label_vectors(config.down_bits, config.num_classes))
    charged = config.num_public * config.charge_first_download
    program = receiving(program, down, Bits.of(math.ceil(charged * of_label)))
    client, dual = with_transform(program, up), config.start == "dual"
    nothing = jnp.zeros((config.num_public, config.num_classes), jnp.float32)

    def init(params, num_clients):
        clients = repeat_rows((down.init(nothing), up.init(nothing)), num_clients)
        initial = () if config.start == "previous" else params
        return State(params, params if dual else (), initial, nothing, clients)

    def round(state, cohort, key):
        public = first_inputs(cohort, config.num_public)
        shared = (state.student if dual else state.params, public, state.labels)
        results = map_clients(
            client, shared, cohort, key, reduce=plugs.reduce, client_state=state.clients
        )
        metrics, labels, params = dict(results.metrics), results.update, state.params
        if dual:
            params, metrics["distil_loss"] = plugs.distil(
                params, public, labels, random.stream(key, "server")
            )
            labels = jax.nn.softmax(predict(plugs.logits, params, public))
        message = Message(labels.astype(jnp.float32), Bits.of(0))
        # As against nothing: what is sent is the same, however it is coded.
        sent, _ = down.apply(message, down.init(nothing), random.stream(key, "down"))
        start = state.params if config.start == "previous" else state.initial
        student, loss = plugs.distil(
            start, public, sent.update, random.stream(key, "clients")
        )
        if not dual:
            params, student = student, ()
            metrics["distil_loss"] = loss
        metrics["downlink_bytes"] = metrics.pop("received_bytes")
        rest = (state.initial, sent.update, results.client_state)
        return State(params, student, *rest), metrics

    return Algorithm(
        name="cfd",
        config=config,
        work=config.work,
        init=init,
        round=round,
        # Labels as they are and as they are sent.
        client_bytes=lambda params: (
            init_bytes(plugs.client)(params) + 2 * num_bytes(nothing)
        ),
        parts=plugs.names | {"reduce": plugs.reduce.name},
        needs=distillation.needs(config.num_classes),
    )
