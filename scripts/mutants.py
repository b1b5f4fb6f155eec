"""Mutation tests of policies and machines: each mutant is one small change that some test should detect.

cosmic-ray generates the mutants. Tests are collected once; each mutant then runs in a forked process in which the changed
function's code is replaced, without touching a file. For changes outside of functions a new process imports the changed
module. A mutant is run against the tests of its module and, if it survives, against others that the caller names. Run by
``scripts/mutants.sh``; the samples are the same on every run.

Not mutated: annotations, decorators, assertions, ``validate`` and messages.
"""

# ruff: noqa: ARG002, T201 - a script that implements foreign interfaces and prints
# mypy: disable-error-code="import-not-found, import-untyped"

import argparse
import fnmatch
import importlib.abc
import importlib.machinery
import importlib.util
import os
import random
import resource
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

import _hypothesis_pytestplugin
import hypothesis
import hypothesis.stateful
import parso
import pytest
import pytest_asyncio.plugin
import pytest_timeout
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator
from parso.tree import BaseNode, NodeOrLeaf

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
LAYERS = ("policy", "machine")
PLUGINS = (_hypothesis_pytestplugin, pytest_asyncio.plugin, pytest_timeout)
MAX_MEMORY_BYTES = 4 << 30
"""A mutant may loop for ever and allocate memory."""
MAX_CPU_S = 600
"""Limit of CPU time of the tests without a mutant."""
MAX_TIMES_CPU = 4
"""Limit with a mutant, as a multiple of the time without; two seconds are added."""

CHANGES = {
    "ReplaceComparisonOperator": "Lt_LtE Lt_GtE LtE_Lt LtE_Gt Gt_GtE Gt_LtE GtE_Gt GtE_Lt Eq_NotEq NotEq_Eq "
    "Is_IsNot IsNot_Is",
    "ReplaceBinaryOperator": "Add_Sub Sub_Add Mul_Add Div_Mul FloorDiv_Mul Mod_Add Pow_Mul "
    "BitOr_BitAnd BitAnd_BitOr LShift_RShift RShift_LShift",
    "ReplaceUnaryOperator": "USub_UAdd Delete_USub Delete_Not",
    "": "AddNot ReplaceAndWithOr ReplaceOrWithAnd ReplaceTrueWithFalse ReplaceFalseWithTrue NumberReplacer "
    "ReplaceBreakWithContinue ReplaceContinueWithBreak ZeroIterationForLoop",
}


class RemoveStatement(Operator):  # type: ignore[misc]  # untyped base
    """Removes a call made for its effect, a deletion, or a change of existing state."""

    def mutation_positions(self, node: NodeOrLeaf) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        if node.parent is not None and node.parent.type == "simple_stmt" and self._acts(node):
            yield node.start_pos, node.end_pos

    def mutate(self, node: BaseNode, index: int) -> NodeOrLeaf:
        return parso.python.tree.Name("pass", node.start_pos, node.get_first_leaf().prefix)

    @staticmethod
    def _acts(node: NodeOrLeaf) -> bool:
        if node.type in {"atom_expr", "del_stmt"}:
            return True
        if node.type != "expr_stmt" or node.children[1].type != "operator":
            return False
        return bool(node.children[0].type != "name" or node.children[1].value != "=")

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


OPERATORS: dict[str, Operator] = {
    name: get_operator(f"core/{name}")()
    for prefix, kinds in CHANGES.items()
    for name in (f"{prefix}_{kind}" if prefix else kind for kind in kinds.split())
} | {"RemoveStatement": RemoveStatement()}


@dataclass(frozen=True)
class Mutant:
    path: Path
    operator: str
    occurrence: int
    line: int
    column: int
    in_function: bool

    @property
    def module(self) -> str:
        return ".".join(self.path.relative_to(SOURCE).with_suffix("").parts)

    @property
    def name(self) -> str:
        """Display name of its module."""
        return name_of(self.path)

    @cached_property
    def code(self) -> str:
        return str(mutate_code(self.path.read_text(), OPERATORS[self.operator], self.occurrence))

    @property
    def tests(self) -> str:
        """The test file of its module, or of the module whose name is its prefix (request_events, request)."""
        folder, stem = Path("tests/unit") / self.path.parent.relative_to(SOURCE / "triptych"), self.path.stem
        while stem and not (ROOT / folder / f"test_{stem}.py").exists():
            stem = stem.rpartition("_")[0]
        return str(folder / f"test_{stem}.py" if stem else folder)

    def __str__(self) -> str:
        before, after = self.path.read_text().splitlines(), self.code.splitlines()
        changed = next(row for row, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1])
        old, new = before[changed].strip(), after[changed].strip()
        return f"{self.name}.py:{self.line}:{self.column} {self.operator}\n    - {old}\n    + {new}"


