"""Makes numbers of packed weights, in registers: of words of four nibbles (kernels.packed.FourBit), and of float8.

A shift and a mask bring the bits of both halves of a register to where a number has them, and one multiplication and addition of
two numbers makes them the right ones. So a weight of 4 bits costs two instructions, which it must, lest they take longer than its
loading. Triton has no operations of halves, and converts float8 to bfloat16 with an instruction of a sixteenth of the others'
rate: hence the assembly. The interpreter, which has none, and float32 take numbers one by one."""

import triton
import triton.language as tl

from kernels.triton.platform import INTERPRETED

_PLAIN = tl.constexpr(INTERPRETED)


def _twice(half: int) -> str:
    return hex(half << 16 | half)


def _shifted(target: str, left: int) -> str:
    return f"shl.b32 {target}, $4, {left};" if left >= 0 else f"shr.u32 {target}, $4, {-left};"


def _integers(kind: str, one: int, offset: int) -> str:
    """$0 to $3: the planes of $4; $5 to $8: what is added to each. A nibble is put into the lowest bits of the mantissa of the
    number with the bits `offset`, where they count ones."""
    lines = [f".reg .b32 t, m, z; mov.b32 m, {_twice(one)}; mov.b32 z, {_twice(offset)};"]
    for plane in range(4):
        lines.append(f"{_shifted('t', -4 * plane)} lop3.b32 t, t, {_twice(15)}, z, 0xEA;")
        lines.append(f"fma.rn.{kind}x2 ${plane}, t, m, ${5 + plane};")
    return "{ " + " ".join(lines) + " }"


def _floats() -> str:
    """$0 to $3: the planes of $4; $5 to $8: their scales. A nibble's sign becomes the highest bit, and its exponent and mantissa
    lie where the exponent ends and the mantissa begins, too small by 2^126, for exponents count from 127 and not from 1."""
    lines = [f".reg .b32 t, u, z; mov.b32 z, {_twice(1 << 15)};"]
    for plane in range(4):
        lines.append(f"{_shifted('t', 6 - 4 * plane)} and.b32 t, t, {_twice(7 << 6)};")
        lines.append(f"{_shifted('u', 12 - 4 * plane)} lop3.b32 t, u, z, t, 0xEA;")
        lines.append(f"fma.rn.bf16x2 ${plane}, t, ${5 + plane}, z;")
    return "{ " + " ".join(lines) + " }"


def _float8() -> str:
    """$0 and $1: two numbers each; $2: four, each of which goes into the upper byte of a half. As `_floats`, with a bias of 7."""
    lines = [f".reg .b32 t, u, m, z; mov.b32 m, {_twice(2 * 127 - 7 << 7)}; mov.b32 z, {_twice(1 << 15)};"]
    for pair, order in enumerate(("0x1404", "0x3424")):
        lines.append(f"prmt.b32 t, $2, 0, {order}; shr.u32 u, t, 4; and.b32 u, u, {_twice(0x7F0)};")
        lines.append(f"lop3.b32 u, t, z, u, 0xEA; fma.rn.bf16x2 ${pair}, u, m, z;")
    return "{ " + " ".join(lines) + " }"


_INTEGERS_BFLOAT16 = tl.constexpr(_integers("bf16", 0x3F80, 0x4300))
_INTEGERS_FLOAT16 = tl.constexpr(_integers("f16", 0x3C00, 0x6400))
_FLOATS_BFLOAT16 = tl.constexpr(_floats())
_FLOAT8_BFLOAT16 = tl.constexpr(_float8())


@triton.jit
def integer_planes(words, zero0, zero1, zero2, zero3, DOT: tl.constexpr):
    """(N, S) int16, four times (N, 1) float32 -> four times (N, S) DOT: each plane's integers less its zero."""
    if _PLAIN or tl.float32 == DOT:
        planes = (
            ((words & 15).to(tl.float32) - zero0).to(DOT), ((words >> 4 & 15).to(tl.float32) - zero1).to(DOT),
            ((words >> 8 & 15).to(tl.float32) - zero2).to(DOT), ((words >> 12 & 15).to(tl.float32) - zero3).to(DOT),
        )  # fmt: skip
    elif tl.bfloat16 == DOT:
        planes = tl.inline_asm_elementwise(
            _INTEGERS_BFLOAT16, "=r,=r,=r,=r,r,r,r,r,r",
            [words, (-128 - zero0).to(DOT), (-128 - zero1).to(DOT), (-128 - zero2).to(DOT), (-128 - zero3).to(DOT)],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        planes = tl.inline_asm_elementwise(
            _INTEGERS_FLOAT16, "=r,=r,=r,=r,r,r,r,r,r",
            [words, (-1024 - zero0).to(DOT), (-1024 - zero1).to(DOT), (-1024 - zero2).to(DOT), (-1024 - zero3).to(DOT)],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return planes


@triton.jit
def float_planes(words, exponents, DOT: tl.constexpr):
    """(N, S) int16, (N, 1) int32 of an exponent of 64 to 190 in each byte -> four times (N, S) DOT, which is not float16: each
    plane's E2M1 numbers times 2^(its exponent - 127 - 64)."""
    if _PLAIN or tl.float32 == DOT:
        wide = words.to(tl.int32)
        planes = (
            (_float(wide & 15) * _power(exponents)).to(DOT), (_float(wide >> 4 & 15) * _power(exponents >> 8)).to(DOT),
            (_float(wide >> 8 & 15) * _power(exponents >> 16)).to(DOT),
            (_float(wide >> 12 & 15) * _power(exponents >> 24)).to(DOT),
        )  # fmt: skip
    else:
        # What the assembly's numbers are too small by is in the scales, whose exponents count from 127, too.
        large = exponents + (126 - 64) * 0x01010101
        planes = tl.inline_asm_elementwise(
            _FLOATS_BFLOAT16, "=r,=r,=r,=r,r,r,r,r,r",
            [words, _half_power(large << 7), _half_power(large >> 1), _half_power(large >> 9), _half_power(large >> 17)],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    return planes


@triton.jit
def from_e4m3(words, byte: tl.constexpr):
    """(N, 1) int32 -> (N, 1) float32: one of their four bytes, as E4M3 without its sign, whose exponent counts from 7."""
    bits = (words >> 8 * byte & 127) << 20
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def _power(exponents):
    return ((exponents & 255) << 23).to(tl.float32, bitcast=True) * 5.421010862427522e-20


@triton.jit
def _half_power(shifted):
    return (shifted & 0x7F80).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _float(nibbles):
    magnitude = nibbles & 7
    normal = ((magnitude << 22) + (126 << 23)).to(tl.float32, bitcast=True)
    number = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, normal)
    return tl.where(nibbles > 7, -number, number)


@triton.jit
def from_float8(values, DOT: tl.constexpr):
    """float8_e4m3fn -> DOT; NaN may become 480."""
    if _PLAIN or tl.bfloat16 != DOT:
        numbers = values.to(DOT)
    else:
        numbers = tl.inline_asm_elementwise(
            _FLOAT8_BFLOAT16,
            "=r,=r,r",
            [values.to(tl.int8, bitcast=True)],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    return numbers
