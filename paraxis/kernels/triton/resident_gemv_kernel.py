"""The Triton kernel of a GEMV with quantized weights that holds the row in registers.

Few programs run over many rows of the weights, and prepare the row that these are multiplied by once: its norm, and for
weights of integers, its integers. A row of 16-bit floats is rounded to integers of 16 bits by groups of columns, each
as two bytes, for the instruction that multiplies four bytes and adds the products: one instruction per weight is left
of three to five. Numbers of bfloat16 within a factor of 128 of the largest of their group are exact; smaller ones are
off by less than 2**-16 of that largest one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...compat.triton import gdc_launch_dependents, gdc_wait
from .quantized_gemv_kernel import _row, _scales

FLOAT8, INT8, NIBBLES, E5M2 = 0, 1, 2, 3
"""What codes are: float8 of the form E4M3, integers of eight bits or of four, float8 of the form E5M2."""

_NIBBLES = tl.constexpr("""{
.reg .b32 low, high, a, b;
and.b32 low, $1, 0x0F0F0F0F;
shr.u32 high, $1, 4;
and.b32 high, high, 0x0F0F0F0F;
mov.b32 a, 0;
dp4a.u32.s32 a, low, $2, a;
dp4a.u32.s32 a, high, $3, a;
shl.b32 b, a, 8;
dp4a.u32.u32 b, low, $4, b;
dp4a.u32.u32 $0, high, $5, b;
}""")
_FLOATS = tl.constexpr("""{
.reg .b16 p, q, h0, h1;
.reg .b32 a;
mov.b32 {p, q}, $4;
cvt.rn.f16x2.e4m3x2 a, p;
mov.b32 {h0, h1}, a;
cvt.f32.f16 $0, h0;
cvt.f32.f16 $1, h1;
cvt.rn.f16x2.e4m3x2 a, q;
mov.b32 {h0, h1}, a;
cvt.f32.f16 $2, h0;
cvt.f32.f16 $3, h1;
}""")
_FLOATS_E5M2 = tl.constexpr(_FLOATS.value.replace("e4m3x2", "e5m2x2"))
_BYTES = tl.constexpr("""{
.reg .b32 a, b;
mov.b32 a, 0;
dp4a.s32.s32 a, $1, $2, a;
shl.b32 b, a, 8;
dp4a.s32.u32 $0, $1, $3, b;
}""")


@triton.jit
def _dot(words, a, b, c, d, KIND: tl.constexpr, ASM: tl.constexpr):
    """Products of the codes of each word with integers, added. Bytes: ``a`` has the high bytes of four integers, ``b``
    the low ones. Nibbles: ``a``, ``c`` those of the first, third, ... code, ``b``, ``d`` those of the others."""
    if ASM:
        if KIND == 2:
            result = tl.inline_asm_elementwise(
                _NIBBLES, "=r,r,r,r,r,r", [words, a, b, c, d], dtype=tl.int32, is_pure=True, pack=1
            )
        else:
            result = tl.inline_asm_elementwise(_BYTES, "=r,r,r,r", [words, a, b], dtype=tl.int32, is_pure=True, pack=1)
    else:
        result = words * 0
        for i in tl.static_range(4):
            if KIND == 2:
                even, odd = (words >> (8 * i)) & 15, (words >> (8 * i + 4)) & 15
                result += even * (((a << (24 - 8 * i)) >> 24) * 256 + ((c >> (8 * i)) & 255))
                result += odd * (((b << (24 - 8 * i)) >> 24) * 256 + ((d >> (8 * i)) & 255))
            else:
                code = (words << (24 - 8 * i)) >> 24
                result += code * (((a << (24 - 8 * i)) >> 24) * 256 + ((b >> (8 * i)) & 255))
    return result


@triton.jit
def _float8(words, i: tl.constexpr, KIND: tl.constexpr):
    """The ``i``-th code of each word."""
    byte = ((words >> (8 * i)) & 255).to(tl.uint8)
    return byte.to(tl.float8e5 if KIND == 3 else tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _products(words, a, b, c, d, KIND: tl.constexpr, ASM: tl.constexpr):
    """Products of the four float8 of each word with floats, added."""
    if ASM:
        ASSEMBLY: tl.constexpr = _FLOATS_E5M2 if KIND == 3 else _FLOATS
        v = tl.inline_asm_elementwise(
            ASSEMBLY,
            "=f,=f,=f,=f,r",
            [words],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        v = (_float8(words, 0, KIND), _float8(words, 1, KIND), _float8(words, 2, KIND), _float8(words, 3, KIND))
    return v[0] * a + v[1] * b + v[2] * c + v[3] * d


@triton.jit
def _floats(
    x_ptr,
    residual_ptr,
    norm_ptr,
    elements,
    valid,
    rms,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROUNDED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    NORM: tl.constexpr,
):
    """Of a step: the columns for the first, second, third and fourth code of each word; ``ROUNDED``: to float8, with a
    scale for each group."""
    a = _row(x_ptr, residual_ptr, norm_ptr, elements * 4, valid, rms, RESIDUAL, NORM)
    b = _row(x_ptr, residual_ptr, norm_ptr, elements * 4 + 1, valid, rms, RESIDUAL, NORM)
    c = _row(x_ptr, residual_ptr, norm_ptr, elements * 4 + 2, valid, rms, RESIDUAL, NORM)
    d = _row(x_ptr, residual_ptr, norm_ptr, elements * 4 + 3, valid, rms, RESIDUAL, NORM)
    if ROUNDED:
        largest = tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))
        largest = tl.max(largest.reshape(GROUPS, WIDTH), 1)
        scale = tl.where(largest > 0, largest / 448.0, 1.0)
        scale = tl.broadcast_to(scale[:, None], [GROUPS, WIDTH]).reshape(GROUPS * WIDTH)
        a = (a / scale).to(tl.float8e4nv).to(tl.float32) * scale
        b = (b / scale).to(tl.float8e4nv).to(tl.float32) * scale
        c = (c / scale).to(tl.float8e4nv).to(tl.float32) * scale
        d = (d / scale).to(tl.float8e4nv).to(tl.float32) * scale
    return a, b, c, d


@triton.jit
def _integer(x, factor):
    """The nearest integer of ``x * factor``, which is below 2**15: in the mantissa of a large float."""
    return (x * factor + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def _larger(a, b):
    """The larger number; NaN, if one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _integers(
    x_ptr,
    residual_ptr,
    norm_ptr,
    elements,
    valid,
    rms,
    GROUPS: tl.constexpr,
    CHUNKS: tl.constexpr,
    VECTOR: tl.constexpr,
    KIND: tl.constexpr,
    RESIDUAL: tl.constexpr,
    NORM: tl.constexpr,
):
    """Of a step: the bytes of its integers in the order of codes, what an integer of each group is, and sums of
    integers."""
    PER_WORD: tl.constexpr = 8 if KIND == 2 else 4
    WIDTH: tl.constexpr = CHUNKS * VECTOR
    largest = tl.zeros([GROUPS * WIDTH], tl.float32)
    for i in tl.static_range(PER_WORD):
        x = _row(x_ptr, residual_ptr, norm_ptr, elements * PER_WORD + i, valid, rms, RESIDUAL, NORM)
        largest = _larger(largest, tl.abs(x))
    largest = tl.reduce(largest.reshape(GROUPS, WIDTH), 1, _larger)
    scale = largest / 32767.0  # NaN or infinite, if a column is: the integers would not say so
    factor = tl.where(largest > 0, 32767.0 / largest, 0.0)
    factor = tl.broadcast_to(factor[:, None], [GROUPS, WIDTH]).reshape(GROUPS * WIDTH)
    high = tl.zeros([GROUPS * WIDTH], tl.int32)
    high_odd, low, low_odd, total = high, high, high, high
    for i in tl.static_range(PER_WORD):
        x = _row(x_ptr, residual_ptr, norm_ptr, elements * PER_WORD + i, valid, rms, RESIDUAL, NORM)
        number = _integer(x, factor)
        total += number
        if KIND == 2:
            if i % 2 == 0:
                high |= ((number >> 8) & 255) << (4 * i)
                low |= (number & 255) << (4 * i)
            else:
                high_odd |= ((number >> 8) & 255) << (4 * i - 4)
                low_odd |= (number & 255) << (4 * i - 4)
        else:
            high |= ((number >> 8) & 255) << (8 * i)
            low |= (number & 255) << (8 * i)
    sums = tl.sum(total.reshape(GROUPS, CHUNKS, VECTOR), 2)
    return high, high_odd, low, low_odd, scale, sums


