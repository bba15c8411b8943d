"""Which tensor of a checkpoint is which parameter, cached from one run to the next.

Most checkpoints have the names of the model. Checking that needs transformers' tables of renamings and conversions of
all models, which take as long to build as reading a gigabyte. So the result is cached on disk (see
:mod:`paraxis.utils.disk_cache`) where it is simple: each parameter is one stored tensor, without conversions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from ..compat.transformers import conversion_tables_are_built
from ..utils import disk_cache
from .convert import Conversion, find_conversions
from .weight_map import header_of, match_parameters

NAMES = "names"


def match(
    model: nn.Module,
    params: Mapping[str, torch.Tensor],
    tied: Mapping[str, Sequence[str]],
    weight_map: Mapping[str, str],
    *,
    read_cache: bool = True,
    write_cache: bool = True,
    header: Callable[[str], torch.Tensor] | None = None,
) -> tuple[dict[str, str], list[Conversion]]:
    """For each parameter the key of its tensor, and the conversions for those that are stored in another form.

    Args:
        model: The model of the parameters.
        params: Parameters by their first names.
        tied: All names of parameters that have several.
        weight_map: The keys of the checkpoint, with their files.
        read_cache: Whether to use the result of an earlier run.
        write_cache: Whether to cache this result.
        header: From a key to a meta tensor; by default, from the headers of the files.
    """
    prefix = getattr(model, "base_model_prefix", "")
    key = None
    if read_cache and not conversion_tables_are_built():  # built tables are fast, and the user may have changed them
        names = {name: list(tied.get(name, [name])) for name in params}
        key = disk_cache.key_of(model, parameters=names, keys=list(weight_map))
    known = disk_cache.read(NAMES, key)
    if isinstance(known, dict) and known.keys() <= params.keys() and weight_map.keys() >= {*known.values()}:
        return known, []
    keys = match_parameters(params, tied, weight_map, prefix, model)
    conversions = find_conversions(params, tied, header or header_of(weight_map), weight_map, prefix, model)
    if write_cache and not conversions:
        disk_cache.write(NAMES, key, keys)
    return keys, conversions
