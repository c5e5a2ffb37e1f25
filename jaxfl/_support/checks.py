"""Argument checks, which raise errors with the name, the value and a remedy before any computation.

`checked` decorates public functions. An argument's annotation determines its check, unless a check
is named for it. Checks return the value in the form that the library uses. NumPy and JAX scalars
become Python numbers.

A sweep calls a builder with each value first, and then once with a traced number. Checks of real
numbers return a traced number unchanged, and checks of whole numbers reject it.
"""

import contextlib
import difflib
import functools
import inspect
import math
import numbers
import os
import pathlib
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import (
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    Unpack,
    get_args,
    get_origin,
    get_type_hints,
)

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float64, Key

from jaxfl.types import Number

Check = Callable[[str, Any], Any]
"""Function from an argument's name and value to the value to use, which raises on a wrong value."""

_F = TypeVar("_F", bound=Callable)

_GENERATOR = "threefry2x32"
"""Name of JAX's generator from which all random bits of a run come."""

_REMEDIES = {
    "bool": "True or False",
    "str": "text in quotation marks",
    "Model": "a model, for instance jaxfl.models.lenet()",
    "GradientTransformation": "an optimizer of optax, for instance optax.sgd(0.1), or of "
    "optax.MultiSteps its gradient_transformation()",
    "LocalSGD": "a jaxfl.LocalSGD(optimizer). The `local` of the FedAvg family also takes a "
    "jaxfl.privacy.DPSGD, and so does that of mr_mtl, which trains personal models by it",
    "DPSGD": "a jaxfl.privacy.DPSGD",
    "Sampling": "Poisson(rate), FixedSize(size) or Full() of jaxfl.privacy",
    "Mechanism": "a jaxfl.privacy.Mechanism",
    "Algorithm": "an algorithm, for instance jaxfl.algorithms.fedavg(model)",
    "Result": "what `simulate` returned",
    "Candidate": "jaxfl.Candidate(build), where build(mechanism) returns an algorithm",
    "Canaries": "jaxfl.privacy.Canaries(), or None for a run without an audit",
    "Clients": "clients from jaxfl.data.make_clients",
    "Dataset": "a dataset from jaxfl.data.load or from_arrays",
    "Encoder": "an encoder, for instance jaxfl.data.efficientnet_lite0()",
    "Module": "an instance of a module of Flax linen, for instance nn.Dense(10)",
}
"""Remedy if an instance of a class is required, by the name of the class, or of the first class."""


def traced(value: Any) -> bool:
    """Return whether a value is a tracer of JAX, which has no value before the program runs."""
    return isinstance(value, jax.core.Tracer)


def nonzero(value: Any) -> bool:
    """Return whether a number is not 0, or is known only when the program runs."""
    # `bool` of a tracer may raise an error, so the test of a tracer comes first.
    return traced(value) or bool(value)


def show(value: Any) -> str:
    """Return a short text for a value in an error message, such as its repr or its type."""
    if isinstance(value, types.FunctionType):
        # The repr of a function ends with an address, which says nothing to a reader.
        return f"<function {value.__qualname__}>"
    # Python raises an error for the repr of an integer with thousands of digits.
    with contextlib.suppress(Exception):
        text = repr(value)
        if len(text) <= 120 and "\n" not in text:
            return text
    kind = type(value).__name__
    if isinstance(value, np.ndarray | jax.Array):
        return f"<{kind} {value.dtype} of shape {value.shape}>"
    return f"<{kind}>"


def is_listed(value: Any) -> bool:
    """Return whether a value is a sequence of entries, and no text.

    >>> is_listed([1.0]), is_listed("1.0"), is_listed(1.0)
    (True, False, False)
    """
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def check_positive(name: str, value: Any, *, zero: bool = False, infinite: bool = False) -> Any:
    """Require a finite real number above 0, and return it as a float.

    A traced number passes unchanged.

    Args:
        name: Name of the argument.
        value: Its value.
        zero: Whether 0 is allowed.
        infinite: Whether infinity is allowed.
    """
    if traced(value):
        return value
    number = _real(value)
    # NaN is neither above nor equal to 0, so it raises the error below.
    if (
        number is not None
        and (number > 0 or (zero and number == 0))
        and (infinite or math.isfinite(number))
    ):
        return float(number)
    kind = "number" if infinite else "finite number"
    bound = "at least 0" if zero else "above 0"
    raise ValueError(f"{name} must be a {kind} {bound}, got {show(value)}. Give for instance 1.0.")


