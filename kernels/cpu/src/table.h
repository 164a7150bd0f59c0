// All kernels in terms of the vectors that were included before.
#pragma once
#include "row_sampling.h"
#include "elementwise.h"
#include "float_attention.h"
#include "float_panels.h"
#include "rows.h"
#include "step_panels.h"
#include "whole_panels.h"

namespace {

constexpr baton::Kernels make_kernels() {
    return {
        {by_rows<FloatPanels<float>, FLOAT_ROWS>, by_rows<FloatPanels<baton::Bfloat16>, FLOAT_ROWS>,
         by_rows<FloatPanels<baton::Float16>, FLOAT_ROWS>, by_rows<WholePanels<Lines8>, WHOLE_ROWS>,
         by_rows<WholePanels<Lines4>, WHOLE_ROWS>, by_rows<StepPanels, WHOLE_ROWS>},
        by_rows<WholePanels<WidenedLines4>, WHOLE_ROWS>,
        {FLOAT_ROWS, FLOAT_ROWS, FLOAT_ROWS, WHOLE_ROWS, WHOLE_ROWS, WHOLE_ROWS},
        OFFSET,
        round_row,
        sum_groups,
        sum_steps,
        interleave,
        widen,
        WIDENS_STEPS ? widen_steps : nullptr,
        {attend<FloatProducts<float>>, attend<FloatProducts<baton::Bfloat16>>, attend<FloatProducts<int8_t>>},
        LANES,
        sample_row,
        norm_row,
        {gate_rows<silu>, gate_rows<gelu_tanh>},
        turn_head,
        read_memory,
        spin,
    };
}

}  // namespace
