// How a matrix of N outputs and K inputs lies in memory, so that any number of rows is multiplied with it in one pass.
//
// Panels of 32 outputs follow each other; behind the N-th output they have zeros. A panel has, by format:
//   f32, f16         K times 32 numbers;
//   bf16             K / 2 times 32 outputs of 2 neighbours;
//   int8             K / 4 times 32 outputs of 4 neighbours, each number plus 128;
//   int4             K / 8 times 32 outputs of 8 neighbours, in 4 bytes: the first 4 in the low halves;
//   steps4           spans of inputs one behind the other: 32 scales in bf16, 32 steps for each 32 of the inputs, and then numbers
//                    as with int4. A number less 8, times its step, is a byte that the scale multiplies.
// Behind numbers of int8 and int4 there are for each group of inputs 32 scales, as wide as they were given, and then, where the
// matrix has any, for each group 32 zero points: float16, or with int4 perhaps bytes. Without them int8 has 0, and int4 has 8.
// K is rounded up to 2 with bf16, 4 with int8, 8 with int4, and 32 with steps4; the last group or span may be shorter.
#pragma once
#include <cstdint>

namespace baton {

constexpr int64_t PANEL = 32;
constexpr int64_t STEP_INPUTS = 32;  // that share a step

enum class Format : int32_t { f32 = 0, bf16 = 1, f16 = 2, int8 = 3, int4 = 4, steps4 = 5 };
constexpr int FORMATS = 6;

struct Bfloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

inline int64_t rounded_up(int64_t number, int64_t step) { return (number + step - 1) / step * step; }

// `group` and what follows it are for int8, int4 and steps4.
struct Layout {
    Format format;
    int64_t outputs;
    int64_t inputs;
    int64_t group;  // inputs that share a scale, a multiple of 4 with int8, of 8 with int4, of 32 with steps4
    int64_t zero_bytes;  // of a zero point: 2, or 1 with int4; 0: the matrix has none
    Format scales;  // f32, bf16 or f16

    bool is_whole() const { return format >= Format::int8; }

    int64_t num_panels() const { return (outputs + PANEL - 1) / PANEL; }

    int64_t num_groups() const { return (inputs + group - 1) / group; }

    int64_t padded_inputs() const {
        switch (format) {
            case Format::bf16: return rounded_up(inputs, 2);
            case Format::int8: return rounded_up(inputs, 4);
            case Format::int4: return rounded_up(inputs, 8);
            case Format::steps4: return rounded_up(inputs, STEP_INPUTS);
            default: return inputs;
        }
    }

    int64_t scales_at() const { return padded_inputs() * (format == Format::int8 ? PANEL : PANEL / 2); }

    int64_t scale_bytes() const { return scales == Format::f32 ? 4 : 2; }

    bool has_zeros() const { return zero_bytes > 0; }

    int64_t zeros_at() const { return scales_at() + num_groups() * PANEL * scale_bytes(); }

    // In a span of steps4.
    int64_t steps_at() const { return PANEL * scale_bytes(); }

    int64_t numbers_at() const { return rounded_up(steps_at() + group / STEP_INPUTS * PANEL, 64); }

    int64_t span_bytes() const { return numbers_at() + group * PANEL / 2; }

    int64_t panel_bytes() const {
        if (format == Format::steps4) return num_groups() * numbers_at() + padded_inputs() * PANEL / 2;
        if (is_whole()) return rounded_up(zeros_at() + num_groups() * PANEL * zero_bytes, 64);
        return padded_inputs() * PANEL * (format == Format::f32 ? 4 : 2);
    }

    // The inputs that a tile takes at once: 64 bytes, or as many that groups are whole steps.
    int64_t tile_inputs() const {
        if (format == Format::bf16) return 32;
        int64_t step = 64;
        while (num_groups() > 1 && group % step != 0) step -= 4;
        return step;
    }

    // Of the panels that `Kernels::widen_steps` makes of steps4.
    Layout widened() const { return {Format::int8, outputs, padded_inputs(), group, 0, scales}; }
};

}  // namespace baton
