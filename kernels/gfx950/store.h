// Output of the gfx950 GEMMs: zeros, tiles from accumulators, tiles through LDS. What a kernel may write: gemm.c.
#pragma once
#include "loop.h"

// How a kernel writes its tile: constants of one line of kernels.def.
struct output {
    enum mx_type type;
    bool add;  // to what is there
    bool bias; // tile.bias, which may be null
    bool any;  // any alignment and width; else rows of whole 16 bytes, 16-byte aligned, and neither of the above
};

INLINE void store_zeros(const CONSTANT struct mx_gfx950_tile *tile, struct mx_gfx950_extent extent, struct output to,
                        int64_t stride, u32x4 zeros) {
    const uint32_t size = (uint32_t)mx_type_bytes(to.type), lane = thread_id() & 63;
    const uint32_t unit = to.any ? size : 16, end = (uint32_t)extent.cols * size;
    ROLLED for (int32_t row = (int32_t)uniform(thread_id() >> 6); row < extent.rows; row += 4) {
        GLOBAL char *out = (GLOBAL char *)tile->out + row * stride * size;
        ROLLED for (uint32_t first = 0; first < end; first += 64 * unit) { // the same turns in all lanes
            const uint32_t at = first + lane * unit;
            if (at >= end)
                continue;
            if (!to.any)
                *(GLOBAL u32x4 *)(out + at) = zeros;
            else if (to.type == MX_BF16)
                *(GLOBAL uint16_t *)(out + at) = 0;
            else
                *(GLOBAL uint32_t *)(out + at) = 0;
        }
    }
}

// A wave's accumulators: quadrants, and columns past 256 by half of A and of B.
struct sums {
    f32x4 (*quadrant[4])[4];
    f32x4 (*extra)[4];
};

INLINE f32x8 join(f32x4 low, f32x4 high) { return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7); }
INLINE f32x4 low_half(f32x8 x) { return __builtin_shufflevector(x, x, 0, 1, 2, 3); }
INLINE f32x4 high_half(f32x8 x) { return __builtin_shufflevector(x, x, 4, 5, 6, 7); }

INLINE float load_f32(buffer from, uint32_t at) {
    return __builtin_bit_cast(float, __builtin_amdgcn_raw_buffer_load_b32(from, at, 0, 0));
}
INLINE f32x4 load_f32x4(buffer from, uint32_t at) {
    return __builtin_bit_cast(f32x4, __builtin_amdgcn_raw_buffer_load_b128(from, at, 0, 0));
}

// The output rows of the tile as one buffer: rows that do not exist are past its end.
INLINE buffer output_buffer(const CONSTANT struct mx_gfx950_tile *tile, struct mx_gfx950_extent extent,
                            uint32_t stride_bytes, uint32_t size) {
    return make_buffer((const GLOBAL void *)tile->out,
                       (uint32_t)(extent.rows - 1) * stride_bytes + (uint32_t)extent.cols * size);
}

// 8 columns of a row, `scalar` bytes past the place that the range check looks at.
INLINE void store_f32x8(buffer out, uint32_t at, uint32_t scalar, f32x8 x) {
    __builtin_amdgcn_raw_buffer_store_b128(__builtin_bit_cast(u32x4, low_half(x)), out, at, scalar, 0);
    __builtin_amdgcn_raw_buffer_store_b128(__builtin_bit_cast(u32x4, high_half(x)), out, at + 16, scalar, 0);
}

// Plain kernels: from the accumulators. A lane has 4 rows a half of A, in 2 pieces of 8 columns a half of B and one
// past column 256. A piece exists whole or not at all. For rows past the tile's end `at` alone is out of range.
struct direct {
    buffer out;
    enum mx_type type;
    uint32_t at[8]; // of the rows' first columns
    u32x4 last;     // what was stored last: its registers are not to be written at once
};

INLINE void store_piece(struct direct *d, int row, uint32_t skip, uint32_t scalar_skip, f32x8 x) {
    if (d->type == MX_F32) {
        store_f32x8(d->out, d->at[row] + skip * 4, scalar_skip * 4, x);
        return;
    }
    u32x4 data = __builtin_bit_cast(u32x4, __builtin_convertvector(x, bf16x8));
    asm volatile("" ::"v"(d->last), "v"(data));
    __builtin_amdgcn_raw_buffer_store_b128(data, d->out, d->at[row] + skip * 2, scalar_skip * 2, 0);
    d->last = data;
}

