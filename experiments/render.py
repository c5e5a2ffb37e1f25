"""Make the numbers and pictures of all READMEs from the results.

python -m experiments.render
python -m experiments.render --check
"""

import dataclasses
import sys

from experiments.common import cli
from experiments.study import all_studies, render


@dataclasses.dataclass(frozen=True)
class Config:
    """What to do."""

    check: bool = False
    """Write nothing; end with 1 if a README is not what its results say."""


def main(config: Config) -> None:
    """Render every package."""
    done = [path for package, studies in all_studies().items() for path in render(package, studies, check=config.check)]
    print(*done, sep="\n")
    if config.check and done:
        sys.exit("not up to date: run `python -m experiments.render`")


if __name__ == "__main__":
    main(cli(Config, __doc__))
