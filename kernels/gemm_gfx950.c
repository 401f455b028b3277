// gfx950 (MI355X) grouped MXFP8 GEMMs, tiles of 256 or 128 rows by 256 columns. Launch, workspace and the table of
// kernels: gfx950.h.
//
//   mx_gemm_rows_gfx950_<rows>x256_*(struct mx_rows_args, struct mx_gfx950_plan)
//   mx_gemm_depth_gfx950_256x256_*(struct mx_depth_args, struct mx_gfx950_plan)
//
// A block does one tile: out[row][col] (+)= sum over d < depth of a[row][d] b[col][d] 2^(a_scale + b_scale - 254)
// (+ bias[col]), from the addresses that prepare wrote into its mx_gfx950_tile; tiles share no output, so there are no
// atomics and the bits depend on nothing but the tile's own operands.
//
// Operands: E4M3, rows `stride` bytes apart (k of gemm_rows, depth of gemm_depth), 16-byte aligned bases, strides and
// depths multiples of 32, stride <= MX_GFX950_MAX_DEPTH. Scales: prepare's order (gfx950.h). Output: aligned to its
// element (`any`) or to 16 bytes with rows of whole 8 elements; rows of up to MX_GFX950_MAX_COLS elements.
// Tails: rows past tile.rows, columns past tile.cols and the contraction past tile.depth are neither read nor written
// here: the loads' offsets for them are out of the buffer's bounds, which makes the operand 0, and so are the stores',
// which drops them. Should hardware not write the zeros of such a load to LDS, what stands there is zero or the tile's
// own earlier columns of the same row, and its scales are 2^-127 on both sides.
//
// Four waves, wave w = 2 * wm + wn. The tile is made of 128x128 quadrants, by `half` of A and `half` of B (a 128-row
// tile has one half of A); each wave has rows wm * 64 and columns wn * 64 of each quadrant, as 4x4 fragments of 16x16,
// by v_mfma_scale_f32_16x16x128_f8f6f4. Registers: 64 accumulators a quadrant, all AGPRs; 4 operand halves of 4
// fragments, 128 VGPRs; 16 of scales. LDS, 128 or 96 KB: buffers {A, B} x {half} x {step parity} of 128 rows of 128
// bytes: 2 wave rows of 4 fragments of 16. Row R keeps its 16-byte chunk c at place c ^ (R & 7), which makes the
// fragment reads free of bank conflicts. Row r of fragment t is the operand's row fragment_row(r) + 4 * (t & 1) + 32 *
// (t >> 1) of 64, and the matrix instruction gets B as its first operand, so that a lane of the result holds 8
// consecutive columns of one output row in two fragments.
//
// One turn of the loop is a body: two steps of 128. Fills (memory to LDS) run two steps ahead of their use and go to
// the half-step buffer that was read last; each barrier waits with vmcnt(16) (12 for 128 rows), which leaves the newest
// fills of the wave in flight. Scales are loaded one body ahead. There is no peeled turn: fills past the contraction's
// end, those of the whole last turn among them, have offsets out of bounds (SET_OFFSETS).
//
// Sources: CDNA4 ISA, chapters 7 (matrix instructions, scales), 9 (buffer resources, fills), 11 (LDS: 64 banks).
#include "device_gfx950.h"

enum { TILE_BUFFER_BYTES = 16384 };
#define TILE_BUFFER(name) static LDS char name[TILE_BUFFER_BYTES] __attribute__((aligned(1024), loader_uninitialized))
// [operand][half][parity], as separate arrays: the compiler then knows that fills and reads do not overlap.
TILE_BUFFER(a00);
TILE_BUFFER(a10);
TILE_BUFFER(b00);
TILE_BUFFER(b10);
TILE_BUFFER(a01);
TILE_BUFFER(a11);
TILE_BUFFER(b01);
TILE_BUFFER(b11);

enum {
    STEP = 128,
    ROW_BLOCK = 32, // rows that a wave fills of a half-step buffer
};

// s_waitcnt: at most n vector memory operations in flight, no LDS or scalar ones. The compiler counts this builtin's
// waits; it puts none of its own on fills.
#define WAIT(n) __builtin_amdgcn_s_waitcnt(((n) & 15) | (n) >> 4 << 14 | 0x70)
#define KEEP_ORDER() __builtin_amdgcn_sched_barrier(0)
// The waits precede the barrier: after it every wave's fills are in LDS and every wave's reads are out of it.
#define WAIT_ALL_WAVES(n)                                                                                              \
    do {                                                                                                               \
        WAIT(n);                                                                                                       \
        __builtin_amdgcn_s_barrier();                                                                                  \
        asm volatile("" ::: "memory");                                                                                 \
        KEEP_ORDER();                                                                                                  \
    } while (0)

