// sm_90 GEMM: how consumers store a tile. A lane has 128 sums, d0 and d1, as gemm.c draws them; out (+)= sum times P's
// factor times Q's (+ bias). 16 bytes at a time where the runs of 8 elements in the output's rows are
// whole and aligned, element by element where not.
#pragma once
#include "pipeline.h"

enum output { BF16_OUT, F32_OUT, ADD_OUT };
INLINE enum output output_of(struct problem problem) {
    return problem.type == MX_BF16 ? BF16_OUT : problem.add ? ADD_OUT : F32_OUT;
}

INLINE void store_one(void *out, int64_t index, float x, enum output output) {
    GLOBAL float *at = (GLOBAL float *)out + index;
    if (output == BF16_OUT)
        ((GLOBAL uint16_t *)out)[index] = round_bf16(x);
    else
        *at = output == ADD_OUT ? *at + x : x;
}

// The first `count` of 8 consecutive outputs.
INLINE void store_some(void *out, int64_t index, float *x, int32_t count, enum output output) {
    ROLLED for (int32_t j = 0; j < min32(count, 8); j++) {
        store_one(out, index + j, x[0], output);
        UNROLL for (int k = 0; k < 7; k++)
            x[k] = x[k + 1];
    }
}

// 16 bytes of an output row: 8 bfloat16 or 4 float32.
INLINE u32x4 chunk_of(const float *x, enum output output) {
    return output == BF16_OUT
               ? (u32x4){pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7])}
               : __builtin_bit_cast(u32x4, (f32x4){x[0], x[1], x[2], x[3]});
}
// Loads and stores of them, aligned, without a branch that what follows would wait for.
INLINE void store_chunk_if(int condition, void *out, int64_t index, u32x4 chunk, enum output output) {
    store_global4_if(condition, output == BF16_OUT ? (void *)((uint16_t *)out + index) : (float *)out + index, chunk);
}
INLINE void store_run_if(int condition, void *out, int64_t index, const float *x, enum output output) {
    UNROLL for (int j = 0; j < 8; j += output == BF16_OUT ? 8 : 4)
        store_chunk_if(condition, out, index + j, chunk_of(x + j, output), output);
}
INLINE u32x4 add_old_if(int condition, const void *out, int64_t index, u32x4 chunk) {
    const u32x4 old = load_global4_if(condition, (const float *)out + index);
    return __builtin_bit_cast(u32x4, __builtin_bit_cast(f32x4, old) + __builtin_bit_cast(f32x4, chunk));
}

// Of the two words that a lane and the one 4 away each have, the even lane gets both first ones, its own first, and the
// odd lane both second ones, its own second.
struct pair {
    uint32_t first, second;
};
INLINE struct pair trade(uint32_t first, uint32_t second, int32_t odd) {
    const uint32_t others = shuffle_xor(odd ? first : second, 4);
    return (struct pair){odd ? others : first, odd ? second : others};
}

// What a consumer thread knows of its part of a tile: rows first_row + 2 r, columns 32 i + 8 quad + 0 .. 7. The
// accumulator of row 4 f + 2 h and column 32 i + 8 quad + 2 j + b is number 16 i + 4 j + 2 h + b of fragment f.
struct part {
    uint32_t slot;
    int32_t first_row, quad;
    int32_t p_rows, q_rows;
    int64_t out, bias; // bias: -1 for none
    uint32_t flags;
};
// A lane's first row among a warpgroup's 128.
INLINE uint32_t first_row_of(uint32_t thread) { return (thread & 0x60) + (thread >> 3 & 3) * 8 + (thread >> 2 & 1); }

INLINE struct part part_of(uint32_t slot, struct problem problem) {
    uint32_t thread = thread_id();
    HIDE(thread); // or what follows from it would stay in registers all along
    return (struct part){
        .slot = slot,
        .first_row = (int32_t)(((thread >> 7) - 2) * 128 + first_row_of(thread)),
        .quad = (int32_t)(thread & 3),
        .p_rows = TILE_FIELD(slot, p_rows),
        .q_rows = TILE_FIELD(slot, q_rows),
        .out = load_shared64(slot + TILE_AT(out)),
        .bias = problem.bias ? load_shared64(slot + TILE_AT(bias)) : -1,
        .flags = (uint32_t)TILE_FIELD(slot, flags),
    };
}

