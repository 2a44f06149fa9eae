"""The table of vLLM's members: the installed vLLM has them, and this package touches no others."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from vllm_blend.compat.check import main, problems
from vllm_blend.compat.fit import misfits
from vllm_blend.compat.members import VERSIONS, Member, members
from vllm_blend.compat.source import Source

ROOT = Path(__file__).parents[2] / "vllm_blend"

OTHERS = {"_foreach_copy_", "_cpp_lib", "_replace", "_member_map_"}
"""Private names of torch, xformers, named tuples and enumerations."""

DOCUMENTED = {
    "LLM",
    "LLM.generate",
    "RequestOutput",
    "SamplingParams",
    "config.VllmConfig",
    "envs",
    "plugins",
    "ir",
    "_custom_ops",
}
"""What vLLM documents, and its own modules."""

MIXINS = {
    "BlendScheduler": ("v1.core.sched.async_scheduler", "AsyncScheduler"),
    "Connected": ("v1.core.sched.scheduler", "Scheduler"),
    "StepRoom": ("v1.core.sched.scheduler", "Scheduler"),
    "BlendKVCacheManager": ("v1.core.kv_cache_manager", "KVCacheManager"),
    "BlendModelState": ("v1.worker.gpu.model_states.default", "DefaultModelState"),
    "BlendRenderer": ("renderers.hf", "HfRenderer"),
    "CPUBlendImpl": ("v1.attention.backends.cpu_attn", "CPUAttentionBackendImpl"),
    "FlashAttentionBlendImpl": ("v1.attention.backends.flash_attn", "FlashAttentionImpl"),
    "XFormersBackend": ("v1.attention.backend", "AttentionBackend"),
    "XFormersImpl": ("v1.attention.backend", "AttentionImpl"),
    "XFormersMetadataBuilder": ("v1.attention.backend", "AttentionMetadataBuilder"),
}
"""Classes of this package that stand before one of vLLM's."""


@pytest.fixture(scope="module")
def source() -> Source:
    found = Source.installed()
    assert found is not None
    return found


def test_the_installed_vllm_fits() -> None:
    assert problems() == []


@dataclass
class Uses:
    """What a module of this package uses of vLLM.

    Attributes:
        imported: by the name that it has here, e.g. ``v1.request.Request``.
        private: attributes with a leading underscore, but those of ``self``.
        wrapped: owner and name of what is wrapped.
    """

    imported: dict[str, str] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)
    wrapped: set[tuple[str, str]] = field(default_factory=set)

    @classmethod
    def of(cls, path: Path) -> Uses:
        uses, tree = cls(), ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                module = (node.module or "").removeprefix("vllm").lstrip(".")
                for alias in node.names:
                    whole = f"{module}.{alias.name}".lstrip(".")
                    uses.imported[alias.asname or alias.name] = whole
            elif isinstance(node, ast.Attribute) and _is_private(node):
                uses.private.add(node.attr)
        uses.wrapped = set(_wrapped(tree))
        return uses


def _is_private(node: ast.Attribute) -> bool:
    of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
    return node.attr.startswith("_") and not node.attr.startswith("__") and not of_self


def _wrapped(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """``_wrap(Owner, "name", ...)``, and ``for name in ("a", "b"): _wrap(Owner, name, ...)``."""
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For)]
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "_wrap"):
            continue
        owner, name = node.args[:2]
        if isinstance(owner, ast.Call):  # type(ModelRegistry)
            owner = owner.args[0]
        assert isinstance(owner, ast.Name)
        if isinstance(name, ast.Constant):
            yield owner.id, str(name.value)
            continue
        (loop,) = [one for one in loops if node in ast.walk(one)]
        for value in ast.literal_eval(loop.iter):
            yield owner.id, value


def own_names() -> set[str]:
    """Private names that this package defines."""
    found = set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.AnnAssign | ast.Assign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {t.attr for t in targets if isinstance(t, ast.Attribute) and _of_self(t)}
                found |= {t.id for t in targets if isinstance(t, ast.Name)}
    return found


def _of_self(target: ast.Attribute) -> bool:
    return isinstance(target.value, ast.Name) and target.value.id == "self"


def test_every_import_is_in_the_table() -> None:
    table = {f"{member.module}.{member.name.split('.')[0]}" for member in members()}
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in ROOT.rglob("*.py")
        if path.relative_to(ROOT).parts[0] != "cli"  # what it misses fails a command, and no engine
        for name in Uses.of(path).imported.values()
        if name not in table | DOCUMENTED
    }
    assert not missing


def test_every_private_name_is_in_the_table() -> None:
    last = {member.name.rpartition(".")[2] for member in members()}
    used = {name for path in ROOT.rglob("*.py") for name in Uses.of(path).private}
    operators = {"_vllm_fa3_C"}  # torch.ops: its caller in vLLM is in the table
    scales = {"_k_scale", "_v_scale", "_q_scale", "_k_scale_float"}  # set by set_default_quant_scales
    assert used - own_names() - OTHERS <= last | operators | scales
    # and the search does find them
    assert {"_forward_method", "_member_map_", "_reserve_prefill_lookahead"} <= used


