"""What holds for every method, whatever it does; a new one is a line in METHODS."""

import dataclasses
import pkgutil
from collections.abc import Callable
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.algorithms.generators import SOFTMAX, linear_gan, linear_vae
from tests.reference import softmax_loss, softmax_problem

from fedjax_core import (
    Algorithm,
    Execution,
    LocalWork,
    Packed,
    algorithms,
    client_mesh,
    clip,
    gaussian_mean,
    top_k,
    trimmed_mean,
)
from fedjax_core.algorithms import (
    aaggff_d,
    apfl,
    cfd,
    cfl,
    ditto,
    fd,
    fedaux,
    fedavg,
    fedbe,
    fedbuff,
    fedcgan,
    fedcvae,
    feddf,
    feddyn,
    fedevg,
    fedmd,
    fedmgda,
    fednova,
    fedopt,
    fedper,
    fedprox,
    fedrep,
    fedsgd,
    fine_tuning,
    gossip,
    label_logits,
    lg_fedavg,
    local_only,
    mimelite,
    one_shot_clustering,
    pfedme,
    qfedavg,
    scaffold,
    signsgd,
    stc,
    superfed,
)
from fedjax_core.metrics import Bits
from fedjax_core.networks.builders import chain, mixing
from fedjax_core.plan import Capacity, Draft
from fedjax_core.sweep import numbers, with_numbers

WORK = LocalWork(batch_size=4, epochs=2)
FEDAVG = fedavg.Config(work=WORK)
SCAFFOLD = scaffold.Config(work=WORK)
PRIVATE: dict[str, Any] = {"transform": clip(0.3), "reduce": gaussian_mean(0.5, 4)}
TEACH: dict[str, Any] = {"num_classes": 3, "distil_lr": 0.05, "work": WORK}


def drawn_like(key: jax.Array, params: Any) -> Any:
    """Other parameters of the same shapes."""
    return jax.tree.map(lambda p: jax.random.normal(key, p.shape), params)


def instead_of_loss(make: Any, *args: Any) -> Algorithm:
    """A method that is built from networks of its own, of `args`, config and loss."""
    *parts, config, _ = args
    return make(config, *parts)


