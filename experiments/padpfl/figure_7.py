"""Figure 7: the same scenario with the noise of (8) and (13), and honest twins.

python -m experiments.padpfl.figure_7 --scale paper
"""

from experiments.padpfl.setting import run

if __name__ == "__main__":
    run(7, __doc__)
