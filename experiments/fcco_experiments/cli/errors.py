"""Mistakes of the user become a few clear lines and exit code 2, never a traceback."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import typer

from .. import distributed

__all__ = ["INTERRUPTED", "fail", "guarded", "require"]

P = ParamSpec("P")
R = TypeVar("R")

WRONG, INTERRUPTED = 2, 130
_PACKAGES = {"ruamel": "ruamel.yaml"}


def fail(text: str, code: int = WRONG) -> typer.Exit:
    """Say what is wrong, of several processes (torchrun) on the first alone; to be raised."""
    if distributed.is_first():
        typer.echo(f"Error: {text}", err=True)
    return typer.Exit(code)


def require(*modules: str, extra: str = "experiments") -> None:
    """Refuse to start without packages that will be needed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        names = " and ".join(_PACKAGES.get(name, name) for name in missing)
        raise fail(f"This needs {names}: pip install 'fcco[{extra}]'")


def guarded(command: Callable[P, R]) -> Callable[P, R]:
    """A command whose expected errors are messages."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        require("ruamel", "pydantic")
        from ..config import ConfigError
        from ..store import FolderError
        from ..workers import LoadError

        try:
            return command(*args, **kwargs)
        except ConfigError as error:
            several = [""] if len(error.problems) > 1 else []
            raise fail("\n  ".join([*several, *error.problems])) from error
        except FolderError as error:
            raise fail(str(error)) from error
        except LoadError as error:
            raise fail("\n".join(filter(None, [str(error), error.details]))) from error
        except KeyboardInterrupt:
            raise fail("Interrupted.", INTERRUPTED) from None

    return wrapped
