// How a matrix of N outputs and K inputs lies in memory, so that any number of rows is multiplied with it in one pass.
//
// Panels of 32 outputs follow each other; behind the N-th output they have zeros. A panel has, by format:
//   f32, bf16, f16   K times 32 numbers;
//   int8             K / 4 times 32 outputs of 4 neighbours, each number plus 128; then 32 float32 scales;
//   int4             K / 8 times 32 outputs of 8 neighbours, in 4 bytes: the first 4 in the low halves; then for each group of
//                    inputs 32 scales (float16); then for each group 32 zero points (bytes), where it has any: else all are 8.
// K is rounded up: to 4 with int8, to whole groups with int4.
#pragma once
#include <cstdint>

namespace baton {

constexpr int64_t PANEL = 32;

enum class Format : int32_t { f32 = 0, bf16 = 1, f16 = 2, int8 = 3, int4 = 4 };

struct Bfloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

inline int64_t rounded_up(int64_t number, int64_t step) { return (number + step - 1) / step * step; }

struct Layout {
    Format format;
    int64_t outputs;
    int64_t inputs;
    int64_t group;  // int4: inputs that share a scale, a multiple of 8
    bool has_zeros;

    int64_t num_panels() const { return (outputs + PANEL - 1) / PANEL; }

    int64_t num_groups() const { return (inputs + group - 1) / group; }

    int64_t padded_inputs() const {
        if (format == Format::int8) return rounded_up(inputs, 4);
        return format == Format::int4 ? num_groups() * group : inputs;
    }

    int64_t scales_at() const {
        return padded_inputs() * (format == Format::int8 ? PANEL : PANEL / 2);
    }

    int64_t zeros_at() const { return scales_at() + num_groups() * PANEL * 2; }

    int64_t panel_bytes() const {
        switch (format) {
            case Format::f32: return inputs * PANEL * 4;
            case Format::int8: return scales_at() + PANEL * 4;
            case Format::int4: return rounded_up(zeros_at() + (has_zeros ? num_groups() * PANEL : 0), 64);
            default: return inputs * PANEL * 2;
        }
    }
};

}  // namespace baton