METHODS: dict[str, tuple[Callable[..., Algorithm], Any]] = {
    "fedavg": (fedavg.make, FEDAVG),
    "fedavg, top-k, Adam on the server": (
        partial(fedavg.make, transform=top_k(0.3), server_optimizer=optax.adam(0.1)),
        FEDAVG,
    ),
    "fedavg, trimmed mean": (partial(fedavg.make, reduce=trimmed_mean(0.4)), FEDAVG),
    "fedavg, clipped and noisy": (partial(fedavg.make, **PRIVATE), FEDAVG),
    "scaffold": (scaffold.make, SCAFFOLD),
    "scaffold, clipped and noisy": (partial(scaffold.make, **PRIVATE), SCAFFOLD),
    "fedper": (fedper.make, fedper.Config(personal=("b",), work=WORK)),
    "lg_fedavg, top-k": (
        partial(lg_fedavg.make, transform=top_k(0.3)),
        lg_fedavg.Config(shared=("b",), work=WORK),
    ),
    "fedrep": (fedrep.make, fedrep.Config(personal=("b",), head=1, work=WORK)),
    "fine_tuning": (fine_tuning.make, fine_tuning.Config(work=WORK)),
    "apfl": (apfl.make, apfl.Config(work=WORK)),
    "pfedme": (pfedme.make, pfedme.Config(work=WORK)),
    "superfed": (
        partial(
            superfed.make,
            init=lambda key: drawn_like(key, PARAMS),
            client_optimizer=optax.sgd(0.1, 0.5),
        ),
        superfed.Config(mixing="layer", work=WORK),
    ),
    "ditto": (ditto.make, ditto.Config(work=WORK)),
    "fedyogi": (fedopt.make, fedopt.Config(rule="yogi", work=WORK)),
    "fedbuff": (fedbuff.make, fedbuff.Config(work=WORK)),
    "fedsgd": (fedsgd.make, fedsgd.Config(batch_size=4)),
    "fedprox": (fedprox.make, fedprox.Config(mu=0.5, work=WORK)),
    "fednova, momentum": (
        fednova.make,
        fednova.Config(mu=0.5, momentum=0.9, work=WORK),
    ),
    "feddyn": (feddyn.make, feddyn.Config(work=WORK)),
    "mimelite, Adam": (
        mimelite.make,
        mimelite.Config(client_lr=0.02, beta2=0.9, tau=0.1, work=WORK),
    ),
    "stc, momentum": (
        stc.make,
        stc.Config(momentum=0.9, sparsity_up=4, sparsity_down=4, work=WORK),
    ),
    "signsgd": (signsgd.make, signsgd.Config(step_size=0.01, work=WORK)),
    "qfedavg": (qfedavg.make, qfedavg.Config(q=2.0, work=WORK)),
    "aaggff_d": (aaggff_d.make, aaggff_d.Config(work=WORK)),
    "fedmgda": (fedmgda.make, fedmgda.Config(work=WORK)),
    "fd": (
        fd.make,
        fd.Config(num_public=7, distil_on="server", select="margin", **TEACH),
    ),
    "cfd": (cfd.make, cfd.Config(num_public=9, down_bits=32, delta=True, **TEACH)),
    "feddf": (feddf.make, feddf.Config(**TEACH)),
    "fedaux": (fedaux.make, fedaux.Config(**TEACH)),
    "fedbe": (fedbe.make, fedbe.Config(num_models=3, **TEACH)),
    "fedmd": (fedmd.make, fedmd.Config(num_public=9, **TEACH)),
    "label_logits": (
        label_logits.make,
        label_logits.Config(num_classes=3, gamma=0.5, work=WORK),
    ),
    "cfl, top-k": (
        partial(cfl.make, transform=top_k(0.3)),
        cfl.Config(max_clusters=3, work=WORK),
    ),
    "one_shot_clustering": (
        one_shot_clustering.make,
        one_shot_clustering.Config(num_clusters=2, work=WORK),
    ),
    "local only": (local_only.make, local_only.Config(work=WORK)),
    "gossip": (gossip.make, gossip.Config(work=WORK)),
    "fedevg, stateful": (
        partial(instead_of_loss, fedevg.make, SOFTMAX),
        fedevg.Config(
            num_classes=3, stateful=True, chain_step_size=0.1, first_step=0.5, work=WORK
        ),
    ),
    "fedcgan": (
        partial(instead_of_loss, fedcgan.make, linear_gan(), SOFTMAX),
        fedcgan.Config(num_classes=3, per_class=2, client_lr=0.01, work=WORK),
    ),
    "fedcvae": (
        partial(instead_of_loss, fedcvae.make, linear_vae(), SOFTMAX),
        fedcvae.Config(num_classes=3, per_class=2, client_lr=0.01, work=WORK),
    ),
}

SIZES = [5, 1, 8, 0, 3, 6, 2, 9]
COHORTS = [[2, 0, 5, 7], [1, 7, 6, 4], [0, 2, 4, 5]]
EXAMPLES, OFFSETS, PARAMS = softmax_problem(SIZES)
TRAIN = Packed(EXAMPLES, OFFSETS)
PUBLIC = {"x": EXAMPLES["x"][::4]}  # what the server holds
PUBLIC["mixing"] = mixing(chain(len(SIZES)))
PUBLIC["scores"] = np.linspace(0.1, 1, 72, dtype=np.float32).reshape(8, 9)
# Models of methods that learn something else than the softmax regression.
STARTS: dict[str, Any] = {
    "fedevg, stateful": np.float32(EXAMPLES["x"][:6]),
    "fedcgan": linear_gan().init(jax.random.key(0)),
    "fedcvae": linear_vae().init(jax.random.key(0)),
}
KEYS = jax.random.split(jax.random.key(0), len(COHORTS))
PLAIN = Execution()


