"""Run and compare methods, plan a deployment, and show this machine's datasets and speed."""

import contextlib
import dataclasses
import functools
import importlib.metadata
import inspect
import io
import itertools
import json
import os
import pathlib
import platform
import re
import sys
import textwrap
import time
import types
from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar

import jax
import numpy as np
import optax
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

import jaxfl
from jaxfl import privacy
from jaxfl._support.backend import backend
from jaxfl._support.checks import check_choice, check_count, key_of, nearest, show
from jaxfl._support.files import cache_folder
from jaxfl.algorithms import dp_fedavg
from jaxfl.cli import launch, quickstart, settings
from jaxfl.data import NAMES, from_arrays, iid, make_clients
from jaxfl.data.load import find_prepared
from jaxfl.engine.mesh import place
from jaxfl.engine.program import compile_rounds, initialize
from jaxfl.local import LocalSGD
from jaxfl.models import lenet
from jaxfl.privacy.accounting import planning
from jaxfl.privacy.sampling import NEEDS
from jaxfl.report.plan_page import check_page
from jaxfl.run import signals
from jaxfl.run.folder import run_folder
from jaxfl.run.simulate import simulate
from jaxfl.types import Clients

T = TypeVar("T")

_LONGEST = 500
"""Largest number of characters of a message that are printed."""

_CHOICE = r"invalid choice '(.*)' for argument '--(\S+)'\. Expected one of \((.*)\)"
"""Pattern of tyro's message on a value that is not among an option's choices."""

_FORMS = (
    (r"Expected one of \{(.*)\}", r"command must be given, got none. Choose from \1"),
    (
        r"--(\S+): invalid literal .*: (.*)",
        r"\1 must be a whole number, got \2. Write it in digits",
    ),
    (r"--(\S+): could not convert .*: (.*)", r"\1 must be a number, got \2. Give for instance 0.5"),
    (
        r"Missing value for argument '--(\S+)'\. Expected 1 values",
        r"\1 must have a value, got none. Write it after --\1",
    ),
    (
        r"Missing value for argument '(\w+)'\. Expected 1 values",
        r"\1 must be given, got none. Write it after the command",
    ),
    (
        r"Missing value for argument '--(\S+)'\. Expected (\d+) values",
        r"\1 must have \2 values, got fewer. Write them after --\1",
    ),
    (
        r"--(\S+): Could not (?:find valid parse for|parse) arguments:? (\[.*?\]).*",
        r"\1 must be values of its type, got \2. The help has the type (--help)",
    ),
)
"""Patterns of tyro's other messages, each with the sentences of this library that say the same."""

_LARGEST_DEPLOYMENT = 10**12
"""Largest number of clients, of a cohort, and of rounds that `plan` takes."""


def main() -> None:
    """Run the command `jaxfl` with the arguments of this process."""
    if sys.argv[1:2] in (["--version"], ["-V"]):
        print(f"jaxfl {jaxfl.__version__}")
        return
    if sys.argv[1:2] == ["launch"]:
        # The words after the options are another program's, so tyro must not read them.
        sys.exit(launch.main(sys.argv[2:]))
    sys.excepthook = in_one_line
    jaxfl.configure()
    chosen = parse(sys.argv[1:])
    chosen()
    # Python would report a closed pipe at exit without the hook.
    sys.stdout.flush()


def parse(words: list[str]) -> Callable[[], None]:
    """Return the command that the words of a command line ask for, without running it."""
    # A command must run outside of `_read_options`, which catches errors and exits of tyro.
    commands = {name: _postponed(command) for name, command in _commands(words).items()}
    read = functools.partial(
        tyro.extras.subcommand_cli_from_dict, commands, prog="jaxfl", description=__doc__
    )
    # A file nests these settings, so `--local.epochs` is read like `--epochs`.
    flat = [re.sub(r"^--(local|population)\.", "--", word) for word in words]
    return _read_options(read, flat)


def _postponed(command: Callable[..., None]) -> Callable[..., Callable[[], None]]:
    """Return a function that binds its arguments to the command, and does not call the command."""

    @functools.wraps(command)
    def bind(*given: Any, **options: Any) -> Callable[[], None]:
        return functools.partial(command, *given, **options)

    # The help would break an argument's text where a line of the docstring ends.
    bind.__doc__ = re.sub(r"\n {8}", " ", inspect.cleandoc(command.__doc__ or ""))
    # Otherwise tyro would read the docstring of the command itself.
    vars(bind)["__signature__"] = inspect.signature(command)
    del vars(bind)["__wrapped__"]
    return bind


