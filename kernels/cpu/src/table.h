// All kernels in terms of the vectors that were included before.
#pragma once
#include "attention_head.h"
#include "drawing.h"
#include "float_panels.h"
#include "int4_panels.h"
#include "int8_panels.h"
#include "rows.h"

namespace {

constexpr baton::Kernels make_kernels() {
    return {
        {by_rows<FloatPanels<float>, FLOAT_ROWS>, by_rows<FloatPanels<baton::Bfloat16>, FLOAT_ROWS>,
         by_rows<FloatPanels<baton::Float16>, FLOAT_ROWS>, by_rows<Int8Panels, INT8_ROWS>,
         by_rows<Int4Panels, INT4_ROWS>},
        {FLOAT_ROWS, FLOAT_ROWS, FLOAT_ROWS, INT8_ROWS, INT4_ROWS},
        round_row,
        interleave,
        {attend<float>, attend<baton::Bfloat16>, attend<int8_t>},
        LANES,
        first_largest,
        mask_row,
        draw_row,
        read_memory,
        spin,
    };
}

}  // namespace