// One of the 4 fills of a wave's 32 rows: 8 rows of 128 bytes. One M0 value (the LDS address) serves all 4.
#define FILL(to, from, at, i)                                                                                          \
    __builtin_amdgcn_raw_ptr_buffer_load_lds(from, (LDS void *)((to) + fill_lds), 16, (at)[i], position, (i) * 1024, 0)
#define FILL_ALL(to, from, at)                                                                                         \
    do {                                                                                                               \
        FILL(to, from, at, 0);                                                                                         \
        FILL(to, from, at, 1);                                                                                         \
        FILL(to, from, at, 2);                                                                                         \
        FILL(to, from, at, 3);                                                                                         \
    } while (0)

INLINE i32x8 read_fragment(const LDS char *from, uint32_t low, uint32_t high, int t) {
    i32x4 lo = *(const LDS i32x4 *)(from + low + t * 16 * STEP), hi = *(const LDS i32x4 *)(from + high + t * 16 * STEP);
    return __builtin_shufflevector(lo, hi, 0, 1, 2, 3, 4, 5, 6, 7);
}
#define READ_A(to, from, t) (to)[t] = read_fragment(from, a_low, a_high, t)
// B's buffers lie past what an LDS instruction's offset reaches; its lane offsets begin at A's end and make up for it.
#define READ_B(to, from, t) (to)[t] = read_fragment((from) - a_bytes, b_low, b_high, t)

#define MULTIPLY(c, a, b, i, j, a_scale, b_scale)                                                                      \
    (c)[i][j] =                                                                                                        \
        __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4((b)[j], (a)[i], (c)[i][j], 0, 0, j, b_scale, i, a_scale)

// One quadrant, one step: 16 matrix instructions, each of the first 12 followed by what it hides: a fragment's read for
// later, a fill, or nothing. Source order is the schedule.
#define QUADRANT(c, a, b, a_scale, b_scale, s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11)                          \
    do {                                                                                                               \
        MULTIPLY(c, a, b, 0, 0, a_scale, b_scale);                                                                     \
        s0;                                                                                                            \
        KEEP_ORDER();                                                                                                  \
        MULTIPLY(c, a, b, 0, 1, a_scale, b_scale);                                                                     \
        s1;                                                                                                            \
        KEEP_ORDER();                                                                                                  \
        MULTIPLY(c, a, b, 0, 2, a_scale, b_scale);                                                                     \
        s2;                                                                                                            \
        KEEP_ORDER();                                                                                                  \
        MULTIPLY(c, a, b, 0, 3, a_scale, b_scale);                                                                     \
        s3;                                                                                                            \
        KEEP_ORDER();                                                                                                  \
        MULTIPLY(c, a, b, 1, 0, a_scale, b_scale);                                                                     \
        s4;                                                                                                            \
        KEEP_ORDER();                                                                                                  \
        MULTIPLY(c, a, b, 1, 1, a_scale, b_scale);                                                                     \
        s5;                                                                                                            \
        KEEP_ORDER();                                                                                                  \
        MULTIPLY(c, a, b, 1, 2, a_scale, b_scale);                                                                     \
        s6;                                                                                                            \
        KEEP_ORDER();                                                                                                  \
        MULTIPLY(c, a, b, 1, 3, a_scale, b_scale);                                                                     \
        s7;                                                                                                            \
        KEEP_ORDER();                                                                                                  \
        MULTIPLY(c, a, b, 2, 0, a_scale, b_scale);                                                                     \
        s8;                                                                                                            \
        KEEP_ORDER();                                                                                                  \
        MULTIPLY(c, a, b, 2, 1, a_scale, b_scale);                                                                     \
        s9;                                                                                                            \
        KEEP_ORDER();                                                                                                  \
        MULTIPLY(c, a, b, 2, 2, a_scale, b_scale);                                                                     \
        s10;                                                                                                           \
        KEEP_ORDER();                                                                                                  \
        MULTIPLY(c, a, b, 2, 3, a_scale, b_scale);                                                                     \
        s11;                                                                                                           \
        KEEP_ORDER();                                                                                                  \
        MULTIPLY(c, a, b, 3, 0, a_scale, b_scale);                                                                     \
        MULTIPLY(c, a, b, 3, 1, a_scale, b_scale);                                                                     \
        MULTIPLY(c, a, b, 3, 2, a_scale, b_scale);                                                                     \
        MULTIPLY(c, a, b, 3, 3, a_scale, b_scale);                                                                     \
        KEEP_ORDER();                                                                                                  \
    } while (0)
