"""The ways of storing weights that are read, and what ranks keep of each: the table of docs/weights.md."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

PAGE = Path(__file__).parents[2] / "docs" / "weights.md"
_BEGIN, _END = "<!-- formats -->\n", "<!-- /formats -->\n"
Held = Literal["as it is stored", "8 bits", "16 bits", "float32"]
"""`8 bits` are whole numbers with the stored scales, which lose nothing; `16 bits` are those in which the format's own library
multiplies, or which have every stored number; `float32` has each of them."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    name: str
    spelled: str
    """What config.json says, `quant_method` first."""
    gpu: Held
    """What GPUs keep, but for floats, which have the model's dtype there."""
    cpu: Held
    """What CPUs keep with `model.dtype: auto`."""


FORMATS = (
    WeightFormat(
        "FP8, one scale or one for each row",
        "`fp8`, `fbgemm_fp8`, `compressed-tensors`, `modelopt` FP8, `quark` fp8_e4m3",
        "as it is stored",
        "float32",
    ),
    WeightFormat(
        "FP8, blocks of 128 x 128",
        "`fp8` with weight_block_size, `compressed-tensors`",
        "as it is stored",
        "float32",
    ),
    WeightFormat(
        "MXFP8", "`compressed-tensors`, `modelopt` MXFP8, `fp8` with blocks of 1 x 32", "16 bits", "16 bits"
    ),
    WeightFormat("INT8, symmetric", "`compressed-tensors`", "as it is stored", "as it is stored"),
    WeightFormat(
        "MXFP4",
        "`compressed-tensors`, `modelopt` W4A16_MXFP4 and W4A8_MXFP4, `quark` fp4",
        "as it is stored",
        "8 bits",
    ),
    WeightFormat(
        "NVFP4", "`compressed-tensors`, `modelopt` NVFP4 and W4A16_NVFP4", "as it is stored", "8 bits"
    ),
    WeightFormat("four bits of AWQ", "`awq`, version gemm", "as it is stored", "as it is stored"),
    WeightFormat("four bits of GPTQ", "`gptq`", "as it is stored", "as it is stored"),
    WeightFormat("eight bits of GPTQ", "`gptq`", "float32", "as it is stored"),
    WeightFormat("packed INT4", "`compressed-tensors`, pack-quantized", "as it is stored", "as it is stored"),
    WeightFormat("packed INT8", "`compressed-tensors`, pack-quantized", "float32", "as it is stored"),
    WeightFormat("NF4 and FP4", "`bitsandbytes`, load_in_4bit, nested or not", "float32", "16 bits"),
    WeightFormat("LLM.int8", "`bitsandbytes`, load_in_8bit", "float32", "as it is stored"),
    WeightFormat("HQQ of 1, 2, 3, 4 and 8 bits", "`hqq`", "float32", "16 bits"),
    WeightFormat("torchao's FP8", "`torchao`, Float8Tensor", "as it is stored", "float32"),
    WeightFormat(
        "torchao's INT8", "`torchao`, Int8Tensor and IntxUnpackedToInt8Tensor", "float32", "as it is stored"
    ),
    WeightFormat("torchao's INT4", "`torchao`, Int4Tensor", "float32", "16 bits"),
)


def page(text: str) -> str:
    """Return `text` with the table of today."""
    before, _, rest = text.partition(_BEGIN)
    return f"{before}{_BEGIN}{_table()}{_END}{rest.partition(_END)[2]}"


def _table() -> str:
    rows = ["| format | `quantization_config` | GPUs keep | CPUs keep |", "|---|---|---|---|"]
    rows += [f"| {row.name} | {row.spelled} | {_floats(row.gpu)} | {row.cpu} |" for row in FORMATS]
    return "\n".join(rows) + "\n"


def _floats(held: Held) -> str:
    return "the model's dtype" if held in ("float32", "16 bits") else held


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