def test_every_wrapped_method_is_in_the_table() -> None:
    uses = Uses.of(ROOT / "plugin" / "hooks.py")
    table = {member.name for member in members()}
    aliases = {"GPUModelRunnerV2": "GPUModelRunner"}
    assert len(uses.wrapped) >= 15
    for owner, name in uses.wrapped:
        if owner == "worker":  # both of them
            continue
        is_module = uses.imported[owner] == owner
        assert (name if is_module else f"{aliases.get(owner, owner)}.{name}") in table


def test_every_overridden_member_is_in_the_table(source: Source) -> None:
    """None is overridden by accident either."""
    table, seen = {member.name.rpartition(".")[2] for member in members()}, set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ClassDef) or node.name not in MIXINS:
                continue
            module, owner = MIXINS[node.name]
            for name in _defined(node):
                if source.find(module, f"{owner}.{name}") is not None:
                    seen.add(node.name)
                    assert name in table, f"{node.name}.{name} hides {owner}.{name}"
    assert seen == set(MIXINS)


def _defined(owner: ast.ClassDef) -> set[str]:
    """A class's members, and what its methods set on ``self``."""
    found = {node.name for node in owner.body if isinstance(node, ast.FunctionDef)}
    found |= {n.target.id for n in owner.body if isinstance(n, ast.AnnAssign) and n.value is not None}  # type: ignore[union-attr]
    for node in ast.walk(owner):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {t.attr for t in targets if isinstance(t, ast.Attribute) and _of_self(t)}
    return found


# --- a vLLM that does not fit -----------------------------------------------------------------------

FILES = {
    "envs.py": "A: int = 1\n",
    "_version.py": "__version__ = version = '0.32.7'\n",
    "base.py": "class Base:\n    def inherited(self, x, *, y=1): ...\n",
    "things.py": (
        "from vllm.base import Base\n"
        "from vllm.stars import *\n"
        "try:\n    import torch\nexcept ImportError:\n    late = 1\n"
        "class Thing(Base):\n"
        "    field: int = 0\n"
        "    def __init__(self):\n        self.kept = {}\n"
        "    def act(self, request, limit=None): ...\n"
    ),
    "stars.py": "def star(): ...\n",
}


@pytest.fixture
def small(tmp_path: Path) -> Source:
    root = tmp_path / "vllm"
    root.mkdir()
    for name, text in FILES.items():
        (root / name).write_text(text)
    return Source(root)


FITS = [
    Member("things", "Thing.act", "self, request, limit="),
    Member("things", "Thing.inherited", "self, x, *, y="),
    Member("things", "Thing.kept"),
    Member("things", "Thing.field"),
    Member("things", "Base"),
    Member("things", "star", ""),
    Member("things", "late"),
    Member("things", "Thing.coming", since="0.33"),
    Member("envs", "A", newer={"0.33": None}),
]


def test_members_are_found_wherever_they_are_defined(small: Source) -> None:
    assert misfits(small, "0.32.7", FITS) == []


@pytest.mark.parametrize(
    ("member", "version", "sentence"),
    [
        (Member("things", "Thing.gone"), "0.32.7", "vllm.things.Thing.gone is missing"),
        (Member("nowhere", "Thing"), "0.32.7", "vllm.nowhere.Thing is missing"),
        (
            Member("things", "Thing.act", "self, request"),
            "0.32.7",
            "vllm.things.Thing.act takes (self, request, limit=); expected (self, request)",
        ),
        (Member("things", "Thing.kept", "self"), "0.32.7", "vllm.things.Thing.kept is no function"),
        (Member("things", "Thing.coming", since="0.33"), "0.33.1", "Thing.coming is missing"),
        (Member("things", "Thing.act", "self", {"0.33": "self, other"}), "0.34.0", "(self, other)"),
    ],
)
def test_what_is_otherwise_is_told_in_a_sentence(
    small: Source, member: Member, version: str, sentence: str
) -> None:
    (found,) = misfits(small, version, [*FITS[:3], member])
    assert sentence in found


def test_one_command_says_whether_a_vllm_fits(
    small: Source, capsys: pytest.CaptureFixture[str], source: Source
) -> None:
    assert main([]) == 0
    assert f"{len(members())} members, 0 otherwise" in capsys.readouterr().out
    assert main([str(small.root)]) == 1  # which has next to nothing
    out = capsys.readouterr().out
    assert "vLLM 0.32.7" in out and "vllm.v1.core.sched.scheduler.Scheduler.schedule is missing" in out
    shutil.rmtree(small.root)
    assert main([str(small.root.parent)]) == 1
    assert "holds no vLLM" in capsys.readouterr().out


def test_versions_that_the_table_tells_apart_are_known() -> None:
    assert all(since in VERSIONS for m in members() for since in (*m.newer, m.since))
