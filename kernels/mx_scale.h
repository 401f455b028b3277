// amax -> E8M0 scale, shared by every quantizer, host and device. Plain C, integers only: exact under any rounding
// or denormal mode. Contract: OCP MX v1.0 (E8M0 bias 127, 255 = NaN).
#pragma once
#include <stdint.h>

#include "mx_args.h"

// `amax` is the float32 bit pattern of the block's largest magnitude, where NaN and Inf count as larger than any number
// (comparing patterns as integers does that). A NaN or Inf gives 255; 0 and amax below 2^-119 give 0.
static inline uint32_t mx_scale_of_amax(uint32_t amax, uint32_t threshold) {
    int32_t exponent = (int32_t)(amax >> 23) - 8 + ((amax & 0x7fffff) > threshold);
    if (amax >= 0x7f800000)
        return 255;
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