#define NOTHING (void)0

// One step of a 256x256 tile. Buffers now_* are this step's, next_* the following one's; fills go two steps ahead, to
// now_*. The waits for b1 in one: it is long there.
#define STEP_256X256(now_a0, now_a1, now_b0, now_b1, next_a0, next_b0, a_scale0, a_scale1, b_scale0, b_scale1)         \
    do {                                                                                                               \
        position += STEP;                                                                                              \
        SET_OFFSETS(at);                                                                                               \
        QUADRANT(c00, a0, b0, a_scale0, b_scale0, READ_B(b1, now_b1, 0), READ_B(b1, now_b1, 1), READ_B(b1, now_b1, 2), \
                 READ_B(b1, now_b1, 3), FILL(now_a0, a_half0, at, 0), NOTHING, FILL(now_a0, a_half0, at, 1), NOTHING,  \
                 FILL(now_a0, a_half0, at, 2), NOTHING, FILL(now_a0, a_half0, at, 3), NOTHING);                        \
        WAIT(63);                                                                                                      \
        KEEP_ORDER();                                                                                                  \
        QUADRANT(c01, a0, b1, a_scale0, b_scale1, READ_A(a1, now_a1, 0), READ_A(a1, now_a1, 1), READ_A(a1, now_a1, 2), \
                 READ_A(a1, now_a1, 3), FILL(now_b0, b_half0, at, 0), NOTHING, FILL(now_b0, b_half0, at, 1), NOTHING,  \
                 FILL(now_b0, b_half0, at, 2), NOTHING, FILL(now_b0, b_half0, at, 3), NOTHING);                        \
        WAIT_ALL_WAVES(16);                                                                                            \
        QUADRANT(c10, a1, b0, a_scale1, b_scale0, READ_A(a0, next_a0, 0), READ_A(a0, next_a0, 1),                      \
                 READ_A(a0, next_a0, 2), READ_A(a0, next_a0, 3), FILL(now_b1, b_half1, at, 0), NOTHING,                \
                 FILL(now_b1, b_half1, at, 1), NOTHING, FILL(now_b1, b_half1, at, 2), NOTHING,                         \
                 FILL(now_b1, b_half1, at, 3), NOTHING);                                                               \
        QUADRANT(c11, a1, b1, a_scale1, b_scale1, READ_B(b0, next_b0, 0), READ_B(b0, next_b0, 1),                      \
                 READ_B(b0, next_b0, 2), READ_B(b0, next_b0, 3), FILL(now_a1, a_half1, at, 0), NOTHING,                \
                 FILL(now_a1, a_half1, at, 1), NOTHING, FILL(now_a1, a_half1, at, 2), NOTHING,                         \
                 FILL(now_a1, a_half1, at, 3), NOTHING);                                                               \
        WAIT_ALL_WAVES(16);                                                                                            \
    } while (0)

// One step of a 128x256 tile, whose A has one half; now_a are the fragments in use, next_a those read for the next
// step.
#define STEP_128X256(now_a, next_a, now_a0, now_b0, now_b1, next_a0, next_b0, a_scale, b_scale0, b_scale1)             \
    do {                                                                                                               \
        position += STEP;                                                                                              \
        SET_OFFSETS(at);                                                                                               \
        QUADRANT(c00, now_a, b0, a_scale, b_scale0, READ_B(b1, now_b1, 0), READ_B(b1, now_b1, 1),                      \
                 READ_B(b1, now_b1, 2), READ_B(b1, now_b1, 3), FILL(now_a0, a_half0, at, 0),                           \
                 FILL(now_a0, a_half0, at, 1), FILL(now_a0, a_half0, at, 2), FILL(now_a0, a_half0, at, 3),             \
                 FILL(now_b0, b_half0, at, 0), FILL(now_b0, b_half0, at, 1), FILL(now_b0, b_half0, at, 2),             \
                 FILL(now_b0, b_half0, at, 3));                                                                        \
        WAIT_ALL_WAVES(12);                                                                                            \
        QUADRANT(c01, now_a, b1, a_scale, b_scale1, READ_A(next_a, next_a0, 0), READ_A(next_a, next_a0, 1),            \
                 READ_A(next_a, next_a0, 2), READ_A(next_a, next_a0, 3), READ_B(b0, next_b0, 0),                       \
                 READ_B(b0, next_b0, 1), READ_B(b0, next_b0, 2), READ_B(b0, next_b0, 3), FILL(now_b1, b_half1, at, 0), \
                 FILL(now_b1, b_half1, at, 1), FILL(now_b1, b_half1, at, 2), FILL(now_b1, b_half1, at, 3));            \
        WAIT_ALL_WAVES(12);                                                                                            \
    } while (0)