INLINE uint32_t p_reference(struct part part, int r) {
    return load_shared_byte(part.slot + REFS_AT + part.first_row + 2 * r);
}
// A pair of the same.
INLINE uint32_t p_factor(struct part part, int r) {
    return load_shared_half(part.slot + FACTORS_AT + 2 * (part.first_row + 2 * r)) * 0x10001;
}
// Of columns 2 j and 2 j + 1 of the i-th run.
INLINE uint32_t q_references(struct part part, int i, int j) {
    return load_shared_half(part.slot + REFS_AT + MX_SM90_P + 32 * i + 8 * part.quad + 2 * j);
}
INLINE uint32_t q_factors_address(struct part part, int i, int j) {
    return part.slot + FACTORS_AT + 2 * (MX_SM90_P + 32 * i + 8 * part.quad + 2 * j);
}

// Elements of a pair of bfloat16.
INLINE float first_of(uint32_t pair) { return __builtin_bit_cast(float, pair << 16); }
INLINE float second_of(uint32_t pair) { return __builtin_bit_cast(float, pair & 0xffff0000); }

// The second factors, where they are not 1.
INLINE void apply_other_factors(float *d, struct part part, int f) {
    UNROLL for (int h = 0; h < 2; h++) {
        const float p_factor = other_factor_of(p_reference(part, 2 * f + h));
        UNROLL for (int i = 0; i < 4; i++) UNROLL
            for (int j = 0; j < 4; j++) {
                const uint32_t both = q_references(part, i, j);
                UNROLL for (int b = 0; b < 2; b++) {
                    const uint32_t q = both >> 8 * b & 255;
                    float *x = &d[16 * i + 4 * j + 2 * h + b];
                    *x *= p_factor * other_factor_of(q);
                }
            }
    }
}

// Two neighbours of its row first_row + 2 r: columns 2 j and 2 j + 1 of the i-th run.
INLINE const float *sums_of(const float *d0, const float *d1, int r, int i, int j) {
    return (r < 2 ? d0 : d1) + 16 * i + 4 * j + 2 * (r % 2);
}
// Times their factors.
INLINE void scale_pair(float *x, const float *d, uint32_t p, uint32_t q, float bias0, float bias1) {
    x[0] = __builtin_fmaf(d[0], second_of(p) * first_of(q), bias0);
    x[1] = __builtin_fmaf(d[1], second_of(p) * second_of(q), bias1);
}
// As bfloat16, of a MODERATE tile: rounded first, which leaves less to multiply.
INLINE uint32_t scale_packed_pair(const float *d, uint32_t p, uint32_t q) {
    return multiply_bf16x2(multiply_bf16x2(pack_bf16(d[0], d[1]), p), q);
}

// Of a lane's row first_row + 2 r: the 8 elements of the i-th 32 columns.
INLINE void scale_run(float *x, const float *d0, const float *d1, int r, int i, uint32_t p, const uint32_t *q,
                      const float *bias) {
    UNROLL for (int j = 0; j < 8; j++)
        x[j] = __builtin_fmaf((r < 2 ? d0 : d1)[16 * i + 4 * (j / 2) + 2 * (r % 2) + j % 2],
                              second_of(p) * (j % 2 ? second_of(q[j / 2]) : first_of(q[j / 2])), bias[j]);
}
// Stores a lane's part, run by run: whatever is to be stored. `whole`: has_whole_runs.
INLINE void store_runs(const float *d0, const float *d1, struct part part, struct problem problem, int whole,
                       enum output output) {
    UNROLL for (int i = 0; i < 4; i++) {
        const int32_t column = 32 * i + 8 * part.quad;
        uint32_t q[4];
        float bias[8];
        load_shared4(q, q_factors_address(part, i, 0));
        UNROLL for (int j = 0; j < 8; j++)
            bias[j] = part.bias >= 0 && column + j < part.q_rows
                          ? ((GLOBAL const float *)problem.bias)[part.bias + column + j]
                          : 0;
        UNROLL for (int r = 0; r < 4; r++) {
            const int32_t row = part.first_row + 2 * r, count = row < part.p_rows ? part.q_rows - column : 0;
            const int64_t index = part.out + row * problem.out_stride + column;
            float x[8];
            scale_run(x, d0, d1, r, i, p_factor(part, r), q, bias);
            if (!whole)
                store_some(problem.out, index, x, count, output);
            else
                store_run_if(count > 0, problem.out, index, x, output);
        }
    }
}