def check_count(name: str, value: Any, *, least: int = 1, most: int | None = None) -> int:
    """Require a whole number from `least` to `most`, and return it as an int.

    None as `most` sets no upper limit.
    """
    # `_real` gives an int for a whole NumPy or JAX scalar, a float for 2.0, and None for True.
    number = _real(value)
    if isinstance(number, int) and number >= least and (most is None or number <= most):
        return number
    limits = f"of at least {least}"
    if most is not None:
        limits = f"from {least} to {most}"
    remedy = f"Give for instance {least}."
    if isinstance(number, int) and most is not None and number > most:
        remedy = f"Give at most {most}."
    raise ValueError(f"{name} must be a whole number {limits}, got {show(value)}. {remedy}")


def check_fraction(
    name: str, value: Any, *, zero: bool = False, one: bool = True, example: float = 0.5
) -> Any:
    """Require a number in (0, 1], or between other ends, and return it as a float.

    A traced number passes unchanged.

    Args:
        name: Name of the argument.
        value: Its value.
        zero: Whether 0 is allowed.
        one: Whether 1 is allowed.
        example: A number that the error advises.
    """
    if traced(value):
        return value
    number = _real(value)
    if number is not None and (0 < number < 1 or (zero and number == 0) or (one and number == 1)):
        return float(number)
    left = "[" if zero else "("
    right = "]" if one else ")"
    raise ValueError(
        f"{name} must be a number in {left}0, 1{right}, got {show(value)}. "
        f"Give for instance {example}."
    )


def check_choice(name: str, value: Any, choices: Collection[Any]) -> Any:
    """Require a value that equals one of the choices, and return this choice."""
    python_value = plain(value)
    for choice in choices:
        if (
            # An array has no single truth value for `==`, so its class is compared before.
            isinstance(python_value, type(choice))
            # True equals 1 in Python, but is another choice.
            and isinstance(python_value, bool) == isinstance(choice, bool)
            and python_value == choice
        ):
            return choice
    known = ", ".join(map(repr, choices))
    raise ValueError(f"{name} must be one of {known}, got {show(value)}. Choose one of these.")


def check_instance(name: str, value: Any, kinds: tuple[type, ...]) -> Any:
    """Require an instance of one of the classes, and return it, or raise a TypeError."""
    python_value = plain(value)
    if isinstance(python_value, kinds):
        return python_value
    names = " or ".join(kind.__name__ for kind in kinds)
    remedy = _REMEDIES.get(kinds[0].__name__, f"a value of type {names}")
    raise TypeError(f"{name} must be of type {names}, got {show(value)}. Give {remedy}.")


def check_callable(name: str, value: Any) -> Callable:
    """Require a function or another callable, and return it."""
    if callable(value):
        return value
    raise TypeError(
        f"{name} must be a function, got {show(value)}. Give one, such as a functools.partial."
    )


def check_layers(name: str, value: Any) -> tuple[str, ...]:
    """Require a sequence of names of layers, and return it as a tuple."""
    if not is_listed(value) or not all(isinstance(layer, str) for layer in value):
        raise TypeError(
            f"{name} must be names of layers, got {show(value)}. Give for instance ('Dense_1',)."
        )
    return tuple(value)


def check_array(name: str, value: Any) -> np.ndarray:
    """Require a value that NumPy reads as an array of numbers or booleans, and return the array.

    JAX arrays are fetched. A masked array is an error, and so is a list of them.
    """
    parts: Sequence[Any] = (value,)
    if isinstance(value, list | tuple):
        parts = value
    # `np.asarray` drops a mask, so missing values would become numbers.
    if any(isinstance(part, np.ma.MaskedArray) for part in parts):
        raise TypeError(
            f"{name} must be a plain array, got a masked array. Drop the rows with masked entries, "
            f"or fill these entries by `{name}.filled(...)`."
        )
    try:
        array = np.asarray(value)
    except Exception:
        # An array of objects stands for what NumPy cannot read, and raises the error below.
        array = np.array(None)
    kind = array.dtype.kind
    # The numbers of `ml_dtypes`, such as bfloat16, have kind V as records do, but no names.
    if kind in "OUSMmT" or (kind == "V" and array.dtype.names is not None):
        raise TypeError(
            f"{name} must be an array of numbers, got {show(value)}. {_array_remedy(value, array)}"
        )
    return array


