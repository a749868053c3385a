"""Lets the tests compose a configuration in half the time: they compose more than a thousand.

What Hydra and OmegaConf do again for every composition is done once in a process. The result is the same; the commands
that tests start as processes of their own compose without any of this.
"""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import omegaconf.base
from hydra import version
from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository, IConfigRepository
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigResult
from omegaconf import (
    AnyNode,
    BooleanNode,
    DictConfig,
    EnumNode,
    FloatNode,
    IntegerNode,
    ListConfig,
    OmegaConf,
    grammar_parser,
)
from omegaconf.base import Metadata, Node
from omegaconf.nodes import PathNode, StringNode

from fedcross.conf import compose

#: Texts of settings that are kept with what was read in them.
MOST_TEXTS = 8192
#: Compositions that are kept: a run keeps fewer than there are methods, and many test files train every method.
MOST_COMPOSED = 512
#: Groups of ``config.yaml``, and itself, up to which many compositions choose the same.
LAST_OF_MANY = ("devices", "config")
#: What :func:`read_once` replaces of Hydra to merge these files once.
HYDRAS = {
    name: getattr(ConfigLoaderImpl, name) for name in ("_compose_config_from_defaults_list", "_load_single_config")
}

#: Nodes of OmegaConf that :func:`read_once` has copied in another way, with OmegaConf's own.
COPIES = {
    kind: kind.__deepcopy__  # type: ignore[attr-defined]
    for kind in (
        DictConfig,
        ListConfig,
        *(AnyNode, BooleanNode, EnumNode, FloatNode, IntegerNode, PathNode, StringNode),
    )
}


def read_once() -> None:
    """Have Hydra keep what it has read of a file until the file changes, and of a setting's text, in this process."""
    compose._composed = functools.lru_cache(MOST_COMPOSED)(compose._composed.__wrapped__)  # type: ignore[assignment]
    _keep_files()
    _keep_what_all_begin_with()
    _keep_versions()
    _copy_marks()
    _copy_nodes()
    _keep_texts()
    _choices_where_needed()


def _keep_files() -> None:
    read, embed = ConfigRepository.load_config, ConfigLoaderImpl._embed_result_config
    known: dict[tuple[Any, ...], Any] = {}

    def load_config(self: ConfigRepository, config_path: str) -> Any:
        places = [str(source.path) for source in self.sources]
        files = [Path(place, config_path).with_suffix(".yaml") for place in places]
        stamps = [(found.st_mtime_ns, found.st_size) for found in (one.stat() for one in files if one.is_file())]
        key = (config_path, *places, *stamps)
        if key not in known:
            known[key] = read(self, config_path)
        return copy.copy(known[key])

    def embedded(ret: Any, package_override: str | None) -> Any:
        """Put a file's content under its package. That copies it; what has no package is merged as it is."""
        found = embed(ret, package_override)
        if found.config is ret.config:
            found = copy.copy(found)
            found.config = copy.deepcopy(found.config)
        return found

    ConfigRepository.load_config = load_config  # type: ignore[method-assign]
    ConfigLoaderImpl._embed_result_config = staticmethod(embedded)  # type: ignore[method-assign, assignment]


class _Begun(ResultDefault):
    """Stands for the files with which a composition begins; `merged` is what they give."""

    def __init__(self, merged: DictConfig) -> None:
        super().__init__(config_path="merged")
        self.merged = merged


