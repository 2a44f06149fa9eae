"""vLLM's members and their signatures, read from its files: nothing of it is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "vllm"
MAX_STEPS = 12
"""From where a name is imported to where it is defined, and from a class to its bases."""
STAR = "*"
"""An import of all names; it goes by this and the module's name."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True, eq=False)
class Place:
    """Something that a module defines.

    Attributes:
        module: its dotted name below ``vllm``.
        node: its statement.
    """

    module: str
    node: ast.stmt

    @property
    def signature(self) -> str | None:
        """A function's parameters, ``=`` behind those with a default; None: it is no function."""
        if isinstance(self.node, ast.FunctionDef | ast.AsyncFunctionDef):
            return signature(self.node.args)
        return None


class Source:
    """The files of a vLLM.

    Args:
        root: the folder of its package, which holds ``envs.py``.

    Attributes:
        files: that were read.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: list[Path] = []
        self._statements = cache(self._read)
        self._members = cache(members_of)

    @classmethod
    def installed(cls) -> Source | None:
        """Of the vLLM of this environment, or None."""
        spec = find_spec(PACKAGE)
        places = spec.submodule_search_locations if spec is not None else None
        return cls(Path(next(iter(places)))) if places else None

    def has(self, module: str) -> bool:
        return self._path(module) is not None

    def find(self, module: str, member: str) -> Place | None:
        """Where a module's member is defined; ``member`` is ``name`` or ``Class.name``."""
        first, *rest = member.split(".")
        place = self._find(module, first, MAX_STEPS)
        for name in rest:
            if place is None:
                return None
            place = self._member(place, name, MAX_STEPS)
        return place

    def _path(self, module: str) -> Path | None:
        base = self.root.joinpath(*module.split(".")) if module else self.root
        found = (path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file())
        return next(found, None)

    def _read(self, module: str) -> dict[str, ast.stmt]:
        """A module's statements by the name that they define or import, the last of each."""
        path = self._path(module)
        if path is None:
            return {}
        self.files.append(path)
        body = ast.parse(path.read_text(encoding="utf-8"), str(path)).body
        return {name: node for node in flat(body) for name in names(node)}

    def _find(self, module: str, name: str, steps: int) -> Place | None:
        statements = self._statements(module)
        node = statements.get(name)
        if node is not None and not isinstance(node, ast.ImportFrom | ast.Import):
            return Place(module, node)
        if isinstance(node, ast.ImportFrom):
            asked = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
            return self._imported(module, node, asked, steps)
        stars = (other for key, other in statements.items() if key.startswith(STAR))
        found = (self._imported(module, star, name, steps) for star in stars)
        return next((place for place in found if place is not None), None)

    def _imported(self, module: str, node: ast.stmt, name: str, steps: int) -> Place | None:
        origin = self._origin(module, node) if isinstance(node, ast.ImportFrom) else None
        return self._find(origin, name, steps - 1) if steps and origin is not None else None

    def _origin(self, module: str, node: ast.ImportFrom) -> str | None:
        """The module below ``vllm`` that a statement imports from; None: it is another package's."""
        if node.level:
            path = self._path(module)
            is_package = path is not None and path.name == "__init__.py"
            up = node.level - is_package
            parts = module.split(".") if module else []
            base = parts[: len(parts) - up] if up else parts
            return ".".join([*base, *([node.module] if node.module else [])])
        whole = node.module or ""
        if whole == PACKAGE:
            return ""
        return whole.removeprefix(f"{PACKAGE}.") if whole.startswith(f"{PACKAGE}.") else None

    def _member(self, place: Place, name: str, steps: int) -> Place | None:
        """A class's member, its own or a base's; of a value the member of its class."""
        node = place.node
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):  # NAME = Class(...)
            node = self._class_of(place.module, node.value.func) or node
        if not isinstance(node, ast.ClassDef):
            return None
        if (statement := self._members(node).get(name)) is not None:
            return Place(place.module, statement)
        for base in node.bases:
            owner = base.value if isinstance(base, ast.Subscript) else base  # Generic classes
            if not isinstance(owner, ast.Name) or not steps:
                continue
            above = self._find(place.module, owner.id, steps)
            found = None if above is None else self._member(above, name, steps - 1)
            if found is not None:
                return found
        return None

    def _class_of(self, module: str, func: ast.expr) -> ast.ClassDef | None:
        if not isinstance(func, ast.Name):
            return None
        place = self._find(module, func.id, MAX_STEPS)
        return place.node if place is not None and isinstance(place.node, ast.ClassDef) else None


def flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, and those under them, but for those of functions and classes."""
    for node in body:
        yield node
        for block in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While):
                yield from flat(getattr(node, block, []))
        if isinstance(node, ast.Try):
            for handler in node.handlers:
                yield from flat(handler.body)


def names(node: ast.stmt) -> list[str]:
    """What a statement defines or imports; of ``self.x = ...`` it is ``x``."""
    if isinstance(node, Definition):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [
            f"{STAR}{getattr(node, 'module', '')}" if alias.name == STAR else alias.asname or alias.name
            for alias in node.names
        ]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    flat_targets = [one for t in targets for one in (t.elts if isinstance(t, ast.Tuple) else [t])]
    found = [one.id for one in flat_targets if isinstance(one, ast.Name)]
    return found + [
        one.attr
        for one in flat_targets
        if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name) and one.value.id == "self"
    ]


def members_of(owner: ast.ClassDef) -> dict[str, ast.stmt]:
    """A class's own members by name; what methods assign to ``self`` where its body has none."""
    found = {name: node for node in flat(owner.body) for name in names(node)}
    for method in owner.body:
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in flat(method.body):
                if isinstance(node, ast.Assign | ast.AnnAssign):
                    for name in names(node):
                        found.setdefault(name, node)
    return found


def signature(args: ast.arguments) -> str:
    """Parameters in their order, e.g. ``self, request, limit=, *, timeout=, **kwargs``."""
    plain = [arg.arg for arg in (*args.posonlyargs, *args.args)]
    without = len(plain) - len(args.defaults)
    parts = [name + "=" * (index >= without) for index, name in enumerate(plain)]
    if args.vararg is not None:
        parts.append(f"*{args.vararg.arg}")
    elif args.kwonlyargs:
        parts.append("*")
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        parts.append(arg.arg + "=" * (default is not None))
    if args.kwarg is not None:
        parts.append(f"**{args.kwarg.arg}")
    return ", ".join(parts)
