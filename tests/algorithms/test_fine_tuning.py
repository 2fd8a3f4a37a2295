"""Fine-tuned models in NumPy, on FedAvg's server; and everyone's after a run."""

from typing import Any

import jax
import numpy as np
import pytest
from tests.algorithms.personal_rounds import (
    EXAMPLES,
    OFFSETS,
    PARAMS,
    SIZES,
    START,
    N,
    X,
    Y,
    assert_close,
    assert_own_losses,
    own_model,
    rounds,
)
from tests.reference import (
    fedavg_round,
    local_sgd,
    softmax_gradient,
    softmax_loss,
    visits,
)

from fedjax_core import FederatedData, Full, LocalWork, Model, Packed, simulate
from fedjax_core.algorithms import fine_tuning, scaffold

WORK = LocalWork(batch_size=3, epochs=2)
CONFIG = fine_tuning.Config(client_lr=0.3, work=WORK)


def test_rounds_are_fedavg_s_and_personal_models_where_clients_ended():
    algorithm = fine_tuning.make(CONFIG, softmax_loss)
    w, own = START, {}
    state: Any = None
    for state, metrics, cohort in rounds(algorithm):
        orders = visits(cohort)
        own |= {i: local_sgd(w, X, Y, b, 0.3)[0] for i, b in orders.items()}
        w = fedavg_round(w, X, Y, orders, {i: SIZES[i] for i in orders}, 0.3, 1.0)
        assert_close(state.params, w)
        assert metrics["uplink_bytes"] == 4 * 12 * len(orders)
    # Clients 3, without examples, and 6 never took part.
    assert set(range(N)) - set(own) == {3, 6}
    assert_own_losses(algorithm, state, [own.get(i, w) for i in range(N)])


@pytest.mark.parametrize("place", ["device", "host"])
def test_a_round_of_everyone_fine_tunes_a_model_of_any_method(place):
    def metrics(params, batch):
        return {"loss": softmax_loss(params, batch, None)}

    model = Model(lambda key: PARAMS, softmax_loss, metrics)
    packed = Packed(EXAMPLES, OFFSETS)
    data = FederatedData(packed, test=packed)
    method = scaffold.make(scaffold.Config(work=WORK), softmax_loss)
    trained = simulate(method, data, model, rounds=2, cohort_size=3, progress=False)
    params = jax.tree.map(lambda x: x[0], trained.params)
    # In full batches the order of examples does not matter.
    work = LocalWork(batch_size=9, epochs=4)
    tuned = simulate(
        fine_tuning.make(fine_tuning.Config(client_lr=0.5, work=work), model.loss),
        data, model, rounds=1, participation=Full(), params=params, progress=False,
        client_store=place,
    )  # fmt: skip
    start = {k: np.asarray(v, np.float64) for k, v in params.items()}
    for i in np.flatnonzero(SIZES):
        mine = np.arange(OFFSETS[i], OFFSETS[i + 1])
        end, _ = local_sgd(start, X, Y, [mine] * 4, 0.5)
        np.testing.assert_allclose(
            tuned.client_metrics["test_personal_loss"][0, i],
            softmax_gradient(end, X[mine], Y[mine])[0],
            rtol=1e-4,
        )


def test_an_excluded_client_goes_on_with_the_server_s_model():
    x = EXAMPLES["x"].copy()
    x[OFFSETS[2]] = np.nan
    algorithm = fine_tuning.make(CONFIG, softmax_loss)
    state, metrics, _ = next(rounds(algorithm, [[2, 0, 5]], x))
    assert metrics["excluded_clients"] == 1
    assert_close(own_model(algorithm, state, 2), state.params)


def test_a_config_names_what_is_wrong():
    with pytest.raises(ValueError, match="client_lr must be > 0 and finite, got 0"):
        fine_tuning.Config(client_lr=0)
