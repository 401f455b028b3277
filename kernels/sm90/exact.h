// sm_90 GEMM: the exact way of plan.h, a block of 32 at a time by a warp's mma, with the scales applied in float32.
#pragma once
#include "store.h"

// 8 bytes from any address.
INLINE uint64_t load8(const uint8_t *from) {
    uint64_t bytes = 0;
    if (((uintptr_t)from & 7) == 0)
        return *(const uint64_t *)from;
    ROLLED for (int i = 0; i < 8; i++)
        bytes |= (uint64_t)from[i] << 8 * i;
    return bytes;
}

// d[16][8] += a[16][16] b[8][16]^T, one warp, float16 in.
INLINE void mma(float *d, const uint32_t *a, const uint32_t *b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

INLINE float scale_exactly(float x, uint32_t p, uint32_t q) {
    return p == 255 || q == 255 ? __builtin_nanf("") : scale_float(x, (int32_t)(p + q) - 254);
}

// d[2 h + b]: the products of a block, of 8 bytes of two of P's rows and of one of Q's in each lane.
INLINE void multiply_block(float *d, const uint64_t *codes) {
    uint32_t a[8], b[4];
    UNROLL for (int h = 0; h < 2; h++) {
        decode_e4m3((uint32_t)codes[h], &a[h], &a[2 + h]);
        decode_e4m3((uint32_t)(codes[h] >> 32), &a[4 + h], &a[6 + h]);
        decode_e4m3((uint32_t)(codes[2] >> 32 * h), &b[2 * h], &b[2 * h + 1]);
    }
    mma(d, a, b);
    mma(d, a + 4, b + 2);
}

// Which of a lane's four elements, a bit 2 h + b each, exist and go the exact way.
INLINE uint32_t wanted_of(const int32_t *rows, const int32_t *columns, const uint8_t *p_ref, const uint8_t *q_ref,
                          int32_t p_last, int32_t q_last) {
    uint32_t wanted = 0; // bit 2 h + b
    UNROLL for (int h = 0; h < 2; h++) UNROLL
        for (int b = 0; b < 2; b++)
            if (rows[h] <= p_last && columns[b] <= q_last &&
                (p_ref[rows[h]] == MX_SM90_EXACT || q_ref[columns[b]] == MX_SM90_EXACT))
                wanted |= 1u << (2 * h + b);
    return wanted;
}

// One warp: 16 rows and 8 columns of a tile, those elements whose row or column goes the exact way. A lane has rows row
// + group + {0, 8} and columns column + 2 quad + {0, 1} of the products, and bytes 8 quad .. 8 quad + 7 of each block.
INLINE void do_exactly(const struct mx_sm90_tile *tile, int32_t row, int32_t column, struct problem problem,
                       struct mx_sm90_plan plan, struct kind kind) {
    const int32_t quad = (int32_t)(thread_id() & 3), group = (int32_t)(thread_id() >> 2 & 7);
    const uint8_t *p_ref = plan.workspace + plan.p_ref + (int64_t)tile->p_ref * MX_SM90_ROW_BLOCK;
    const uint8_t *q_ref = plan.workspace + plan.q_ref + (int64_t)tile->q_ref * MX_SM90_ROW_BLOCK;
    const int32_t p_last = tile->p_rows - 1, q_last = tile->q_rows - 1;
    int32_t rows[2], columns[2];
    UNROLL for (int i = 0; i < 2; i++) {
        rows[i] = row + group + 8 * i;
        columns[i] = column + 2 * quad + i;
    }
    const uint32_t wanted = wanted_of(rows, columns, p_ref, q_ref, p_last, q_last);

    // The last row that exists stands in for those that do not.
    const int64_t scale_stride = problem.stride / MX_BLOCK, q_loaded = min32(column + group, q_last);
    const uint8_t *q = problem.q + (tile->q_row + q_loaded) * problem.stride + tile->start + 8 * quad;
    const uint8_t *p[2], *p_scale[2], *q_scale[2];
    UNROLL for (int i = 0; i < 2; i++) {
        const int64_t p_row = tile->p_row + min32(rows[i], p_last), q_row = tile->q_row + min32(columns[i], q_last);
        p[i] = problem.p + p_row * problem.stride + tile->start + 8 * quad;
        p_scale[i] = problem.p_scale + p_row * scale_stride + tile->start / MX_BLOCK;
        q_scale[i] = problem.q_scale + q_row * scale_stride + tile->start / MX_BLOCK;
    }
    enum { AT_ONCE = 4 }; // blocks that are loaded before the first of them is waited for
    const int32_t blocks = tile->blocks;
    float sums[4] = {};
    ROLLED for (int32_t block = 0; block < blocks; block += AT_ONCE) {
        uint64_t codes[AT_ONCE][3];
        uint32_t scales[AT_ONCE][4];
        UNROLL for (int i = 0; i < AT_ONCE; i++) {
            const int32_t at = min32(block + i, blocks - 1);
            codes[i][2] = load8(q + at * MX_BLOCK);
            UNROLL for (int h = 0; h < 2; h++) {
                codes[i][h] = load8(p[h] + at * MX_BLOCK);
                scales[i][h] = p_scale[h][at];
                scales[i][2 + h] = q_scale[h][at];
            }
        }
        UNROLL for (int i = 0; i < AT_ONCE; i++) {
            float d[4] = {};
            multiply_block(d, codes[i]);
            UNROLL for (int j = 0; j < 4; j++)
                if (block + i < blocks)
                    sums[j] += scale_exactly(d[j], scales[i][j / 2], scales[i][2 + j % 2]);
        }
    }
    UNROLL for (int i = 0; i < 4; i++) {
        if (!(wanted >> i & 1))
            continue;
        const int32_t across = kind.swapped ? columns[i % 2] : rows[i / 2];
        const int32_t along = kind.swapped ? rows[i / 2] : columns[i % 2];
        if (problem.bias)
            sums[i] += problem.bias[tile->bias + along];
        store_one(problem.out, tile->out + across * problem.out_stride + along, sums[i], output_of(problem));
    }
}

// The consumers, when all tiles are stored: whatever goes the exact way, in this block's tiles from `first` on.
INLINE void do_rest_exactly(struct problem problem, struct mx_sm90_plan plan, uint32_t first, struct kind kind) {
    const struct mx_sm90_tile *tiles = (const struct mx_sm90_tile *)plan.workspace;
    const int32_t warp = (int32_t)(thread_id() >> 5) - 8;
    asm volatile("barrier.cta.sync.aligned 1, 256;" ::: "memory");
    ROLLED for (uint32_t index = first; index < (uint32_t)plan.tiles; index += grid_size()) {
        const struct extent tile = extent_of(load_quarter(plan, index));
        if (!tile.p_rows)
            return;
        uint32_t exact[3]; // a bit for every 4 rows, as references_of has them
        UNROLL for (uint32_t i = 0; i < 3; i++)
            exact[i] = lanes_where(has_zero_byte(references_of(tile, plan, i) ^ MX_SM90_EXACT * 0x01010101u));
        if (!(exact[0] | exact[1] | exact[2]))
            continue;
        ROLLED for (int32_t part = warp; part < 256; part += CONSUMER_WARPS) {
            const uint32_t rows = (part < 128 ? exact[0] : exact[1]) >> part / 16 % 8 * 4 & 15,
                           columns = exact[2] >> part % 16 * 2 & 3;
            if (rows | columns)
                do_exactly(&tiles[index], part / 16 * 16, part % 16 * 8, problem, plan, kind);
        }
    }
}