def mutants_of(path: Path) -> list[Mutant]:
    """All mutants of a module, in file order."""
    tree = parso.parse(path.read_text())
    seen: Counter[str] = Counter()
    found: list[Mutant] = []

    def visit(node: NodeOrLeaf, *, skipped: bool, in_function: bool) -> None:
        skipped = skipped or _is_skipped(node)
        in_function = in_function or (node.type == "suite" and node.parent.type == "funcdef")
        for name, operator in OPERATORS.items():
            for (line, column), _ in operator.mutation_positions(node):
                if not skipped:
                    found.append(Mutant(path, name, seen[name], line, column, in_function))
                seen[name] += 1
        for child in getattr(node, "children", ()):
            visit(child, skipped=skipped, in_function=in_function)

    visit(tree, skipped=False, in_function=False)
    return sorted(found, key=lambda mutant: (mutant.line, mutant.column, mutant.operator, mutant.occurrence))


def _is_skipped(node: NodeOrLeaf) -> bool:
    if node.type == "funcdef":
        return bool(node.name.value == "validate")
    if node.type in {"decorator", "assert_stmt", "raise_stmt", "fstring", "tfpdef", "import_from", "import_name"}:
        return True
    parent = node.parent
    if parent is None:
        return False
    if parent.type == "annassign":
        return bool(parent.children[1] is node)
    if parent.type == "expr_stmt" and parent.parent.parent.type == "file_input" and "|" in node.get_code():
        return True  # a union of types
    return bool(parent.type == "funcdef" and parent.annotation is node)


class _Mutated(importlib.abc.InspectLoader):
    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def get_source(self, fullname: str) -> str:
        return self._mutant.code


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the mutated module."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._mutant.module:
            return None
        return importlib.util.spec_from_loader(fullname, _Mutated(self._mutant), origin=str(self._mutant.path))


def _functions(owner: ModuleType | type, module: str) -> Iterator[FunctionType]:
    """A module's functions, including methods and properties."""
    for value in vars(owner).values():
        if isinstance(value, type) and value.__module__ == module:
            yield from _functions(value, module)
        for candidate in (value, getattr(value, "__func__", None), getattr(value, "fget", None)):
            if isinstance(candidate, FunctionType) and candidate.__module__ == module:
                yield candidate


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def change(mutant: Mutant) -> None:
    """Replace the code of the imported module's functions by the mutant's."""
    codes = {code.co_qualname: code for code in _codes(compile(mutant.code, str(mutant.path), "exec"))}
    for function in _functions(sys.modules[mutant.module], mutant.module):
        if function.__qualname__ in codes:  # dataclasses generate some
            function.__code__ = codes[function.__qualname__]


def fork(cpu_s: int) -> int:
    """As ``os.fork``; the child has resource limits and no output."""
    process = os.fork()
    if process == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    return process


class _Pool:
    """Processes that each run one mutant, at most ``jobs`` at a time."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._running: dict[int, Mutant] = {}
        self.alive: set[Mutant] = set()

    def add(self, process: int, mutant: Mutant) -> None:
        self._running[process] = mutant
        while len(self._running) >= self._jobs:
            self._wait()

    def finish(self) -> None:
        while self._running:
            self._wait()

    def _wait(self) -> None:
        process, status = os.wait()
        mutant = self._running.pop(process)
        if status == 0:
            self.alive.add(mutant)


class _Forks:
    """Runs the collected tests in one process per mutant, after one run without a mutant."""

    def __init__(self, mutants: Sequence[Mutant], pool: _Pool) -> None:
        self._mutants = mutants
        self._pool = pool
        self._in_child = False
        self.cpu_s = 0
        """CPU time of a mutant; 0 if the tests fail without one."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self) -> bool | None:
        process = fork(MAX_CPU_S)
        if process == 0:
            self._in_child = True
            return None
        _, status, used = os.wait4(process, 0)
        if status != 0:
            return True
        self.cpu_s = round(MAX_TIMES_CPU * used.ru_utime) + 2
        for mutant in self._mutants:
            process = fork(self.cpu_s)
            if process == 0:
                self._in_child = True
                change(mutant)
                return None
            self._pool.add(process, mutant)
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if self._in_child:
            os._exit(exitstatus)


