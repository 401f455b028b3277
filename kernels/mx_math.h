// Smallest, largest and rounded-up quotient of integers, for every file. Plain C.
#pragma once
#include <stdint.h>

[[gnu::always_inline]] static inline int32_t min32(int32_t a, int32_t b) { return a < b ? a : b; }
[[gnu::always_inline]] static inline int32_t max32(int32_t a, int32_t b) { return a > b ? a : b; }
[[gnu::always_inline]] static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
[[gnu::always_inline]] static inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
[[gnu::always_inline]] static inline int32_t div_up32(int32_t n, int32_t by) { return (n + by - 1) / by; }
[[gnu::always_inline]] static inline int64_t div_up(int64_t n, int64_t by) { return (n + by - 1) / by; }