INLINE void store_direct(const CONSTANT struct mx_gfx950_tile *tile, struct mx_gfx950_extent extent, struct shape shape,
                         struct output to, int64_t stride, struct sums sums, uint32_t wave, uint32_t lane) {
    const uint32_t size = (uint32_t)mx_type_bytes(to.type), stride_bytes = (uint32_t)stride * size;
    const uint32_t col = (wave & 1) * 64 + (lane >> 4) * 8;
    struct direct d = {.out = output_buffer(tile, extent, stride_bytes, size), .type = to.type};
    d.at[0] = ((wave >> 1) * 64 + fragment_row(lane & 15)) * stride_bytes + col * size;
    UNROLL for (int i = 1; i < 4 * shape.a_halves; i++)
        d.at[i] = i & 4   ? d.at[i - 4] + 128 * stride_bytes
                  : i & 2 ? d.at[i - 2] + 32 * stride_bytes
                          : d.at[i - 1] + 4 * stride_bytes;
    UNROLL for (int part = 0; part < 2 * shape.b_halves; part++) {
        const int half = part >> 1, j = (part & 1) * 2;
        const uint32_t skip = (uint32_t)(half * 128 + j * 16);
        if (col + skip < (uint32_t)extent.cols) {
            UNROLL for (int i = 0; i < 4 * shape.a_halves; i++) {
                f32x4 *row = sums.quadrant[(i >> 2) * shape.b_halves + half][i & 3];
                KEEP_ORDER();
                store_piece(&d, i, skip, 0, join(row[j], row[j + 1]));
            }
        }
        KEEP_ORDER();
    }
    const uint32_t skip = 256 - (wave & 1) * 32;
    if (shape.extra && col + skip < (uint32_t)extent.cols) {
        UNROLL for (int i = 0; i < 8; i++) {
            f32x4(*half)[4] = sums.extra + (i >> 2) * 2;
            store_piece(&d, i, 0, skip, join(half[0][i & 3], half[1][i & 3]));
        }
    }
}

// The other kernels: through LDS, of which each wave has a part to itself. It holds float32 of a strip of the wave's
// columns, its 64 a half of B or its 32 past column 256, and of 64 rows at a time, those of a half of A, or half as
// many where LDS is short. 16-byte chunk c of row R is at c ^ staged_key(R), which makes both directions free of bank
// conflicts: rows are 512, 256 or 128 bytes.
INLINE uint32_t staged_key(uint32_t row, uint32_t row_bytes) {
    return (row_bytes == 128 ? row >> 1 & 1 : row & 3) | (row >> 1 & 4);
}

enum { PIECES_AT_ONCE = 4 }; // of a lane: what is added to is read before any of them is written

// What a lane does of the staged rows: a piece of 8 columns in every `step`-th row.
struct staged {
    buffer out, bias_row;
    f32x8 bias;
    uint32_t row_bytes, step, stride_bytes;
    uint32_t row;       // its first
    uint32_t place, at; // of the piece in it: in LDS, and from the tile's first element, in bytes
    int32_t col, left;  // first column, columns of the tile from there on
    int32_t first, end; // row of the tile that staged row 0 is, rows from there on
};

// LDS place of a half of the piece in the i-th row from the one at `place`, a multiple of PIECES_AT_ONCE from `row`:
// the rows' key differs in one bit.
INLINE uint32_t staged_place(const struct staged *s, uint32_t place, uint32_t i, uint32_t half) {
    const uint32_t key = s->step == 4 ? i >> 1 & 1 : s->step == 8 ? i & 1 : 0;
    return (place ^ key << 6 ^ half << 4) + i * s->step * s->row_bytes;
}

INLINE void store_pieces(GLOBAL char *out, struct output to, const struct staged *s) {
    uint32_t place = s->place, at = to.type == MX_F32 && s->left < 8 ? OUTSIDE : s->at;
    ROLLED for (int32_t row = 0; row < s->end; row += PIECES_AT_ONCE * (int32_t)s->step) {
        f32x8 old[PIECES_AT_ONCE];
        UNROLL for (uint32_t i = 0; to.add && i < PIECES_AT_ONCE; i++) {
            const uint32_t from = at + i * s->step * s->stride_bytes;
            old[i] = join(load_f32x4(s->out, from), load_f32x4(s->out, from + 16));
        }
        UNROLL for (uint32_t i = 0; i < PIECES_AT_ONCE; i++) {
            const uint32_t address = at + i * s->step * s->stride_bytes;
            f32x8 x = join(*(LDS f32x4 *)staged_place(s, place, i, 0), *(LDS f32x4 *)staged_place(s, place, i, 1));
            if (to.bias)
                x += s->bias;
            if (to.add)
                x += old[i];
            if (to.type == MX_F32) // 4-byte aligned: enough for a buffer
                store_f32x8(s->out, address, 0, x);
            else if (s->left >= 8 && row + (int32_t)(s->row + i * s->step) < s->end)
                *(GLOBAL bf16x8_anywhere *)(out + address) = __builtin_convertvector(x, bf16x8);
        }
        place += PIECES_AT_ONCE * s->step * s->row_bytes;
        at += PIECES_AT_ONCE * s->step * s->stride_bytes;
    }
}

