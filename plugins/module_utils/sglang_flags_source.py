"""Read values out of SGLang's source files without running them.

SGLang cannot be imported where torch is missing, and importing it takes seconds where it is not. What its command
line accepts is written down as literals, module constants and one-line functions: enough to be read.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class NotStatic(Exception):
    """The value is only known at run time (it comes from a call, the environment, another package, …)."""


class Module:
    """One source file: its tree, and the statements that bind each of its top-level names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        self.bindings = _bindings(self.tree.body)


def _bindings(body: list[ast.stmt]) -> dict[str, ast.AST]:
    """Map each name bound by `body` to its value, definition or import; the last binding wins."""
    bound: dict[str, ast.AST] = {}
    for statement in body:
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    bound[target.id] = statement.value
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
            bound[statement.target.id] = statement.value
        elif isinstance(statement, ast.FunctionDef | ast.ClassDef):
            bound[statement.name] = statement
        elif isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                bound[alias.asname or alias.name] = statement
    return bound


class Package:
    """The source tree of one installed package, read lazily and once."""

    def __init__(self, package_dir: Path) -> None:
        self.dir = package_dir
        self._modules: dict[Path, Module] = {}

    def module(self, path: Path) -> Module:
        if path not in self._modules:
            self._modules[path] = Module(path)
        return self._modules[path]

    def find(self, dotted: str) -> Module:
        """Return the module `sglang.a.b`; raises NotStatic for another package's."""
        parts = dotted.split(".")
        if parts[0] != self.dir.name:
            raise NotStatic(dotted)
        base = self.dir.joinpath(*parts[1:])
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return self.module(path)
        raise NotStatic(dotted)

    def lookup(self, name: str, module: Module) -> tuple[ast.AST, Module]:
        """Return what `name` is bound to in `module`, following imports inside the package."""
        bound = module.bindings.get(name)
        if bound is None:
            raise NotStatic(name)
        if isinstance(bound, ast.ImportFrom):
            original = next(a.name for a in bound.names if (a.asname or a.name) == name)
            if bound.level or not bound.module:
                raise NotStatic(name)
            return self.lookup(original, self.find(bound.module))
        return bound, module

    def evaluate(self, node: ast.AST, module: Module, names: Mapping[str, ast.AST] | None = None) -> Any:
        """Return the value of the expression `node` written in `module`. Raises NotStatic.

        `names` are local names (of a function or class body) that come before the module's own. A mapping is
        returned with its keys only (the values are classes, and only the keys are ever choices).
        """
        local = names or {}
        match node:
            case ast.Constant():
                return node.value
            case ast.Tuple() | ast.List() | ast.Set():
                return list(self._items(node, module, local))
            case ast.Dict():
                return {self.evaluate(key, module, local): None for key in node.keys if key is not None}
            case ast.UnaryOp(op=ast.USub()):
                return -self.evaluate(node.operand, module, local)
            case ast.BinOp(op=ast.Add()):
                return self._sum(self.evaluate(node.left, module, local), self.evaluate(node.right, module, local))
            case ast.BinOp(op=ast.Mult()):
                return self.evaluate(node.left, module, local) * self.evaluate(node.right, module, local)
            case ast.Name(id=name) if name in local:
                return self.evaluate(local[name], module, {k: v for k, v in local.items() if k != name})
            case ast.Name(id=name):
                bound, home = self.lookup(name, module)
                return self.evaluate(bound, home)
            case ast.Attribute(value=ast.Name(id=owner), attr=attribute):
                return self._attribute(owner, attribute, module)
            case ast.Call(func=ast.Name(id="list" | "sorted" | "tuple" | "set" | "frozenset"), args=[only]):
                return list(self.evaluate(only, module, local))
            case ast.Call(func=ast.Attribute(value=mapping, attr="keys"), args=[]):
                return list(self.evaluate(mapping, module, local))
            case ast.Call(func=ast.Name(id=function), args=[]):
                return self._call(function, module)
        raise NotStatic(ast.dump(node)[:80])

    def _items(
        self, node: ast.Tuple | ast.List | ast.Set, module: Module, local: Mapping[str, ast.AST]
    ) -> Iterator[Any]:
        for item in node.elts:
            if isinstance(item, ast.Starred):
                yield from self.evaluate(item.value, module, local)
            else:
                yield self.evaluate(item, module, local)

    @staticmethod
    def _sum(left: Any, right: Any) -> Any:
        if type(left) is not type(right):
            raise NotStatic("a sum of unlike things")
        return left + right

    def _attribute(self, owner: str, attribute: str, module: Module) -> Any:
        bound, home = self.lookup(owner, module)
        if not isinstance(bound, ast.ClassDef):
            raise NotStatic(f"{owner}.{attribute}")
        inside = _bindings(bound.body)
        if attribute not in inside:
            raise NotStatic(f"{owner}.{attribute}")
        return self.evaluate(inside[attribute], home, inside)

    def _call(self, function: str, module: Module) -> Any:
        """Return what a function without parameters returns in the end: the last statement of its body."""
        bound, home = self.lookup(function, module)
        if not isinstance(bound, ast.FunctionDef) or not isinstance(bound.body[-1], ast.Return):
            raise NotStatic(function)
        result = bound.body[-1].value
        if result is None:
            raise NotStatic(function)
        local: dict[str, ast.AST] = {}
        for name, value in _bindings(bound.body).items():
            if isinstance(value, ast.ImportFrom) and value.module:
                original = next(a.name for a in value.names if (a.asname or a.name) == name)
                found, other = self.lookup(original, self.find(value.module))
                local[name] = ast.copy_location(_constant(self.evaluate(found, other)), found)
            else:
                local[name] = value
        return self.evaluate(result, home, local)


def _constant(value: Any) -> ast.expr:
    """Return an expression that stands for an already evaluated value."""
    return ast.parse(repr(value), mode="eval").body
