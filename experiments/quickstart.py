"""Six methods at one target epsilon: digits, several hundred clients, about a minute on two cores.

python -m experiments.quickstart
"""

from jaxfl.cli.main import command_line
from jaxfl.cli.quickstart import Config, main

if __name__ == "__main__":
    main(command_line(Config, __doc__))
