"""Modules of version 0.1 by their names of today, so that imports and entry points find them.

An import of an old name gives the module of today, with a DeprecationWarning. A later version drops
this file.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

PACKAGE = "repo_interp"
MOVED = {
    "analysis.ablation": "analysis.ablation_effects",
    "analysis.atlas": "plugins.head_tables.atlas_table",
    "analysis.failing_cell": "plugins.results.failing_cell",
    "analysis.head_file": "plugins.head_tables.head_file",
    "analysis.heads": "plugins.head_tables.head_numbers",
    "analysis.memory": "analysis.memory_needed",
    "analysis.one_head": "plugins.one_head.one_head",
    "analysis.training": "plugins.training.training",
    "cli.analyze": "cli.analyze_command",
    "cli.compare": "cli.compare_command",
    "cli.explore": "cli.explore_command",
    "checkpoint_files.fetched": "plugins.packages.fetched",
    "cli.fetch": "plugins.packages.fetch_command",
    "cli.fetch_command": "plugins.packages.fetch_command",
    "cli.inspect": "cli.inspect_command",
    "cli.options": "cli.arguments",
    "cli.score": "cli.score_command",
    "cli.tables": "cli.console_tables",
    "collection": "runtime.collection",
    "comparison.notes": "comparison.comparison_notes",
    "console": "runtime.console",
    "experiments.atlas": "plugins.heads.atlas",
    "experiments.catalogue": "experiments.experiment_catalogue",
    "experiments.effects": "plugins.causes.effects",
    "experiments.extrapolation": "plugins.lengths.extrapolation",
    "experiments.gaussians": "plugins.lengths.gaussians",
    "experiments.head_columns": "plugins.head_tables.head_columns",
    "experiments.head_names": "plugins.heads.head_names",
    "experiments.head_scores": "plugins.heads.head_scores",
    "experiments.kinds": "plugins.kinds.kinds",
    "experiments.perturbation": "plugins.lengths.perturbation",
    "experiments.saliency": "plugins.causes.saliency",
    "experiments.task_scores": "experiments.test_set_scores",
    "experiments.twins": "plugins.heads.twins",
    "explorer.edits": "explorer.session_edits",
    "failures": "runtime.failures",
    "files": "storage.files",
    "interruptible": "runtime.interruptible",
    "interventions.paths": "plugins.paths.paths",
    "launcher": "runtime.launcher",
    "libraries": "runtime.libraries",
    "measures.activations": "plugins.distance.activations",
    "measures.catalogue": "measures.measure_catalogue",
    "measures.fake_distance": "plugins.fake_distance.fake_distance",
    "measures.gates": "plugins.cope.gates",
    "measures.kernels.axis_fit": "plugins.three_axis.axis_fit",
    "measures.kernels.block_means": "plugins.fake_distance.block_means",
    "measures.kernels.closed_form": "plugins.rotation.closed_form",
    "measures.kernels.fake_logits": "plugins.fake_distance.fake_logits",
    "measures.kernels.head_patterns": "plugins.heads.head_patterns",
    "measures.kernels.held_out": "plugins.sources.held_out",
    "measures.kernels.position_cells": "plugins.three_axis.position_cells",
    "measures.maps": "plugins.fake_distance.maps",
    "measures.octaves": "plugins.distance.octaves",
    "measures.position_sources": "plugins.sources.position_sources",
    "measures.rotation": "plugins.rotation.rotation",
    "measures.segments": "plugins.segments.segments",
    "measures.stability": "plugins.distance.stability",
    "measures.symbols": "plugins.distance.symbols",
    "measures.three_axis": "plugins.three_axis.three_axis",
    "memory": "runtime.memory",
    "models.adapter_training": "plugins.adapters.adapter_training",
    "models.adapters": "plugins.adapters.adapters",
    "models.audit": "plugins.verify.audit",
    "models.batch_arguments": "plugins.verify_batch.batch_arguments",
    "models.batch_audit": "plugins.verify_batch.batch_audit",
    "models.direct_path": "plugins.paths.direct_path",
    "models.dispatch": "plugins.placement.dispatch",
    "models.dumped_tables": "plugins.verify.dumped_tables",
    "models.own_attention": "plugins.own_attention.own_attention",
    "models.parity": "plugins.loading_checks.parity",
    "models.scheme_audit": "plugins.verify_scheme.scheme_audit",
    "models.text_part": "plugins.text_parts.text_part",
    "plain_hdf5": "storage.plain_hdf5",
    "plots.audit": "plugins.verify.figure",
    "plots.beside": "plots.compared",
    "plots.catalogue": "plots.view_catalogue",
    "plots.marks.grid": "plots.marks.panels",
    "plots.marks.heads": "plots.marks.head_map",
    "plots.one_head": "plugins.one_head.one_head_figure",
    "plots.views.atlas": "plugins.heads.view",
    "plots.views.effects": "plugins.causes.effects_view",
    "plots.views.extrapolation": "plugins.lengths.extrapolation_view",
    "plots.views.fake_distance": "plugins.fake_distance.view",
    "plots.views.gates": "plugins.cope.view",
    "plots.views.kinds": "plugins.kinds.view",
    "plots.views.perturbation": "plugins.lengths.perturbation_view",
    "plots.views.position_sources": "plugins.sources.view",
    "plots.views.position_texts": "plugins.sources.position_texts",
    "plots.views.rotation": "plugins.rotation.view",
    "plots.views.saliency": "plugins.causes.saliency_view",
    "plots.views.segments": "plugins.segments.view",
    "plots.views.three_axis": "plugins.three_axis.view",
    "plots.views.use_of_distance": "plugins.distance.view",
    "plugins.verify.scheme_audit": "plugins.verify_scheme.scheme_audit",
    "processes": "runtime.processes",
    "progress": "runtime.progress",
    "records": "storage.records",
    "shipped": "checkpoint_files.shipped",
    "side_by_side": "models.side_by_side",
    "store": "storage.store",
    "wheels": "storage.wheels",
}
"""Old and new names, from the top of the package."""


class Moved(MetaPathFinder, Loader):
    """Finds modules by their old names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a specification of a module that moved.

        Args:
            fullname: Name of the module.
            path: Not used.
            target: Not used.

        Returns:
            The specification; None of all other modules.
        """
        moved = fullname.removeprefix(f"{PACKAGE}.") in MOVED
        return ModuleSpec(fullname, self) if moved and fullname.startswith(PACKAGE) else None

    def exec_module(self, module: ModuleType) -> None:
        """Replace an empty module of the old name by the current module.

        Args:
            module: Empty module of the old name.
        """
        old = module.__name__
        new = f"{PACKAGE}.{MOVED[old.removeprefix(f'{PACKAGE}.')]}"
        warnings.warn(f"{old} is now {new}", DeprecationWarning, stacklevel=2)
        # The import system returns the module in this place afterwards.
        sys.modules[old] = import_module(new)


def install() -> None:
    """Find old names from now on."""
    if not any(isinstance(finder, Moved) for finder in sys.meta_path):
        sys.meta_path.append(Moved())
