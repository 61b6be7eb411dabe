"""Which flags the installed SGLang release accepts, read from its source: nothing is imported or run.

SGLang has declared its flags in three places over time; all three are read, so that no release number is asked for:

* `parser.add_argument("--…")` calls in server_args.py (all of them up to 0.5.13, a few in every release);
* annotated fields `name: A[type, Arg(…)] = default` in server_args.py (0.5.14 to 0.5.19);
* the same fields in arg_groups/fields/*.py (from 0.5.20).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .sglang_flags_model import (
    APPEND,
    BOOLEAN_OPTIONAL,
    RETIRED,
    STORE,
    STORE_CONST,
    STORE_FALSE,
    STORE_TRUE,
    Flag,
)
from .sglang_flags_source import Module, NotStatic, Package


class FlagsUnreadable(ValueError):
    """The package has no command line that can be read. The text is one sentence."""


# SGLang's own argparse actions that take a value in spite of being deprecated, or one more value than a switch.
_ACTIONS = {
    "store": STORE,
    "store_true": STORE_TRUE,
    "store_false": STORE_FALSE,
    "store_const": STORE_CONST,
    "append": APPEND,
    "BooleanOptionalAction": BOOLEAN_OPTIONAL,
    "DeprecatedAction": RETIRED,
    "DeprecatedStoreTrueAction": STORE_TRUE,
    "DeprecatedStoreConstAction": STORE_CONST,
    "DeprecatedAliasStoreAction": STORE,
}


def read_flags(package_dir: Path) -> list[Flag]:
    """Return every flag of `python -m sglang.launch_server`, fields first, in the order of the source.

    `package_dir` is the directory named `sglang`. Raises FlagsUnreadable when it holds no server_args.py, or when the
    file declares no flag (a layout newer than this reader).
    """
    package = Package(package_dir)
    server_args = package_dir / "srt" / "server_args.py"
    if not server_args.is_file():
        raise FlagsUnreadable(f"{server_args} does not exist, so the server's flags cannot be read. Install SGLang.")
    main = package.module(server_args)
    fields = [main, *map(package.module, sorted((package_dir / "srt" / "arg_groups" / "fields").glob("*.py")))]
    flags = [flag for module in fields for flag in _annotated(package, module)]
    flags += _added(package, main)
    if not any("--model-path" in flag.names for flag in flags):
        raise FlagsUnreadable(
            f"{server_args} declares no --model-path in any of the ways known here, so its flags cannot be trusted. "
            "This SGLang release is newer than this collection."
        )
    return flags


def _annotated(package: Package, module: Module) -> Iterator[Flag]:
    """Yield the flags of `name: A[type, "help"]` and `name: A[type, Arg(…)]` fields."""
    for cls in (node for node in module.tree.body if isinstance(node, ast.ClassDef)):
        for field in cls.body:
            match field:
                case ast.AnnAssign(
                    target=ast.Name(id=name),
                    annotation=ast.Subscript(
                        value=ast.Name(id="A" | "Annotated"), slice=ast.Tuple(elts=[kind, *metadata])
                    ),
                ):
                    arg = _metadata(metadata)
                    if arg is not None and not _is_true(arg.get("no_cli")):
                        yield _field_flag(package, module, name, kind, field.value, arg)
                case _:
                    pass


def _metadata(metadata: list[ast.expr]) -> dict[str, ast.expr] | None:
    """Return Arg's keywords of the first Arg or help text among an annotation's metadata; None without either."""
    for node in metadata:
        match node:
            case ast.Call(func=ast.Name(id="Arg")):
                return {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
            case ast.Constant(value=str()) | ast.JoinedStr() | ast.BinOp():
                return {"help": node}
            case _:
                pass
    return None


def _field_flag(
    package: Package,
    module: Module,
    name: str,
    annotation: ast.expr,
    default: ast.expr | None,
    arg: dict[str, ast.expr],
) -> Flag:
    cli_name = _string(arg.get("cli_name")) or "--" + name.replace("_", "-")
    names = (cli_name, *(_choices(package, module, arg.get("aliases"), {}) or ()))
    common: dict[str, Any] = {
        "names": names,
        "dest": name,
        "default": ast.unparse(default) if default is not None else None,
        "help": _text(arg.get("help")),
    }
    if (action := arg.get("action")) is not None and not _is_none(action):
        extra = arg.get("action_kwargs")
        if isinstance(extra, ast.Dict):
            arg = arg | {_string(k) or "": v for k, v in zip(extra.keys, extra.values, strict=True) if k is not None}
        kind = _action(action)
        return Flag(kind=kind, nargs=_nargs(arg.get("nargs")), type_name=_converter(arg.get("type")), **common)

    inner = _without_none(annotation)
    parser = arg.get("type_parser")
    literal = _literal_values(inner)
    choices = _choices(package, module, arg.get("choices"), {}) or literal
    head = inner.value if isinstance(inner, ast.Subscript) else inner
    base = head.id if isinstance(head, ast.Name) else ""
    if literal is not None:
        return Flag(choices=choices, type_name=_converter(parser) if parser else type(literal[0]).__name__, **common)
    if base in ("List", "list") and parser is None:
        element = inner.slice if isinstance(inner, ast.Subscript) else None
        nargs = _nargs(arg.get("nargs")) or "+"
        return Flag(choices=choices, nargs=nargs, type_name=_scalar(element), **common)
    if base == "bool":
        return Flag(kind=STORE_TRUE, **common)
    required = _is_true(arg.get("required")) or ("required" not in arg and default is None)
    type_name = _converter(parser) if parser else _scalar(inner)
    return Flag(choices=choices, nargs=_nargs(arg.get("nargs")), type_name=type_name, required=required, **common)


def _added(package: Package, module: Module) -> Iterator[Flag]:
    """Yield the flags of `….add_argument("--…", …)` calls."""
    for function in ast.walk(module.tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        local: dict[str, ast.AST] = {
            target.id: node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for call in ast.walk(function):
            match call:
                case ast.Call(func=ast.Attribute(attr="add_argument"), args=[ast.Constant(value=str()), *_]):
                    flag = _call_flag(package, module, call, local)
                    if flag.names[0].startswith("--"):
                        yield flag
                case _:
                    pass


def _call_flag(package: Package, module: Module, call: ast.Call, local: dict[str, ast.AST]) -> Flag:
    names = tuple(name for node in call.args if (name := _string(node)) is not None)
    given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    kind = _action(given.get("action"))
    nargs = _nargs(given.get("nargs"))
    if kind == STORE_CONST and "nargs" in given and nargs is None:
        kind = STORE  # a retired flag of which one value survives: it still takes that value
    default = given.get("default")
    return Flag(
        names=names,
        dest=_string(given.get("dest")) or names[0].lstrip("-").replace("-", "_"),
        kind=kind,
        nargs=nargs,
        choices=_choices(package, module, given.get("choices"), local),
        type_name=_converter(given.get("type")),
        default=_default_text(module, default),
        required=_is_true(given.get("required")),
        help=_text(given.get("help")),
        replacement=_string(given.get("new_flag")),
        error=_text(given["error_message"]) if "error_message" in given else None,
    )


def _default_text(module: Module, default: ast.expr | None) -> str | None:
    """Return the source of a default; one that names a field (`ServerArgs.tp_size`) gives that field's."""
    match default:
        case None:
            return None
        case ast.Attribute(value=ast.Name(id=owner), attr=attribute):
            cls = module.bindings.get(owner)
            for field in cls.body if isinstance(cls, ast.ClassDef) else ():
                match field:
                    case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value) if name == attribute:
                        return ast.unparse(value)
                    case _:
                        pass
        case _:
            pass
    return ast.unparse(default)


