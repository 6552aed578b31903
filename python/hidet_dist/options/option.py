"""The definition of an option: a field of a dataclass that carries its check, its meaning and its flag.

The classes of options are tables with a row for each option. Configurations, the options of the search, the command
line, the documentation and a plan's record of its origin follow from them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, TypeVar

from hidet_dist.checks import is_whole, shown
from hidet_dist.errors import ConfigError

_KEY = "option"
REQUIRED = MISSING
"""The default of an option that must be given."""

T = TypeVar("T")


@dataclass(frozen=True)
class Check:
    """A requirement on the value of an option.

    Attributes
    ----------
    fits: whether a value meets it.
    requirement: its text, after "must be"; a function where it is known only when a value is checked.
    most: the largest number that fits, which errors name; None for no such bound.
    """

    fits: Callable[[Any], bool]
    requirement: str | Callable[[], str]
    most: float | None = None

    def __call__(self, label: str, value: Any) -> None:
        """Raise ConfigError unless a value fits; ``label`` is the option's name in errors."""
        if not self.fits(value):
            beyond = self.most is not None and isinstance(value, int | float) and value > self.most
            more = f", more than the largest, {self.most}" if beyond else ""
            wanted = self.requirement if isinstance(self.requirement, str) else self.requirement()
            raise ConfigError(f"{label} must be {wanted}; got {shown(value)}{more}.")


def _same(value: Any, choice: Any) -> bool:
    """Whether a value is a choice: True is not 1."""
    is_kind = isinstance(value, str) if isinstance(choice, str) else type(value) is type(choice)
    return is_kind and bool(value == choice)


def one_of(choices: Collection[str | int]) -> Check:
    """Require one of the choices that there are when a value is checked, of the same type."""
    return Check(
        lambda value: any(_same(value, one) for one in choices), lambda: f"one of {', '.join(map(str, choices))}"
    )


def or_none(check: Check) -> Check:
    """Accept None as well."""
    return Check(lambda value: value is None or check.fits(value), check.requirement, check.most)


BOOL = Check(lambda value: isinstance(value, bool), "True or False")
COUNT = Check(lambda value: is_whole(value, 1), "1 or more")


@dataclass(frozen=True)
class Flag:
    """An option on the command line of ``hidet-dist plan`` and ``build``.

    Attributes
    ----------
    help: its text in ``--help``.
    kind: what a user writes: ``str``, ``int``, ``float``, or ``list`` for a text that may be repeated.
    name: its name in a plan's record of its origin; None for the option's name.
    spelled: how it is written; None for two dashes and the name.
    read: makes the option's value of what the user writes; raises ConfigError.
    check: the requirement on what the user writes, where it is narrower than that of the option.
    completions: the values that a shell offers.
    metavar: what stands for the value in ``--help``.
    """

    help: str
    kind: type = str
    name: str | None = None
    spelled: str | None = None
    read: Callable[[Any], Any] | None = None
    check: Check | None = None
    completions: Callable[[], Iterable[str]] | None = None
    metavar: str | None = None


@dataclass(frozen=True)
class Option:
    """What is known of an option beside its name and default.

    Attributes
    ----------
    kind: its type in the documentation.
    help: its meaning.
    check: the requirement on its value, if it is simple.
    read: makes its value of what a user gives; takes the option's name in errors, too, and raises ConfigError.
    flag: how it is given on the command line, if it can be.
    by_plan: whether a plan decides it, so that it cannot be given beside a plan.
    """

    kind: str
    help: str
    check: Check | None = None
    read: Callable[[str, Any], Any] | None = None
    flag: Flag | None = None
    by_plan: bool = False


def option(
    default: Any,
    kind: str,
    help: str,
    check: Check | None = None,
    read: Callable[[str, Any], Any] | None = None,
    flag: Flag | None = None,
    by_plan: bool = False,
) -> Any:
    """Make the field of an option, whose default may be a function without parameters. See :class:`Option`."""
    made: Mapping[str, Any] = {"default_factory": default} if callable(default) else {"default": default}
    return field(**made, metadata={_KEY: Option(kind, help, check, read, flag, by_plan)})


def options_of(kind: Any) -> dict[str, Option]:
    """Return the options of a class of options, or of an object of it, by name, in order."""
    return {one.name: one.metadata[_KEY] for one in fields(kind) if _KEY in one.metadata}


def default_of(kind: Any, name: str) -> Any:
    """Return the default of an option; :data:`REQUIRED` if it has none."""
    (found,) = (one for one in fields(kind) if one.name == name)
    return _default(found)


def _default(one: Field[Any]) -> Any:
    return one.default_factory() if one.default_factory is not MISSING else one.default


def taken_from(kind: type[T], source: Any, **changes: Any) -> T:
    """Make an object of options with the values that another one has of them, but for ``changes``."""
    shared = options_of(source).keys() & options_of(kind).keys()
    return kind(**{**{name: getattr(source, name) for name in shared}, **changes})


def check_options(options: Any, label: Callable[[str], str] = str) -> None:
    """Check all values of an object of options; ``label`` gives their names in errors. Raises ConfigError."""
    for name, one in options_of(options).items():
        if one.check is not None:
            one.check(label(name), getattr(options, name))


def refuse_unknown(what: str, given: Any, known: Sequence[str]) -> None:
    """Raise ConfigError unless a value is a mapping whose keys are known; ``what`` is its name in errors."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"{what} must be a dict; got {shown(given)}.")
    for key in given:
        if not isinstance(key, str) or key not in known:
            raise ConfigError(f"Unknown key {shown(key)} in {what}; the keys are {', '.join(known)}.")


def read_options(kind: type[T], given: Mapping[str, Any], what: str) -> T:
    """Make an object of options from values by name; ``what`` is the mapping's name in errors. Raises ConfigError."""
    known, values = options_of(kind), {}
    for name, value in given.items():
        read = known[name].read
        values[name] = value if read is None else read(f"{what}[{name!r}]", value)
    options = kind(**values)
    check_options(options, lambda name: f"{what}[{name!r}]")
    return options


def parse_options(kind: type[T], given: Any, what: str) -> T:
    """Make an object of options from a user's dict; ``what`` is its name in errors. Raises ConfigError."""
    refuse_unknown(what, given, tuple(options_of(kind)))
    return read_options(kind, given, what)
