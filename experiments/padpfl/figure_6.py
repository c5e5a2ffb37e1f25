"""Figure 6: loss by round where parts differ in examples per client, no privacy.

python -m experiments.padpfl.figure_6 --scale paper
"""

from experiments.padpfl.setting import run

if __name__ == "__main__":
    run(6, __doc__)
