"""How a model is laid out over GPUs: the topology of a cell, its name, and the topologies a campaign considers.

Source: collector.md section 1.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fpmsdk.errors import OnboardError

AXES = ("tp", "pp", "dp", "moe_tp", "moe_ep", "cp")
PRESETS = ("auto", "tp", "tep", "dep", "pure_tp")

# The axes that have the width of a preset; all others are 1.
_WIDE_AXES = {"tp": ("tp",), "tep": ("tp", "moe_ep"), "dep": ("dp", "moe_ep"), "pure_tp": ("tp", "moe_tp")}
_PRESET_OF_AXES = {frozenset(axes): preset for preset, axes in _WIDE_AXES.items()} | {
    frozenset(("tp", "dp", "moe_tp", "moe_ep")): "auto"
}


class Topology(NamedTuple):
    """Sizes of the six parallel axes.

    >>> Topology(tp=8, moe_ep=8).strategy(is_moe=True)
    'tep'
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    moe_tp: int = 1
    moe_ep: int = 1
    cp: int = 1

    @property
    def gpus(self) -> int:
        """GPUs of one engine."""
        return self.tp * self.pp * self.dp * self.cp

    def strategy(self, is_moe: bool) -> str:
        """`single`, `tp`, `tep`, `dep` or `pure_tp`.

        Raises
        ------
        OnboardError: a mixture of experts in no such topology.
        """
        if self.gpus == 1:
            return "single"
        if not is_moe:
            return "tp"
        for name in ("tep", "dep", "pure_tp"):
            if self == _of_preset(name, self.gpus):
                return name
        raise OnboardError(
            f"topology: {self.document()} is none of the collected layouts; a mixture of experts runs as tep "
            "(tp=moe_ep), dep (dp=moe_ep) or pure_tp (tp=moe_tp), with all other axes 1",
            "topology",
        )

    def document(self) -> dict[str, int]:
        """The sizes by axis."""
        return self._asdict()

    @classmethod
    def from_document(cls, document: Mapping[str, Any], where: str = "topology") -> Topology:
        """Read the six sizes of a saved topology.

        Raises
        ------
        OnboardError: an axis is missing, unknown or no positive integer; names `where`.
        """
        if not isinstance(document, Mapping) or set(document) != set(AXES):
            raise OnboardError(f"{where}: expected the axes {', '.join(AXES)}, found {document!r}", where)
        for axis in AXES:
            size = document[axis]
            if type(size) is not int or size < 1:
                raise OnboardError(f"{where}.{axis}: expected a positive integer, found {size!r}", f"{where}.{axis}")
        return cls(**document)


def candidate_topologies(
    *,
    is_moe: bool,
    max_gpus: int,
    gpu_counts: Iterable[int],
    parallel_presets: Sequence[str] = ("auto",),
    parallel_axes: Sequence[str] = (),
    sizes: Mapping[str, Sequence[int] | None] | None = None,
    allow_pure_tp: bool = True,
) -> tuple[Topology, ...]:
    """The topologies that a campaign considers, smallest first.

    Parameters
    ----------
    is_moe: whether the model is a mixture of experts.
    max_gpus: largest number of GPUs of one engine.
    gpu_counts: numbers of GPUs to consider.
    parallel_presets: names of layouts, or `auto` alone.
    parallel_axes: the older way to name one layout, by its wide axes; instead of presets.
    sizes: allowed sizes by axis; an axis that is missing or None is not restricted.
    allow_pure_tp: whether the model may run experts in tensor parallelism.

    Raises
    ------
    OnboardError: the presets do not fit the model, a size exceeds the GPUs, or nothing is left.

    Example
    -------
    >>> [t.document()["tp"] for t in candidate_topologies(is_moe=False, max_gpus=4, gpu_counts=[1, 2, 4])]
    [1, 2, 4]
    """
    presets = _presets(is_moe, tuple(parallel_presets), tuple(parallel_axes), allow_pure_tp)
    allowed = {axis: tuple(values) for axis, values in (sizes or {}).items() if values is not None}
    _check_sizes(allowed, presets, max_gpus)
    counts = tuple(gpu_counts)
    found = {
        _of_preset(preset, width)
        for width in counts
        for preset in presets
        if all(width in allowed.get(axis, (width,)) for axis in _WIDE_AXES[preset])
    }
    if not found:
        raise OnboardError(
            f"no topology is left: GPU counts {list(counts)} and presets {list(presets)} leave none within the sizes "
            f"{ {axis: list(values) for axis, values in allowed.items()} }; widen one of them",
            "parallel_presets",
        )
    return tuple(sorted(found, key=lambda topology: (topology.gpus, topology.strategy(is_moe), topology)))


def _of_preset(preset: str, width: int) -> Topology:
    return Topology(**dict.fromkeys(_WIDE_AXES[preset], width))


def _presets(is_moe: bool, presets: tuple[str, ...], axes: tuple[str, ...], allow_pure_tp: bool) -> tuple[str, ...]:
    if axes:
        named = _PRESET_OF_AXES.get(frozenset(axes))
        if named is None:
            accepted = "; ".join(f"{' '.join(wide)} ({preset})" for preset, wide in _WIDE_AXES.items())
            raise OnboardError(
                f"parallel_axes: {list(axes)} name no layout; accepted are {accepted}; tp dp moe_tp moe_ep (auto)",
                "parallel_axes",
            )
        presets = (named,)
    if presets == ("auto",):
        if not is_moe:
            return ("tp",)
        return ("pure_tp", "tep", "dep") if allow_pure_tp else ("tep", "dep")
    if not is_moe and set(presets) != {"tp"}:
        raise OnboardError(f"parallel_presets: dense models run as tp only, found {list(presets)}", "parallel_presets")
    if is_moe and "tp" in presets:
        raise OnboardError(
            "parallel_presets: a mixture of experts runs as tep, dep or pure_tp, found tp", "parallel_presets"
        )
    if "pure_tp" in presets and not allow_pure_tp:
        raise OnboardError("parallel_presets: this model cannot run as pure_tp; use tep or dep", "parallel_presets")
    return presets


def _check_sizes(allowed: Mapping[str, tuple[int, ...]], presets: tuple[str, ...], max_gpus: int) -> None:
    wide = {axis for preset in presets for axis in _WIDE_AXES[preset]}
    for axis, values in allowed.items():
        if axis not in wide and values != (1,):
            raise OnboardError(f"{axis}_sizes: the presets {list(presets)} keep {axis} at 1", f"{axis}_sizes")
        too_large = [size for size in values if size > max_gpus]
        if too_large:
            raise OnboardError(f"{axis}_sizes: {too_large} exceed max_gpus {max_gpus}", f"{axis}_sizes")
