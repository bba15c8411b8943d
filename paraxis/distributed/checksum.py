"""Checksums of a call's arguments, to compare them between ranks.

Equal values have equal checksums: two NaNs are equal whatever their bits, and so are 0.0 and -0.0. A tensor in the
host's memory is summed at once (CRC-32 of its bytes). One on a device is copied to the host without waiting, or summed
there if it is large, and read later, when the device is done with it. Sharded tensors differ between ranks by design,
and objects that are no plain data (KV caches) are the model's own: neither has a checksum.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import nn

MASK = (1 << 62) - 1
"""Sums stay below this, so that they fit into a signed 64-bit integer."""

_PLAIN = frozenset({bool, int, float, complex, str, bytes, slice, torch.dtype})
_INTEGRAL = frozenset({torch.int64, torch.int32, torch.bool, torch.uint8})
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
LARGE = 4096
"""Elements from which on the sum of a tensor is remembered."""
MAX_SEEN = 64
"""Tensors whose sums are remembered."""
CHUNK = 1 << 20
"""Elements that a device sums at once: it needs eight bytes for each of them."""
_seen: dict[int, tuple[weakref.ref[torch.Tensor], int, int | torch.Tensor]] = {}
_dtypes: dict[torch.dtype, int] = {}
_seeds: dict[str, int] = {}  # by the name of an argument
_opaque: set[type] = set()  # types without a checksum
_weights: dict[torch.device, torch.Tensor] = {}
is_on_host = attrgetter("is_cpu")
"""Whether a tensor can be summed at once."""


class ArgumentSums:
    """The checksums of one call's arguments: one number per argument, and the total.

    ``late`` says that tensors on a device are missing in it, until :meth:`settle` adds them.
    """

    __slots__ = ("_device", "_event", "_late", "form", "late", "sums", "total", "values")

    def __init__(self) -> None:
        self.sums: dict[str, int] = {}
        self.values: dict[str, Any] = {}
        """What an argument is, for errors: a tensor's shape, or the plain value."""
        self.total = 0
        self.form = 0
        """A sum over names, shapes, dtypes and plain values: ranks with different ones run different programs."""
        self._late: list[tuple[str, torch.Tensor]] = []
        self._device: torch.device | None = None
        self._event: Any = None
        self.late = False

    def add(self, name: str, value: Any) -> None:
        """Add an argument. ``None`` counts as absent: it is the default of most arguments."""
        if value is None:
            return
        seed = _seeds.get(name)
        if seed is None:
            seed = _seeds[name] = zlib.crc32(name.encode())
        kind = type(value)
        if kind in _opaque:
            return
        if kind in _PLAIN:
            text = repr(value)
            found, value = zlib.crc32(text.encode(), seed), text
            self.form = (self.form + found * 2654435761) & MASK
        else:
            found = self._sum(name, value, seed)
            value = value.shape if isinstance(value, torch.Tensor) else None
        if found != seed:
            self.sums[name] = found
            self.total = (self.total + found * 2654435761) & MASK
            self.values[name] = value

    def _sum(self, name: str, value: Any, seed: int) -> int:
        kind = type(value)
        if kind is torch.Tensor or kind is nn.Parameter:
            return self._tensor(name, value, seed)
        if kind in _PLAIN:
            found = zlib.crc32(repr(value).encode(), seed)
            self.form = (self.form + found * 2654435761) & MASK
            return found
        if isinstance(value, Mapping):
            for key in value:
                if isinstance(key, (str, int)) and value[key] is not None:
                    seed = self._sum(name, value[key], zlib.crc32(repr(key).encode(), seed))
        elif isinstance(value, (list, tuple)):
            for item in value:
                seed = self._sum(name, item, seed * 31 + 1 & 0xFFFFFFFF)
        elif isinstance(value, (np.ndarray, np.generic)) and value.dtype != object:
            return zlib.crc32(np.ascontiguousarray(value).tobytes(), seed)
        else:
            _opaque.add(kind)
        return seed

    def _tensor(self, name: str, tensor: torch.Tensor, seed: int) -> int:
        dtype = tensor.dtype
        form = _dtypes.get(dtype)
        if form is None:
            form = _dtypes[dtype] = zlib.crc32(str(dtype).encode())
        seed = (seed ^ form ^ hash(tensor.shape)) & 0xFFFFFFFF
        self.form = (self.form + seed * 2654435761) & MASK
        if dtype in _INTEGRAL and is_on_host(tensor):  # the tokens and masks of a decode step: nothing to prepare
            try:
                return zlib.crc32(tensor.numpy(), seed)  # type: ignore[arg-type]
            except (RuntimeError, TypeError, ValueError):  # not contiguous, or not a plain tensor
                pass
        if tensor.layout != torch.strided or tensor.is_meta:
            return seed
        if tensor.numel() > LARGE:
            return self._large_tensor(name, tensor, seed)
        if not is_on_host(tensor):
            return self._copy_later(name, tensor, seed)
        return zlib.crc32(host_bytes(tensor), seed)

    def _copy_later(self, name: str, tensor: torch.Tensor, seed: int) -> int:
        """Start copying a small device tensor to the host: one launch, where summing it there would be several."""
        pinned = tensor.is_cuda
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        host.copy_(tensor.detach(), non_blocking=True)
        self._device = tensor.device if pinned else None
        self._late.append((name, host))
        self.late = True
        return seed

    def _large_tensor(self, name: str, tensor: torch.Tensor, seed: int) -> int:
        """The sum of a large tensor is reused while nobody has written to it: a decoder gets the states of its encoder
        in every step."""
        version = -1 if tensor.is_inference() else tensor._version
        ref, then, number = _seen.get(id(tensor), (None, -1, None))
        if number is None or ref is None or ref() is not tensor or then != version or version == -1:
            number = zlib.crc32(host_bytes(tensor)) if is_on_host(tensor) else device_checksum(tensor)
            if len(_seen) >= MAX_SEEN:
                _seen.clear()
            _seen[id(tensor)] = (weakref.ref(tensor), version, number)
        if isinstance(number, torch.Tensor):
            return self._copy_later(name, number, seed)
        return (seed * 31 ^ number) & 0xFFFFFFFF

    def send(self) -> None:
        """Note the end of the copies from a device, without waiting for it."""
        if self._device is not None:
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(self._device))

    def settle(self) -> None:
        """Sum what was copied from a device; waits for the device only if it has not come to this call yet."""
        if self._event is not None:
            self._event.synchronize()
        for name, host in self._late:
            self.sums[name] = (self.sums.get(name, 0) * 31 + zlib.crc32(host_bytes(host))) & MASK
            self.total = (self.total + self.sums[name] * 2654435761) & MASK
        self._late, self._device, self._event, self.late = [], None, None, False