def _read_options(reader: Callable[..., T], words: list[str]) -> T:
    """Return the result of one of tyro's readers, and print its errors in one line.

    Args:
        reader: Function of `args`, which exits the program on wrong words.
        words: Words of the command line.

    Raises:
        SystemExit: A word is wrong, or asks for help.
    """
    # Tyro prints its errors in a box to stderr, before it exits the program.
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return reader(args=words)
    except SystemExit as end:
        # A request for help ends the program too, with the code 0.
        if end.code:
            print(f"error: {_message(box.getvalue(), words[:1])}", file=sys.stderr)
        raise


def _message(box: str, command: list[str]) -> str:
    """Return the message in a box of tyro: what must hold, what was given, and a remedy.

    Lines in the box separate a title, the message, comments and a footer.

    Args:
        box: The box.
        command: Name of the command that was called, or [] if there is none.
    """
    message, *comments = _paragraphs(box)
    message = re.sub(r"^Error parsing (\S*dummy\S*: )?", "", message).removesuffix(".")
    # The end of a line in the box may part the full stop from the last word.
    message = message.rstrip()
    # An option with a short name is called by its long one.
    message = re.sub(r"--[\w-]+/(?=--)", "", message)
    if found := re.fullmatch(_CHOICE, message):
        value, name, choices = found.groups()
        return _not_a_choice(name, value, choices, command)
    if found := re.fullmatch(r"Unrecognized (?:or misplaced )?options: (.*)", message):
        words = re.sub(r" \(applied to [^)]*\),?", ",", found[1])
        return _unknown(words.strip(","), comments, command)
    if found := re.match(r"Missing from .*?: (\S+)", message):
        names = re.findall(r"--[\w-]+", message) or [found[1].lower()]
        return f"{', '.join(names)} must be given, got none. The help says more (--help)."
    for pattern, sentences in _FORMS:
        message = re.sub(f"^{pattern}$", sentences, message)
    if len(message) > _LONGEST:
        return f"{message[:_LONGEST]}..."
    return f"{message}."


