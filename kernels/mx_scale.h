// amax -> E8M0 scale, shared by every quantizer, host and device. Plain C, integers only: exact under any rounding
// or denormal mode. Contract: OCP MX v1.0 (E8M0 bias 127, 255 = NaN).
//
// An amax is a float32 bit pattern, or a bf16 one ("word"), where NaN and Inf count as larger than any number
// (comparing patterns as integers does that). A NaN or Inf gives 255; 0 and amax below 2^-119 give 0.
#pragma once
#include <stdint.h>

#include "mx_args.h"

enum {
    MX_SCALE_OFFSET = 8, // from amax's exponent down to the scale's: 448 is 1.75 * 2^8
    MX_SCALE_NAN = 255,
    MX_WORD_INF = 0x7f80,
};
enum : uint32_t { MX_FLOAT_INF = 0x7f800000 };

static inline uint32_t mx_scale_of_amax(uint32_t amax, uint32_t threshold) {
    int32_t exponent = (int32_t)(amax >> 23) - MX_SCALE_OFFSET + ((amax & 0x7fffff) > threshold);
    if (amax >= MX_FLOAT_INF)
        return MX_SCALE_NAN;
    return exponent < 0 ? 0 : (uint32_t)exponent;
}

static inline uint32_t mx_rounding_threshold(int32_t rounding) {
    static const uint32_t thresholds[] = {
#define MX_ROUNDING_THRESHOLD(name, threshold) threshold,
        MX_ROUNDING_MODES(MX_ROUNDING_THRESHOLD)
#undef MX_ROUNDING_THRESHOLD
    };
    return thresholds[rounding];
}

// A float32 magnitude as a word that compares alike with words and with every threshold: its top half, with the last
// bit set when any bit below is (round to odd).
static inline uint32_t mx_word_of(uint32_t magnitude) { return magnitude >> 16 | ((magnitude & 0xffff) != 0); }

// mx_scale_of_amax of two words at once, for processors that have instructions for that. Added to a word, `bump`
// carries into its exponent when its mantissa is above the threshold.
typedef uint16_t mx_words __attribute__((ext_vector_type(2)));
static inline mx_words mx_scales_of_words(mx_words amax, uint16_t bump) {
    mx_words not_finite = (amax + (mx_words)(0x8000 - MX_WORD_INF)) >> 15, lowest = MX_SCALE_OFFSET << 7;
    mx_words exponent = (__builtin_elementwise_max(amax + bump, lowest) >> 7) - MX_SCALE_OFFSET;
    return __builtin_elementwise_max(exponent, not_finite * (mx_words)MX_SCALE_NAN);
}

// By comparisons, not from a table, which would be in memory.
static inline uint16_t mx_rounding_bump(int32_t rounding) {
    uint32_t threshold = 0;
#define MX_ROUNDING_BUMP(name, value)                                                                                  \
    if (rounding == MX_ROUND_##name)                                                                                   \
        threshold = value;
    MX_ROUNDING_MODES(MX_ROUNDING_BUMP)
#undef MX_ROUNDING_BUMP
    return (uint16_t)(0x7f - (threshold >> 16));
}