def _array_remedy(value: Any, array: np.ndarray) -> str:
    """Return the remedy of `check_array` that suits the wrong value, such as a data frame.

    Args:
        value: The wrong value.
        array: The array that NumPy reads it as.
    """
    if hasattr(value, "train_labels"):
        return "Give one of its arrays, for instance dataset.train_labels."
    if hasattr(value, "columns"):
        return "jaxfl.data.from_frame encodes names, booleans and gaps of a data frame."
    if isinstance(value, Mapping) and value:
        return "Join its arrays along their last axis, or give columns to jaxfl.data.from_frame."
    nested = isinstance(value, list | tuple) and any(isinstance(part, list) for part in value)
    if nested and array.dtype.kind in "OU":
        return "Give rows of one length. jaxfl.data.from_lists cuts and pads lists of tokens."
    if array.ndim == 1 and array.dtype.kind in "UT":
        return "Number the names, for instance by numpy.unique(..., return_inverse=True)[1]."
    return "Give for instance [0.5, 1.0]."


def check_arrays(name: str, value: Any) -> list[np.ndarray]:
    """Require a sequence of arrays of numbers, one for each client, and return it as a list."""
    # Arrays are no `Sequence`, and those without axes cannot be iterated over.
    array = isinstance(value, np.ndarray | jax.Array) and value.ndim > 0
    if array or is_listed(value):
        return [check_array(f"{name}[{i}]", item) for i, item in enumerate(value)]
    remedy = "Give a list with one array for each client."
    if isinstance(value, Mapping):
        # A partition by clients' names, as JSON has it.
        remedy = f"Give list({name}.values())."
    raise TypeError(f"{name} must be a sequence of arrays, got {show(value)}. {remedy}")


def check_numbers(
    name: str,
    value: Any,
    *,
    axes: Collection[int] = (1,),
    zero: bool = False,
    negative: bool = False,
    infinite: bool = False,
) -> Float64[np.ndarray, "..."]:
    """Require a non-empty array of real numbers, and return it in float64.

    Args:
        name: Name of the argument.
        value: Its value.
        axes: The allowed numbers of axes.
        zero: Whether 0 is allowed. Numbers must otherwise be above 0.
        negative: Whether all numbers are allowed.
        infinite: Whether infinity is allowed.
    """
    array = check_array(name, value)
    if array.dtype.kind in "iuf" and array.ndim in axes and array.size:
        floats = array.astype(np.float64)
        # Comparisons with NaN are false, so only the first case has to look for NaN.
        if negative:
            inside = ~np.isnan(floats)
        elif zero:
            inside = floats >= 0
        else:
            inside = floats > 0
        if np.all(inside) and (infinite or np.all(np.isfinite(floats))):
            return floats
    if negative:
        limits = ""
    elif zero:
        limits = " of at least 0"
    else:
        limits = " above 0"
    forms = {0: "a number", 1: "a vector", 2: "a table"}
    form = " or ".join(forms[n] for n in axes)
    entries = "numbers" if infinite else "finite numbers"
    examples = {0: "1.0", 1: "[0.5, 1.0]", 2: "[[0.5, 1.0]]"}
    example = examples[next(iter(axes))]
    raise ValueError(
        f"{name} must be {form} of {entries}{limits}, got {show(value)}. "
        f"Give for instance {example}."
    )


def check_noise(name: str, value: Any, *, axes: Collection[int] = (0, 1)) -> Any:
    """Require a finite number of at least 0, or an array of such numbers.

    A number is returned as a float, and a JAX array as a NumPy array. Other values are returned
    unchanged.

    Args:
        name: Name of the argument.
        value: Its value.
        axes: The allowed numbers of axes of an array.
    """
    if traced(value) or _real(value) is not None:
        return check_positive(name, value, zero=True)
    if isinstance(value, str):
        raise TypeError(
            f"{name} must be a number or an array of numbers, got {show(value)}. Give for instance "
            "1.0, or what jaxfl.privacy.calibrate returns."
        )
    check_numbers(name, value, axes=axes, zero=True)
    if isinstance(value, jax.Array):
        return np.asarray(value)
    return value


