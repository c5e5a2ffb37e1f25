"""Resources of a run's local steps on a chip that this machine lacks, by the chip's compiler.

python -m tools.footprint --chip h100 --config run.yaml

Nothing runs on the chip. Its compiler comes by `pip install -e ".[plan-gpu]"` or ".[plan-tpu]".
"""

import json
import pathlib
from typing import Any, Literal

from jaxfl.cli import settings
from jaxfl.cli.main import command_line
from jaxfl.local.train import blocks_of
from tools.footprint.ahead import footprint
from tools.footprint.chips import CHIPS, run_here


def main(
    chip: Literal[tuple(CHIPS)],  # pyrefly: ignore[invalid-literal]
    chunk: int = 128,
    config: pathlib.Path | None = None,
    as_json: bool = False,
) -> None:
    """Compile a run for a chip, and print the resources of a local step on it.

    Args:
        chip: Chip to compile the run for.
        chunk: Number of clients vectorised at a time. It is halved until the program fits.
        config: YAML file with the settings of the run, as for `jaxfl run`. None takes the default
            settings.
        as_json: Whether to print JSON instead of lines. Values that are not known are null.
    """
    run_here()
    setting = settings.Run() if config is None else settings.read_settings(settings.Run, config)
    dataset = setting.population.load()
    clients = setting.population.make(dataset, setting.seed)
    most = max(1, int(clients.train_size.max()))
    blocks, steps = blocks_of(most, setting.local.batch_size)
    algorithm = setting.build(setting.network(dataset))
    trips = (steps, blocks, setting.local.epochs)
    found = footprint(chip, algorithm, clients, chunk=chunk, trips=trips)
    values: dict[str, Any] = {
        "chip": chip,
        "clients vectorised": found.chunk,
        "kernels of a step of all": found.kernels,
        "those of the step itself": found.in_step,
        "MB moved, per client": found.bytes / 1e6,
        "MFLOP, per client": found.flops / 1e6,
        "us by memory's speed": found.bandwidth_us,
        "us by the chip's peak": found.compute_us,
        "us as its compiler expects": found.expected_us,
        "MB of memory, per client": found.memory / 1e6,
        "GB held by the run": found.held / 1e9,
        "largest chunk": found.largest_chunk,
    }
    if as_json:
        # JSON has no NaN.
        known = {name: None if value != value else value for name, value in values.items()}
        print(json.dumps(known, indent=1))
        return
    for name, value in values.items():
        shown = f"{value:.4g}" if isinstance(value, float) else value
        print(f"{name:28}{shown}")


if __name__ == "__main__":
    command_line(main, __doc__)