class Runner:
    """A method, compiled once, run on the same three cohorts again and again."""

    def __init__(self, make, config, params=PARAMS):
        self.params = params
        self.algorithm = make(config, softmax_loss)
        self.numbers = numbers(config)
        # Of another config, so that nothing is left of it but what is no number.
        other = {k: 0.7 * v or 0.05 for k, v in self.numbers.items()}
        other = with_numbers(config, other)
        self.build = lambda values: make(with_numbers(other, values), softmax_loss)
        self.traces = 0
        self.round = jax.jit(self._counted)
        self.state = self.algorithm.init(params, len(SIZES))

    def _counted(self, *args):
        self.traces += 1
        return self.algorithm.round(*args)

    def plan(self, ids, round, how=PLAIN, slots=6):
        draft = Draft(
            np.asarray(ids),
            OFFSETS,
            self.algorithm.work,
            seed=0,
            round=round,
            execution=how,
        )
        cohort = draft.build(Capacity(slots, 6, 40, 64), num_clients=len(SIZES))
        examples = {k: jnp.asarray(v) for k, v in EXAMPLES.items()}
        whole = dataclasses.replace(cohort, examples=examples, public=PUBLIC)
        return jax.tree.map(jnp.asarray, whole)

    def plans(self, cohorts, how=PLAIN):
        return [self.plan(ids, t, how) for t, ids in enumerate(cohorts)]

    def __call__(self, cohorts=COHORTS, how=PLAIN, round=None, start=None):
        state, kept = start or self.state, []
        for cohort, key in zip(self.plans(cohorts, how), KEYS, strict=True):
            state, metrics = (round or self.round)(state, cohort, key)
            kept.append(metrics)
        return state, kept


def test_every_method_is_here():
    modules = {m.name for m in pkgutil.iter_modules(algorithms.__path__) if not m.ispkg}
    here = {type(config).__module__.rsplit(".", 1)[1] for _, config in METHODS.values()}
    # One's only client is everybody pooled, others are rounds of `fedavg.mixed`, as
    # those of aaggff_d are.
    mixed = {"aaggff_s", "afl", "portfolio", "propfair", "term"}
    assert modules - here == {"centralised", *mixed}


@pytest.fixture(scope="module", params=METHODS)
def runner(request) -> Runner:
    name = request.param
    return Runner(*METHODS[name], STARTS.get(name, PARAMS))


@pytest.fixture(scope="module")
def expected(runner):
    return runner()


def without_slots(metrics):
    return [{k: v for k, v in m.items() if np.ndim(v) == 0} for m in metrics]


def stacked(trees):
    return jax.tree.map(lambda *x: np.stack(x), *trees)


def assert_same(got, expected):
    chex.assert_trees_all_close(got[0], expected[0], rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(
        without_slots(got[1]), without_slots(expected[1]), rtol=1e-5, atol=1e-6
    )


def test_rounds_move_the_model_and_stay_finite(runner, expected):
    state, metrics = expected
    chex.assert_tree_all_finite(state)
    sends = runner.algorithm.name != "local_only"
    models = [state.params]
    if runner.algorithm.own_models is not None:
        row = jax.tree.map(lambda x: x[COHORTS[0][0]], state.clients)
        models += runner.algorithm.own_models(state, row).values()
    for before, *after in zip(
        *map(jax.tree.leaves, [runner.params, *models]), strict=True
    ):
        assert max(np.abs(before - x).max() for x in after) > 1e-3
    # Some methods have nothing to send down in the first round.
    assert all(m["downlink_bytes"] > 0 for m in metrics[1:]) == sends
    for m in metrics:
        assert m["valid_clients"] == 4
        assert m["excluded_clients"] == 0
        assert 0 < m["train_loss"] < 10
        assert (m["uplink_bytes"] > 0) == sends


def test_init_is_the_given_model(runner):
    chex.assert_trees_all_equal(
        runner.state.params, jax.tree.map(jnp.array, runner.params)
    )
    for leaf in jax.tree.leaves(getattr(runner.state, "clients", ())):
        assert leaf.shape[0] == len(SIZES)
        np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape))


