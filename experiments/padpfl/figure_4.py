"""Figure 4: loss by round where parts differ in data quality and number of clients, no privacy.

python -m experiments.padpfl.figure_4 --scale paper
"""

from experiments.padpfl.setting import run

if __name__ == "__main__":
    run(4, __doc__)