@triton.jit
def _place(tile, tiles0, tiles1, rows0, rows1, rows2, GATED: tl.constexpr):
    """Of a tile: which weight it is of, its number there, the rows of that, and where they are in the result."""
    if GATED:
        which, number, rows, first = tile * 0, tile, rows0, tile * 0
    else:
        which = (tile >= tiles0).to(tl.int32) + (tile >= tiles0 + tiles1).to(tl.int32)
        number = tile - tl.where(which == 2, tiles0 + tiles1, tl.where(which == 1, tiles0, 0))
        rows = tl.where(which == 2, rows2, tl.where(which == 1, rows1, rows0))
        first = tl.where(which == 2, rows0 + rows1, tl.where(which == 1, rows0, 0))
    return which, number, rows, first


@triton.jit
def _pick(ptr, which, second, third, GATED: tl.constexpr):
    """The pointer to a part of one of the weights."""
    if GATED:
        found = ptr
    else:
        found = ptr + tl.where(which == 2, third, tl.where(which == 1, second, 0))
    return found


@triton.jit
def resident_gemv_kernel(
    x_ptr,
    residual_ptr,
    norm_ptr,
    sum_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    index_ptr,
    factor_ptr,
    bias_ptr,
    out_ptr,
    eps,
    rows0,
    rows1,
    rows2,
    codes1,
    codes2,
    scales1,
    scales2,
    zeros1,
    zeros2,
    index1,
    index2,
    factor1,
    factor2,
    bias1,
    bias2,
    tiles,
    REPEAT: tl.constexpr,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    LATE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    CHUNKS: tl.constexpr,
    VECTOR: tl.constexpr,
    KIND: tl.constexpr,
    OFFSET: tl.constexpr,
    EXPONENTS: tl.constexpr,
    ZEROS: tl.constexpr,
    INDEX: tl.constexpr,
    FACTOR: tl.constexpr,
    ROUNDED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Every program: tiles of ``BLOCK_N`` rows of one of the weights; gated: of both.

    Arguments are those of :func:`~paraxis.kernels.triton.quantized_gemv_kernel.quantized_gemv_kernel`; ``tiles``: how
    many there are, ``REPEAT``: how many a program has.
    """
    dtype = x_ptr.dtype.element_ty
    FLOATS: tl.constexpr = KIND == 0 or KIND == 3
    PER_WORD: tl.constexpr = 8 if KIND == 2 else 4
    ROW: tl.constexpr = K // PER_WORD
    WIDTH: tl.constexpr = CHUNKS * VECTOR
    STEP: tl.constexpr = BLOCK_G * WIDTH
    STEPS: tl.constexpr = (ROW + STEP - 1) // STEP
    programs = tl.num_programs(0)
    tiles0 = tl.cdiv(rows0, BLOCK_N)
    tiles1 = tl.cdiv(rows1, BLOCK_N)
    group = tl.arange(0, BLOCK_G)
    place = tl.arange(0, STEP)
    tile = tl.program_id(0)
    which, number, rows, first = _place(tile, tiles0, tiles1, rows0, rows1, rows2, GATED)
    row = number * BLOCK_N + tl.arange(0, BLOCK_N)
    at = row.to(tl.int64)[:, None] * ROW + place[None, :]
    mask = (row < rows)[:, None]
    if STEP > ROW:
        mask = mask & (place < ROW)[None, :]
    c_ptr = _pick(codes_ptr, which, codes1, codes2, GATED)
    c = tl.load(c_ptr + at, mask=mask, other=0, eviction_policy="evict_first")
    if GATED:
        u = tl.load(c_ptr + codes1 + at, mask=mask, other=0, eviction_policy="evict_first")
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    rms = 1.0
    if NORM:
        all_cols = tl.arange(0, PADDED_K)
        valid = all_cols < K
        x = tl.load(x_ptr + all_cols, mask=valid, other=0.0)
        if RESIDUAL:
            other = tl.load(residual_ptr + all_cols, mask=valid, other=0.0)
            x = (x.to(tl.float32) + other.to(tl.float32)).to(dtype)
            if tile == 0:
                tl.store(sum_ptr + all_cols, x, mask=valid)
        x32 = x.to(tl.float32)
        rms = tl.rsqrt(tl.sum(x32 * x32, 0) / K + eps)
    prepared = ()
    for s in tl.static_range(STEPS):
        elements = s * STEP + place
        valid = elements < ROW
        if FLOATS:
            prepared = prepared + _floats(
                x_ptr, residual_ptr, norm_ptr, elements, valid, rms, BLOCK_G, WIDTH, ROUNDED, RESIDUAL, NORM
            )
        else:
            prepared = prepared + _integers(
                x_ptr, residual_ptr, norm_ptr, elements, valid, rms, BLOCK_G, CHUNKS, VECTOR, KIND, RESIDUAL, NORM
            )
    for turn in range(REPEAT):
        tile = tl.program_id(0) + turn * programs
        which, number, rows, first = _place(tile, tiles0, tiles1, rows0, rows1, rows2, GATED)
        rows = tl.where(tile < tiles, rows, 0)
        row = number * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = row < rows
        s_ptr = _pick(scales_ptr, which, scales1, scales2, GATED)
        if INDEX:
            i_ptr = _pick(index_ptr, which, index1, index2, GATED)
            scale_row = tl.load(i_ptr + row, mask=inside, other=0)
            up_row = scale_row
            if GATED:
                up_row = tl.load(i_ptr + index1 + row, mask=inside, other=0)
        elif GROUP_ROWS == 0:
            scale_row = row * 0
            up_row = scale_row
        else:
            scale_row = row // GROUP_ROWS
            up_row = scale_row
        total = tl.zeros([BLOCK_N, BLOCK_G, CHUNKS], tl.float32)
        gate = total
        for s in tl.static_range(STEPS):
            # The next step, or the first of the next tile, is loaded before this one is computed.
            if s + 1 < STEPS:
                next_which, next_row, next_rows = which, row, rows
            else:
                next_which, next_number, next_rows, _ = _place(
                    tile + programs, tiles0, tiles1, rows0, rows1, rows2, GATED
                )
                next_row = next_number * BLOCK_N + tl.arange(0, BLOCK_N)
                next_rows = tl.where(tile + programs < tiles, next_rows, 0)
            columns = ((s + 1) % STEPS) * STEP + place
            at = next_row.to(tl.int64)[:, None] * ROW + columns[None, :]
            mask = (next_row < next_rows)[:, None]
            if ((s + 1) % STEPS) * STEP + STEP > ROW:
                mask = mask & (columns < ROW)[None, :]
            c_ptr = _pick(codes_ptr, next_which, codes1, codes2, GATED)
            next_c = tl.load(c_ptr + at, mask=mask, other=0, eviction_policy="evict_first")
            if GATED:
                next_u = tl.load(c_ptr + codes1 + at, mask=mask, other=0, eviction_policy="evict_first")
            position = s * BLOCK_G + group
            known = inside[:, None] & (position < GROUPS)[None, :]
            where = scale_row[:, None] * GROUPS + position[None, :]
            where_up = up_row[:, None] * GROUPS + position[None, :]
            if LATE:
                known = inside[:, None] & (group >= 0)[None, :]
                where = scale_row[:, None] + group[None, :] * 0
                where_up = up_row[:, None] + group[None, :] * 0
            if FLOATS:
                a, b = prepared[4 * s][None, :], prepared[4 * s + 1][None, :]  # type: ignore[var-annotated]
                low, d = prepared[4 * s + 2][None, :], prepared[4 * s + 3][None, :]  # type: ignore[var-annotated]
                products = _products(c, a, b, low, d, KIND, ASM)
                part = tl.sum(products.reshape(BLOCK_N, BLOCK_G, CHUNKS, VECTOR), 3)
                if GATED:
                    products = _products(u, a, b, low, d, KIND, ASM)
                    upper = tl.sum(products.reshape(BLOCK_N, BLOCK_G, CHUNKS, VECTOR), 3)
            else:
                a, b = prepared[6 * s][None, :], prepared[6 * s + 1][None, :]
                low, d = prepared[6 * s + 2][None, :], prepared[6 * s + 3][None, :]
                if KIND == 1:
                    b = low
                unit, sums = prepared[6 * s + 4], prepared[6 * s + 5]  # type: ignore[var-annotated]
                products = _dot(c, a, b, low, d, KIND, ASM)
                part = tl.sum(products.reshape(BLOCK_N, BLOCK_G, CHUNKS, VECTOR), 3)
                if GATED:
                    products = _dot(u, a, b, low, d, KIND, ASM)
                    upper = tl.sum(products.reshape(BLOCK_N, BLOCK_G, CHUNKS, VECTOR), 3)
                if ZEROS:
                    z_ptr = _pick(zeros_ptr, which, zeros1, zeros2, GATED)
                    zero = tl.load(z_ptr + where, mask=known, other=0).to(tl.int32) + OFFSET
                    part -= zero[:, :, None] * sums[None, :, :]
                    if GATED:
                        zero = tl.load(z_ptr + zeros1 + where_up, mask=known, other=0).to(tl.int32) + OFFSET
                        upper -= zero[:, :, None] * sums[None, :, :]
                elif OFFSET != 0:
                    part -= OFFSET * sums[None, :, :]
                    if GATED:
                        upper -= OFFSET * sums[None, :, :]
            if LATE:
                if FLOATS:
                    total += part
                    if GATED:
                        gate += upper
                else:
                    total += part.to(tl.float32) * unit[None, :, None]
                    if GATED:
                        gate += upper.to(tl.float32) * unit[None, :, None]
            else:
                scale = _scales(s_ptr, where, known, EXPONENTS)
                if not FLOATS:
                    scale = scale * unit[None, :]
                total += part.to(tl.float32) * scale[:, :, None]
                if GATED:
                    scale = _scales(s_ptr + scales1, where_up, known, EXPONENTS)
                    if not FLOATS:
                        scale = scale * unit[None, :]
                    gate += upper.to(tl.float32) * scale[:, :, None]
            c = next_c
            if GATED:
                u = next_u
        result = tl.sum(total.reshape(BLOCK_N, BLOCK_G * CHUNKS), 1)
        if GATED:
            up = tl.sum(gate.reshape(BLOCK_N, BLOCK_G * CHUNKS), 1)
        if LATE:
            result *= _scales(s_ptr, scale_row, inside, EXPONENTS)
            if GATED:
                up *= _scales(s_ptr + scales1, up_row, inside, EXPONENTS)
        if FACTOR:
            f_ptr = _pick(factor_ptr, which, factor1, factor2, GATED)
            each_row = row * 0 if FACTOR == 2 else row
            result *= tl.load(f_ptr + each_row, mask=inside, other=0.0)
            if GATED:
                up *= tl.load(f_ptr + factor1 + each_row, mask=inside, other=0.0)
        if BIAS:
            b_ptr = _pick(bias_ptr, which, bias1, bias2, GATED)
            result += tl.load(b_ptr + row, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            if BIAS:
                up += tl.load(b_ptr + bias1 + row, mask=inside, other=0.0).to(tl.float32)
            result = result.to(dtype).to(tl.float32)
            result = (result / (1 + tl.exp(-result))).to(dtype).to(tl.float32)
            result *= up.to(dtype).to(tl.float32)
        tl.store(out_ptr + first + row, result.to(dtype), mask=inside)