def check_counts(
    name: str, value: Any, *, least: int = 1, length: int | None = None, empty: bool = True
) -> tuple:
    """Require a sequence of whole numbers of at least `least`, and return it as a tuple.

    Args:
        name: Name of the argument.
        value: Its value.
        least: Least number that is allowed.
        length: Required length. None allows any length.
        empty: Whether an empty sequence is allowed.
    """
    array = check_array(name, value)
    if array.ndim != 1:
        sized = False
    elif length is not None:
        sized = len(array) == length
    else:
        sized = empty or len(array) > 0
    # An empty list has no minimum, and NumPy reads it as float64, so only its length counts.
    if not sized or (array.size and (array.dtype.kind not in "iu" or array.min() < least)):
        count = ""
        if length is not None:
            count = f"{length} "
        elif not empty:
            count = "one or more "
        raise ValueError(
            f"{name} must be a list of {count}whole numbers of at least {least}, got "
            f"{show(value)}. Give for instance {show([max(least, 2)] * (length or 1))}."
        )
    return tuple(array.tolist())


def check_seeds(name: str, value: Any) -> tuple[int, ...]:
    """Require one or more different whole numbers of at least 0, and return them as a tuple."""
    seeds = check_counts(name, value, least=0, empty=False)
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"{name} must be different, got {show(value)}. Give each seed once.")
    return seeds


def key_of(seed: int) -> Key[Array, ""]:
    """Return the threefry key of a seed, which does not depend on `jax_default_prng_impl`."""
    return jax.random.key(seed, impl=_GENERATOR)


def check_key(name: str, value: Any) -> Key[Array, "*P"]:
    """Require a JAX key, or a vector of keys, one for each point, and return it.

    Raw key data are wrapped. A seed from 0 to 2**32 - 1 becomes a key.

    Raises:
        ValueError: The key belongs to another generator than threefry.
        TypeError: The value is neither a key nor a seed.
    """
    # True is an int in Python, but no seed.
    if isinstance(value, int | np.integer) and not isinstance(value, bool) and 0 <= value < 2**32:
        return key_of(int(value))
    if (
        isinstance(value, jax.Array)
        and value.ndim <= 1
        and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    ):
        # Other generators give vectorised clients draws that depend on the size of a chunk.
        if str(jax.random.key_impl(value)) != _GENERATOR:
            raise ValueError(
                f"{name} must be a key of the generator {_GENERATOR}, got one of "
                f"{jax.random.key_impl(value)}. Give the seed itself, or "
                f"jax.random.key(seed, impl={_GENERATOR!r})."
            )
        return value
    # The raw data of a threefry key are two words, as `jax.random.PRNGKey` returns them.
    if (
        isinstance(value, jax.Array)
        and value.ndim in (1, 2)
        and value.dtype == jnp.uint32
        and value.shape[-1] == 2
    ):
        return jax.random.wrap_key_data(value, impl=_GENERATOR)
    raise TypeError(
        f"{name} must be a key, or a seed from 0 to 2**32 - 1, got {show(value)}. "
        "Give for instance jax.random.key(0)."
    )