// The columns that are no whole piece, one by one.
INLINE void store_rest(GLOBAL char *out, struct output to, const struct staged *s) {
    if (s->left <= 0 || s->left >= 8)
        return;
    const uint32_t size = (uint32_t)mx_type_bytes(to.type);
    ROLLED for (int32_t e = 0; e < s->left; e++) {
        const uint32_t place = s->place ^ (uint32_t)(e >> 2) << 4;
        uint32_t at = s->at + (uint32_t)e * size;
        const float bias = to.bias ? load_f32(s->bias_row, (uint32_t)(s->col + e) * 4) : 0;
        ROLLED for (int32_t row = (int32_t)s->row; row < s->end; row += (int32_t)s->step) {
            const uint32_t key = ((uint32_t)row >> 1 & 4) ^ (s->row >> 1 & 4);
            const uint32_t from = (place ^ key << 4) + ((uint32_t)row - s->row) * s->row_bytes;
            const float x = *(LDS float *)(from + (uint32_t)(e & 3) * 4) + bias;
            if (to.type == MX_BF16)
                *(GLOBAL __bf16 *)(out + at) = (__bf16)x;
            else if (to.add)
                *(GLOBAL float *)(out + at) += x;
            else
                *(GLOBAL float *)(out + at) = x;
            at += s->step * s->stride_bytes;
        }
    }
}

// Rows of half `first / 2` of A, `pairs` of its two fragment pairs from `first % 2`, from the accumulators to LDS.
INLINE void stage(struct sums sums, struct shape shape, bool extra, int first, int pairs, const uint32_t to[2],
                  uint32_t row_bytes) {
    UNROLL for (int i = 0; i < 2 * pairs; i++) {
        const int fragment = (first & 1) * 2 + i;
        const uint32_t row = (uint32_t)((i >> 1) * 32 + (i & 1) * 4) * row_bytes;
        KEEP_ORDER();
        UNROLL for (int j = 0; extra && j < 2; j++)
            *(LDS f32x4 *)(to[j] + row) = sums.extra[(first >> 1) * 2 + j][fragment];
        UNROLL for (int j = 0; !extra && j < 4 * shape.b_halves; j++)
            *(LDS f32x4 *)(to[j & 1] + row + (j >> 1) * 128) =
                sums.quadrant[(first >> 1) * shape.b_halves + (j >> 2)][fragment][j & 3];
    }
    KEEP_ORDER();
}

// One strip.
INLINE void store_strip(const CONSTANT struct mx_gfx950_tile *tile, struct mx_gfx950_extent extent, struct shape shape,
                        struct output to, int64_t stride, struct sums sums, uint32_t wave, uint32_t lane, bool extra) {
    const uint32_t halves = (uint32_t)shape.b_halves, pieces = extra ? 4 : 8 * halves,
                   size = (uint32_t)mx_type_bytes(to.type);
    const int pairs = shape.a_halves < shape.b_halves ? 1 : 2;
    const uint32_t mine = wave * (uint32_t)pairs * 32 * halves * 256, r = lane & 15, piece = lane % pieces;
    struct staged s = {.row_bytes = pieces * 32,
                       .step = 64 / pieces,
                       .stride_bytes = (uint32_t)stride * size,
                       .row = lane / pieces,
                       .first = (int32_t)(wave >> 1) * 64};
    s.col =
        (int32_t)(extra ? 256 + (wave & 1) * 32 + piece * 8 : (wave & 1) * 64 + (piece >> 3) * 128 + (piece & 7) * 8);
    s.out = output_buffer(tile, extent, s.stride_bytes, size);
    s.left = extent.cols - s.col;
    s.bias_row = make_buffer((const GLOBAL void *)tile->bias, tile->bias ? (uint32_t)extent.cols * 4 : 0);
    if (to.bias)
        s.bias = join(load_f32x4(s.bias_row, (uint32_t)s.col * 4), load_f32x4(s.bias_row, (uint32_t)s.col * 4 + 16));
    s.place = mine + s.row * s.row_bytes + (piece * 32 ^ staged_key(s.row, s.row_bytes) << 4);
    s.at = ((uint32_t)s.first + s.row) * s.stride_bytes + (uint32_t)s.col * size;
    const uint32_t row = fragment_row(r), chunk = (lane >> 4) * 32 ^ staged_key(row, s.row_bytes) << 4;
    uint32_t places[2] = {mine + row * s.row_bytes + chunk, mine + row * s.row_bytes + (chunk ^ 16)};
    asm volatile("" : "+v"(places[0]), "+v"(places[1])); // the rest of an LDS place is in the instruction
    ROLLED for (int round = 0; round < 2 * shape.a_halves; round += pairs) {
        UNROLL for (int which = 0; which < 2 * shape.a_halves; which += pairs) {
            if (which == round)
                stage(sums, shape, extra, which, pairs, places, s.row_bytes);
        }
        s.end = extent.rows - s.first < pairs * 32 ? extent.rows - s.first : pairs * 32;
        store_pieces((GLOBAL char *)tile->out, to, &s);
        store_rest((GLOBAL char *)tile->out, to, &s);
        KEEP_ORDER();
        const int32_t rows = pairs == 1 ? 32 : 128; // two pairs are a half; one is used with one half only
        s.first += rows;
        s.at += (uint32_t)rows * s.stride_bytes;
    }
}

INLINE void store_staged(const CONSTANT struct mx_gfx950_tile *tile, struct mx_gfx950_extent extent, struct shape shape,
                         struct output to, int64_t stride, struct sums sums, uint32_t wave, uint32_t lane) {
    store_strip(tile, extent, shape, to, stride, sums, wave, lane, false);
    if (shape.extra)
        store_strip(tile, extent, shape, to, stride, sums, wave, lane, true);
}
