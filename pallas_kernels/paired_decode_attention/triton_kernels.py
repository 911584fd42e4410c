# type: ignore  (Triton's language, which looks like Python)
"""Device code of `triton.py`, and the only module that imports triton as soon as it is imported.

Pointers stand for contiguous arrays; letters as in `api.py`, R rows a sequence, G = N / K. A program's rows are the
R * G rows that share a key/value head, filled up to ROWS.

The tensor cores multiply 16-bit numbers. A cache of 8 bits is therefore loaded in words of two neighbouring columns,
which the shared memory can transpose as it can 16-bit numbers, and taken apart in registers into a tile of the even and
one of the odd columns, with float16 as the type of the products: it holds every int8 and every float8_e4m3fn.
"""

import triton
import triton.language as tl


@triton.jit
def attend_to_split(
    q_ptr,  # [B, R, N, H]
    k_ptr,  # [B, K, S, H]
    v_ptr,  # [B, K, S, H]
    lengths_ptr,  # int32 [B]
    k_scale_ptr,  # float32 [B, K]
    out_ptr,  # float32 [B, K, SPLITS, R * G, H]
    lse_ptr,  # float32 [B, K, SPLITS, R * G], base 2, plus SHIFT
    R: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    H: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOWS: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Attention of all rows of a key/value head over one split of the keys that any of them sees.

    A split that holds no key, and a row that sees none of the split's keys, has output 0 and log-sum-exp -inf.
    """
    CACHE: tl.constexpr = k_ptr.dtype.element_ty
    PACKED: tl.constexpr = CACHE.primitive_bitwidth == 8
    PRODUCT: tl.constexpr = tl.float16 if PACKED else CACHE
    # Weights are at most 2^SHIFT, where float16 would lose the small ones if they were at most 1.
    SHIFT: tl.constexpr = 15 if PRODUCT.is_fp16() else 0
    STEP: tl.constexpr = 2 if PACKED else 1
    COLUMNS: tl.constexpr = H // STEP

    split, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.arange(0, ROWS)
    # A length beyond the cache is a mistake of the caller, but it must not lead beyond the cache.
    length = tl.minimum(tl.load(lengths_ptr + batch), S)
    first = tl.zeros([ROWS], tl.int32)
    begin = length
    for r in tl.static_range(R):
        first_of_r = tl.maximum(length - WINDOWS[r], 0)
        first = tl.where(row // G == r, first_of_r, first)
        begin = tl.minimum(begin, first_of_r)
    # The splits share what this sequence has, not the capacity: a short one in a large cache is spread as well.
    keys = tl.maximum(tl.cdiv(length - begin, SPLITS), LEAST)
    keys = tl.cdiv(keys, BLOCK) * BLOCK
    begin += split * keys
    end = tl.minimum(begin + keys, length)

    in_use = row < R * G
    column = tl.arange(0, COLUMNS) * STEP
    query = ((batch * R + row // G) * K + head) * G + row % G
    at_query = query[:, None] * H + column[None, :]
    q = tl.load(q_ptr + at_query, mask=in_use[:, None], other=0.0)
    # The cache may have more than 2^31 elements; an offset within a block is small.
    cache_head = (batch * K + head).to(tl.int64)
    to_log2 = tl.load(k_scale_ptr + cache_head) * (SCALE * 1.4426950408889634)
    if PACKED:
        q_odd = tl.load(q_ptr + at_query + 1, mask=in_use[:, None], other=0.0)
        # Bfloat16 queries may be beyond float16: a power of two brings the largest of a row below 2.
        largest = tl.max(tl.maximum(tl.abs(q.to(tl.float32)), tl.abs(q_odd.to(tl.float32))), axis=1)
        power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        power = tl.where(power == 0.0, 1.0, power)
        q = (q.to(tl.float32) / power[:, None]).to(PRODUCT)
        q_odd = (q_odd.to(tl.float32) / power[:, None]).to(PRODUCT)
        to_log2 *= power[:, None]
        k_ptr = k_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
        v_ptr = v_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    in_block = tl.arange(0, BLOCK)
    at_block = in_block[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]

    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    acc_odd = acc
    for start in range(begin, end, BLOCK):
        key = start + in_block
        block = (cache_head * S + start) * COLUMNS
        # Keys beyond the end are not read: a weight of zero would not silence a NaN among their values.
        present = (key < end)[:, None]
        k = tl.load(k_ptr + block + at_block, mask=present, other=0)
        v = tl.load(v_ptr + block + at_block, mask=present, other=0)
        if PACKED:
            k, k_odd = columns_apart(k, CACHE)
            scores = tl.dot(q_odd, tl.trans(k_odd), tl.dot(q, tl.trans(k)))
        else:
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        visible = (first[:, None] <= key[None, :]) & (key < end)[None, :]
        scores = tl.where(visible, scores * to_log2, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        # A row that has seen no key yet keeps its maximum at -inf: exp2 must not meet -inf - (-inf).
        finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        decay = tl.exp2(row_max - finite_max)
        weights = tl.exp2(scores - (finite_max - SHIFT)[:, None])
        row_sum = row_sum * decay + tl.sum(weights, axis=1)
        weights = weights.to(PRODUCT)
        acc *= decay[:, None]
        if PACKED:
            v, v_odd = columns_apart(v, CACHE)
            acc_odd = tl.dot(weights, v_odd, acc_odd * decay[:, None])
        acc = tl.dot(weights, v, acc, input_precision="ieee")
        row_max = new_max

    seen = row_sum > 0.0
    row_sum = tl.where(seen, row_sum, 1.0)
    lse = tl.where(seen, row_max + tl.log2(row_sum), float("-inf"))
    partial = (cache_head * SPLITS + split) * (R * G) + row
    at_partial = partial[:, None] * H + column[None, :]
    tl.store(lse_ptr + partial, lse, mask=in_use)
    tl.store(out_ptr + at_partial, acc / row_sum[:, None], mask=in_use[:, None])
    if PACKED:
        tl.store(out_ptr + at_partial + 1, acc_odd / row_sum[:, None], mask=in_use[:, None])


@triton.jit
def columns_apart(words, CACHE: tl.constexpr):
    """Even and odd columns, in float16, of words that hold two numbers of type CACHE each.

    The assembly takes two words at a time, a register; what Triton makes of shifts and casts is twice as long.
    """
    if CACHE.is_int8():
        # 0x6400 + u is the float16 number 1024 + u, for u = x + 128 in [0, 256); 0x6480 is 1152.
        code: tl.constexpr = """{
            .reg .b32 u, bias;
            xor.b32 u, $2, 0x80808080;
            mov.b32 bias, 0x64806480;
            prmt.b32 $0, u, 0x64646464, 0x4240;
            prmt.b32 $1, u, 0x64646464, 0x4341;
            sub.rn.f16x2 $0, $0, bias;
            sub.rn.f16x2 $1, $1, bias;
        }"""
    else:
        code: tl.constexpr = """{
            .reg .b32 u;
            .reg .b16 even, odd;
            prmt.b32 u, $2, 0, 0x3120;
            mov.b32 {even, odd}, u;
            cvt.rn.f16x2.e4m3x2 $0, even;
            cvt.rn.f16x2.e4m3x2 $1, odd;
        }"""
    return tl.inline_asm_elementwise(code, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)


@triton.jit
def merge_splits(
    partial_ptr,  # float32 [B, K, SPLITS, R * G, H]
    lse_ptr,  # float32 [B, K, SPLITS, R * G], base 2, plus a constant
    v_scale_ptr,  # float32 [B, K]
    out_ptr,  # [B, R, N, H]
    R: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Output of one row: the mean of its splits' outputs, weighted by the sums of their exponentials."""
    row, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    cache_head = (batch * K + head).to(tl.int64)
    h = tl.arange(0, H)
    in_block = tl.arange(0, BLOCK)
    row_max = float("-inf")
    row_sum = 0.0
    acc = tl.zeros([H], tl.float32)
    for start in range(0, SPLITS, BLOCK):
        split = start + in_block
        partial = (cache_head * SPLITS + split) * (R * G) + row
        lse = tl.load(lse_ptr + partial, mask=split < SPLITS, other=float("-inf"))
        out = tl.load(partial_ptr + partial[:, None] * H + h[None, :], mask=(split < SPLITS)[:, None], other=0.0)
        new_max = tl.maximum(row_max, tl.max(lse, axis=0))
        finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        decay = tl.exp2(row_max - finite_max)
        weights = tl.exp2(lse - finite_max)
        row_sum = row_sum * decay + tl.sum(weights, axis=0)
        acc = acc * decay + tl.sum(weights[:, None] * out, axis=0)
        row_max = new_max
    out = acc * tl.load(v_scale_ptr + cache_head) / tl.where(row_sum > 0.0, row_sum, 1.0)
    query = ((batch * R + row // G) * K + head) * G + row % G
    tl.store(out_ptr + query * H + h, out.to(out_ptr.dtype.element_ty))