#define FOR_FRAGMENTS(i, j) UNROLL for (int i = 0; i < 4; i++) UNROLL for (int j = 0; j < 4; j++)

// Accumulators begin as a product of zeros: 16 registers an instruction, by naming the registers (E2M1 operands, which
// take 4 registers, are the fastest). The compiler knows neither what the instruction is nor its latency:
// the fragment reads and WAIT_ALL_WAVES stand between it and the first use.
#define CLEAR(row, all, r0, r1, r2, r3)                                                                                \
    asm volatile("v_mfma_f32_32x32x64_f8f6f4 a[" all "], %4, %4, 0 cbsz:4 blgp:4"                                      \
                 : "={a[" r0 "]}"((row)[0]), "={a[" r1 "]}"((row)[1]), "={a[" r2 "]}"((row)[2]),                       \
                   "={a[" r3 "]}"((row)[3])                                                                            \
                 : "v"(zero))
// Keeps the accumulators in AGPRs across the loop.
#define PIN(c) FOR_FRAGMENTS(i, j) asm volatile("" : "+a"((c)[i][j]))

// ---- output ----

// How a kernel writes its tile: constants of one line of the kernel tables in gfx950.h. One kernel per way, because
// accumulators that are alive across a branch do not stay in their registers.
struct output {
    enum mx_type type;
    bool add;   // to what is there
    bool bias;  // tile.bias, which may be null only with `any`
    bool any;   // any alignment and width; else rows of whole 16 bytes, 16-byte aligned
    int pieces; // rows of pieces of a lane, of 32 tile rows each
};

INLINE uint32_t type_bytes(enum mx_type type) { return type == MX_BF16 ? 2 : 4; }

INLINE void store_zeros(const CONSTANT struct mx_gfx950_tile *tile, struct output to, int64_t stride) {
    const uint32_t size = type_bytes(to.type), lane = thread_id() & 63;
    const uint32_t unit = to.any ? size : 16, end = (uint32_t)tile->cols * size;
    ROLLED for (int32_t row = (int32_t)(thread_id() >> 6); row < tile->rows; row += 4) {
        GLOBAL char *out = (GLOBAL char *)tile->out + row * stride * size;
        ROLLED for (uint32_t at = lane * unit; at < end; at += 64 * unit) {
            if (!to.any)
                *(GLOBAL u32x4 *)(out + at) = (u32x4){};
            else if (to.type == MX_BF16)
                *(GLOBAL uint16_t *)(out + at) = 0;
            else
                *(GLOBAL uint32_t *)(out + at) = 0;
        }
    }
}

// The 8 x 4 pieces of 8 consecutive columns that a lane has: rows by quadrant row half and fragment, columns by
// quadrant column half and fragment pair.
INLINE uint32_t piece_row(uint32_t first, uint32_t i) {
    return first + (i >> 2) * 128 + (i & 1) * 4 + (i >> 1 & 1) * 32;
}
INLINE uint32_t piece_col(uint32_t first, uint32_t j) { return first + (j >> 1) * 128 + (j & 1) * 32; }
INLINE f32x8 piece(f32x4 (*const c[4])[4], int i, int j) {
    f32x4 *row = c[(i >> 2) * 2 + (j >> 1)][i & 3];
    return __builtin_shufflevector(row[(j & 1) * 2], row[(j & 1) * 2 + 1], 0, 1, 2, 3, 4, 5, 6, 7);
}
// Keeps the accumulators of piece row i in AGPRs until here.
INLINE void keep_pieces(f32x4 (*const c[4])[4], int i) {
    UNROLL for (int half = 0; half < 2; half++) {
        UNROLL for (int j = 0; j < 4; j++) asm volatile("" : "+a"(c[(i >> 2) * 2 + half][i & 3][j]));
    }
}
INLINE f32x4 low_half(f32x8 x) { return __builtin_shufflevector(x, x, 0, 1, 2, 3); }
INLINE f32x4 high_half(f32x8 x) { return __builtin_shufflevector(x, x, 4, 5, 6, 7); }