def test_the_state_keeps_structure_shapes_and_dtypes(runner, expected):
    chex.assert_trees_all_equal_shapes_and_dtypes(expected[0], runner.state)


@pytest.mark.parametrize("dtype", [jnp.bfloat16])
def test_the_state_keeps_low_precision(runner, dtype):
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), runner.params)
    state = runner.algorithm.init(params, len(SIZES))
    cohort = runner.plan([0, 2, 4], 0)
    cohort = dataclasses.replace(
        cohort, examples=cohort.examples | {"x": cohort.examples["x"].astype(dtype)}
    )
    after, _ = jax.eval_shape(runner.algorithm.round, state, cohort, KEYS[0])
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)


def test_metrics_are_flat(runner, expected):
    for metrics in expected[1]:
        for name, value in metrics.items():
            assert isinstance(name, str)
            # float32 holds the bytes of no more than four million parameters.
            assert isinstance(value, Bits if "bytes" in name else jax.Array)
            assert value.shape in ((), (6,)), name


def test_order_of_clients_does_not_matter(runner, expected):
    assert_same(runner([ids[::-1] for ids in COHORTS]), expected)


def test_a_client_without_examples_changes_nothing(runner, expected):
    got = runner([[ids[0], 3, *ids[1:]] for ids in COHORTS])
    assert_same(got, expected)
    for clients, first in zip(
        jax.tree.leaves(getattr(got[0], "clients", ())),
        jax.tree.leaves(getattr(runner.state, "clients", ())),
        strict=True,
    ):
        np.testing.assert_array_equal(clients[3], first[3])


def test_clients_outside_a_cohort_keep_their_state(runner):
    state, _ = runner.round(runner.state, runner.plan(COHORTS[0], 0), KEYS[0])
    others = np.setdiff1d(np.arange(len(SIZES)), COHORTS[0])
    for after, before in zip(
        jax.tree.leaves(getattr(state, "clients", ())),
        jax.tree.leaves(getattr(runner.state, "clients", ())),
        strict=True,
    ):
        np.testing.assert_array_equal(after[others], before[others])
        moved = np.not_equal(after, before).reshape(len(SIZES), -1).any(1)
        assert moved[COHORTS[0]].all()


def test_one_trace_serves_every_round(runner, expected):
    before = runner.traces
    runner()
    runner([[1], [], [3, 2, 6, 7, 5, 4]])
    assert runner.traces == before
    assert runner.traces == 1


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "apfl"])
def test_eager_blocks_of_3_equal_compiled_blocks_of_1(name):
    runner, how = Runner(*METHODS[name]), Execution(block_size=3)
    eager, metrics = runner.algorithm.round(
        runner.state, runner.plan(COHORTS[0], 0, how), KEYS[0]
    )
    compiled, same = runner.round(runner.state, runner.plan(COHORTS[0], 0), KEYS[0])
    assert_same((eager, [metrics]), (compiled, [same]))


