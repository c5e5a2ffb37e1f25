"""Every algorithm, built for small tests. All contract tests use the same row of the table."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from reference import padded

from jaxfl.algorithms import (
    adp_pfl,
    adp_pfl_paper,
    apfl,
    blur_lus,
    centaur,
    ditto,
    dp_fedavg,
    dp_fedavg_fb,
    dp_fedavg_mixed,
    dp_fedsam,
    dp_lg,
    dp_pfeddsu,
    dp_pfeddsu_paper,
    dp_prototypes,
    dp_ridge,
    fed_smp,
    fedavg,
    fedbuff,
    feddpa,
    feddpa_paper,
    fedprox,
    fedrep,
    fedrod,
    fine_tuned,
    ifca,
    local_only,
    matrix_scaled,
    mixed,
    mr_mtl,
    padpfl,
    padpfl_paper,
    pdp_fl,
    pdp_fl_paper,
    per_fedavg,
    pfedme,
    pmtl,
    pmtl_ft,
    ppsgd,
    ppsgd_centaur,
    prior_corrected,
    scaffold,
)
from jaxfl.algorithms.adp_pfl import fisher_threshold, largest, random_share
from jaxfl.algorithms.padpfl import nbafl_noise
from jaxfl.algorithms.pdp_fl import Budgets
from jaxfl.data import load, make_clients
from jaxfl.local.train import LocalSGD
from jaxfl.models import mlp
from jaxfl.privacy import (
    DPSGD,
    AdaptiveClip,
    BallsInBins,
    BandedNoise,
    BLTNoise,
    CyclicPoisson,
    Dropouts,
    Extrapolated,
    FixedSize,
    Full,
    Krum,
    Mechanism,
    Median,
    MinSeparation,
    Poisson,
    Sampling,
    Skellam,
    TrimmedMean,
)
from jaxfl.privacy.accounting.ledgers import epsilon, planned_ledger
from jaxfl.privacy.schedule import ClientNoise
from jaxfl.tasks import one_hot_error
from jaxfl.types import Algorithm, ClientData, Clients, Lists, Message

MODEL = mlp((8, 8, 1), 10, hidden=(16,))
CLIP = 0.2
SIZES = (9, 4, 0, 7, 9, 1, 5, 8, 6, 3, 9)
"""Numbers of training examples. They differ, one is 0, and two devices do not divide their count."""

ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "local_only": lambda z=1.0, sgd=0.1, **o: local_only(
        MODEL, local=passes(sgd, 2), sampling=Poisson(0.6)
    ),
    "fedavg": lambda z=1.0, sgd=0.1, **o: fedavg(
        MODEL,
        local=LocalSGD(optax.sgd(sgd, momentum=0.5), 4),
        mechanism=Mechanism(
            clip=CLIP,
            sampling=FixedSize(6),
            weights=np.array(SIZES, float),
            denominator="participants",
        ),
    ),
    "fedprox": lambda z=1.0, sgd=0.1, **o: fedprox(
        MODEL, mu=0.5, local=LocalSGD(optax.sgd(sgd), 4, steps=3), mechanism=Mechanism(clip=CLIP)
    ),
    "dp_fedavg": lambda z=1.0, sgd=0.1, **o: dp_fedavg(MODEL, **private(z, sgd)),
    "dp_fedavg_fb": lambda z=1.0, sgd=0.1, **o: dp_fedavg_fb(
        MODEL, head=passes(0.01, 2), **private(z, sgd) | {"local": passes(sgd)}
    ),
    "feddpa": lambda z=1.0, sgd=0.1, **o: feddpa(
        MODEL, sampling=Poisson(0.6), noise_multiplier=z, clip=CLIP, local=passes(sgd)
    ),
    "feddpa_paper": lambda z=1.0, sgd=0.1, **o: feddpa_paper(
        MODEL,
        reg="code",
        clients=len(SIZES),
        sampling=FixedSize(6),
        noise_multiplier=z,
        clip=CLIP,
        local=passes(sgd),
    ),
    "fedrep": lambda z=1.0, sgd=0.1, **o: fedrep(
        MODEL, local=passes(sgd), head=LocalSGD(HEAD, 4, 2), mechanism=Mechanism(clip=CLIP)
    ),
    "centaur": lambda z=1.0, sgd=0.1, **o: centaur(
        MODEL,
        local=LocalSGD(optax.sgd(sgd, momentum=0.9), 4),
        head=LocalSGD(optax.sgd(0.01, momentum=0.9), 4, 2),
        clip=CLIP,
        noise_multiplier=z,
        sampling=Poisson(0.6),
    ),
    "fedrod": lambda z=1.0, sgd=0.1, **o: fedrod(MODEL, **private(z, sgd)),
    "dp_pfeddsu": lambda z=1.0, sgd=0.1, **o: dp_pfeddsu(MODEL, noise_multiplier=z, **sparse(sgd)),
    "dp_pfeddsu_random": lambda z=1.0, sgd=0.1, **o: dp_pfeddsu(
        MODEL, noise_multiplier=z, mask_source="public_random", backward_density=0.5, **sparse(sgd)
    ),
    "dp_pfeddsu_paper": lambda z=1.0, sgd=0.1, **o: dp_pfeddsu_paper(
        MODEL, noise_multiplier=z, clients=len(SIZES), **sparse(sgd) | {"sampling": FixedSize(6)}
    ),
    "ppsgd": lambda z=1.0, sgd=0.1, **o: ppsgd(
        MODEL,
        clip=CLIP,
        noise_multiplier=z,
        sampling=Poisson(0.6),
        batch_size=4,
        server_learning_rate=1.0,
        loss=lambda *batch: (
            10 * sgd * one_hot_error(*batch)
        ),  # it sends gradients, which no local rate scales
    ),
    "ppsgd_centaur": lambda z=1.0, sgd=0.1, **o: ppsgd_centaur(
        MODEL,
        head=LocalSGD(optax.sgd(0.1, momentum=0.9), 4),
        evaluation_epochs=2,
        **private(z, sgd),
    ),
    "dp_ridge": lambda z=1.0, sgd=0.1, **o: dp_ridge(MODEL, ridge=1.0, scale=1.0, **one_shot(z)),
    "dp_prototypes": lambda z=1.0, sgd=0.1, **o: dp_prototypes(MODEL, **one_shot(z)),
    "pmtl": lambda z=1.0, sgd=0.1, **o: pmtl(
        MODEL, penalty_weight=0.5, start="broadcast", **private(z, sgd)
    ),
    "pmtl_own": lambda z=1.0, sgd=0.1, **o: pmtl(MODEL, penalty_weight=0.5, **private(z, sgd)),
    "pmtl_ft": lambda z=1.0, sgd=0.1, **o: pmtl_ft(MODEL, head=passes(0.01, 2), **private(z, sgd)),
    "mr_mtl": lambda z=1.0, sgd=0.1, **o: mr_mtl(
        MODEL,
        penalty_weight=0.5,
        local=DPSGD(
            clip=0.5, noise_multiplier=z, rate=0.4, steps=3, optimizer=optax.sgd(sgd), chunk=2
        ),
    ),
    "ditto": lambda z=1.0, sgd=0.1, **o: ditto(
        MODEL, penalty_weight=0.5, personal=passes(sgd, 2), **private(z, sgd)
    ),
    "scaffold": lambda z=1.0, sgd=0.1, **o: scaffold(
        MODEL,
        learning_rate=sgd,
        batch_size=4,
        epochs=2,
        clip=CLIP,
        noise_multiplier=z,
        sampling=Poisson(0.6),
    ),
    "apfl": lambda z=1.0, sgd=0.1, **o: apfl(MODEL, alpha_learning_rate=0.1, **private(z, sgd)),
    "ifca": lambda z=1.0, sgd=0.1, **o: ifca(
        # By this rate the server moves by the aggregate, as those of other methods do.
        MODEL,
        clusters=3,
        server_optimizer=optax.sgd(1 / 3),
        **private(z, sgd),
    ),
    "pfedme": lambda z=1.0, sgd=0.1, **o: pfedme(MODEL, inner_steps=2, **private(z, sgd)),
    "per_fedavg": lambda z=1.0, sgd=0.1, **o: per_fedavg(
        MODEL, inner_learning_rate=0.1, **private(z, sgd)
    ),
    "dp_fedavg_decay": lambda z=1.0, sgd=0.1, **o: dp_fedavg(
        MODEL,
        **private(z, sgd)
        | {"local": LocalSGD(optax.sgd(sgd, momentum=0.5), 4, decay=lambda t: 0.5**t)},
    ),
    "dp_fedsam": lambda z=1.0, sgd=0.1, **o: dp_fedsam(MODEL, radius=0.1, **private(z, sgd)),
    "fed_smp": lambda z=1.0, sgd=0.1, **o: fed_smp(MODEL, density=0.2, **private(z, sgd)),
    "blur_lus": lambda z=1.0, sgd=0.1, **o: blur_lus(
        MODEL, density=0.5, **private(z, sgd) | {"local": decayed(sgd)}
    ),
    "dp_lg": lambda z=1.0, sgd=0.1, **o: dp_lg(MODEL, **private(z, sgd)),
    "adp_pfl": lambda z=1.0, sgd=0.1, **o: adp_pfl(
        MODEL, noise=z, **budgeted(sgd) | {"sampling": Poisson(0.6)}
    ),
    "adp_pfl_public": lambda z=1.0, sgd=0.1, **o: adp_pfl(
        MODEL,
        noise=filtered(z),
        risks=np.full(len(SIZES), 3.0),
        **budgeted(sgd) | {"mask": largest(50.0)},
    ),
    "adp_pfl_released": lambda z=1.0, sgd=0.1, **o: adp_pfl(
        MODEL,
        noise=filtered(z),
        risks="private",
        risk_bounds=(1.0, 3.0),
        **budgeted(sgd) | {"mask": None},
    ),
    "adp_pfl_paper": lambda z=1.0, sgd=0.1, **o: adp_pfl_paper(
        MODEL, noise=z * 6**0.5, risks="private", **budgeted(sgd) | {"mask": random_share(50.0)}
    ),
    "padpfl": lambda z=1.0, sgd=0.1, **o: padpfl(
        MODEL,
        epsilon=honest(z),
        upload_epsilon=honest(z / 8),
        impacts=IMPACTS,
        mu=0.5,
        rounds=ROUNDS,
        **noised(sgd),
    ),
    "padpfl_paper": lambda z=1.0, sgd=0.1, **o: padpfl_paper(
        MODEL,
        epsilon=claimed(z, times=ROUNDS),
        smallest=10,
        sampling=FixedSize(6),
        rounds=ROUNDS,
        **noised(sgd),
    ),
    "pdp_fl": lambda z=1.0, sgd=0.1, **o: pdp_fl(
        MODEL,
        budgets=asked(honest(z / 8)),
        epsilon_max=honest(z),
        sampling=Poisson(0.6),
        rounds=ROUNDS,
        **noised(sgd),
    ),
    "pdp_fl_examples": lambda z=1.0, sgd=0.1, **o: pdp_fl(
        MODEL,
        budgets=asked(math.inf),
        epsilon_max=math.inf,
        rounds=ROUNDS,
        clip=CLIP,
        local=DPSGD(
            clip=0.5,
            noise_multiplier=np.linspace(0, z, len(SIZES)),
            rate=0.4,
            steps=3,
            optimizer=optax.sgd(sgd),
            chunk=2,
        ),
    ),
    "pdp_fl_paper": lambda z=1.0, sgd=0.1, **o: pdp_fl_paper(
        MODEL,
        budgets=asked(claimed(z / 4)),
        epsilon_max=claimed(z),
        smallest=10,
        sampling=FixedSize(6),
        **noised(sgd),
    ),
    "fine_tuned": lambda z=1.0, sgd=0.1, **o: fine_tuned(
        prior_corrected(dp_fedavg(MODEL, **private(z, sgd))), local=passes(0.1)
    ),
    "prior_corrected": lambda z=1.0, sgd=0.1, **o: prior_corrected(
        dp_fedavg(MODEL, **private(z, sgd)), train=True
    ),
    "dp_fedavg_mixed": lambda z=1.0, sgd=0.1, **o: dp_fedavg_mixed(
        MODEL, tuning=passes(0.05, 2), alone=passes(0.1), **private(z, sgd)
    ),
    "prior_corrected_released": lambda z=1.0, sgd=0.1, **o: prior_corrected(
        dp_fedavg(MODEL, **private(z, sgd)), released=0.3
    ),
    "matrix_scaled": lambda z=1.0, sgd=0.1, **o: matrix_scaled(
        dp_fedavg(MODEL, **private(z, sgd)), train=20.0
    ),
    "mixed": lambda z=1.0, sgd=0.1, **o: mixed(
        prior_corrected(dp_fedavg(MODEL, **private(z, sgd))), local=passes(0.1)
    ),
}

SAMPLERS: dict[str, Sampling] = {
    "full": Full(),
    "poisson": Poisson(0.5),
    "fixed size": FixedSize(6),
    "cyclic": CyclicPoisson(0.3, 2),
    "separated": MinSeparation(3, separation=2),
    "bins": BallsInBins(4),
}
"""Every sampler by name, for the clients of `SIZES`."""

SEND_WEIGHTS = ("padpfl_paper", "pdp_fl_paper")
MECHANISMS: dict[str, Mechanism] = {
    "adaptive clip": AdaptiveClip(
        clip=0.2, noise_multiplier=1.0, sampling=Poisson(0.6), bit_noise=2.0
    ),
    "banded noise": BandedNoise(clip=0.2, noise_multiplier=1.0, bands=2),
    "blt noise": BLTNoise(clip=0.2, noise_multiplier=1.0, sampling=MinSeparation(3, separation=2)),
    "amplified bands": BandedNoise(
        clip=0.2, noise_multiplier=1.0, bands=2, sampling=CyclicPoisson(0.3, 2)
    ),
    "extrapolated": Extrapolated(
        clip=0.2, noise_multiplier=1.0, sampling=Poisson(0.6), cohort=20, population=900
    ),
    "skellam": Skellam(
        clip=0.2,
        noise_multiplier=1.0,
        sampling=Dropouts(FixedSize(8), 0.9),
        steps=2**15,
        dropout=0.2,
    ),
    "median": Median(clip=0.2, sampling=Poisson(0.6)),
    "trimmed mean": TrimmedMean(clip=0.2, sampling=Poisson(0.6), share=0.2),
    "krum": Krum(clip=0.2, sampling=FixedSize(6), keep=3),
}


def untrained(mechanism: Mechanism) -> Algorithm:
    """Return a method without local training, which compiles quickly.

    The norms of updates are about 0.05 to 0.5, and depend on the server's state.
    """
    base = fedavg(mlp((8, 8, 1), 10, hidden=()), mechanism=mechanism)

    def client_update(key: Any, server: Any, client: Any, data: ClientData) -> tuple:
        def drift(leaf: Any) -> Any:
            places = jnp.arange(leaf.size, dtype=jnp.float32).reshape(leaf.shape)
            return 0.0025 * (data.id + 1) * jnp.cos(leaf + places * (data.id + 1))

        return Message(jax.tree.map(drift, server.params)), client, {}

    return base._replace(client_update=client_update)


TOGETHER: dict[str, Callable[[float], Algorithm]] = {
    **{
        name: lambda clip, mechanism=mechanism: untrained(dataclasses.replace(mechanism, clip=clip))
        for name, mechanism in MECHANISMS.items()
    },
    "balls in bins": lambda clip: untrained(
        Mechanism(clip=clip, noise_multiplier=1.0, sampling=BallsInBins(2))
    ),
    "fedbuff": lambda clip: fedbuff(
        untrained(Mechanism(clip=clip, noise_multiplier=1.0, sampling=Poisson(0.6))), staleness=2
    ),
}
"""Functions from a clip bound to a method, by name of the mechanism, sampler or wrapper."""


IMPACTS = np.linspace(0, 2 / len(SIZES), len(SIZES))


HEAD = optax.sgd(0.01, momentum=0.5)
ROUNDS = 4
"""Number of rounds of methods whose noise follows from a target epsilon. No test runs more."""


def passes(sgd: float, epochs: int = 1) -> LocalSGD:
    """Return passes of plain SGD over batches of four, with the learning rate `sgd`."""
    return LocalSGD(optax.sgd(sgd), 4, epochs)


def decayed(sgd: float) -> LocalSGD:
    """Return passes of SGD with weight decay.

    Equal pixels have equal updates and Fisher values, so that rounding would choose among them. The
    decay makes the values differ.
    """
    return LocalSGD(optax.chain(optax.add_decayed_weights(0.1), optax.sgd(sgd)), 4, 2)


def budgeted(sgd: float) -> dict[str, Any]:
    """Return options of ADP-PFL, except for the noise."""
    # A percentile would not do, because rounding would decide between equal pixels' Fisher values.
    return {
        "clip": CLIP,
        "sampling": FixedSize(6),
        "mask": fisher_threshold(0.05),
        "local": decayed(sgd),
    }


def filtered(z: float) -> ClientNoise:
    """Return noise of clients, of which six together have the multiplier z.

    A filter stops each client after two rounds, except that it stops none without noise.
    """
    s = z / 6**0.5
    return ClientNoise((s,), least_total=s / 3, release_noise=4 * s + (z == 0))


def private(z: float, sgd: float) -> dict[str, Any]:
    """Return options of most private methods, for a noise multiplier and a learning rate."""
    return {"clip": CLIP, "noise_multiplier": z, "sampling": Poisson(0.6), "local": passes(sgd, 2)}


def one_shot(z: float) -> dict[str, Any]:
    """Return options of methods that send statistics, which no learning rate scales."""
    return {"clip": CLIP, "noise_multiplier": z, "sampling": Poisson(0.6)}


def noised(sgd: float) -> dict[str, Any]:
    """Return options of methods whose noise follows from a target epsilon."""
    return {"clip": CLIP, "local": passes(sgd, 2)}


def honest(z: float) -> float:
    """Return the epsilon for which calibration over four rounds gives a noise multiplier.

    It is infinite for a multiplier of 0.
    """
    mechanism = Mechanism(clip=1.0, noise_multiplier=z)
    return epsilon(planned_ledger(mechanism, 1, 4), mechanism).value if z else math.inf


def claimed(z: float, times: int = 1) -> float:
    """Return the epsilon for which the papers' rule gives a noise multiplier.

    It is infinite for a multiplier of 0.
    """
    return float(nbafl_noise(1.0, delta=1e-5, smallest=10, times=times)) / z if z else math.inf


def asked(least: float) -> Budgets:
    """Return budgets from `least` to twice that. All are infinite if `least` is."""
    return Budgets(least * np.linspace(1, 2, len(SIZES)), np.resize([2.0, 5.0, 8.0], len(SIZES)))


def sparse(sgd: float) -> dict[str, Any]:
    """Return options of DP-pFedDSU, except for the noise."""
    head = LocalSGD(optax.sgd(0.01, momentum=0.9), 4, 2)
    return {
        "sampling": Poisson(0.6),
        "clip": CLIP,
        "density": 0.2,
        "local": passes(sgd),
        "head": head,
    }


def client_data(index: int = 0) -> ClientData:
    """Return the data of one of the small clients, as `client_update` gets them."""
    clients = small_clients()
    return ClientData(
        jnp.asarray(clients.inputs),
        jnp.asarray(clients.labels),
        jnp.asarray(padded(clients.train)[index]),
        jnp.asarray(clients.train_size[index]),
    )


def small_clients(
    sizes: tuple[int, ...] = SIZES, extra_padding: int = 0, shift: int = 0
) -> Clients:
    """Make clients of the given sizes from consecutive digits, each with five test examples.

    Args:
        sizes: Numbers of training examples.
        extra_padding: Columns of padding, which must change nothing but shapes.
        shift: Index of the first training example.
    """
    digits = load("digits")
    starts = np.cumsum((shift, *sizes))
    train = [np.arange(a, b) for a, b in itertools.pairwise(starts)]
    test = [np.arange(5 * i, 5 * i + 5) for i in range(len(sizes))]
    clients = make_clients(digits, train, test)
    return (
        clients._replace(train=Lists.of(padded(clients.train, extra_padding)))
        if extra_padding
        else clients
    )
