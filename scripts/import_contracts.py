"""A contract type for import-linter: it limits the libraries that a part of the code may import."""

from __future__ import annotations

import sys

from grimp import ImportGraph
from importlinter.application import output
from importlinter.domain import fields
from importlinter.domain.contract import Contract, ContractCheck
from importlinter.domain.helpers import pop_import_expressions


class OnlyExternals(Contract):
    """The contract that `modules`, and our modules that they import, import no library but `allowed_externals`.

    The standard library is always allowed. Imports under `if TYPE_CHECKING` count. Imports in `ignore_imports` do not;
    an entry there that matches no import is an error.
    """

    type_name = "only_externals"

    modules = fields.SetField(subfield=fields.StringField())
    allowed_externals = fields.SetField(subfield=fields.StringField())
    ignore_imports = fields.SetField(subfield=fields.ImportExpressionField(), required=False)

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        pop_import_expressions(graph, self.ignore_imports or ())  # type: ignore[arg-type, truthy-bool]
        allowed = {*self.allowed_externals, *sys.stdlib_module_names}  # type: ignore[misc]
        chains = {
            tuple(chain)
            for module in _with_descendants(graph, sorted(self.modules))  # type: ignore[call-overload]
            for external in sorted(graph.find_upstream_modules(module))
            if graph.is_module_squashed(external) and external.partition(".")[0] not in allowed
            if (chain := graph.find_shortest_chain(importer=module, imported=external)) is not None
        }
        return ContractCheck(kept=not chains, metadata={"chains": sorted(chains)})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for chain in check.metadata["chains"]:
            output.print_error(" -> ".join(chain), bold=False)


def _with_descendants(graph: ImportGraph, modules: list[str]) -> list[str]:
    """Returns the modules with all their submodules.

    Raises ValueError for a module that does not exist, so that a contract does not become empty when a module is
    renamed.
    """
    missing = [module for module in modules if module not in graph.modules]
    if missing:
        raise ValueError(f"no such module: {', '.join(missing)}")
    return sorted({*modules, *(below for module in modules for below in graph.find_descendants(module))})