INLINE float load_f32(buffer from, uint32_t at) {
    return __builtin_bit_cast(float, __builtin_amdgcn_raw_buffer_load_b32(from, at, 0, 0));
}
INLINE void store_f32(buffer to, uint32_t at, float x) {
    __builtin_amdgcn_raw_buffer_store_b32(__builtin_bit_cast(uint32_t, x), to, at, 0, 0);
}
INLINE f32x4 load_f32x4(buffer from, uint32_t at) {
    return __builtin_bit_cast(f32x4, __builtin_amdgcn_raw_buffer_load_b128(from, at, 0, 0));
}
INLINE void store_f32x4(buffer to, uint32_t at, f32x4 x) {
    __builtin_amdgcn_raw_buffer_store_b128(__builtin_bit_cast(u32x4, x), to, at, 0, 0);
}

// The output rows of the tile as one buffer: rows that do not exist are past its end.
INLINE buffer output_buffer(const CONSTANT struct mx_gfx950_tile *tile, uint32_t stride_bytes, uint32_t size) {
    return make_buffer((const GLOBAL void *)tile->out,
                       (uint32_t)(tile->rows - 1) * stride_bytes + (uint32_t)tile->cols * size);
}

// The bias of a lane's 4 x 8 columns, 0 past the tile's; 4-byte aligned. Element by element only where the tile may end
// within a piece.
INLINE void load_bias(f32x8 bias[4], const CONSTANT struct mx_gfx950_tile *tile, bool any, uint32_t first_col) {
    const buffer from = make_buffer((const GLOBAL void *)tile->bias, tile->bias ? (uint32_t)tile->cols * 4 : 0);
    UNROLL for (uint32_t j = 0; j < 4; j++) {
        const uint32_t at = piece_col(first_col, j) * 4;
        if (any) {
            UNROLL for (uint32_t e = 0; e < 8; e++) bias[j][e] = load_f32(from, at + e * 4);
        } else {
            bias[j] = __builtin_shufflevector(load_f32x4(from, at), load_f32x4(from, at + 16), 0, 1, 2, 3, 4, 5, 6, 7);
        }
    }
    UNROLL for (uint32_t j = 0; j < 4; j++) asm volatile("" : "+v"(bias[j])); // not in AGPRs, which each use would read
}

// Whole 16-byte stores. Columns that do not exist are OUTSIDE.
INLINE void store_wide(const CONSTANT struct mx_gfx950_tile *tile, struct output to, int64_t stride,
                       f32x4 (*const c[4])[4], uint32_t first_row, uint32_t first_col, const f32x8 bias[4]) {
    const uint32_t size = type_bytes(to.type), stride_bytes = (uint32_t)stride * size;
    const buffer out = output_buffer(tile, stride_bytes, size);
    uint32_t col[4];
    UNROLL for (uint32_t j = 0; j < 4; j++) {
        const uint32_t at = piece_col(first_col, j);
        col[j] = at < (uint32_t)tile->cols ? at * size : OUTSIDE;
    }
    UNROLL for (int i = 0; i < to.pieces; i++) {
        const uint32_t row = piece_row(first_row, (uint32_t)i) * stride_bytes;
        f32x8 old[4];
        KEEP_ORDER();
        keep_pieces(c, i);
        if (to.add) {
            UNROLL for (int j = 0; j < 4; j++) old[j] = __builtin_shufflevector(
                load_f32x4(out, row + col[j]), load_f32x4(out, row + col[j] + 16), 0, 1, 2, 3, 4, 5, 6, 7);
        }
        UNROLL for (int j = 0; j < 4; j++) {
            f32x8 x = piece(c, i, j);
            if (to.bias)
                x += bias[j];
            if (to.add)
                x += old[j];
            if (to.type == MX_BF16) {
                __builtin_amdgcn_raw_buffer_store_b128(__builtin_bit_cast(u32x4, __builtin_convertvector(x, bf16x8)),
                                                       out, row + col[j], 0, 0);
            } else {
                store_f32x4(out, row + col[j], low_half(x));
                store_f32x4(out, row + col[j] + 16, high_half(x));
            }
        }
    }
}

