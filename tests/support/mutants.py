"""Mutants of a file: every change of one operator, number, truth value, condition, `return` or unused call."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

#: What stands in for an operator.
SWAPS: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,), ast.NotIn: (ast.In,), ast.And: (ast.Or,), ast.Or: (ast.And,),
    ast.Add: (ast.Sub,), ast.Sub: (ast.Add,), ast.Mult: (ast.Div,), ast.Div: (ast.Mult,), ast.FloorDiv: (ast.Div,),
    ast.Mod: (ast.FloorDiv,), ast.Pow: (ast.Mult,), ast.MatMult: (ast.Mult,), ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,), ast.BitXor: (ast.BitAnd,), ast.LShift: (ast.RShift,), ast.RShift: (ast.LShift,),
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change: `old` became `new`; `lines` are those whose execution can show it, None for all of the file."""

    number: int
    line: int
    old: str
    new: str
    source: str
    lines: frozenset[int] | None


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """Return every changed form of `node` itself, its children as they are."""

    def changed(**fields: Any) -> ast.AST:
        other = copy.copy(node)
        for name, value in fields.items():
            setattr(other, name, value)
        return other

    match node:
        case ast.Compare(ops=ops):
            for place, op in enumerate(ops):
                for swap in SWAPS[type(op)]:
                    yield changed(ops=[*ops[:place], swap(), *ops[place + 1 :]])
        case ast.BoolOp(op=op) | ast.BinOp(op=op) | ast.AugAssign(op=op):
            for swap in SWAPS[type(op)]:
                yield changed(op=swap())
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.Constant(value=bool() as value):
            yield changed(value=not value)
        case ast.Constant(value=int() | float() as value):
            yield changed(value=value + 1)
            yield changed(value=value - 1)
        case ast.Return(value=value) if value is not None and not _is_none(value):
            yield changed(value=ast.Constant(None))
        case ast.Expr(value=ast.Call()):
            yield ast.Pass()


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def mutants(source: str) -> list[Mutant]:
    """Return all mutants of a file's `source`."""
    raw = source.encode()
    starts = [0]
    for line in raw.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: list[Mutant] = []
    for node, lines in _places(ast.parse(source)):
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        old = raw[begin:end].decode()
        for other in _forms(node):
            new = ast.unparse(ast.fix_missing_locations(other))
            text = f"({new})" if isinstance(other, ast.expr) else new
            mutated = (raw[:begin] + text.encode() + raw[end:]).decode()
            found.append(Mutant(len(found), node.lineno, " ".join(old.split()), new, mutated, lines))
    return found


def _forms(node: ast.AST) -> Iterator[ast.AST]:
    yield from changes(node)
    if getattr(node, "condition", False) and not isinstance(node, ast.Compare) and not _negated(node):
        yield ast.UnaryOp(ast.Not(), node)


def _negated(node: ast.AST) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def _places(tree: ast.Module) -> Iterator[tuple[Any, frozenset[int] | None]]:
    """Return every node that may be changed, and the lines that show it (None outside of functions)."""

    def walk(node: ast.AST, lines: frozenset[int] | None, inside: bool) -> Iterator[tuple[Any, frozenset[int] | None]]:
        if isinstance(node, ast.JoinedStr | ast.Raise | ast.Import | ast.ImportFrom):
            return  # message texts; an f-string's parts have no true places before Python 3.12
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.stmt) and inside:
            last = node.body[0].lineno - 1 if getattr(node, "body", None) else node.end_lineno
            lines = frozenset(range(node.lineno, (last or node.lineno) + 1)) | {node.lineno}
        for tested in _conditions(node):
            tested.condition = True  # type: ignore[attr-defined]
        if isinstance(node, ast.stmt | ast.expr):
            yield node, lines if inside else None
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "type_params", "bases"):
                continue
            within = inside or (field == "body" and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from walk(child, lines, within)

    yield from walk(tree, None, False)


def _conditions(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        return [node.test]
    return node.ifs if isinstance(node, ast.comprehension) else []