def check_path(name: str, value: Any) -> Any:
    """Require a path that is not empty and has no NUL, and return it unchanged."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise TypeError(f"{name} must be a path, got {show(value)}. Give a str or a pathlib.Path.")
    if "\0" in os.fsdecode(value):
        raise ValueError(f"{name} must be a path without NUL, got {show(value)}. Take the NUL out.")
    return value


def check_folder(name: str, value: Any) -> Any:
    """Require the path of a folder, which may not exist yet, and return it unchanged.

    Neither the path nor a folder above it may be a file.
    """
    path = pathlib.Path(check_path(name, value))
    try:
        above = (path, *path.parents)
        file = next((own for own in above if own.exists() and not own.is_dir()), None)
    except OSError as error:
        # Looking up a path may fail, for instance if a name is too long or a folder is closed.
        raise ValueError(
            f"{name} must be the path of a folder, got {show(value)} ({error.strerror}). "
            "Choose another folder."
        ) from None
    if file is not None:
        raise ValueError(
            f"{name} must be the path of a folder, got {show(value)}, where {str(file)!r} is a "
            "file. Choose another folder."
        )
    return value


def check_not_empty(name: str, value: Any, *, check: Check) -> Any:
    """Return the value that another check returns, which must have at least one entry."""
    entries = check(name, value)
    if not len(entries):
        raise ValueError(
            f"{name} must have at least one entry, got {show(value)}. Give one entry or more."
        )
    return entries


def check_optional(name: str, value: Any, *, check: Check) -> Any:
    """Return the value that another check returns, or None for None."""
    if value is None:
        return None
    return check(name, value)


def unchecked(name: str, value: Any) -> Any:
    """Return any value as it is."""
    return value


def not_empty(check: Check) -> Check:
    """Return a check that also requires at least one entry."""
    return functools.partial(check_not_empty, check=check)


at_least_0 = functools.partial(check_positive, zero=True)
up_to_infinity = functools.partial(check_positive, infinite=True)
count_from_0 = functools.partial(check_count, least=0)
check_delta = functools.partial(check_fraction, one=False, example=1e-5)

GAUSSIAN: dict[str, Check] = {
    "clip": up_to_infinity,
    "noise_multiplier": check_noise,
    "delta": check_delta,
}
"""Checks of the arguments that the builders with a Gaussian mechanism share."""


def nearest(name: Any, known: Collection[str]) -> str:
    """Return the remedy for an unknown name, as a sentence.

    The remedy is the known name with the most similar spelling or the same beginning. If none is
    similar, it lists all known names. If none is known, it is to leave the name out.

    >>> nearest("batchsize", ["batch_size", "epochs"]), nearest("noise", ["noise_multiplier"])
    ("Did you mean 'batch_size'?", "Did you mean 'noise_multiplier'?")
    """
    # The time of `difflib` grows with the square of the length, so a long text is cut.
    text = str(name)[:100]
    close = difflib.get_close_matches(text, known, 1, 0.65)
    close += [longer for longer in known if text and longer.startswith(text)]
    if close:
        return f"Did you mean {close[0]!r}?"
    if known:
        return f"Choose from {', '.join(known)}."
    return "Leave it out."


def checked(**checks: Check) -> Callable[[_F], _F]:
    """Check all arguments that a function, or a dataclass, gets at every call, but no defaults.

    The function gets the values that the checks return. The annotation `int` requires a whole
    number of at least 1. `float` and `Number` require a finite number above 0, and `Literal` one of
    the named choices. `Any` requires nothing. Other annotations require a function, or an object of
    a class. None passes if the annotation allows it. Names that the function does not have, and
    arguments by position that it takes by name, are errors of the same form.

    Args:
        checks: Checks by argument, for wider or narrower limits. Arguments with any other
            annotation must be named here, so that none is forgotten.

    >>> @checked(share=check_fraction)
    ... def cut(size: int, share: float, way: Literal["up", "down"] = "up") -> int:
    ...     return math.ceil(size * share)
    >>> cut(np.int64(5), 0.5)
    3
    >>> cut(5, 0.5, way="left")
    Traceback (most recent call last):
    ValueError: way must be one of 'up', 'down', got 'left'. Choose one of these.
    """

    def decorate(target: _F) -> _F:
        if isinstance(target, type):
            # The class stays a class, so that `isinstance` and `dataclasses.replace` work.
            target.__init__ = decorate(target.__init__)  # pyrefly: ignore[bad-argument-type]
            return target

        # The checks are made at the first call, because they would slow down the import.
        @functools.cache
        def prepared() -> _Prepared:
            return _checks_of(target, checks)

        @functools.wraps(target)
        def call(*args: Any, **kwargs: Any) -> Any:
            signature, options, fields, by_name = prepared()
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError:
                # A `**` argument takes any name, so a wrong name is then not the cause.
                if not options:
                    check_keywords(target.__qualname__, by_name, kwargs)
                _check_positional(signature, args)
                # Python's own error names the function.
                return target(*args, **kwargs)
            # This dict is the one inside of `bound`, so the call below gets the changes made to it.
            further = bound.arguments.get(options, {})
            if fields:
                check_keywords(target.__qualname__, by_name, further)
            for name, check in by_name.items():
                for arguments in (bound.arguments, further):
                    if name in arguments:
                        arguments[name] = check(name, arguments[name])
            return target(*bound.args, **bound.kwargs)

        # Tests derive from these checks which values must raise errors.
        call.argument_checks = lambda: prepared().by_name  # pyrefly: ignore[missing-attribute]
        return call  # pyrefly: ignore[bad-return]

    return decorate


class _Prepared(NamedTuple):
    """Checks of a function's arguments, and what is known of its arguments."""

    signature: inspect.Signature
    options: str
    """Name of the function's `**` argument, or empty without one."""
    fields: dict[str, Any]
    """Annotations of further keyword arguments by name, which a `TypedDict` may have."""
    by_name: dict[str, Check]


