"""Cost of a mechanism or an audit, relative to the same round with the Gaussian mechanism.

python -m benchmarks.mechanisms
"""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import tyro

from benchmarks.common import OUT, bars, finish, in_turn, medians, ratio
from benchmarks.workloads import (
    WORKLOADS,
    Name,
    algorithm_of,
    clients_of,
    compile_round,
    examples_of,
    usual_chunk,
)
from jaxfl.engine.mesh import place
from jaxfl.privacy import AdaptiveClip, BandedNoise, BLTNoise, Canaries, Mechanism
from jaxfl.types import Algorithm


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    workloads: tuple[Name, ...] = ("lenet", "mlp")
    bands: int = 32
    """Number of bands of banded noise."""
    canaries: int = 1000
    """Number of canaries of an audit."""
    repeats: int = 15
    out: pathlib.Path = OUT


def ways(config: Config) -> dict[str, Callable[[Algorithm], Algorithm]]:
    """Return functions from a workload's method to the method that is timed, by name.

    The result of "Gaussian" is the method itself. Others have another mechanism, or an audit.
    """

    def of(kind: type[Mechanism], **options: Any) -> Callable[[Algorithm], Algorithm]:
        names = [field.name for field in dataclasses.fields(Mechanism)]

        def change(plain: Algorithm) -> Algorithm:
            shared = {name: getattr(plain.mechanism, name) for name in names}
            return plain._replace(mechanism=kind(**shared | options))

        return change

    return {
        "Gaussian": lambda plain: plain,
        "on a grid": of(Mechanism, noise="grid"),
        "adaptive clip": of(AdaptiveClip, bit_noise=2.5),
        f"{config.bands} bands": of(BandedNoise, bands=config.bands),
        "BLT, 3 buffers": of(BLTNoise, scales=(0.3, 0.1, 0.05), decays=(0.6, 0.9, 0.99)),
        f"{config.canaries:,} canaries": lambda plain: plain._replace(
            audit=Canaries(config.canaries)
        ),
    }


def main(config: Config) -> None:
    """Print a round's milliseconds, and its cost over the Gaussian mechanism's in percent."""
    rows, costs = [], {}
    for name in config.workloads:
        work = WORKLOADS[name]
        population, plain = place(clients_of(*examples_of(work))), algorithm_of(work)
        chunk = usual_chunk(plain, population)
        rounds = {
            way: compile_round(make(plain), population, chunk).run
            for way, make in ways(config).items()
        }
        seconds = in_turn(rounds, config.repeats)
        typical = medians(seconds)
        for way in rounds:
            cost = ratio(seconds[way], seconds["Gaussian"]) - 1
            rows.append(
                {
                    "workload": name,
                    "mechanism": way,
                    "milliseconds": 1e3 * typical[way],
                    "cost %": 100 * cost,
                }
            )
            costs[f"{name}: {way}"] = 100 * cost
        jax.clear_caches()
    headline = ", ".join(
        f"{way} {cost:+.1f}%" for way, cost in costs.items() if "Gaussian" not in way
    )
    shown = {way: cost for way, cost in costs.items() if "Gaussian" not in way}
    finish(
        config,
        "mechanisms",
        headline,
        rows,
        bars(shown, "cost of a round, %", "against the Gaussian mechanism"),
    )


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
