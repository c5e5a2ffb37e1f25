"""Figure 8: loss by round where data quality changes half-way, fixed and adaptive factors, no privacy.

python -m experiments.padpfl.figure_8 --scale paper
"""

from experiments.padpfl.setting import run

if __name__ == "__main__":
    run(8, __doc__)