def _choices(
    package: Package, module: Module, node: ast.expr | None, local: dict[str, ast.AST]
) -> tuple[Any, ...] | None:
    """Return the choices, or None when there are none or they are not written down in the source."""
    if node is None or _is_none(node):
        return None
    try:
        return tuple(package.evaluate(node, module, local))
    except NotStatic:
        return None


def _without_none(annotation: ast.expr) -> ast.expr:
    """Return X of Optional[X], `X | None` and Union[X, None]; other annotations as they are."""
    match annotation:
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            return inner
        case ast.BinOp(op=ast.BitOr(), left=inner, right=ast.Constant(value=None)):
            return inner
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=[inner, ast.Constant(value=None)])):
            return inner
    return annotation


def _literal_values(annotation: ast.expr) -> tuple[Any, ...] | None:
    match annotation:
        case ast.Subscript(value=ast.Name(id="Literal"), slice=values):
            return tuple(ast.literal_eval(v) for v in (values.elts if isinstance(values, ast.Tuple) else [values]))
    return None


def _scalar(annotation: ast.expr | None) -> str:
    """Return the converter of a scalar type; SGLang takes everything but int and float as text."""
    return annotation.id if isinstance(annotation, ast.Name) and annotation.id in ("int", "float") else "str"


def _converter(node: ast.expr | None) -> str:
    match node:
        case ast.Attribute(value=ast.Name(id="json"), attr="loads"):
            return "json.loads"
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return "str"


def _action(node: ast.expr | None) -> str:
    match node:
        case ast.Constant(value=str() as name) | ast.Name(id=name) | ast.Attribute(attr=name):
            return _ACTIONS.get(name, STORE)
    return STORE


def _nargs(node: ast.expr | None) -> str | int | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str | int) else None


def _string(node: ast.AST | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _is_true(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _text(node: ast.AST | None) -> str:
    """Return a help text; what is only known at run time becomes an ellipsis."""
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_string(part) or "…" for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left) + _text(right)
    return "" if node is None else "…"