def _paragraphs(box: str) -> list[str]:
    """Return the message in a box of tyro, and the comments and the footer after it."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", box)
    lines = [line.strip(" |\u2500\u2502\u256d\u256e\u2570\u256f") for line in plain.splitlines()]
    # The first line is the title. A line that separates parts is empty by now, or has only dashes.
    ruled = itertools.groupby(lines[1:], lambda line: not line.strip("-"))
    return [" ".join(map(str.strip, part)) for rule, part in ruled if not rule]


def _not_a_choice(name: str, value: str, choices: str, command: list[str]) -> str:
    """Return the message on a value that is not among the choices of an option."""
    remedy = nearest(value, re.findall(r"'(.*?)'", choices))
    # `run` has no option that takes several values.
    if "," in value and command != ["run"]:
        remedy = "Separate values by spaces."
    return f"{name} must be one of its choices, got {show(value)}. {remedy}"


def _unknown(words: str, comments: list[str], command: list[str]) -> str:
    """Return the message on words of a command line that no option takes."""
    for comment in comments:
        if found := re.match(r"Available subcommands: (.*)", comment):
            return f"command must be one of {found[1]}, got {show(words)}. Choose one of these."
    of_run = ""
    if command == ["run"]:
        of_run = " A number of the method is --option NAME=VALUE."
    options = [word for word in words.split(", ") if word.startswith("-")]
    # Words without an option are values too many.
    if not options:
        remedy = f"Leave out the surplus.{of_run}"
        return f"words must be options or their values, got {show(words)}. {remedy}"
    similar = re.findall(r"Perhaps you meant: (?:\S+, )*(\S+)", " ".join(comments))
    # Another command may have an option of this name.
    similar = [name for name in similar if name != options[0]]
    remedy = "Options are listed by --help."
    if similar:
        remedy = f"Did you mean {similar[0]}?"
    return f"option must be known to the command, got {show(options[0])}. {remedy}{of_run}"


def command_line(config: Callable[..., T], description: str | None, **options: Any) -> T:
    """Return the configuration from a program's command line, and configure JAX for simulations.

    From then on, a wrong value, Ctrl-C or SIGTERM during a run ends the program with one line.

    Args:
        config: The configuration, a dataclass that checks its values.
        description: Help of the command.
        options: Further arguments of `tyro.cli`.
    """
    sys.excepthook = in_one_line
    jaxfl.configure()
    reader = functools.partial(tyro.cli, config, description=description, **options)
    return _read_options(reader, sys.argv[1:])


def in_one_line(
    kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
) -> None:
    """Print errors of our own checks, and of paths, in one line, and others with their traceback.

    An error in one line ends the program with the exit code 2. Ctrl-C and SIGTERM end it with the
    signal's exit code (130, 143), and a closed pipe ends it with 141.
    """
    if isinstance(error, BrokenPipeError):
        # Nothing reads the rest of the output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    if isinstance(error, KeyboardInterrupt):
        # All processes of a run stop, and one of them says so.
        if jax.process_index() == 0:
            print(f"\n{str(error) or 'stopped'}", file=sys.stderr)
        sys.exit(signals.exit_code(error))
    # Only errors of this library's own modules have a remedy in their text, so those of JAX and
    # NumPy keep their traceback.
    package = _raised_in(trace).split(".")[0]
    if isinstance(error, ValueError | TypeError) and package == "jaxfl":
        text = str(error)
    elif isinstance(error, OSError) and error.filename is not None:
        # An example is a folder that cannot be made.
        text = f"path must be usable, got {error.filename} ({error.strerror}). Choose another path."
    else:
        sys.__excepthook__(kind, error, trace)
        return
    print(f"error: {text}", file=sys.stderr)
    sys.exit(2)


def _raised_in(trace: types.TracebackType | None) -> str:
    """Return the name of the module that raised an error, or "" if it is not known."""
    if trace is None:
        return ""
    # The innermost frame comes last.
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_globals.get("__name__", "")


def _commands(words: list[str]) -> dict[str, Callable[..., Any]]:
    """Return the commands by name.

    Settings in the file after --config replace the defaults of the command that the words call.

    Args:
        words: Words of the command line.
    """
    file = _config_file(words)

    def settings_of(command: str, kind: type[T]) -> T:
        # With a file there is a first word, because --config is one of the words.
        if file is not None and words[0] == command:
            return settings.read_settings(kind, file)
        return kind()

    def run(
        setting: tyro.conf.OmitArgPrefixes[settings.Run] = settings_of("run", settings.Run),
        *,
        option: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
        out: pathlib.Path = pathlib.Path("runs"),
        config: pathlib.Path | None = None,
    ) -> None:
        """Run a method, and show its accuracy and its privacy statement.

        Args:
            setting: Settings of the run.
            option: NAME=VALUE sets another number of the method. The option may be repeated.
            out: Folder of all runs. The same command resumes a run that was stopped.
            config: YAML file of settings, which options replace. Its entry `options` has further
                numbers of the method.
        """
        # Options of the command line replace those of the file.
        numbers = {**setting.options, **settings.parse_options(option)}
        _run_method(dataclasses.replace(setting, options=numbers), out)

    def compare(
        setting: tyro.conf.OmitArgPrefixes[settings.Compare] = settings_of(
            "compare", settings.Compare
        ),
        *,
        out: pathlib.Path = pathlib.Path("runs/comparison"),
        config: pathlib.Path | None = None,
    ) -> None:
        """Tune methods with the same effort, run each over several seeds, and show accuracies.

        Args:
            setting: Settings of the comparison.
            out: Folder of all its runs. The same command resumes a comparison that was stopped.
            config: YAML file of settings, which options replace.
        """
        _compare_methods(setting, out)

    return {
        "quickstart": quickstart.main,
        "run": run,
        "compare": compare,
        "report": report,
        "plan": plan,
        "data": data,
        "doctor": doctor,
        # `main` calls it before tyro reads words. Here it has its line in the help and in errors.
        "launch": launch.main,
    }


def _config_file(words: list[str]) -> str | None:
    """Return the file after --config in a command line, or None without one."""
    # An option and its value may be one word, as in --config=FILE.
    parted: list[str] = []
    for word in words:
        if word.startswith("--"):
            parted += word.split("=", 1)
        else:
            parted.append(word)
    configs = [path for option, path in itertools.pairwise(parted) if option == "--config"]
    if len(configs) > 1:
        raise ValueError(
            f"config must be given once, got {configs}. Put all settings into one file."
        )
    return next(iter(configs), None)


def _run_method(setting: settings.Run, out: pathlib.Path) -> None:
    """Run a method in a folder below `out`, and print its accuracy and its privacy statement."""
    dataset = setting.population.load()
    algorithm = setting.build(setting.network(dataset))
    folder = run_folder(out, setting.method, setting, setting.seed)
    clients = setting.population.make(dataset, setting.seed)
    result = simulate(setting.seed, algorithm, clients, rounds=setting.rounds, folder=folder)
    # The last row is that of the last evaluation.
    row = result.metrics[-1]
    worst = f"worst 10% of clients {row['accuracy_worst10']:.3f}"
    print(f"accuracy {row['accuracy']:.3f}, {worst}, after round {row['round']}")
    print(privacy.format_statement(result.statement))
    print(f"folder: {folder}")


def _compare_methods(setting: settings.Compare, out: pathlib.Path) -> None:
    """Compare methods in the folder `out`, and print their accuracies."""
    dataset = setting.population.load()
    found = jaxfl.compare(
        setting.candidates(setting.network(dataset)),
        functools.partial(setting.population.make, dataset),
        rounds=setting.rounds,
        epsilons=setting.epsilons,
        seeds=setting.seeds,
        folder=out,
    )
    print(found.to_markdown(), found.protocol, f"folder: {out}", sep="\n\n")


def report(
    folder: Annotated[tyro.conf.Positional[pathlib.Path], tyro.conf.arg(metavar="FOLDER")],
) -> None:
    """Write report.html into the folder of a run, a sweep or a comparison.

    Args:
        folder: Folder with metrics.jsonl, comparison.json, or the points of a sweep.
    """
    print(jaxfl.write_report(folder))


def plan(
    *,
    clients: int,
    cohort: int,
    rounds: int,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    delta: float | None = None,
    kinds: tuple[planning.Kind, ...] = planning.KINDS,
    stateful: bool = False,
    participations: int | None = None,
    separation: int | None = None,
    as_json: bool = False,
    report: pathlib.Path | None = None,
) -> None:
    """Compare mechanisms for a deployment. The one with the least noise in the model comes first.

    Args:
        clients: Number of clients, N.
        cohort: Number of clients expected in a round.
        rounds: Number of rounds, T.
        epsilon: The budget, which determines the noise. Give epsilon or noise_multiplier.
        noise_multiplier: Std of the noise on a sum divided by the clip bound, which determines
            epsilon.
        delta: Failure probability (default: min(1e-5, 1 / (10 N))).
        kinds: Kinds to compare, such as: poisson "fixed size" separated.
        stateful: Clients keep a state between rounds.
        participations: Most rounds of a client, which the server enforces (default: those of the
            sampler).
        separation: Fewest rounds from one participation of a client to its next, which the server
            enforces (default: those of the sampler).
        as_json: Print JSON instead of a table.
        report: HTML file to write, a page for a review board.
    """
    deployment: dict[str, Any] = {"clients": clients, "cohort": cohort, "rounds": rounds}
    for name, value in deployment.items():
        check_count(name, value, most=_LARGEST_DEPLOYMENT)
    if report is not None:
        # Planning takes a while, so a path that cannot be written ends the command before it.
        check_page("report", report)
    found = privacy.plan(
        clients=clients,
        cohort=cohort,
        rounds=rounds,
        epsilon=epsilon,
        noise_multiplier=noise_multiplier,
        delta=delta,
        kinds=kinds,
        stateful=stateful,
        participations=participations,
        separation=separation,
        progress=True,
    )
    if report is not None:
        # On stdout, the path would mix with the JSON text.
        print(jaxfl.write_plan(found, report), file=sys.stderr)
    # All mechanisms are planned at one delta.
    delta = found[0].delta
    if as_json:
        rows = list(map(_plan_row, found))
        values = {"delta": delta, "mechanisms": rows}
        print(json.dumps(values, indent=1))
    else:
        title = f"{clients} clients, {cohort} in a round, {rounds} rounds, delta {delta:.3g}"
        _print_plan(title, found)


def _plan_row(planned: planning.Plan) -> dict[str, Any]:
    """Return the row of a planned mechanism in the result of `plan`."""
    return {
        "mechanism": planned.kind,
        "needs": ", ".join(planned.needs),
        "bands": getattr(planned.mechanism, "bands", None),
        "noise multiplier": planned.noise_multiplier,
        "epsilon": planned.epsilon,
        "epsilon, RDP": planned.rdp.value,
        "noise in the model / C": planned.error,
    }


def _print_plan(title: str, found: list[planning.Plan]) -> None:
    """Print a table of planned mechanisms, and what they need of a deployment."""
    rows = list(map(_plan_row, found))
    # All columns would exceed a terminal of 80.
    names = [name for name in rows[0] if name != "epsilon, RDP"]
    cells = ([_as_text(row[name]) for name in names] for row in rows)
    _print_table(title, names, cells)
    print("Epsilon covers a client's data (zero-out), for observers of sums and models.")
    # Several mechanisms may have one need, which is explained once.
    for need in dict.fromkeys(need for planned in found for need in planned.needs):
        print(textwrap.fill(f"{need}: {NEEDS[need]}", 80, subsequent_indent="  "))


def data(name: str = "all", /) -> None:
    """Show which datasets are on this machine, and how to get one that is not.

    Args:
        name: Name of a dataset. The command shows where this dataset is, or how to get it. The
            default shows all datasets.
    """
    check_choice("name", name, ("all", *NAMES))
    if name not in ("all", "digits"):
        # The error about a dataset that is absent says how to get it.
        print(f"{name}: {find_prepared(name, None)}")
        return
    shown = (name,)
    if name == "all":
        shown = NAMES
    rows = []
    for known in shown:
        absent = f"absent: `jaxfl data {known}` shows how to get it"
        rows.append((known, settings.find_dataset(known) or absent))
    _print_table("Datasets", ("name", "where"), rows)


def doctor() -> None:
    """Show versions, devices and folders, and how many clients per second this machine trains."""
    packages = ("jax", "jaxlib", "flax", "optax", "dp-accounting")
    versions = [(name, importlib.metadata.version(name)) for name in packages]
    devices = ", ".join(device.device_kind for device in jax.devices())
    try:
        cache = str(cache_folder())
    except OSError as error:
        cache = f"none ({error})"
    rows = [
        ("jaxfl", jaxfl.__version__),
        ("Python", platform.python_version()),
        *versions,
        ("devices", devices),
        ("cache", cache),
    ]
    _print_table("This machine", ("", ""), rows)
    rate = f"{throughput():.0f} clients per second, after compilation"
    print(f"LeNet, 28x28, 5 steps of 10 examples: {rate}")


def throughput(seconds: float = 5.0) -> float:
    """Return the number of clients per second that are trained, clipped and summed up.

    The time of compilation does not count.

    Args:
        seconds: Least duration of the measurement.
    """
    clients = _random_clients(number=64, size=50)
    local = LocalSGD(optax.sgd(0.01), batch_size=10)
    algorithm = dp_fedavg(
        lenet((28, 28, 1)), clip=1.0, noise_multiplier=1.0, sampling=privacy.Full(), local=local
    )
    key = key_of(0)
    population = place(clients, None)
    chunk = backend().chunk
    if chunk == "auto":
        chunk = 32
    center, states = initialize(key, key, algorithm, population)
    step = compile_rounds(algorithm, population, chunk=chunk, segment=1)
    # The first call compiles the program. Each call donates its center and states.
    center, states, _ = jax.block_until_ready(step(key, 0, 1, center, states))
    rounds = 0
    began = time.monotonic()
    while time.monotonic() < began + seconds:
        center, states, _ = jax.block_until_ready(step(key, rounds, 1, center, states))
        rounds += 1
    return clients.num_clients * rounds / (time.monotonic() - began)


def _random_clients(number: int, size: int) -> Clients:
    """Return clients with random pictures, `size` for training and one for tests each."""
    # Random pictures take as long to train on as real ones, and need no dataset.
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (number * size, 28, 28, 1), np.uint8)
    labels = generator.integers(0, 10, number * size, np.int32)
    dataset = from_arrays(images, labels, images[:number], labels[:number])
    train = iid(labels, number, seed=0)
    test = iid(labels[:number], number, seed=0)
    return make_clients(dataset, train, test)


def _print_table(title: str, head: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """Print a table, in which long paths are folded and not cut."""
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    for name in head:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _as_text(value: Any) -> str:
    """Return a value as text, a float with four significant digits and None as a dash."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


if __name__ == "__main__":
    main()
