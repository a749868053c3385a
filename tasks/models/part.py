"""Training a part of a network (``train.only``): the rest, the base, stays on every device and is never sent.

Entries of the base leave the ``state_dict``: they become buffers that are not persistent. Normalisation layers whose
statistics belong to the base use them as they are, also in training (:func:`hold_statistics`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor, nn

from fedcross.core.errors import ConfigError, DataError, nearest
from fedcross.tasks.models.weights import tied

#: Attributes of a layer: the names of its parameters, and of its buffers (it may write into them), in the base.
MARK, BUFFERS = "base_names", "base_buffers"
#: Statistics of a normalisation layer: they match together.
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
#: What wrappers add to a name; a file of base weights may come from the network without them.
ADDED = (".base_layer", "features.network.")


def narrow(network: nn.Module, patterns: Sequence[str], file: Path | None = None) -> str:
    """Make everything in `network` that matches none of `patterns` its base, in place; return the base's digest.

    `patterns` are shell patterns (``*lora_*``) for names in the ``state_dict``; a match is trained even if it was
    frozen. `file` is a safetensors file with the base's weights; None keeps the initial ones.
    """
    part = _matching(network, patterns)
    base = {name: tensor for name, tensor in network.state_dict().items() if name not in part}
    if file is not None:
        _fill(base, file)
    for name, parameter in network.named_parameters(remove_duplicate=False):
        parameter.requires_grad_(name in part)
    parameters = {name for name, _ in network.named_parameters(remove_duplicate=False)}
    once: dict[int, Tensor] = {}
    for name in base:
        _demote(network, name, MARK if name in parameters else BUFFERS, once)
    for layer in network.modules():
        if "running_mean" in getattr(layer, BUFFERS, ()):
            layer.track_running_stats = False  # type: ignore[assignment]  # otherwise torch expects a counter to load
    return digest(base) if base else ""


def _matching(network: nn.Module, patterns: Sequence[str]) -> set[str]:
    """Return the names in the ``state_dict`` that match one of `patterns`, tied ones under all their names."""
    names = list(network.state_dict())
    parameters = {name for name, _ in network.named_parameters(remove_duplicate=False)}
    part = {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in part):
            near = nearest(pattern, sorted(parameters))[:600]
            raise ConfigError(f"train.only={pattern!r}: matches no parameter of this model. {near}")
    for name in [name for name in part if name.rpartition(".")[2] in STATISTICS]:
        owner = name.rpartition(".")[0]
        part |= {f"{owner}.{entry}" for entry in STATISTICS} & set(names)
    again = tied(network)
    first = {again.get(name, name) for name in part}
    part |= {name for name in names if again.get(name, name) in first}
    if not part & parameters:
        raise ConfigError(f"train.only={list(patterns)}: matches buffers only, nothing to train. Match parameters too.")
    return part


def _demote(network: nn.Module, name: str, mark: str, once: dict[int, Tensor]) -> None:
    """Make the entry `name` of the ``state_dict`` a buffer outside it; `once` keeps tied tensors one."""
    owner, _, entry = name.rpartition(".")
    layer = network.get_submodule(owner)
    given = getattr(layer, entry)
    tensor = once.setdefault(id(given), given.detach())
    delattr(layer, entry)
    layer.register_buffer(entry, tensor, persistent=False)
    setattr(layer, mark, getattr(layer, mark, frozenset()) | {entry})


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a SHA-256 over names, dtypes, shapes and bytes of `tensors`, in the order of their names."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _fill(base: Mapping[str, Tensor], file: Path) -> None:
    """Copy the base's weights from `file`."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        stored = load_file(file)
    except (OSError, SafetensorError) as error:
        raise DataError(f"train.base={str(file)!r}: cannot be read ({error}). Put a safetensors file there.") from error
    for name, tensor in base.items():
        plain = name.replace(ADDED[0], "")
        given = next((stored[known] for known in (name, plain, plain.replace(ADDED[1], "")) if known in stored), None)
        if given is None or given.shape != tensor.shape:
            found = "no such entry" if given is None else f"shape {tuple(given.shape)}"
            lacks, near = f"for {name} of shape {tuple(tensor.shape)} it has {found}", nearest(name, sorted(stored))
            raise DataError(f"train.base={str(file)!r}: {lacks}. Give the file of this model. {near[:300]}")
        with torch.no_grad():
            tensor.copy_(given)


def check_file(file: Path, sha256: str | None) -> None:
    """Raise a DataError unless `file` has this digest."""
    try:
        found = hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise DataError(f"train.base={str(file)!r}: cannot be read ({error.strerror}). Put the file there.") from error
    if sha256 != found:
        differs = f"its SHA-256 is {found}, train.base_sha256 says {sha256}"
        raise DataError(f"train.base={str(file)!r}: {differs}. Set the digest of the file that every device has.")


def hold_statistics(network: nn.Module) -> None:
    """Put normalisation layers whose statistics belong to the base into evaluation mode, where they do not change."""
    for layer in network.modules():
        if "running_mean" in getattr(layer, BUFFERS, ()):
            layer.eval()


def base_tensors(network: nn.Module, mark: str = MARK) -> list[Tensor]:
    """Return the tensors of the base inside `network`, or those with another `mark`; it may wrap a narrowed network."""
    return [getattr(layer, entry) for layer in network.modules() for entry in sorted(getattr(layer, mark, ()))]