def host_bytes(tensor: torch.Tensor) -> Any:
    """The bytes of a tensor in the host's memory, the same for equal values."""
    if tensor.requires_grad or tensor.is_neg():
        tensor = tensor.detach().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.detach().resolve_conj())
    if tensor.is_floating_point() and tensor.dtype.itemsize > 1:
        tensor = _canonical(tensor)
    try:
        return tensor.numpy() if tensor.is_contiguous() else tensor.contiguous().numpy()
    except (RuntimeError, TypeError):  # bfloat16 and its like, and tensors of a function transform
        pass
    try:
        return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    except (RuntimeError, TypeError):
        return b""


def _canonical(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with one bit pattern for NaN, and one for zero."""
    plain = tensor.detach() + 0
    return plain.masked_fill_(plain != plain, float("nan"))


@torch.no_grad()
def device_checksum(tensor: torch.Tensor) -> torch.Tensor:
    """A sum over the elements, each times a number of its own, so that their order counts. Stays on the device."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.detach().resolve_conj())
    plain = tensor.detach()
    if plain.is_floating_point() and plain.dtype.itemsize > 1:
        plain = _canonical(plain)
    if plain.dtype != torch.bool and plain.dtype not in _INTEGERS.values():
        plain = plain.contiguous().view(_INTEGERS[plain.dtype.itemsize])
    flat = plain.reshape(-1)
    if flat.numel() <= CHUNK:
        return (flat * _weights_for(flat.numel(), flat.device)).sum(dtype=torch.int64)
    return device_checksum(torch.stack([device_checksum(chunk) for chunk in flat.split(CHUNK)]))


def _weights_for(count: int, device: torch.device) -> torch.Tensor:
    """``count`` odd numbers. Odd ones have inverses modulo 2**64: a change of one element always changes the sum."""
    found = _weights.get(device)
    if found is None or found.numel() < count:
        size = max(1024, 1 << (count - 1).bit_length())
        numbers = torch.arange(size, dtype=torch.int64, device=device)
        found = _weights[device] = numbers.mul_(0x9E3779B97F4A7).bitwise_xor_(numbers >> 7).bitwise_or_(1)
    return found[:count]


def sums_of(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> ArgumentSums:
    """The checksums of a call's arguments; ``names`` are those of the positional ones."""
    sums = ArgumentSums()
    for position, value in enumerate(args):
        sums.add(names[position] if position < len(names) else f"argument {position}", value)
    for name, value in kwargs.items():
        sums.add(name, value)
    sums.send()
    return sums