def test_traced_numbers_seeds_and_scans_on_eight_devices_equal_loops_on_one(
    runner,
):
    # Without padding, where the loops have it, and in blocks of two. The config's
    # numbers are arguments: the round does not look at them, and has no others.
    how = Execution(block_size=2, mesh=client_mesh(jax.devices()[:8]))
    cohorts = [COHORTS, COHORTS[::-1]]
    starts = [
        runner.state._replace(
            params=jax.tree.map(lambda p, s=s: p + s / 4, runner.state.params)
        )
        for s in range(2)
    ]
    plans = [
        stacked([runner.plan(ids, t, how, slots=4) for ids in both])
        for t, both in enumerate(zip(*cohorts, strict=True))
    ]
    assert all(p.client_mask.all() for p in plans)

    # Seeds inside the loop over rounds, as `simulate` has them.
    @jax.jit
    def run(values, states, plans):
        seeds = jax.vmap(runner.build(values).round, (0, 0, None))
        return jax.lax.scan(lambda s, xs: seeds(s, *xs), states, (plans, KEYS))

    first = jax.eval_shape(
        lambda values: runner.build(values).init(runner.params, len(SIZES)),
        runner.numbers,
    )
    chex.assert_trees_all_equal_shapes_and_dtypes(first, runner.state)
    got, metrics = jax.tree.map(
        np.asarray, run(runner.numbers, stacked(starts), stacked(plans))
    )
    for s, start in enumerate(starts):
        state = jax.tree.map(lambda x, s=s: x[s], got)
        each = [
            jax.tree.map(lambda x, s=s, t=t: x[t, s], metrics)
            for t in range(len(COHORTS))
        ]
        assert_same((state, each), runner(cohorts[s], start=start))


def test_rounds_lower_for_accelerators_from_any_machine(runner):
    args = (runner.state, runner.plan(COHORTS[0], 0), KEYS[0])
    exported = jax.export.export(runner.round, platforms=["cuda", "tpu"])(*args)
    assert exported.platforms == ("cuda", "tpu")


def test_float64_models_train_in_float64(runner):
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64), runner.params)
        state = runner.algorithm.init(wide, len(SIZES))
        cohort = runner.plan(COHORTS[0], 0)
        cohort = dataclasses.replace(
            cohort, examples=cohort.examples | {"x": np.float64(EXAMPLES["x"])}
        )
        after, metrics = jax.eval_shape(runner.algorithm.round, state, cohort, KEYS[0])
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
    assert all(x.dtype == np.float64 for x in jax.tree.leaves(after.params))
    assert metrics["train_loss"].dtype == np.float64


def test_the_method_is_described(runner):
    algorithm: Algorithm = runner.algorithm
    assert algorithm.name == algorithm.name.lower()
    config: Any = algorithm.config
    assert dataclasses.is_dataclass(config)
    assert algorithm.work.batch_size == FEDAVG.work.batch_size
    assert hash(config) is not None, "frozen"


NOISY: dict[str, Callable[..., Algorithm]] = {
    "fedavg": lambda loss, **parts: fedavg.make(FEDAVG, loss, **parts),
    "fedsgd": lambda loss, **parts: fedsgd.make(fedsgd.Config(), loss, **parts),
    "scaffold": lambda loss, **parts: scaffold.make(SCAFFOLD, loss, **parts),
    "feddyn": lambda loss, **parts: feddyn.make(feddyn.Config(), loss, **parts),
    "ditto": lambda loss, **parts: ditto.make(ditto.Config(), loss, **parts),
}


@pytest.mark.parametrize("name", NOISY)
def test_noise_on_the_server_does_not_tell_who_took_part(name):
    # The same draw reaches every part of the server's state at the same scale.
    def after(noise_multiplier, cohort):
        reduce = gaussian_mean(noise_multiplier, 2.5)
        algorithm = NOISY[name](softmax_loss, transform=clip(0.3), reduce=reduce)
        state = algorithm.init(PARAMS, len(SIZES))
        new, metrics = algorithm.round(state, cohort, KEYS[0])
        assert "idle" in metrics
        kept = new._replace(clients=())
        return kept, metrics["idle"]

    def noise(ids):
        cohort = runner.plan(ids, 0)
        loud, silent = (step(jnp.float32(z), cohort) for z in (4.0, 0.0))
        assert not loud[1]
        return jax.tree.map(jnp.subtract, loud[0], silent[0])

    runner = Runner(lambda config, loss: NOISY[name](loss), FEDAVG)
    step = jax.jit(after)
    empty, full = noise([]), noise([0, 1, 2, 5, 7])
    chex.assert_trees_all_close(empty, full, rtol=1e-4, atol=1e-6)
    assert all(np.abs(x).max() > 0.01 for x in jax.tree.leaves(empty.params))
