// Words of four bytes, on sm_90's device side. Plain C, which needs INLINE.
#pragma once
#include "../mx_math.h"

// Nonzero when a byte of x is 0.
INLINE uint32_t has_zero_byte(uint32_t x) { return (x - 0x01010101) & ~x & 0x80808080; }
// Mask of the first `count` bytes of a word.
INLINE uint32_t first_bytes(int32_t count) { return count >= 4 ? ~0u : (1u << 8 * max32(count, 0)) - 1; }