def _keep_what_all_begin_with() -> None:
    """Merge Hydra's own files and ``config.yaml``, with which every composition begins, once; later ones copy that."""
    merge, load = HYDRAS.values()
    known: dict[tuple[Any, ...], DictConfig] = {}

    def begin(self: ConfigLoaderImpl, defaults: list[ResultDefault], repo: IConfigRepository) -> _Begun:
        """Return what `defaults` give. :func:`_keep_files` keeps what it has read, so that its address is a key."""
        files = [(repo.load_config(str(one.config_path)), one.package) for one in defaults]
        key = tuple((id(file and file.config), package) for file, package in files)
        if key not in known:
            known[key] = merged(self, defaults, repo)
        return _Begun(copy.deepcopy(known[key]))

    def merged(self: ConfigLoaderImpl, defaults: list[ResultDefault], repo: IConfigRepository) -> DictConfig:
        groups = [str(one.config_path).partition("/")[0] for one in defaults[:-1]]
        for last in LAST_OF_MANY:
            if last in groups:
                first = len(groups) - groups[::-1].index(last)
                return merge(self, [begin(self, defaults[:first], repo), *defaults[first:]], repo)
        return merge(self, defaults, repo)

    def loaded(self: ConfigLoaderImpl, default: ResultDefault, repo: IConfigRepository) -> ConfigResult:
        if isinstance(default, _Begun):
            return ConfigResult("tests", "", default.merged, {})
        return load(self, default, repo)

    ConfigLoaderImpl._compose_config_from_defaults_list = merged  # type: ignore[method-assign]
    ConfigLoaderImpl._load_single_config = loaded  # type: ignore[method-assign]


def _keep_versions() -> None:
    """Have Hydra read its compatibility version once; it asks for it two hundred times in a composition."""
    version._get_version = functools.lru_cache(16)(version._get_version)


def _copy_marks() -> None:
    """Copy what OmegaConf notes on each value field by field: types and names do not change, two tables may."""

    def copied(self: Metadata, memo: dict[int, Any]) -> Metadata:
        new: Metadata = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new.flags = None if self.flags is None else dict(self.flags)
        new.resolver_cache = copy.deepcopy(self.resolver_cache, memo) if self.resolver_cache else defaultdict(dict)
        return new

    Metadata.__deepcopy__ = copied  # type: ignore[attr-defined]


def _copy_nodes() -> None:
    """Copy a table's nodes as OmegaConf does, but without a call of its constructors, which check each value again."""

    def copied(self: Node, memo: dict[int, Any]) -> Node:
        new: Node = object.__new__(type(self))
        own = self.__dict__
        new.__dict__.update(own)  # a value is shared, as in OmegaConf's own copy
        new.__dict__["_metadata"] = copy.deepcopy(own["_metadata"], memo)
        new.__dict__["_flags_cache"] = None
        if "_content" not in own:
            return new
        new.__dict__["_flags_cache"] = own["_flags_cache"] and dict(own["_flags_cache"])
        content = own["_content"]
        if isinstance(content, dict):
            new.__dict__["_content"] = {key: below(child, new, memo) for key, child in content.items()}
        elif isinstance(content, list):
            new.__dict__["_content"] = [below(child, new, memo) for child in content]
        return new

    def below(child: Node, parent: Node, memo: dict[int, Any]) -> Node:
        new: Node = child.__deepcopy__(memo)  # type: ignore[attr-defined]
        new.__dict__["_parent"] = parent
        return new

    for kind in COPIES:
        kind.__deepcopy__ = copied  # type: ignore[attr-defined]


def _keep_texts() -> None:
    parse, parse_rule = functools.lru_cache(MOST_TEXTS)(grammar_parser.parse), OverridesParser.parse_rule
    known: dict[tuple[str, str], Override] = {}

    def parsed(self: OverridesParser, s: str, rule_name: str) -> Any:
        if (s, rule_name) in known:
            return copy.deepcopy(known[s, rule_name])
        found = parse_rule(self, s, rule_name)
        if isinstance(found, Override):
            if len(known) >= MOST_TEXTS:
                known.clear()
            known[s, rule_name] = copy.deepcopy(found)
        return found

    OverridesParser.parse_rule = parsed  # type: ignore[method-assign]
    for module in (omegaconf.base, omegaconf._utils):
        module.parse = parse  # type: ignore[attr-defined]


def _choices_where_needed() -> None:
    """Have Hydra collect the choices made so far only for lists of defaults that ask for one (``${...}``)."""
    collect = defaults_list._create_interpolation_map

    def collected(overrides: Any, defaults: Sequence[Any], self_added: bool) -> Any:
        if any("${" in str(vars(one)) for one in defaults):
            return collect(overrides, list(defaults), self_added)
        return OmegaConf.create()

    defaults_list._create_interpolation_map = collected  # type: ignore[assignment]