// One 4-byte store an element: rows of any length, 4-byte aligned.
INLINE void store_any_f32(const CONSTANT struct mx_gfx950_tile *tile, struct output to, int64_t stride,
                          f32x4 (*const c[4])[4], uint32_t first_row, uint32_t first_col, const f32x8 bias[4]) {
    const uint32_t stride_bytes = (uint32_t)stride * 4;
    const buffer out = output_buffer(tile, stride_bytes, 4);
    uint32_t col[4][8];
    UNROLL for (uint32_t j = 0; j < 4; j++) {
        UNROLL for (uint32_t e = 0; e < 8; e++) {
            const uint32_t at = piece_col(first_col, j) + e;
            col[j][e] = at < (uint32_t)tile->cols ? at * 4 : OUTSIDE;
        }
    }
    UNROLL for (int i = 0; i < to.pieces; i++) {
        const uint32_t row = piece_row(first_row, (uint32_t)i) * stride_bytes;
        f32x8 old[4];
        KEEP_ORDER();
        keep_pieces(c, i);
        if (to.add) {
            UNROLL for (int j = 0; j < 4; j++) {
                UNROLL for (int e = 0; e < 8; e++) old[j][e] = load_f32(out, row + col[j][e]);
            }
        }
        UNROLL for (int j = 0; j < 4; j++) {
            f32x8 x = piece(c, i, j);
            if (to.bias)
                x += bias[j];
            if (to.add)
                x += old[j];
            UNROLL for (int e = 0; e < 8; e++) store_f32(out, row + col[j][e], x[e]);
        }
    }
}

// Rows of any length, 2-byte aligned: through LDS, from which every lane takes one column. A wave uses two of the tile
// buffers, one per quadrant row half; a quadrant has 64 rows of 128 bytes, 16-byte chunk c of row R at c ^ (R & 7).
INLINE void store_any_bf16(const CONSTANT struct mx_gfx950_tile *tile, struct output to, int64_t stride,
                           f32x4 (*const c[4])[4], uint32_t wave, uint32_t lane, const f32x8 bias[4]) {
    LDS char *const half0 = wave == 0 ? a00 : wave == 1 ? b00 : wave == 2 ? a01 : b01;
    LDS char *const half1 = wave == 0 ? a10 : wave == 1 ? b10 : wave == 2 ? a11 : b11;
    UNROLL for (int i = 0; i < to.pieces; i++) {
        const uint32_t row = piece_row(fragment_row(lane & 15), (uint32_t)i & 3);
        KEEP_ORDER();
        keep_pieces(c, i);
        UNROLL for (int j = 0; j < 4; j++) {
            const uint32_t chunk = (uint32_t)(j & 1) * 4 + (lane >> 4);
            f32x8 x = piece(c, i, j);
            if (to.bias)
                x += bias[j];
            *(LDS bf16x8 *)((i < 4 ? half0 : half1) + (j >> 1) * 8192 + row * 128 + (chunk ^ (row & 7)) * 16) =
                __builtin_convertvector(x, bf16x8);
        }
    }
    ROLLED for (int32_t quadrant = 0; quadrant < to.pieces / 2; quadrant++) {
        const LDS char *from = (quadrant < 2 ? half0 : half1) + (quadrant & 1) * 8192 + lane % 8 * 2;
        const int32_t row = (int32_t)(wave >> 1) * 64 + quadrant / 2 * 128;
        const int32_t col = (int32_t)(wave & 1) * 64 + quadrant % 2 * 128 + (int32_t)lane;
        GLOBAL uint16_t *out = (GLOBAL uint16_t *)tile->out + row * stride + col;
        const int32_t rows = col < tile->cols ? tile->rows - row : 0;
        ROLLED for (int32_t r = 0; r < 64 && r < rows; r++) out[r * stride] =
            *(const LDS uint16_t *)(from + r * 128 + ((lane / 8) ^ ((uint32_t)r & 7)) * 16);
    }
}

// ---- one tile ----

