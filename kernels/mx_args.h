// What crosses from the host to a kernel, for every backend: the same structs are the launcher's arguments, the GPU
// kernels' argument buffers and the CPU kernels' arguments.
//
// Terms. A matrix is "row-blocked" when its 32-element blocks run along its last axis. `k` is always a contraction
// extent that is stored (a multiple of MX_BLOCK, zeros in what the quantizer had to add). Data is E4M3, one byte an
// element; scale is E8M0, one byte a block. Everything is contiguous. `offs` are torch's int32 cumulative group ends.
#pragma once
#include <stdint.h>

#include "mx_math.h"

enum {
    MX_BLOCK = 32,        // elements of the contraction that share one scale (OCP MX v1.0)
    MX_GROUP_ALIGN = 128, // the quantizer starts each group's token columns at a multiple of this
};

enum mx_type { MX_BF16, MX_F32 };

static inline int64_t mx_type_bytes(int32_t type) { return type == MX_BF16 ? 2 : 4; }

// One line per rounding mode: name, largest 23-bit mantissa of a block's amax that does NOT move its scale up one
// binade. The scale's exponent is exponent(amax) - 8 + (mantissa > threshold), never below 0. The quantizers decide
// that on a bf16 whose last bit stands for all bits that float32 has below as well (mx_word_of): the last 17 bits of a
// threshold must be equal.
#define MX_ROUNDING_MODES(X)                                                                                           \
    X(rceil, 0x600000) /* up when amax > 448 * 2^e: nothing saturates */                                               \
    X(floor, 0x7fffff) /* never: amax in (448, 512) * 2^e saturates */                                                 \
    X(ceil, 0x000000)  /* up unless amax is a power of two */                                                          \
    X(even, 0x77ffff)  /* up when amax rounded to E4M3's mantissa carries into the next binade */

#define MX_ROUNDING_CHECK(name, threshold)                                                                             \
    static_assert(((threshold) & 0x1ffff) == 0 || ((threshold) & 0x1ffff) == 0x1ffff, #name);
MX_ROUNDING_MODES(MX_ROUNDING_CHECK)
#undef MX_ROUNDING_CHECK

enum mx_rounding {
#define MX_ROUNDING_ENUM(name, threshold) MX_ROUND_##name,
    MX_ROUNDING_MODES(MX_ROUNDING_ENUM)
#undef MX_ROUNDING_ENUM
};

static inline int64_t mx_round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Token columns that hold any split of m tokens into `groups` groups, each started at a multiple of MX_GROUP_ALIGN.
static inline int64_t mx_padded_tokens(int64_t m, int64_t groups) {
    return (m + (MX_GROUP_ALIGN - 1) * groups) / MX_GROUP_ALIGN * MX_GROUP_ALIGN;
}

// What one of the offs says, cut to the rows or columns that there are: GPU kernels get offs that no one has looked at.
[[gnu::always_inline]] static inline int32_t mx_clamp_offset(int32_t offset, int32_t limit) {
    return min32(max32(offset, 0), limit);
}

// What an array without elements has for an address is anything, null included: no pointer below says more than where
// its elements are, if it has any.

enum mx_wants { MX_ROWS = 1, MX_COLS = 2 };

// What is asked for is written whole, padding included.
// Not grouped, x is `batch` matrices and each is one group whose columns start at 0.
// Grouped, batch is 1 and the rows are tokens: group g = rows [offs[g-1], offs[g]) goes to the columns that start at
// the sum of the earlier groups' lengths, each rounded up to MX_GROUP_ALIGN. Rows past offs[groups-1] are in no column.
struct mx_quantize_args {
    const void *x;       // [batch][rows][cols], type x_type
    const int32_t *offs; // [groups] if grouped
    uint8_t *row_data;   // [batch][rows][row_k] if wants & MX_ROWS
    uint8_t *row_scale;  // [batch][rows][row_k / 32]
    uint8_t *col_data;   // [batch][cols][col_k] if wants & MX_COLS
    uint8_t *col_scale;  // [batch][cols][col_k / 32]
    int64_t batch, rows, cols, groups;
    int64_t row_k;    // mx_round_up(cols, MX_BLOCK)
    int64_t col_k;    // mx_padded_tokens(rows, groups) if grouped, else mx_round_up(rows, MX_BLOCK)
    int16_t x_type;   // enum mx_type
    int8_t wants;     // enum mx_wants, one or both
    int8_t grouped;   // 1: by offs, of which there may be none
    int32_t rounding; // enum mx_rounding
};

// out[r] = a[r] . b[g]^T (+ bias[g]) for r in [offs[g-1], offs[g]); rows past offs[groups-1] are 0.
struct mx_rows_args {
    const uint8_t *a, *a_scale; // [m][k], [m][k / 32]
    const uint8_t *b, *b_scale; // [groups][n][k], [groups][n][k / 32]
    const int32_t *offs;        // [groups]
    const float *bias;          // [groups][n], or null for zeros; with groups or n 0, no output element would read it
    void *out;                  // [m][n], type out_type
    int64_t m, n, k, groups;
    int32_t out_type; // enum mx_type
};

// out[g] (+)= a[:, group g] . b[:, group g]^T, contracted over the group's token columns; an empty group gives exact 0.
// plain = 0: groups lie where the quantizer puts them (starts at multiples of MX_GROUP_ALIGN, zeros after each group).
// plain = 1: group g is columns [offs[g-1], offs[g]), all multiples of MX_BLOCK; what lies outside is finite.
struct mx_depth_args {
    const uint8_t *a, *a_scale; // [n][depth], [n][depth / 32]
    const uint8_t *b, *b_scale; // [k][depth], [k][depth / 32]
    const int32_t *offs;        // [groups]
    void *out;                  // [groups][n][k], type out_type; read as well when accumulating
    int64_t n, k, depth, groups;
    int32_t out_type;   // enum mx_type
    int32_t accumulate; // 1: add to out, which is then MX_F32
    int32_t plain;
};

// In place: clears the columns (and their scales) of a plain-layout operand that lie in no group.
struct mx_padding_args {
    uint8_t *data, *scale; // [rows][depth], [rows][depth / 32]
    const int32_t *offs;   // [groups], multiples of MX_BLOCK
    int64_t rows, depth, groups;
};
