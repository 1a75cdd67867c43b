"""Every point that deployments miss in their tables, found by replays that go on with made-up times.

Source: predict-recommend.md section 5.4.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field, structs

from fpmsdk.errors import FpmSdkError
from fpmsdk.perfmodel.stand_in import MissingPoint, StandInModel
from fpmsdk.prediction.compile import compile_config
from fpmsdk.prediction.config import PredictConfig
from fpmsdk.prediction.deployment import ModelCache, sized_roles
from fpmsdk.prediction.documents import read_document
from fpmsdk.prediction.kv_load import NoCapacityError
from fpmsdk.prediction.simulate import replay_on

if TYPE_CHECKING:
    from fpmsdk.perfdb.forward_cells import ForwardCell

CellKey = tuple[str, str, tuple[tuple[str, str], ...]]


class MissingOfCell(Struct):
    """What is missing in one cell of a table.

    Attributes
    ----------
    config: canonical configuration of the model that asked.
    table_path: file of the table.
    cell: with its measured points.
    points: missing ones, and how often they were asked for.
    candidate_ids: who asked, in order.
    """

    config: Mapping[str, Any]
    table_path: str
    cell: ForwardCell
    points: Counter[MissingPoint] = field(default_factory=Counter)
    candidate_ids: list[str] = field(default_factory=list)


class Missing(Struct, frozen=True):
    """What is missing over several deployments.

    cells: those with missing points, in the order in which they were first asked.
    stopped: by candidate, why its replay did not reach its end, so that more may be missing.
    """

    cells: tuple[MissingOfCell, ...]
    stopped: Mapping[str, str]


def missing_points(candidates: Iterable[tuple[str, Mapping[str, Any]]]) -> Missing:
    """Replay deployments with stand-ins for what was not measured.

    Parameters
    ----------
    candidates: id and concrete configuration of each.

    Returns
    -------
    The missing points by cell. The times of these replays are dropped: with the real latencies other passes may form,
    which then miss other points.

    Source: predict-recommend.md section 5.4.
    """
    found: dict[CellKey, MissingOfCell] = {}
    stopped = {}
    for candidate_id, document in candidates:
        models: list[StandInModel] = []
        reason = _replay(document, models)
        if reason is not None:
            stopped[candidate_id] = " ".join(reason.split())
        for model in models:
            if model.missing:
                cell = found.setdefault(_key(model), MissingOfCell(model.config, model.table_path, model.cell))
                cell.points.update(model.missing)
                if candidate_id not in cell.candidate_ids:
                    cell.candidate_ids.append(candidate_id)
    return Missing(tuple(found.values()), stopped)


def _replay(document: Mapping[str, Any], models: list[StandInModel]) -> str | None:
    """Replay one deployment; the models that it asked are left in the list. Why it did not end, if it did not."""
    try:
        config = read_document(document).checked(PredictConfig)
        roles = sized_roles(compile_config(config), ModelCache())
        for name, role in roles.items():
            if role.model is not None and StandInModel.has_table(role.model):
                models.append(StandInModel(role.model))
                roles[name] = structs.replace(role, timing=models[-1])
        return replay_on(config, roles).error
    except (FpmSdkError, NoCapacityError) as fault:
        return str(fault)


def _key(model: StandInModel) -> CellKey:
    return model.table_path, model.cell.model_path, tuple(sorted(model.cell.identity.items()))