INLINE void multiply_tile(const CONSTANT struct mx_gfx950_tile *tile, bool tall, int32_t stride, int64_t stride_out,
                          struct output to) {
    if (tile->bodies == 0) { // apart from what follows, so that accumulators never join a path without products
        store_zeros(tile, to, stride_out);
        return;
    }
    const uint32_t lane = thread_id() & 63, wave = uniform(thread_id() >> 6), wm = wave >> 1, wn = wave & 1;

    const buffer a_half0 = load_buffer(&tile->operand[wave][0][0]), a_half1 = load_buffer(&tile->operand[wave][0][1]);
    const buffer b_half0 = load_buffer(&tile->operand[wave][1][0]), b_half1 = load_buffer(&tile->operand[wave][1][1]);
    const uint32_t fill_lds = wave * (ROW_BLOCK * STEP);
    // Byte offsets of this lane's 16 bytes in fill i, at step 0, and the last step position at which its 32-element
    // block still exists.
    const uint32_t chunk = (lane & 7) ^ lane >> 3, block_end = (chunk / 2 + 1) * MX_BLOCK;
    const bool exists = block_end <= (uint32_t)tile->depth;
    const uint32_t last = exists ? (uint32_t)tile->depth - block_end : UINT32_MAX;
    const uint32_t row = (lane >> 5) * 8 + (lane >> 3 & 3);
    uint32_t base = row * (uint32_t)stride + chunk * 16 + MX_GFX950_FILL_BIAS, first_at[4];
    base = exists ? base : OUTSIDE;
    UNROLL for (uint32_t i = 0; i < 4; i++) first_at[i] =
        base + ((i & 1) * 16 + (i >> 1) * 4) * (uint32_t)stride - i * 1024;
// Fill offsets of the step at `position`. A lane that is past the contraction's end is past it by 32 to 448 elements
// (an even number of 32s up to the end of the body after the last), and its offset is that << 23: at least
// MAX_BUFFER_BYTES and short of wrapping.
// (The compiler knows no better than one subtraction and four shift-and-adds, so it is kept from looking for it.)
#define SET_OFFSETS(at)                                                                                                \
    do {                                                                                                               \
        asm volatile("" : "+s"(position));                                                                             \
        uint32_t past_ = __builtin_elementwise_sub_sat(position, last);                                                \
        asm volatile("" : "+v"(past_));                                                                                \
        UNROLL for (int i_ = 0; i_ < 4; i_++)(at)[i_] = (past_ << 23) + first_at[i_];                                  \
    } while (0)

    const buffer a_scales = load_buffer(&tile->scale[0][wm]), b_scales = load_buffer(&tile->scale[1][wn]);
    uint32_t scale_at = lane * 16;
    u32x4 sa = __builtin_amdgcn_raw_buffer_load_b128(a_scales, scale_at, 0, 0);
    u32x4 sb = __builtin_amdgcn_raw_buffer_load_b128(b_scales, scale_at, 0, 0);

    const uint32_t r = lane & 15, group = lane >> 4, swizzle = r & 7;
    const uint32_t low = r * STEP + ((group ^ swizzle) << 4), high = low ^ 64;
    const uint32_t a_low = wm * 8192 + low, a_high = wm * 8192 + high;
    const int a_bytes = tall ? 4 * TILE_BUFFER_BYTES : 2 * TILE_BUFFER_BYTES;
    uint32_t b_low = (uint32_t)a_bytes + wn * 8192 + low, b_high = (uint32_t)a_bytes + wn * 8192 + high;
    asm volatile("" : "+v"(b_low), "+v"(b_high));

    i32x4 zero = {};
    asm volatile("" : "+v"(zero));
    if (tile->depth < MX_GFX950_BODY) {
        ROLLED for (uint32_t place = fill_lds + lane * 16; place < fill_lds + ROW_BLOCK * STEP; place += 64 * 16) {
            LDS char *const buffers[] = {a00, b00, b10, a01, b01, b11, a10, a11};
            UNROLL for (int b = 0; b < (tall ? 8 : 6); b++) { *(LDS i32x4 *)(buffers[b] + place) = zero; }
        }
        WAIT(63);
    }
    uint32_t at[4], position = 0; // of the step to fill, from the group's start
    FILL_ALL(a00, a_half0, first_at);
    FILL_ALL(b00, b_half0, first_at);
    FILL_ALL(b10, b_half1, first_at);
    if (tall)
        FILL_ALL(a10, a_half1, first_at);
    position += STEP;
    SET_OFFSETS(at);
    FILL_ALL(a01, a_half0, at);
    FILL_ALL(b01, b_half0, at);
    FILL_ALL(b11, b_half1, at);
    if (tall)
        FILL_ALL(a11, a_half1, at);
    KEEP_ORDER();
    f32x4 c00[4][4], c01[4][4], c10[4][4], c11[4][4];
    CLEAR(c00[0], "0:15", "0:3", "4:7", "8:11", "12:15");
    CLEAR(c00[1], "16:31", "16:19", "20:23", "24:27", "28:31");
    CLEAR(c00[2], "32:47", "32:35", "36:39", "40:43", "44:47");
    CLEAR(c00[3], "48:63", "48:51", "52:55", "56:59", "60:63");
    CLEAR(c01[0], "64:79", "64:67", "68:71", "72:75", "76:79");
    CLEAR(c01[1], "80:95", "80:83", "84:87", "88:91", "92:95");
    CLEAR(c01[2], "96:111", "96:99", "100:103", "104:107", "108:111");
    CLEAR(c01[3], "112:127", "112:115", "116:119", "120:123", "124:127");
    if (tall) {
        CLEAR(c10[0], "128:143", "128:131", "132:135", "136:139", "140:143");
        CLEAR(c10[1], "144:159", "144:147", "148:151", "152:155", "156:159");
        CLEAR(c10[2], "160:175", "160:163", "164:167", "168:171", "172:175");
        CLEAR(c10[3], "176:191", "176:179", "180:183", "184:187", "188:191");
        CLEAR(c11[0], "192:207", "192:195", "196:199", "200:203", "204:207");
        CLEAR(c11[1], "208:223", "208:211", "212:215", "216:219", "220:223");
        CLEAR(c11[2], "224:239", "224:227", "228:231", "232:235", "236:239");
        CLEAR(c11[3], "240:255", "240:243", "244:247", "248:251", "252:255");
    }
    if (tall)
        WAIT_ALL_WAVES(24);
    else
        WAIT_ALL_WAVES(16);
    i32x8 a0[4], a1[4], b0[4], b1[4];
    UNROLL for (int t = 0; t < 4; t++) {
        READ_A(a0, a00, t);
        READ_B(b0, b00, t);
    }
    if (tall)
        WAIT_ALL_WAVES(16);
    else
        WAIT_ALL_WAVES(12);

    int32_t turns = tile->bodies;
#pragma clang loop unroll(disable)
    do {
        scale_at += MX_GFX950_BODY_SCALES;
        u32x4 next_sa = __builtin_amdgcn_raw_buffer_load_b128(a_scales, scale_at, 0, 0);
        u32x4 next_sb = __builtin_amdgcn_raw_buffer_load_b128(b_scales, scale_at, 0, 0);
        KEEP_ORDER();
        if (tall) {
            STEP_256X256(a00, a10, b00, b10, a01, b01, sa.x, sa.y, sb.x, sb.y);
            STEP_256X256(a01, a11, b01, b11, a00, b00, sa.z, sa.w, sb.z, sb.w);
        } else {
            STEP_128X256(a0, a1, a00, b00, b10, a01, b01, sa.x, sb.x, sb.y);
            STEP_128X256(a1, a0, a01, b01, b11, a00, b00, sa.z, sb.z, sb.w);
        }
        sa = next_sa;
        sb = next_sb;
    } while (--turns > 0);
#undef SET_OFFSETS
    PIN(c00);
    PIN(c01);
    if (tall) {
        PIN(c10);
        PIN(c11);
    }
    WAIT(0); // the last turn's fills: they must not reach LDS after this block

    f32x4(*const c[4])[4] = {c00, c01, c10, c11};
    const uint32_t first_row = wm * 64 + fragment_row(r), first_col = wn * 64 + group * 8;
    f32x8 bias[4] = {};
    if (to.bias)
        load_bias(bias, tile, to.any, first_col);
    if (!to.any) {
        store_wide(tile, to, stride_out, c, first_row, first_col, bias);
    } else if (to.type == MX_F32) {
        store_any_f32(tile, to, stride_out, c, first_row, first_col, bias);
    } else {
        WAIT_ALL_WAVES(0);
        store_any_bf16(tile, to, stride_out, c, wave, lane, bias);
    }
}

INLINE const CONSTANT struct mx_gfx950_tile *find_tile(const struct mx_gfx950_plan *plan) {
    return (const CONSTANT struct mx_gfx950_tile *)(uintptr_t)plan->workspace + block_id();
}

#define DEFINE_ROWS(name, tile_rows, tile_cols, type, add, bias, any)                                                  \
    KERNEL void name(struct mx_rows_args args, struct mx_gfx950_plan plan) {                                           \
        multiply_tile(find_tile(&plan), (tile_rows) == 256, (int32_t)args.k, args.n,                                   \
                      (struct output){type, add, bias, any, (tile_rows) / 32});                                        \
    }
#define DEFINE_DEPTH(name, tile_rows, tile_cols, type, add, bias, any)                                                 \
    KERNEL void name(struct mx_depth_args args, struct mx_gfx950_plan plan) {                                          \
        multiply_tile(find_tile(&plan), (tile_rows) == 256, (int32_t)args.depth, args.k,                               \
                      (struct output){type, add, bias, any, (tile_rows) / 32});                                        \
    }
MX_GFX950_ROWS_KERNELS(DEFINE_ROWS)
MX_GFX950_DEPTH_KERNELS(DEFINE_DEPTH)