// Stores a lane's part where has_whole_runs and there is no bias; as bfloat16, of a MODERATE tile. A line is 128 bytes
// of an output row, of which a lane has two chunks of 16 in each of its rows. Lanes 4 apart, whose rows are neighbours,
// swap a chunk, so that 8 lanes store a line at once: memory takes that faster than the halves of two (on an H200, 403
// MB in 94 instead of 127 us).
INLINE void store_lines(const float *d0, const float *d1, struct part part, struct problem problem,
                        enum output output) {
    const int32_t runs = output == BF16_OUT ? 2 : 1; // of 8 elements, that a lane has of a line
    const int32_t odd = part.first_row & 1, row = part.first_row - odd;
    const int32_t column = 8 * part.quad + (output == BF16_OUT ? 32 : 4) * odd;
    const int64_t first = part.out + row * problem.out_stride + column;
    const float zeros[8] = {};
    uint32_t p[4];
    UNROLL for (int r = 0; r < 4; r++)
        p[r] = p_factor(part, r);
    UNROLL for (int line = 0; line < 4 / runs; line++) {
        uint32_t q[2][4];
        UNROLL for (int run = 0; run < runs; run++)
            load_shared4(q[run], q_factors_address(part, runs * line + run, 0));
        const int32_t rows = column + 32 * runs * line < part.q_rows ? part.p_rows - row : 0;
        const int64_t at = first + 32 * runs * line;
        UNROLL for (int r = 0; r < 4; r++) {
            u32x4 mine[2];
            if (output == BF16_OUT) {
                UNROLL for (int c = 0; c < 2; c++) UNROLL
                    for (int j = 0; j < 4; j++)
                        mine[c][j] = scale_packed_pair(sums_of(d0, d1, r, 2 * line + c, j), p[r], q[c][j]);
            } else {
                float x[8];
                scale_run(x, d0, d1, r, line, p[r], q[0], zeros);
                UNROLL for (int c = 0; c < 2; c++)
                    mine[c] = chunk_of(x + 4 * c, output);
            }
            u32x4 lines[2]; // a chunk of the even row's and one of the odd row's
            UNROLL for (int k = 0; k < 4; k++) {
                const struct pair both = trade(mine[0][k], mine[1][k], odd);
                lines[0][k] = both.first;
                lines[1][k] = both.second;
            }
            UNROLL for (int s = 0; s < 2 && output == ADD_OUT; s++)
                lines[s] = add_old_if(2 * r + s < rows, problem.out, at + (2 * r + s) * problem.out_stride, lines[s]);
            UNROLL for (int s = 0; s < 2; s++)
                store_chunk_if(2 * r + s < rows, problem.out, at + (2 * r + s) * problem.out_stride, lines[s], output);
        }
    }
}

// Whether an output row's runs of 8 elements, `row_length` in all, are whole and aligned, as the stores above want
// them.
INLINE int has_whole_runs(struct part part, struct problem problem, int32_t row_length) {
    const int64_t bytes = problem.type == MX_BF16 ? 2 : 4;
    return (((uintptr_t)problem.out + part.out * bytes) | problem.out_stride * bytes) % 16 == 0 && row_length % 8 == 0;
}

INLINE void store_tile(const float *d0, const float *d1, struct part part, struct problem problem) {
    const enum output output = output_of(problem);
    const int whole = has_whole_runs(part, problem, part.q_rows), lines = whole && part.bias < 0;
    if (lines && output == BF16_OUT && part.flags & MODERATE)
        store_lines(d0, d1, part, problem, BF16_OUT);
    else if (lines && output == F32_OUT)
        store_lines(d0, d1, part, problem, F32_OUT);
    else if (lines && output == ADD_OUT)
        store_lines(d0, d1, part, problem, ADD_OUT);
    else if (whole && output == BF16_OUT)
        store_runs(d0, d1, part, problem, 1, BF16_OUT);
    else if (whole)
        store_runs(d0, d1, part, problem, 1, F32_OUT);
    else
        store_runs(d0, d1, part, problem, 0, output);
}

