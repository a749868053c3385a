"""Judges a reply object by object, before any array is put together.

Flower stores a message as objects: the message, its table of records, the records, their arrays and the arrays' chunks.
Each object is named by the SHA-256 of its content, and its head says its kind, its children and its length. The tree
that comes with a reply has names only; sizes and kinds are in the objects. Equal chunks are stored and sent once: a
few MiB can stand for any number of GiB. So a reply is pulled from the top down, every object is compared with what the
reply may hold, an object is asked for only if its parent was as it should be, and the length that an array will have is
known before it is made.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from fedcross.core.allowance import HEAD, RECORDS, SCALARS, Allowance, Arrays
from fedcross.core.errors import UploadError

#: Message, table of records, record, array, chunk.
DEPTH = 5
#: Flower cuts arrays into chunks of 5 MiB; a client may be set to smaller ones, down to this.
SMALLEST_CHUNK = 1 << 16
#: Bytes of an array's head beside its chunks: name, shape, dtype. Also the bytes of a record's table per array.
PER_ARRAY = 4096
#: Bytes of an array's head per chunk: a name of 64 characters, a comma, a number.
PER_CHUNK = 80
_NAME = re.compile(r"[0-9a-f]{64}")
#: Most bytes of one object.
LARGEST = 1 << 25


class Tree(Protocol):
    """Flower's ``ObjectTree``."""

    object_id: str

    @property
    def children(self) -> Iterable[Any]:
        """The trees below this one."""


#: Returns the contents of objects, in any order: names and the most bytes that one of them may have -> name, content.
Pull = Callable[[list[str], int], Iterable[tuple[str, bytes]]]


@dataclass(frozen=True)
class Part:
    """One object: its kind, its children's names in order, and its body."""

    kind: str
    children: tuple[str, ...]
    body: bytes


def most_chunks(arrays: Arrays) -> int:
    """Return how many chunks the arrays of one record may have in all."""
    return arrays.count + arrays.nbytes // SMALLEST_CHUNK


def most_objects(allowance: Allowance) -> int:
    """Return how many objects a reply may have."""
    scalars = RECORDS if allowance.scalars is None else len(allowance.scalars)
    arrays = sum(1 + arrays.count + most_chunks(arrays) for arrays in allowance.arrays.values())
    return 2 + scalars + arrays


def names_of(tree: Tree, allowance: Allowance) -> set[str]:
    """Return the names of all objects in `tree`; refuse a tree that is too large, too deep or malformed."""
    most, found, seen = most_objects(allowance), set(), 0
    level: list[Tree] = [tree]
    for _ in range(DEPTH):
        below: list[Tree] = []
        for node in level:
            seen += 1
            if seen > most:
                raise UploadError("too_large", f"more than {most} objects")
            if not _NAME.fullmatch(node.object_id):
                raise UploadError("malformed_message", "an object's name is no SHA-256")
            found.add(node.object_id)
            below += node.children
        level = below
        if not level:
            return found
    raise UploadError("malformed_message", f"objects nested more than {DEPTH} deep")


def read(name: str, content: bytes) -> Part:
    """Return the object `name` with this content; refuse one whose digest, head or length is wrong."""
    if hashlib.sha256(content).hexdigest() != name:
        raise UploadError("malformed_message", "an object's content does not have the digest that names it")
    head, divider, body = content.partition(b"\0")
    try:
        kind, children, length = head.decode("ascii").split(" ")
        told = int(length)
    except ValueError as error:
        raise UploadError("malformed_message", "an object without a readable head") from error
    names = tuple(children.split(",")) if children else ()
    if not divider or told != len(body) or not all(_NAME.fullmatch(one) for one in names):
        raise UploadError("malformed_message", "an object's head and body disagree")
    if len(set(names)) != len(names):
        raise UploadError("malformed_message", "an object names a child twice")
    return Part(kind, names, body)