def _checks_of(target: Callable, checks: Mapping[str, Check]) -> _Prepared:
    """Return the checks of a function's arguments, of which `checks` has the given ones."""
    signature = inspect.signature(target)
    hints = get_type_hints(target)
    kinds = {
        name: parameter.kind for name, parameter in signature.parameters.items() if name != "self"
    }
    options = next(
        (name for name, kind in kinds.items() if kind is inspect.Parameter.VAR_KEYWORD), ""
    )
    # A `TypedDict` may name the further keyword arguments.
    further_hint = hints.get(options)
    fields: dict[str, Any] = {}
    if get_origin(further_hint) is Unpack:
        fields = get_type_hints(get_args(further_hint)[0])
    named = {name: hints[name] for name in kinds if name != options} | fields
    by_name = {name: _by_annotation(name, hint, checks.get(name)) for name, hint in named.items()}
    # Only the decorator's own arguments can be wrong here, and no value of a user.
    assert set(checks) <= set(by_name), (
        f"{target.__qualname__}: {set(checks) - set(by_name)} are no arguments"
    )
    return _Prepared(signature, options, fields, by_name)


def check_keywords(function: str, known: Collection[str], keywords: Collection[str]) -> None:
    """Require keywords that are names of a function's arguments, or raise a TypeError.

    Args:
        function: Name of the function, for errors.
        known: Names of the function's arguments.
        keywords: Names of the keyword arguments that it got.
    """
    for name in keywords:
        if name not in known:
            raise TypeError(
                f"{name} must be an argument of {function.removesuffix('.__init__')}(), got an "
                f"unexpected keyword argument. {nearest(name, known)}"
            )


def check_accepts(name: str, function: Callable, keywords: Collection[str]) -> None:
    """Require keywords that a function accepts, even if it is not `checked`.

    A function with `**` arguments accepts all of them.

    Args:
        name: Name of the function in an error message.
        function: The function.
        keywords: Names of the keyword arguments.
    """
    parameters = inspect.signature(function).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        check_keywords(name, parameters, keywords)


def _check_positional(signature: inspect.Signature, args: Sequence[Any]) -> None:
    """Require no more positional arguments than a function takes before its keyword arguments."""
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    if inspect.Parameter.KEYWORD_ONLY not in kinds:
        return
    first = kinds.index(inspect.Parameter.KEYWORD_ONLY)
    if len(args) > first:
        name = list(signature.parameters)[first]
        raise TypeError(
            f"{name} must be given by name, as all arguments after it, got the positional argument "
            f"{show(args[first])}. Write its name before it, for instance {name}=..."
        )


def _by_annotation(name: str, hint: Any, check: Check | None) -> Check:
    """Return the given check of an argument, or without one that of its annotation.

    None passes too if the annotation names None.
    """
    members: tuple[Any, ...] = (hint,)
    if get_origin(hint) in (Union, types.UnionType):
        members = get_args(hint)
    kinds = tuple(member for member in members if member is not types.NoneType)
    if check is None:
        check = _of_kinds(name, kinds)
    if len(kinds) == len(members):
        return check
    return functools.partial(check_optional, check=check)


def _of_kinds(name: str, kinds: tuple[Any, ...]) -> Check:
    """Return the check of an argument whose annotation has these members, without None."""
    if Any in kinds:
        return unchecked
    if kinds == (int,):
        return check_count
    if float in kinds and set(kinds) <= set(get_args(Number)):
        return check_positive
    if len(kinds) == 1 and get_origin(kinds[0]) is Literal:
        return functools.partial(check_choice, choices=get_args(kinds[0]))
    if len(kinds) == 1 and get_origin(kinds[0]) is Callable:
        return check_callable
    classes = all(isinstance(kind, type) and kind not in (float, int, np.ndarray) for kind in kinds)
    assert classes, f"{name}: {kinds} need a check of their own"
    return functools.partial(check_instance, kinds=kinds)


def plain(value: Any) -> Any:
    """Return a NumPy or JAX scalar as the Python value that it holds, and other values unchanged.

    >>> plain(np.float32(0.5)), plain(jnp.int32(2)), plain(np.array(3)), plain([1])
    (0.5, 2, 3, [1])
    """
    if not isinstance(value, np.generic | np.ndarray | jax.Array) or traced(value):
        return value
    # A single key of JAX has no axes either, but it holds no number.
    if value.ndim or jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return value
    return value.item()


def _real(value: Any) -> int | float | None:
    """Return a value as a real number, and integers as `int`.

    None stands for values that are not real numbers, for bools, and for numbers too large for a
    float.
    """
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        as_float = float(value)
    except OverflowError:
        return None
    if isinstance(value, numbers.Integral):
        return int(value)
    return as_float