INLINE void turn_pair(float *x, int32_t odd, enum output output) {
    if (output == BF16_OUT) {
        const uint32_t both = transpose_8x8(pack_bf16(x[0], x[1]));
        x[0] = first_of(both);
        x[1] = second_of(both);
    } else {
        const struct pair both = trade(__builtin_bit_cast(uint32_t, x[0]), __builtin_bit_cast(uint32_t, x[1]), odd);
        x[0] = __builtin_bit_cast(float, both.first);
        x[1] = __builtin_bit_cast(float, both.second);
    }
}

// The swapped tile's output has P's rows as its columns. Lanes 4 apart hold the even and the odd ones of a run; between
// them a pair of Q's rows is transposed, so that a lane has a run of one of the two: bfloat16 by movmatrix, which also
// swaps the roles of a lane's quad and of its group, 8 lanes apart; float32 by swapping what is the other's. `packed`:
// as bfloat16, has_whole_runs, no bias, of a MODERATE tile.
INLINE void store_swapped_tile_as(const float *d0, const float *d1, struct part part, struct problem problem,
                                  int packed, enum output output) {
    const int whole = packed || has_whole_runs(part, problem, part.p_rows);
    const int32_t pair = (int32_t)(thread_id() >> 3 & 3), odd = (int32_t)(thread_id() >> 2 & 1);
    const int32_t column = (part.first_row & ~31) + 8 * (output == BF16_OUT ? part.quad : pair);
    uint32_t p[4];
    float bias[4] = {};
    UNROLL for (int r = 0; r < 4; r++) {
        const int32_t row = part.first_row + 2 * r;
        p[r] = p_factor(part, r);
        if (!packed && part.bias >= 0 && row < part.p_rows)
            bias[r] = ((GLOBAL const float *)problem.bias)[part.bias + row];
    }
    UNROLL for (int i = 0; i < 4; i++) UNROLL
        for (int j = 0; j < 4; j++) {
            const uint32_t q = load_shared(q_factors_address(part, i, j));
            int32_t token = 32 * i + 8 * (output == BF16_OUT ? pair : part.quad) + 2 * j + odd;
            HIDE(token); // or all the addresses would be computed first
            const int64_t index = part.out + token * problem.out_stride + column;
            const int32_t count = token < part.q_rows ? part.p_rows - column : 0;
            u32x4 pairs;
            float x[8];
            UNROLL for (int r = 0; r < 4; r++) {
                const float *d = sums_of(d0, d1, r, i, j);
                if (packed) {
                    pairs[r] = transpose_8x8(scale_packed_pair(d, p[r], q));
                } else {
                    scale_pair(&x[2 * r], d, p[r], q, bias[r], bias[r]);
                    turn_pair(&x[2 * r], odd, output);
                }
            }
            if (packed)
                store_chunk_if(count > 0, problem.out, index, pairs, output);
            else if (whole)
                store_run_if(count > 0, problem.out, index, x, output);
            else
                store_some(problem.out, index, x, count, output);
        }
}

INLINE void store_swapped_tile(const float *d0, const float *d1, struct part part, struct problem problem) {
    if (problem.type != MX_BF16)
        store_swapped_tile_as(d0, d1, part, problem, 0, F32_OUT);
    else if (has_whole_runs(part, problem, part.p_rows) && part.bias < 0 && part.flags & MODERATE)
        store_swapped_tile_as(d0, d1, part, problem, 1, BF16_OUT);
    else
        store_swapped_tile_as(d0, d1, part, problem, 0, BF16_OUT);
}

// Stores a tile without a contraction, zeros or the bias, every eighth row of the output by a warp.
INLINE void store_empty_tile(struct part part, struct problem problem, struct kind kind) {
    const int32_t rows = kind.swapped ? part.q_rows : part.p_rows, columns = kind.swapped ? part.p_rows : part.q_rows;
    const int32_t warp = (int32_t)(thread_id() >> 5) - 8, lane = (int32_t)(thread_id() & 31);
    ROLLED for (int32_t row = warp; row < rows; row += CONSUMER_WARPS) ROLLED
        for (int32_t column = lane; column < columns; column += 32)
            store_one(problem.out, part.out + row * problem.out_stride + column,
                      part.bias >= 0 ? problem.bias[part.bias + column] : 0, output_of(problem));
}
