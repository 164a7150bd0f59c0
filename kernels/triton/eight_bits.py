"""Keys and values of 8 bits as tensor cores take them. Two neighbours in a vector are read as one number of 16 bits: shared
memory transposes no smaller ones, and one instruction converts the numbers of two tokens, which lie where a product wants them.

float16 holds all of float8 and int8, and the hardware converts to it as it does not to bfloat16. Its range is narrow. So queries
are divided by a power of two, and the softmax's weights are multiplied with `WEIGHTS_FACTOR` times the values' scales, which are
a 448th or a 127th of what the vectors hold: values of up to 100,000 are in range."""

import torch
import triton
import triton.language as tl

from kernels.triton.platform import INTERPRETED

STORED_DTYPES = {torch.float8_e4m3fn: tl.float8e4nv, torch.int8: tl.int8}
WEIGHTS_FACTOR = tl.constexpr(64.0)

_WITHOUT_ASSEMBLY = tl.constexpr(INTERPRETED)


@triton.jit
def halves(pairs, stored: tl.constexpr, dtype: tl.constexpr):
    """int16 pairs -> the numbers in the low bytes and in the high bytes, which are `stored`, as `dtype`."""
    if dtype != tl.float16 or _WITHOUT_ASSEMBLY:
        low = (pairs & 0xFF).to(tl.int8).to(stored, bitcast=True).to(dtype)
        high = (pairs >> 8).to(tl.int8).to(stored, bitcast=True).to(dtype)
    elif stored == tl.int8:
        # 0x64 before a byte is 1024 and the byte; 0x6480 is 1024 + 128.
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 bytes, exponents, offset;
            mov.b32 exponents, 0x64646464;
            mov.b32 offset, 0x64806480;
            xor.b32 bytes, $2, 0x80808080;
            prmt.b32 $0, bytes, exponents, 0x4240;
            prmt.b32 $1, bytes, exponents, 0x4341;
            sub.f16x2 $0, $0, offset;
            sub.f16x2 $1, $1, offset;
            }""",
            "=&r,=&r,r", [pairs], (tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 bytes;
            .reg .b16 low, high;
            prmt.b32 bytes, $2, 0, 0x3120;
            mov.b32 {low, high}, bytes;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",
            "=&r,=&r,r", [pairs], (tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return low, high


@triton.jit
def in_range(even, odd, dtype: tl.constexpr):
    """(M, N) columns of queries -> the same as `dtype`, divided by a power of two such that the largest of a row is below 2, and
    these (M,) powers."""
    even, odd = even.to(tl.float32), odd.to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(even), 1), tl.max(tl.abs(odd), 1))
    size = (tl.maximum(largest, 1e-30).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return (even / size[:, None]).to(dtype), (odd / size[:, None]).to(dtype), size
