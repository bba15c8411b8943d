"""The Triton kernel of a GEMV with quantized weights.

The packed bytes are read once and decoded in registers. A multiprocessor has time for three to four instructions per
weight of four bits while the memory delivers it, and for seven per weight of eight bits. Hence integers are decoded by
two bit operations: the bits of an integer below 16, put into the mantissa of 128, are the float 128 more than it. What
is too much in a group is taken off its sum at once, together with the zero point, and the scale comes after the sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...compat.triton import gdc_launch_dependents, gdc_wait

BYTES, NIBBLES, FP4, TABLE = 0, 1, 2, 3
"""What codes are: numbers of eight bits; integers of four bits; E2M1; positions in a table of sixteen numbers."""


@triton.jit
def _row(x_ptr, residual_ptr, norm_ptr, col, valid, scale, RESIDUAL: tl.constexpr, NORM: tl.constexpr):
    """Some columns of the row, in float32, with the rounding of separate operators."""
    dtype = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + col, mask=valid, other=0.0)
    if NORM:
        if RESIDUAL:
            other = tl.load(residual_ptr + col, mask=valid, other=0.0)
            x = (x.to(tl.float32) + other.to(tl.float32)).to(dtype)
        by = tl.load(norm_ptr + col, mask=valid, other=0.0)
        x = (x.to(tl.float32) * scale).to(dtype)
        x = (x.to(tl.float32) * by.to(tl.float32)).to(dtype)
    return x.to(tl.float32)


@triton.jit
def _rounded(x, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """Each group of columns, rounded to float8 with a scale of its own."""
    groups = x.reshape(GROUPS, WIDTH)
    largest = tl.max(tl.abs(groups), 1)
    scale = tl.where(largest > 0, largest / 448.0, 1.0)[:, None]
    return ((groups / scale).to(tl.float8e4nv).to(tl.float32) * scale).reshape(GROUPS * WIDTH)


@triton.jit
def _scales(ptr, at, mask, EXPONENTS: tl.constexpr):
    """Scales in float32; exponents are those of two, with 127 added."""
    if EXPONENTS:
        bits = tl.load(ptr + at, mask=mask, other=0).to(tl.int32)
        scale = tl.where(bits == 0, 0x00400000, bits << 23).to(tl.float32, bitcast=True)
    else:
        scale = tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)
    return scale


_INTEGERS = tl.constexpr("""{
.reg .b32 low, high;
and.b32 low, $8, 0x0F0F0F0F;
shr.u32 high, $8, 4;
and.b32 high, high, 0x0F0F0F0F;
prmt.b32 $0, low, 0x43000000, 0x7044;
prmt.b32 $1, high, 0x43000000, 0x7044;
prmt.b32 $2, low, 0x43000000, 0x7144;
prmt.b32 $3, high, 0x43000000, 0x7144;
prmt.b32 $4, low, 0x43000000, 0x7244;
prmt.b32 $5, high, 0x43000000, 0x7244;
prmt.b32 $6, low, 0x43000000, 0x7344;
prmt.b32 $7, high, 0x43000000, 0x7344;
}""")
"""Of a word, eight floats: 128 and the integer of four bits, which is put into the second byte."""

_E2M1 = tl.constexpr("""{
.reg .b32 low, high, t, a, b, c, d;
.reg .b16 p, q, h0, h1;
shl.b32 t, $8, 4;
and.b32 low, t, 0x80808080;
shl.b32 t, $8, 1;
lop3.b32 low, t, 0x0E0E0E0E, low, 0xEA;
and.b32 high, $8, 0x80808080;
shr.u32 t, $8, 3;
lop3.b32 high, t, 0x0E0E0E0E, high, 0xEA;
mov.b32 {p, q}, low;
cvt.rn.f16x2.e5m2x2 a, p;
cvt.rn.f16x2.e5m2x2 b, q;
mov.b32 {p, q}, high;
cvt.rn.f16x2.e5m2x2 c, p;
cvt.rn.f16x2.e5m2x2 d, q;
mov.b32 {h0, h1}, a;
cvt.f32.f16 $0, h0;
cvt.f32.f16 $2, h1;
mov.b32 {h0, h1}, c;
cvt.f32.f16 $1, h0;
cvt.f32.f16 $3, h1;
mov.b32 {h0, h1}, b;
cvt.f32.f16 $4, h0;
cvt.f32.f16 $6, h1;
mov.b32 {h0, h1}, d;
cvt.f32.f16 $5, h0;
cvt.f32.f16 $7, h1;
}""")
"""Of a word, eight floats: the bits of E2M1 are those of E5M2 of a number that is 2**14 times smaller."""


@triton.jit
def _decoded(words, table_ptr, KIND: tl.constexpr, ASM: tl.constexpr):
    """The eight codes of each word: of an integer, the number plus 128; of E2M1, the number times 2**-14."""
    if ASM and KIND != 3:
        ASSEMBLY: tl.constexpr = _INTEGERS if KIND == 1 else _E2M1
        values = tl.inline_asm_elementwise(
            ASSEMBLY,
            "=f,=f,=f,=f,=f,=f,=f,=f,r",
            [words],
            dtype=(
                tl.float32,
                tl.float32,
                tl.float32,
                tl.float32,
                tl.float32,
                tl.float32,
                tl.float32,
                tl.float32,
            ),
            is_pure=True,
            pack=1,
        )
    else:
        values = (
            _code(words, table_ptr, 0, KIND),
            _code(words, table_ptr, 1, KIND),
            _code(words, table_ptr, 2, KIND),
            _code(words, table_ptr, 3, KIND),
            _code(words, table_ptr, 4, KIND),
            _code(words, table_ptr, 5, KIND),
            _code(words, table_ptr, 6, KIND),
            _code(words, table_ptr, 7, KIND),
        )
    return values


@triton.jit
def _code(words, table_ptr, i: tl.constexpr, KIND: tl.constexpr):
    """The ``i``-th code of each word."""
    code = (words >> (4 * i)) & 15
    if KIND == 1:
        value = code.to(tl.float32) + 128.0
    elif KIND == 2:
        value = (((code & 8) << 28) | ((code & 7) << 22)).to(tl.float32, bitcast=True) * 5.192296858534828e33  # 2**112
    else:
        value = tl.load(table_ptr + code)
    return value


@triton.jit
def quantized_gemv_kernel(
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
    table_ptr,
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
    EXPERTS: tl.constexpr = 0,
    PADDED_EXPERTS: tl.constexpr = 1,
    SCALE_ROWS: tl.constexpr = 1,
):
    """``BLOCK_N`` rows of one of the weights per program; gated: of both.

    A row is ``BLOCK_G`` groups at a time, of ``CHUNKS`` times ``VECTOR`` loaded elements: bytes, or words of eight
    codes. ``GROUPS``: scales per row; with ``LATE`` there is one, which the sum is multiplied by. ``GROUP_ROWS``: rows
    that have one scale; 0 for all. ``FACTOR``: 1 for one per row, 2 for one. ``OFFSET`` is subtracted from all codes.
    ``ROUNDED``: the row is rounded to float8 by groups first.
    ``codes1``, ... are the offsets of the parts of the other weights from those of the first one in memory.

    With ``EXPERTS``, programs have a row each as well, and the weight is that of its expert in a stack: the first one
    whose rows end after it. ``sum_ptr`` has these ends; ``SCALE_ROWS``: rows of scales of one weight.
    """
    dtype = x_ptr.dtype.element_ty
    PER_WORD: tl.constexpr = 1 if KIND == 0 else 8
    NOTHING: tl.constexpr = 0.0 if KIND == 0 else 0
    ROW: tl.constexpr = K // PER_WORD
    WIDTH: tl.constexpr = CHUNKS * VECTOR
    STEP: tl.constexpr = BLOCK_G * WIDTH
    pid = tl.program_id(0)
    tiles0 = tl.cdiv(rows0, BLOCK_N)
    tiles1 = tl.cdiv(rows1, BLOCK_N)
    if GATED:
        tile, rows, first = pid, rows0, 0
        c_ptr, s_ptr, z_ptr, i_ptr, f_ptr, b_ptr = codes_ptr, scales_ptr, zeros_ptr, index_ptr, factor_ptr, bias_ptr
    else:
        second, third = pid >= tiles0, pid >= tiles0 + tiles1
        tile = pid - tl.where(third, tiles0 + tiles1, tl.where(second, tiles0, 0))
        rows = tl.where(third, rows2, tl.where(second, rows1, rows0))
        first = tl.where(third, rows0 + rows1, tl.where(second, rows0, 0))
        c_ptr = codes_ptr + tl.where(third, codes2, tl.where(second, codes1, 0))
        s_ptr = scales_ptr + tl.where(third, scales2, tl.where(second, scales1, 0))
        z_ptr, i_ptr, f_ptr, b_ptr = zeros_ptr, index_ptr, factor_ptr, bias_ptr
        if ZEROS:
            z_ptr = zeros_ptr + tl.where(third, zeros2, tl.where(second, zeros1, 0))
        if INDEX:
            i_ptr = index_ptr + tl.where(third, index2, tl.where(second, index1, 0))
        if FACTOR:
            f_ptr = factor_ptr + tl.where(third, factor2, tl.where(second, factor1, 0))
        if BIAS:
            b_ptr = bias_ptr + tl.where(third, bias2, tl.where(second, bias1, 0))
    row = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = row < rows
    if EXPERTS > 0:
        which = tl.program_id(1)
        each = tl.arange(0, PADDED_EXPERTS)
        ends = tl.load(sum_ptr + each, mask=each < EXPERTS, other=0).to(tl.int32)
        expert = tl.sum(((ends <= which) & (each < EXPERTS)).to(tl.int32), 0)
        inside = inside & (expert < EXPERTS)
        wide = expert.to(tl.int64)
        x_ptr += which * K
        out_ptr += which * rows0
        c_ptr += wide * rows0 * ROW
        s_ptr += wide * (SCALE_ROWS * GROUPS)
        z_ptr += wide * (SCALE_ROWS * GROUPS)
        f_ptr += wide * (1 if FACTOR == 2 else rows0)
    group = tl.arange(0, BLOCK_G)
    place = tl.arange(0, STEP)
    c_rows = c_ptr + row.to(tl.int64)[:, None] * ROW + place[None, :]
    mask = inside[:, None]
    if STEP > ROW:
        mask = mask & (place < ROW)[None, :]
    c = tl.load(c_rows, mask=mask, other=NOTHING, eviction_policy="evict_first")
    if GATED:
        u = tl.load(c_rows + codes1, mask=mask, other=NOTHING, eviction_policy="evict_first")
    if INDEX:
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
            if pid == 0:
                tl.store(sum_ptr + all_cols, x, mask=valid)
        x32 = x.to(tl.float32)
        rms = tl.rsqrt(tl.sum(x32 * x32, 0) / K + eps)
    total = tl.zeros([BLOCK_N, BLOCK_G, CHUNKS], tl.float32)
    gate = total
    for start in tl.static_range(0, ROW, STEP):
        elements = start + place
        valid = elements >= 0
        if start + STEP > ROW:
            valid = elements < ROW
        if start > 0:
            mask = inside[:, None]
            if start + STEP > ROW:
                mask = mask & valid[None, :]
            c = tl.load(c_rows + start, mask=mask, other=NOTHING, eviction_policy="evict_first")
            if GATED:
                u = tl.load(c_rows + codes1 + start, mask=mask, other=NOTHING, eviction_policy="evict_first")
        if KIND == 0:
            x = _row(x_ptr, residual_ptr, norm_ptr, elements, valid, rms, RESIDUAL, NORM)
            if ROUNDED:
                x = _rounded(x, BLOCK_G, WIDTH)
            each = c.to(tl.float32) * x[None, :]
            if GATED:
                each_up = u.to(tl.float32) * x[None, :]
            if ZEROS:
                sum_each = x
        else:
            each = tl.zeros([BLOCK_N, STEP], tl.float32)
            each_up = each
            sum_each = tl.zeros([STEP], tl.float32)
            values = _decoded(c, table_ptr, KIND, ASM)
            if GATED:
                values_up = _decoded(u, table_ptr, KIND, ASM)
            for i in tl.static_range(8):
                x = _row(x_ptr, residual_ptr, norm_ptr, elements * 8 + i, valid, rms, RESIDUAL, NORM)
                sum_each += x
                each += values[i] * x[None, :]
                if GATED:
                    each_up += values_up[i] * x[None, :]
        part = tl.sum(each.reshape(BLOCK_N, BLOCK_G, CHUNKS, VECTOR), 3)
        if GATED:
            upper = tl.sum(each_up.reshape(BLOCK_N, BLOCK_G, CHUNKS, VECTOR), 3)
        if ZEROS or OFFSET != 0:
            sums = tl.sum(sum_each.reshape(BLOCK_G, CHUNKS, VECTOR), 2)
        number = start // WIDTH + group
        known = inside[:, None] & (number < GROUPS)[None, :]
        if LATE:
            known = inside[:, None] & (group == 0)[None, :]
            where = scale_row[:, None] + group[None, :] * 0
            where_up = up_row[:, None] + group[None, :] * 0
        else:
            where = scale_row[:, None] * GROUPS + number[None, :]
            where_up = up_row[:, None] * GROUPS + number[None, :]
        if ZEROS:
            zero = tl.load(z_ptr + where, mask=inside[:, None] if LATE else known, other=0).to(tl.float32) + OFFSET
            part -= zero[:, :, None] * sums[None, :, :]
            if GATED:
                zero = tl.load(z_ptr + zeros1 + where_up, mask=inside[:, None] if LATE else known, other=0)
                upper -= (zero.to(tl.float32) + OFFSET)[:, :, None] * sums[None, :, :]
        elif OFFSET != 0:
            part -= OFFSET * sums[None, :, :]
            if GATED:
                upper -= OFFSET * sums[None, :, :]
        if LATE:
            total += part
            if GATED:
                gate += upper
        else:
            total += part * _scales(s_ptr, where, known, EXPONENTS)[:, :, None]
            if GATED:
                gate += upper * _scales(s_ptr + scales1, where_up, known, EXPONENTS)[:, :, None]
    result = tl.sum(tl.sum(total, 2), 1)
    if GATED:
        up = tl.sum(tl.sum(gate, 2), 1)
    if LATE:
        result *= _scales(s_ptr, scale_row, inside, EXPONENTS)
        if GATED:
            up *= _scales(s_ptr + scales1, up_row, inside, EXPONENTS)
    if KIND == 2:
        result *= 16384.0
        if GATED:
            up *= 16384.0
    if FACTOR:
        each_row = row * 0 if FACTOR == 2 else row
        result *= tl.load(f_ptr + each_row, mask=inside, other=0.0)
        if GATED:
            up *= tl.load(f_ptr + factor1 + each_row, mask=inside, other=0.0)
    if BIAS:
        result += tl.load(b_ptr + row, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        if BIAS:
            up += tl.load(b_ptr + bias1 + row, mask=inside, other=0.0).to(tl.float32)
        result = result.to(dtype).to(tl.float32)
        result = (result / (1 + tl.exp(-result))).to(dtype).to(tl.float32)
        result *= up.to(dtype).to(tl.float32)
    if EXPERTS > 0:
        result = tl.where(inside, result, 0.0)
        inside = row < rows
    tl.store(out_ptr + first + row, result.to(dtype), mask=inside)