@dataclass
class Judge:
    """Pulls the objects of one reply, and refuses those that `allowance` does not hold.

    Parameters
    ----------
    allowance : Allowance
        What the reply may consist of.
    names : set of str
        The names in the reply's tree; nothing else is pulled.
    pull : callable
        Returns contents.

    Attributes
    ----------
    contents : dict
        Name -> content of what was pulled.
    """

    allowance: Allowance
    names: set[str]
    pull: Pull
    contents: dict[str, bytes] = field(default_factory=dict)

    def judge(self, root: str) -> Part:
        """Pull the reply below `root` and return its first object, the message without its content.

        Raises
        ------
        UploadError
            ``too_large`` or ``malformed_message``; nothing more is pulled then.
        """
        (message,) = self._pull({root}, HEAD).values()
        _want(message, "Message")
        if len(message.children) > 1:
            raise UploadError("malformed_message", "a message has one table of records")
        if not message.children:  # an error
            return message
        (table,) = self._pull(set(message.children), HEAD).values()
        _want(table, "RecordDict")
        records = _table(table)
        self._check_names(records)
        arrays = {name: one for name, one in records.items() if name in self.allowance.arrays}
        scalars = {one for name, one in records.items() if name not in arrays}
        if scalars & set(arrays.values()):
            raise UploadError("malformed_message", "a record of arrays is also one of scalars")
        for record in self._pull(scalars, SCALARS).values():
            _want(record, "ConfigRecord", "MetricRecord")
            if record.children:
                raise UploadError("malformed_message", f"a {record.kind} has no children")
        for name, one in arrays.items():
            self._arrays(one, self.allowance.arrays[name])
        return message

    def _check_names(self, records: Mapping[str, str]) -> None:
        scalars = [name for name in records if name not in self.allowance.arrays]
        known = self.allowance.scalars
        if (known is None and len(scalars) > RECORDS) or (known is not None and not known.issuperset(scalars)):
            shown = sorted(one[:40] for one in scalars)[:8]
            raise UploadError("malformed_message", f"{len(records)} records, {shown} among them")

    def _arrays(self, name: str, allowed: Arrays) -> None:
        """Pull and judge one record of arrays."""
        (record,) = self._pull({name}, HEAD + PER_ARRAY * allowed.count).values()
        _want(record, "ArrayRecord")
        table = _table(record)
        if len(table) > allowed.count:
            raise UploadError("too_large", f"{len(table)} arrays, {allowed.count} at most")
        most = most_chunks(allowed)
        lists: list[list[str]] = []
        for array in self._pull(set(record.children), PER_ARRAY + PER_CHUNK * most).values():
            _want(array, "Array")
            lists.append(_chunk_list(array, most))
        used = {one for chunks in lists for one in chunks}
        if sum(map(len, lists)) > most:
            raise UploadError("too_large", f"{sum(map(len, lists))} chunks, {most} at most")
        sizes = self._chunks(used, allowed)
        total = sum(sizes[one] * times for one, times in Counter(c for chunks in lists for c in chunks).items())
        if total > allowed.nbytes:
            raise UploadError("too_large", f"{total} bytes of arrays, {allowed.nbytes} at most")

    def _chunks(self, names: set[str], allowed: Arrays) -> dict[str, int]:
        """Pull chunks and return their lengths; stop as soon as they are more than allowed."""
        sizes: dict[str, int] = {}
        total = 0
        for name, part in self._each(names, allowed.nbytes + HEAD):
            _want(part, "ArrayChunk")
            if part.children:
                raise UploadError("malformed_message", "an ArrayChunk has no children")
            sizes[name] = len(part.body)
            total += len(part.body)
            if total > allowed.nbytes:
                raise UploadError("too_large", f"more than {allowed.nbytes} bytes of chunks")
        return sizes

    def _pull(self, names: set[str], most: int) -> dict[str, Part]:
        return dict(self._each(names, most))

    def _each(self, names: set[str], most: int) -> Iterator[tuple[str, Part]]:
        """Pull and keep objects; yield their parts."""
        if not names <= self.names:
            raise UploadError("malformed_message", "an object names a child that is not in the reply's tree")
        most = min(most, LARGEST)
        for name in names & self.contents.keys():
            yield name, read(name, self.contents[name])
        for name, content in self.pull(sorted(names - self.contents.keys()), most):
            if len(content) > most:
                raise UploadError("too_large", f"an object of {len(content)} bytes, {most} at most")
            self.contents[name] = content
            yield name, read(name, content)


def _want(part: Part, *kinds: str) -> None:
    if part.kind not in kinds:
        raise UploadError("malformed_message", f"a {part.kind[:20]} instead of a {' or '.join(kinds)}")


def _table(part: Part) -> dict[str, str]:
    """Return name -> object of a table of records or of arrays; all its children, and no other object, are in it."""
    found = _json(part)
    if not isinstance(found, dict) or not all(isinstance(one, str) for one in found.values()):
        raise UploadError("malformed_message", f"the table of a {part.kind} is no table")
    if set(found.values()) != set(part.children):
        raise UploadError("malformed_message", f"table and children of a {part.kind} disagree")
    return found


def _chunk_list(array: Part, most: int) -> list[str]:
    """Return the names of an array's chunks in order, repeated ones too."""
    found = _json(array)
    if not isinstance(found, dict) or set(found) != {"dtype", "shape", "stype", "arraychunk_ids"}:
        raise UploadError("malformed_message", "an array's declaration has other entries")
    shape, numbers = found["shape"], found["arraychunk_ids"]
    if not (isinstance(found["dtype"], str) and isinstance(found["stype"], str) and _whole(shape) and _whole(numbers)):
        raise UploadError("malformed_message", "an array's declaration has values of other types")
    if len(numbers) > most:
        raise UploadError("too_large", f"an array of {len(numbers)} chunks, {most} at most")
    if set(numbers) != set(range(len(array.children))):
        raise UploadError("malformed_message", "an array's chunks and children disagree")
    return [array.children[number] for number in numbers]


def _whole(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int for value in values)


def _json(part: Part) -> Any:
    try:
        return json.loads(part.body)
    except (ValueError, RecursionError) as error:
        raise UploadError("malformed_message", f"the body of a {part.kind} cannot be read") from error
