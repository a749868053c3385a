"""Methods by name: ``strategies/NAME.py`` holds the class whose name in lower case is NAME."""

from __future__ import annotations

from strategies.base import Method
from tasks.errors import ConfigError
from tasks.settings import find


def method_class(name: str) -> type[Method]:
    """Return the method class of module ``strategies.NAME``.

    Raises
    ------
    ConfigError
        If there is no such module, or no such class in it.
    """
    module = find("strategies", name, "method")
    for attribute, value in vars(module).items():
        if attribute.lower() == name.replace("_", "") and isinstance(value, type) and issubclass(value, Method):
            return value
    raise ConfigError(f"method.name={name!r}: {module.__name__} has no Method class named like it.")
