"""Which tensor of a checkpoint is which parameter, remembered from one run to the next.

Most checkpoints have the names of the model as it is. To know that, transformers' tables of renamings and conversions
have to be made, of all models, which takes as long as reading a gigabyte. So the answer is kept (see
:mod:`paraxis.utils.disk_cache`), where it is a plain one: each parameter is one tensor, as stored.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from ..utils import disk_cache as cache
from .convert import Conversion, find_conversions
from .weight_map import header_of, match_parameters

NAMES = "names"


def match(
    model: nn.Module,
    params: Mapping[str, torch.Tensor],
    tied: Mapping[str, Sequence[str]],
    weight_map: Mapping[str, str],
    *,
    remember: bool = True,
    keep: bool = True,
) -> tuple[dict[str, str], list[Conversion]]:
    """For each parameter the key of its tensor, and the conversions for those that are not stored as they are.

    Args:
        model: What the parameters are of.
        params: By their first names.
        tied: All names of those that have several.
        weight_map: The keys of the checkpoint, with their files.
        remember: Whether an answer of an earlier run will do.
        keep: Whether this one is kept for later.
    """
    prefix = getattr(model, "base_model_prefix", "")
    key = None
    if remember and not _tables_are_made():  # else asking them is quick, and somebody may have changed them
        names = {name: list(tied.get(name, [name])) for name in params}
        key = cache.key_of(model, parameters=names, keys=list(weight_map))
    known = cache.read(NAMES, key)
    if isinstance(known, dict) and known.keys() <= params.keys() and weight_map.keys() >= {*known.values()}:
        return known, []
    keys = match_parameters(params, tied, weight_map, prefix, model)
    conversions = find_conversions(params, tied, header_of(weight_map), weight_map, prefix, model)
    if keep and not conversions:
        cache.write(NAMES, key, keys)
    return keys, conversions


def _tables_are_made() -> bool:
    """Whether transformers has made its tables in this process; so too if there is no telling."""
    made = getattr(sys.modules.get("transformers.conversion_mapping"), "_checkpoint_conversion_mapping_cache", False)
    return made is not None
