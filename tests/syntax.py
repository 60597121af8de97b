"""The syntax of Python files, for tests about code: each text is parsed and walked once in a run."""

from __future__ import annotations

import ast
from functools import cache


@cache
def tree_of(text: str) -> ast.Module:
    return ast.parse(text)


@cache
def nodes_of(text: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree_of(text)))


def dotted(node: ast.expr) -> str:
    """A name as it is written; quickly where it is nothing but a name, which is nearly always."""
    match node:
        case ast.Name(id):
            return id
        case ast.Attribute(ast.Name(id), attr):
            return f"{id}.{attr}"
    return ast.unparse(node)
