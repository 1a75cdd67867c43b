"""Parallel sizes that are searched without being named: of a model, or those that a profile has measured.

Source: predict-recommend.md section 6.2.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from fpmsdk.config.profile import FpmModelProfile
from fpmsdk.recommendation.parallelism import SIZES, Layouts, Sizes

WORKER_GPUS = (1, 2, 4, 8, 16)
_SHAPE = SIZES[1:]


def worker_menu(is_moe: bool, most_gpus: int) -> list[Sizes]:
    """The shapes of one worker that engines are run in, of up to so many GPUs.

    Dense models are divided by tensor. Of models with experts attention is divided by tensor or by data, experts by
    number or by tensor, each of them purely.

    Source: predict-recommend.md section 6.2.

    >>> [str(shape) for shape in worker_menu(True, 2)]  # doctest: +NORMALIZE_WHITESPACE
    ['tensor 1', 'tensor 1, attention_data 2, moe_expert 2', 'tensor 1, attention_data 2, moe_tensor 2',
     'tensor 2, moe_expert 2', 'tensor 2, moe_tensor 2']
    """
    shapes = []
    for gpus in WORKER_GPUS:
        if gpus > most_gpus:
            break
        if gpus == 1 or not is_moe:
            shapes.append(Sizes(tensor=gpus))
            continue
        for attention, experts in itertools.product(("attention_data", "tensor"), ("moe_expert", "moe_tensor")):
            shapes.append(Sizes(**{attention: gpus, experts: gpus}))
    return shapes


def profile_menu(profile: FpmModelProfile, system: str, version: str, role: str) -> list[Sizes]:
    """The shapes of one worker that a profile has deployments of, in its order."""
    found = [
        Sizes(1, deployment.tp, deployment.pp, deployment.dp, deployment.moe_tp, deployment.moe_ep)
        for deployment in profile.deployments
        if (deployment.system, deployment.backend_version) == (system, version)
        and deployment.worker_type in (None, role)
    ]
    return list(dict.fromkeys(found))


def asked_shapes(layouts: Layouts, menu: list[Sizes], is_moe: bool, most_gpus: int, *, closed: bool) -> list[Sizes]:
    """The shapes of one worker that a role asks for, whether they are viable or not.

    Parameters
    ----------
    layouts: what its configuration says.
    menu: what is searched when it says nothing.
    is_moe: whether the model has experts.
    most_gpus: GPUs of a worker at most.
    closed: whether the menu is all there is, as with a profile, so that named sizes only choose from it.

    Returns
    -------
    Distinct shapes. Sizes that are not named take the values of the menu; where all that divide attention and experts
    are named, mixed shapes are among them too.
    """
    if layouts.kind == "list":
        return list(dict.fromkeys(entry.shape for entry in layouts.entries))
    if layouts.kind == "menu":
        return menu
    named = {name: layouts.values(name, most_gpus) for name in _SHAPE}
    chosen = [shape for shape in menu if _matches(shape, named)]
    if closed:
        return chosen
    return list(dict.fromkeys([*chosen, *_beyond_menu(named, menu, is_moe, most_gpus)]))


def _matches(shape: Sizes, named: dict[str, list[int] | None]) -> bool:
    return all(values is None or getattr(shape, name) in values for name, values in named.items())


def _beyond_menu(
    named: dict[str, list[int] | None], menu: list[Sizes], is_moe: bool, most_gpus: int
) -> Iterator[Sizes]:
    dividing = ("tensor", "attention_data", "moe_tensor", "moe_expert") if is_moe else ("tensor",)
    if all(named[name] is not None for name in dividing):
        values = ([1] if named[name] is None else named[name] for name in _SHAPE)
        shapes = (Sizes(1, *sizes) for sizes in itertools.product(*values))  # type: ignore[arg-type]
    else:
        # The shapes of the menu, in as many stages as are asked for.
        deeper = itertools.product(menu, named["pipeline"] or ())
        shapes = (Sizes(**{**shape.to_dict(), "pipeline": pipeline}) for shape, pipeline in deeper)
    for shape in shapes:
        if shape.worker_gpus <= most_gpus and _matches(shape, named):
            yield shape


def with_replicas(layouts: Layouts, shapes: list[Sizes], most_gpus: int) -> list[Sizes]:
    """The shapes, each as often as the GPUs and the configuration of the role allow.

    >>> [str(sizes) for sizes in with_replicas(Layouts("menu", ""), [Sizes(tensor=2)], 5)]
    ['tensor 2', 'tensor 2, replicas 2']
    """
    if layouts.kind == "list":
        return [entry for entry in layouts.entries if entry.shape in set(shapes)]
    named = layouts.values("replicas", most_gpus)
    return [
        shape.times(replicas)
        for shape in shapes
        for replicas in range(1, most_gpus // shape.worker_gpus + 1)
        if named is None or replicas in named
    ]