def _run(tests: Sequence[str], *plugins: object) -> int:
    options = ["-x", "-s", "-p", "no:terminal", "-p", "no:cacheprovider", "--hypothesis-profile=mutants"]
    return int(pytest.main([*options, *tests], plugins=[*PLUGINS, *plugins]))


def _run_anew(mutant: Mutant, tests: Sequence[str]) -> int:
    for name in [name for name in sys.modules if name.split(".")[0] in {"triptych", "tests"}]:
        del sys.modules[name]
    sys.meta_path.insert(0, _Finder(mutant))
    return _run(tests)


def meet(mutants: Sequence[Mutant], tests: Sequence[str], jobs: int) -> list[Mutant]:
    """The mutants that survive these tests, in order. Raises RuntimeError when the tests fail without a mutant."""
    pool = _Pool(jobs)
    forks = _Forks([mutant for mutant in mutants if mutant.in_function], pool)
    _run(tests, forks)
    if not forks.cpu_s:
        raise RuntimeError(f"{' '.join(tests)}: these tests fail without any mutant")
    for mutant in mutants:
        if not mutant.in_function:
            process = fork(forks.cpu_s)
            if process == 0:
                os._exit(_run_anew(mutant, tests))
            pool.add(process, mutant)
    pool.finish()
    survivors = [mutant for mutant in mutants if mutant in pool.alive]
    for mutant in survivors:
        print(mutant, flush=True)
    print(f"{len(survivors)} of {len(mutants)} survive {' '.join(tests)}\n", flush=True)
    return survivors


def name_of(path: Path) -> str:
    """Name of a module as options and tables have it: ``machine/router/cluster``."""
    return str(path.relative_to(SOURCE / "triptych").with_suffix(""))


def main() -> None:
    parser = argparse.ArgumentParser(description="Mutation test of the policy and machine layers.")
    parser.add_argument(
        "modules", nargs="*", default=["*"], help="such as policy/sharding, or machine/*; all by default"
    )
    parser.add_argument("--samples", type=int, default=0, help="mutants per module, drawn from a fixed seed; 0 for all")
    parser.add_argument("--jobs", type=int, default=2, help="test processes at a time")
    parser.add_argument("--then", action="append", default=[], help="tests that survivors meet next: tests/simulation")
    options = parser.parse_args()

    os.chdir(ROOT)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # noqa: TID251  # only three plugins are needed
    sys.path[:0] = [str(SOURCE), str(ROOT)]
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("mutants", derandomize=True, database=None, deadline=None, phases=phases)

    tried: Counter[str] = Counter()
    all_of: Counter[str] = Counter()
    survivors: list[Mutant] = []
    for path in (path for layer in LAYERS for path in sorted((SOURCE / "triptych" / layer).rglob("*.py"))):
        name = name_of(path)
        mutants = mutants_of(path) if any(fnmatch.fnmatch(name, pattern) for pattern in options.modules) else []
        all_of[name] = len(mutants)
        if 0 < options.samples < len(mutants):
            drawn = random.Random(name).sample(range(len(mutants)), options.samples)  # noqa: S311  # reproducible
            mutants = [mutants[index] for index in sorted(drawn)]
        tried[name] = len(mutants)
        if mutants:
            survivors += meet(mutants, [mutants[0].tests], options.jobs)
    for tests in options.then:
        survivors = meet(survivors, [tests], options.jobs)
    left = Counter(mutant.name for mutant in survivors)
    _print_table(
        [(name, all_of[name], number, number - left[name], left[name]) for name, number in tried.items() if number]
    )


def _print_table(rows: list[tuple[str, int, int, int, int]]) -> None:
    print(f"{'module':36}{'mutants':>10}{'tried':>10}{'killed':>10}{'survived':>10}")
    for name, *numbers in (*rows, ("all", *(sum(column) for column in list(zip(*rows, strict=True))[1:]))):
        print(f"{name:36}" + "".join(f"{number:10}" for number in numbers))


if __name__ == "__main__":
    main()
