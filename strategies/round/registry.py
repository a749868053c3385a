"""Methods by name: ``strategies/NAME.py`` holds the class whose name in lower case is NAME."""

from __future__ import annotations

from fedcross.core.errors import ConfigError
from fedcross.core.settings import find
from fedcross.strategies.round.base import Method


def method_class(name: str) -> type[Method]:
    """Return the method class of module ``strategies.NAME``.

    Raises
    ------
    ConfigError
        If there is no such module, or no such class in it.
    """
    module = find("fedcross.strategies", name, "method")
    for attribute, value in vars(module).items():
        if attribute.lower() == name.replace("_", "") and isinstance(value, type) and issubclass(value, Method):
            return value
    raise ConfigError(f"method.name={name!r}: {module.__name__} has no Method class named like it.")
