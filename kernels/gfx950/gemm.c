// gfx950 (MI355X) grouped MXFP8 GEMMs. Launch, workspace and the table of kernels: plan.h.
//
//   mx_gemm_rows_gfx950_<rows>x<columns>_*(struct mx_rows_args, struct mx_gfx950_plan)
//   mx_gemm_depth_gfx950_<rows>x<columns>_*(struct mx_depth_args, struct mx_gfx950_plan)
//
// A block does a tile: out[row][col] (+)= sum over d < depth of a[row][d] b[col][d] 2^(a_scale + b_scale - 254)
// (+ bias[col]), from the addresses that prepare wrote into its mx_gfx950_tile. A persistent kernel's block then does
// those that it gets from its XCD's counter, until there are none. Tiles share no output, and the bits depend on
// nothing but the tile's own operands.
//
// Operands: E4M3, rows `stride` bytes apart (k of gemm_rows, depth of gemm_depth), 16-byte aligned bases, strides and
// depths multiples of 32, stride <= MX_GFX950_MAX_DEPTH. Scales: prepare's order (plan.h). Output: aligned to its
// element (`any`) or to 16 bytes with rows of whole 8 elements; rows of up to MX_GFX950_MAX_COLS elements.
// Tails: rows past extent.rows, columns past extent.cols and the contraction past extent.depth are neither read nor
// written here: the loads' offsets for them are out of the buffer's bounds, which makes the operand 0, and so are the
// stores' or their lanes are off. Should hardware not write the zeros of such a load to LDS, what stands there is zero
// or the tile's own earlier columns of the same row, and its scales are 2^-127 on both sides. (In a row that does not
// exist it may be what a persistent block's earlier tile left: no output that exists depends on it.)
//
// Four waves, wave w = 2 * wm + wn. The tile is made of 128x128 quadrants, by `half` of A and `half` of B (128 rows or
// columns are one half); each wave has rows wm * 64 and columns wn * 64 of each quadrant, as 4x4 fragments of 16x16, by
// v_mfma_scale_f32_16x16x128_f8f6f4. Row r of fragment t is the operand's row fragment_row(r) + 4 * (t & 1) + 32 * (t
// >> 1) of 64, and the matrix instruction gets B as its first operand, so that a lane of the result holds 8 consecutive
// columns of one output row in two fragments. A 256x320 tile has 64 columns more, 32 a wave: one more fragment of each
// half of B, row r of which is row 256 + wn * 32 + fragment_row(r) + 4 * half.
//
// Registers: 64 accumulators a quadrant, all AGPRs, and 64 VGPRs for the columns past 256; 4 operand halves of 4
// fragments (or 5), 128 (144) VGPRs; 16 (18) of scales.
// LDS, 32 KB a half and 16 KB for the columns past 256: buffers {A, B} x {half} x {step parity} of 128 rows of 128
// bytes: 2 wave rows of 4 fragments of 16; 32 rows, 2 wave rows of 1 fragment, for the columns past 256. Row R keeps
// its 16-byte chunk c at place c ^ (R & 7), which makes the fragment reads free of bank conflicts.
//
// One turn of the loop is a body: two steps of 128. Fills (memory to LDS) run two steps ahead of their use and go to
// the half-step buffer that was read last; each barrier waits until only the wave's fills of one step are in flight,
// the newest. Scales are loaded one body ahead. There is no peeled turn: fills past the contraction's end, those of the
// whole last turn among them, have offsets out of bounds (SET_OFFSETS).
// In a persistent kernel the last turn stands after the loop: with its own descriptors the fills there are the next
// tile's first two steps, in flight during the stores, which leave LDS alone. The tile after that is asked for in the
// same turn; its number is known after the stores, and its description is loaded while accumulators are cleared.
//
// Output: plain kernels store from the accumulators, 16 bytes a lane. The others stage float32 in LDS, a wave its own
// rows, and read it back by rows, which costs LDS time but makes any alignment, bias and addition one short loop; their
// stores of 16 bytes lie at any element (HSA has the hardware take unaligned addresses). Only what is left of a row
// after pieces of 8 columns is stored by elements.
//
// Sources: CDNA4 ISA, chapters 7 (matrix instructions, scales), 9 (buffer resources, fills), 11 (LDS: 64 banks).
#include "device.h"

enum { TILE_BUFFER_BYTES = 16384, EXTRA_BUFFER_BYTES = 4096 };
#define TILE_BUFFER(name, bytes) static LDS char name[bytes] __attribute__((aligned(1024), loader_uninitialized))
// [operand][half][parity], as separate arrays: the compiler then knows that fills and reads do not overlap. x: B's rows
// past 256. Those of a kernel are its LDS from address 0 on; what is less aligned follows.
TILE_BUFFER(a00, TILE_BUFFER_BYTES);
TILE_BUFFER(a10, TILE_BUFFER_BYTES);
TILE_BUFFER(b00, TILE_BUFFER_BYTES);
TILE_BUFFER(b10, TILE_BUFFER_BYTES);
TILE_BUFFER(a01, TILE_BUFFER_BYTES);
TILE_BUFFER(a11, TILE_BUFFER_BYTES);
TILE_BUFFER(b01, TILE_BUFFER_BYTES);
TILE_BUFFER(b11, TILE_BUFFER_BYTES);
TILE_BUFFER(x00, EXTRA_BUFFER_BYTES);
TILE_BUFFER(x10, EXTRA_BUFFER_BYTES);
TILE_BUFFER(x01, EXTRA_BUFFER_BYTES);
TILE_BUFFER(x11, EXTRA_BUFFER_BYTES);

// A tile, constant in each use.
struct shape {
    int a_halves, b_halves;
    bool extra;        // 64 columns more
    int b_lane_scales; // bytes of B's scales of a lane and body
};

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
// A wave's 8 rows of a half of B's rows past 256: rows of fill 0 for half 0, of fill 2 for half 1.
#define FILL_EXTRA(to, at, half)                                                                                       \
    __builtin_amdgcn_raw_ptr_buffer_load_lds(in.x_rows, (LDS void *)((to) + fill_extra_lds - (half) * 2048), 16,       \
                                             (at)[(half) * 2], position, (half) * 2048, 0)

INLINE i32x8 read_fragment(const LDS char *from, uint32_t low, uint32_t high, int t) {
    i32x4 lo = *(const LDS i32x4 *)(from + low + t * 16 * STEP), hi = *(const LDS i32x4 *)(from + high + t * 16 * STEP);
    return __builtin_shufflevector(lo, hi, 0, 1, 2, 3, 4, 5, 6, 7);
}
#define READ_A(to, from, t) (to)[t] = read_fragment(from, a_low, a_high, t)
// B's buffers lie past what an LDS instruction's offset reaches; its lane offsets begin at A's end and make up for it.
#define READ_B(to, from, t) (to)[t] = read_fragment((from) - a_bytes, b_low, b_high, t)
#define READ_EXTRA(to, from) to = read_fragment((from) - a_bytes - b_bytes, x_low, x_high, 0)

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

// The products of all of a with the fragment x of B's rows past 256. Their accumulators are VGPRs, of which there are
// no more AGPRs; as a builtin the compiler would copy them to some and back. It knows nothing of the latency: every
// other use of c stands at least a quadrant or FINISH_EXTRA away.
#define MULTIPLY_EXTRA(c, a, x, i, x_byte, a_scale, x_scale)                                                           \
    asm("v_mfma_scale_f32_16x16x128_f8f6f4 %0, %1, %2, %0, %3, %4 op_sel:[%5,%6,0] op_sel_hi:[%7,%8,0]"                \
        : "+v"((c)[i])                                                                                                 \
        : "v"(x), "v"((a)[i]), "v"(x_scale), "v"(a_scale), "n"((x_byte) & 1), "n"((i) & 1), "n"((x_byte) >> 1),        \
          "n"((i) >> 1))
#define EXTRA(c, a, x, x_byte, a_scale, x_scale, s0)                                                                   \
    do {                                                                                                               \
        MULTIPLY_EXTRA(c, a, x, 0, x_byte, a_scale, x_scale);                                                          \
        s0;                                                                                                            \
        KEEP_ORDER();                                                                                                  \
        MULTIPLY_EXTRA(c, a, x, 1, x_byte, a_scale, x_scale);                                                          \
        MULTIPLY_EXTRA(c, a, x, 2, x_byte, a_scale, x_scale);                                                          \
        MULTIPLY_EXTRA(c, a, x, 3, x_byte, a_scale, x_scale);                                                          \
        KEEP_ORDER();                                                                                                  \
    } while (0)
// 12 wait states: the latency of the last of them.
#define FINISH_EXTRA()                                                                                                 \
    do {                                                                                                               \
        KEEP_ORDER();                                                                                                  \
        asm volatile("s_nop 11");                                                                                      \
        KEEP_ORDER();                                                                                                  \
    } while (0)

// One step. Buffers now_* are this step's, next_* the following one's; fills go two steps ahead, to now_*. Of an
// operand with one half, now_a or now_b are the fragments in use, next_a or next_b those read for the next step. `step`
// is 0 or 1 of the body.
//
// 256 columns, and the columns past 256 where the tile has them. The wait for b1 in one: it is long there.
#define STEP_256X256(step, now_a0, now_a1, now_b0, now_b1, now_x0, now_x1, next_a0, next_b0, next_x0, a_scale0,        \
                     a_scale1, b_scale0, b_scale1)                                                                     \
    do {                                                                                                               \
        position += STEP;                                                                                              \
        SET_OFFSETS(at);                                                                                               \
        QUADRANT(c[0], a0, b0, a_scale0, b_scale0, READ_B(b1, now_b1, 0), READ_B(b1, now_b1, 1),                       \
                 READ_B(b1, now_b1, 2), READ_B(b1, now_b1, 3), FILL(now_a0, in.a_half0, at, 0),                        \
                 if (shape.extra) READ_EXTRA(x1, now_x1), FILL(now_a0, in.a_half0, at, 1), NOTHING,                    \
                 FILL(now_a0, in.a_half0, at, 2), NOTHING, FILL(now_a0, in.a_half0, at, 3), NOTHING);                  \
        if (shape.extra)                                                                                               \
            EXTRA(cx[0], a0, x0, (step) * 2, a_scale0, sx, NOTHING);                                                   \
        WAIT(63);                                                                                                      \
        KEEP_ORDER();                                                                                                  \
        QUADRANT(c[1], a0, b1, a_scale0, b_scale1, READ_A(a1, now_a1, 0), READ_A(a1, now_a1, 1),                       \
                 READ_A(a1, now_a1, 2), READ_A(a1, now_a1, 3), FILL(now_b0, in.b_half0, at, 0), NOTHING,               \
                 FILL(now_b0, in.b_half0, at, 1), NOTHING, FILL(now_b0, in.b_half0, at, 2), NOTHING,                   \
                 FILL(now_b0, in.b_half0, at, 3), NOTHING);                                                            \
        if (shape.extra) {                                                                                             \
            EXTRA(cx[1], a0, x1, (step) * 2 + 1, a_scale0, sx, FILL_EXTRA(now_x0, at, 0));                             \
            WAIT_ALL_WAVES(18);                                                                                        \
        } else {                                                                                                       \
            WAIT_ALL_WAVES(16);                                                                                        \
        }                                                                                                              \
        QUADRANT(c[2], a1, b0, a_scale1, b_scale0, READ_A(a0, next_a0, 0), READ_A(a0, next_a0, 1),                     \
                 READ_A(a0, next_a0, 2), READ_A(a0, next_a0, 3), FILL(now_b1, in.b_half1, at, 0), NOTHING,             \
                 FILL(now_b1, in.b_half1, at, 1), NOTHING, FILL(now_b1, in.b_half1, at, 2), NOTHING,                   \
                 FILL(now_b1, in.b_half1, at, 3), NOTHING);                                                            \
        if (shape.extra)                                                                                               \
            EXTRA(cx[2], a1, x0, (step) * 2, a_scale1, sx, FILL_EXTRA(now_x1, at, 1));                                 \
        QUADRANT(c[3], a1, b1, a_scale1, b_scale1, READ_B(b0, next_b0, 0), READ_B(b0, next_b0, 1),                     \
                 READ_B(b0, next_b0, 2), READ_B(b0, next_b0, 3), FILL(now_a1, in.a_half1, at, 0),                      \
                 if (shape.extra) READ_EXTRA(x0, next_x0), FILL(now_a1, in.a_half1, at, 1), NOTHING,                   \
                 FILL(now_a1, in.a_half1, at, 2), NOTHING, FILL(now_a1, in.a_half1, at, 3), NOTHING);                  \
        if (shape.extra) {                                                                                             \
            EXTRA(cx[3], a1, x1, (step) * 2 + 1, a_scale1, sx, NOTHING);                                               \
            WAIT_ALL_WAVES(18);                                                                                        \
        } else {                                                                                                       \
            WAIT_ALL_WAVES(16);                                                                                        \
        }                                                                                                              \
    } while (0)

#define STEP_128X256(now_a, next_a, now_a0, now_b0, now_b1, next_a0, next_b0, a_scale, b_scale0, b_scale1)             \
    do {                                                                                                               \
        position += STEP;                                                                                              \
        SET_OFFSETS(at);                                                                                               \
        QUADRANT(c[0], now_a, b0, a_scale, b_scale0, READ_B(b1, now_b1, 0), READ_B(b1, now_b1, 1),                     \
                 READ_B(b1, now_b1, 2), READ_B(b1, now_b1, 3), FILL(now_a0, in.a_half0, at, 0),                        \
                 FILL(now_a0, in.a_half0, at, 1), FILL(now_a0, in.a_half0, at, 2), FILL(now_a0, in.a_half0, at, 3),    \
                 FILL(now_b0, in.b_half0, at, 0), FILL(now_b0, in.b_half0, at, 1), FILL(now_b0, in.b_half0, at, 2),    \
                 FILL(now_b0, in.b_half0, at, 3));                                                                     \
        WAIT_ALL_WAVES(12);                                                                                            \
        QUADRANT(c[1], now_a, b1, a_scale, b_scale1, READ_A(next_a, next_a0, 0), READ_A(next_a, next_a0, 1),           \
                 READ_A(next_a, next_a0, 2), READ_A(next_a, next_a0, 3), READ_B(b0, next_b0, 0),                       \
                 READ_B(b0, next_b0, 1), READ_B(b0, next_b0, 2), READ_B(b0, next_b0, 3),                               \
                 FILL(now_b1, in.b_half1, at, 0), FILL(now_b1, in.b_half1, at, 1), FILL(now_b1, in.b_half1, at, 2),    \
                 FILL(now_b1, in.b_half1, at, 3));                                                                     \
        WAIT_ALL_WAVES(12);                                                                                            \
    } while (0)

#define STEP_256X128(now_b, next_b, now_a0, now_a1, now_b0, next_a0, next_b0, a_scale0, a_scale1, b_scale)             \
    do {                                                                                                               \
        position += STEP;                                                                                              \
        SET_OFFSETS(at);                                                                                               \
        QUADRANT(c[0], a0, now_b, a_scale0, b_scale, READ_A(a1, now_a1, 0), READ_A(a1, now_a1, 1),                     \
                 READ_A(a1, now_a1, 2), READ_A(a1, now_a1, 3), FILL(now_a0, in.a_half0, at, 0),                        \
                 FILL(now_a0, in.a_half0, at, 1), FILL(now_a0, in.a_half0, at, 2), FILL(now_a0, in.a_half0, at, 3),    \
                 FILL(now_b0, in.b_half0, at, 0), FILL(now_b0, in.b_half0, at, 1), FILL(now_b0, in.b_half0, at, 2),    \
                 FILL(now_b0, in.b_half0, at, 3));                                                                     \
        WAIT_ALL_WAVES(12);                                                                                            \
        QUADRANT(c[1], a1, now_b, a_scale1, b_scale, READ_A(a0, next_a0, 0), READ_A(a0, next_a0, 1),                   \
                 READ_A(a0, next_a0, 2), READ_A(a0, next_a0, 3), READ_B(next_b, next_b0, 0),                           \
                 READ_B(next_b, next_b0, 1), READ_B(next_b, next_b0, 2), READ_B(next_b, next_b0, 3),                   \
                 FILL(now_a1, in.a_half1, at, 0), FILL(now_a1, in.a_half1, at, 1), FILL(now_a1, in.a_half1, at, 2),    \
                 FILL(now_a1, in.a_half1, at, 3));                                                                     \
        WAIT_ALL_WAVES(12);                                                                                            \
    } while (0)

#define STEP_128X128(now_a, next_a, now_b, next_b, now_a0, now_b0, next_a0, next_b0, a_scale, b_scale)                 \
    do {                                                                                                               \
        position += STEP;                                                                                              \
        SET_OFFSETS(at);                                                                                               \
        QUADRANT(c[0], now_a, now_b, a_scale, b_scale, FILL_TWO(now_a0, in.a_half0, at, 0),                            \
                 FILL_TWO(now_a0, in.a_half0, at, 2), FILL_TWO(now_b0, in.b_half0, at, 0),                             \
                 FILL_TWO(now_b0, in.b_half0, at, 2), WAIT_ALL_WAVES(8);                                               \
                 READ_A(next_a, next_a0, 0), READ_B(next_b, next_b0, 0), READ_A(next_a, next_a0, 1),                   \
                 READ_B(next_b, next_b0, 1), READ_A(next_a, next_a0, 2), READ_B(next_b, next_b0, 2),                   \
                 READ_A(next_a, next_a0, 3), READ_B(next_b, next_b0, 3));                                              \
        WAIT_ALL_WAVES(8);                                                                                             \
    } while (0)
#define FILL_TWO(to, from, at, i)                                                                                      \
    FILL(to, from, at, i);                                                                                             \
    FILL(to, from, at, i + 1)

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

INLINE void clear_extra(f32x4 c[4], u64x2 zero) {
    f32x16 all;
    asm volatile("v_mfma_f32_32x32x64_f8f6f4 %0, %1, %1, 0 cbsz:4 blgp:4" : "=&v"(all) : "v"(zero));
    c[0] = __builtin_shufflevector(all, all, 0, 1, 2, 3);
    c[1] = __builtin_shufflevector(all, all, 4, 5, 6, 7);
    c[2] = __builtin_shufflevector(all, all, 8, 9, 10, 11);
    c[3] = __builtin_shufflevector(all, all, 12, 13, 14, 15);
}

// ---- output ----

// How a kernel writes its tile: constants of one line of kernels.def.
struct output {
    enum mx_type type;
    bool add;  // to what is there
    bool bias; // tile.bias, which may be null
    bool any;  // any alignment and width; else rows of whole 16 bytes, 16-byte aligned, and neither of the above
};

INLINE uint32_t type_bytes(enum mx_type type) { return type == MX_BF16 ? 2 : 4; }

INLINE void store_zeros(const CONSTANT struct mx_gfx950_tile *tile, struct mx_gfx950_extent extent, struct output to,
                        int64_t stride, u32x4 zeros) {
    const uint32_t size = type_bytes(to.type), lane = thread_id() & 63;
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
    const uint32_t size = type_bytes(to.type), stride_bytes = (uint32_t)stride * size;
    const uint32_t col = (wave & 1) * 64 + (lane >> 4) * 8;
    struct direct d = {.out = output_buffer(tile, extent, stride_bytes, size), .type = to.type};
    d.at[0] = ((wave >> 1) * 64 + fragment_row(lane & 15)) * stride_bytes + col * size;
    UNROLL for (int i = 1; i < 4 * shape.a_halves; i++) d.at[i] = i & 4   ? d.at[i - 4] + 128 * stride_bytes
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
    const uint32_t size = type_bytes(to.type);
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
        UNROLL for (int j = 0; extra && j < 2; j++) * (LDS f32x4 *)(to[j] + row) =
            sums.extra[(first >> 1) * 2 + j][fragment];
        UNROLL for (int j = 0; !extra && j < 4 * shape.b_halves; j++) *
            (LDS f32x4 *)(to[j & 1] + row + (j >> 1) * 128) =
            sums.quadrant[(first >> 1) * shape.b_halves + (j >> 2)][fragment][j & 3];
    }
    KEEP_ORDER();
}

// One strip.
INLINE void store_strip(const CONSTANT struct mx_gfx950_tile *tile, struct mx_gfx950_extent extent, struct shape shape,
                        struct output to, int64_t stride, struct sums sums, uint32_t wave, uint32_t lane, bool extra) {
    const uint32_t halves = (uint32_t)shape.b_halves, pieces = extra ? 4 : 8 * halves, size = type_bytes(to.type);
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

// ---- tiles ----

// What a wave reads of a tile: the rows that it fills, the scales of its products.
struct operands {
    buffer a_half0, a_half1, b_half0, b_half1, x_rows, a_scales, b_scales;
};

INLINE void load_rows(struct operands *in, const CONSTANT struct mx_gfx950_tile *tile, uint32_t wave) {
    const CONSTANT struct mx_gfx950_buffer *const rows =
        (const CONSTANT struct mx_gfx950_buffer *)((const CONSTANT char *)tile->wave +
                                                   wave * (uint32_t)sizeof tile->wave[0]);
    in->a_half0 = load_buffer(&rows[0]), in->a_half1 = load_buffer(&rows[1]);
    in->b_half0 = load_buffer(&rows[2]), in->b_half1 = load_buffer(&rows[3]), in->x_rows = load_buffer(&rows[4]);
}

INLINE void load_scales(struct operands *in, const CONSTANT struct mx_gfx950_tile *tile, uint32_t wm, uint32_t wn) {
    in->a_scales = load_buffer(&tile->scale[0][wm]), in->b_scales = load_buffer(&tile->scale[1][wn]);
}

// A persistent block's next tile, and how it comes by the one after: thread 0 asks the XCD's counter, and hands out the
// answer through LDS.
struct queue {
    const CONSTANT struct mx_gfx950_tile *tiles;
    int32_t count; // of tiles
    GLOBAL char *counters;
    int32_t answer; // of thread 0
    int32_t number; // of the next tile: there is none from `count` on
    const CONSTANT struct mx_gfx950_tile *next;
    struct mx_gfx950_extent extent; // the next tile's
};
static LDS int32_t handed_out __attribute__((loader_uninitialized));

INLINE void ask(struct queue *q) {
    if (thread_id() == 0) {
        uint32_t at = block_id() % MX_GFX950_XCDS * MX_GFX950_COUNTER_BYTES;
        asm volatile("" : "+v"(at)); // else the compiler adds up over lanes first
        GLOBAL int32_t *counter = (GLOBAL int32_t *)(q->counters + at);
        q->answer = __scoped_atomic_fetch_add(counter, MX_GFX950_XCDS, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
    }
}

// Between barriers: before it all have learnt what was handed out last, and they learn after the next one.
INLINE void hand_out(const struct queue *q) {
    if (thread_id() == 0)
        handed_out = q->answer;
}

INLINE void learn(struct queue *q, struct operands *in, uint32_t wave) { // nobody waits for the tile's description yet
    q->number = (int32_t)uniform((uint32_t)handed_out);
    q->next = q->tiles + (q->number < q->count ? q->number : q->count - 1);
    q->extent = q->next->extent;
    load_rows(in, q->next, wave);
    load_scales(in, q->next, wave >> 1, wave & 1);
}

// Fill offsets of the step at `position`. A lane that is past the contraction's end is past it by 32 to 448 elements
// (an even number of 32s up to the end of the body after the last), and its offset is that << 23: at least
// 2^28, which is past every buffer's end, and short of wrapping.
// (The compiler knows no better than one subtraction and four shift-and-adds, so it is kept from looking for it.)
#define SET_OFFSETS(at)                                                                                                \
    do {                                                                                                               \
        asm volatile("" : "+s"(position), "+s"(fill_lds), "+s"(fill_extra_lds));                                       \
        uint32_t past_ = __builtin_elementwise_sub_sat(position, last);                                                \
        asm volatile("" : "+v"(past_));                                                                                \
        UNROLL for (int i_ = 0; i_ < 4; i_++)(at)[i_] = (past_ << 23) + first_at[i_];                                  \
    } while (0)

#define CLEAR_ALL(c)                                                                                                   \
    do {                                                                                                               \
        CLEAR((c)[0][0], "0:15", "0:3", "4:7", "8:11", "12:15");                                                       \
        CLEAR((c)[0][1], "16:31", "16:19", "20:23", "24:27", "28:31");                                                 \
        CLEAR((c)[0][2], "32:47", "32:35", "36:39", "40:43", "44:47");                                                 \
        CLEAR((c)[0][3], "48:63", "48:51", "52:55", "56:59", "60:63");                                                 \
        if (a_two || b_two) {                                                                                          \
            CLEAR((c)[1][0], "64:79", "64:67", "68:71", "72:75", "76:79");                                             \
            CLEAR((c)[1][1], "80:95", "80:83", "84:87", "88:91", "92:95");                                             \
            CLEAR((c)[1][2], "96:111", "96:99", "100:103", "104:107", "108:111");                                      \
            CLEAR((c)[1][3], "112:127", "112:115", "116:119", "120:123", "124:127");                                   \
        }                                                                                                              \
        if (a_two && b_two) {                                                                                          \
            CLEAR((c)[2][0], "128:143", "128:131", "132:135", "136:139", "140:143");                                   \
            CLEAR((c)[2][1], "144:159", "144:147", "148:151", "152:155", "156:159");                                   \
            CLEAR((c)[2][2], "160:175", "160:163", "164:167", "168:171", "172:175");                                   \
            CLEAR((c)[2][3], "176:191", "176:179", "180:183", "184:187", "188:191");                                   \
            CLEAR((c)[3][0], "192:207", "192:195", "196:199", "200:203", "204:207");                                   \
            CLEAR((c)[3][1], "208:223", "208:211", "212:215", "216:219", "220:223");                                   \
            CLEAR((c)[3][2], "224:239", "224:227", "228:231", "232:235", "236:239");                                   \
            CLEAR((c)[3][3], "240:255", "240:243", "244:247", "248:251", "252:255");                                   \
        }                                                                                                              \
    } while (0)

// The two steps of a body. The scales of the one after are at a_scale_at and b_scale_at, one register if they can be.
#define B_SCALE_AT (shape.b_lane_scales == MX_GFX950_LANE_SCALES ? a_scale_at : b_scale_at)
#define TURN()                                                                                                         \
    do {                                                                                                               \
        u32x4 next_sa = __builtin_amdgcn_raw_buffer_load_b128(in.a_scales, a_scale_at, 0, 0);                          \
        u32x4 next_sb = __builtin_amdgcn_raw_buffer_load_b128(in.b_scales, B_SCALE_AT, 0, 0);                          \
        uint32_t next_sx = shape.extra ? __builtin_amdgcn_raw_buffer_load_b32(in.b_scales, b_scale_at + 16, 0, 0) : 0; \
        KEEP_ORDER();                                                                                                  \
        if (a_two && b_two) {                                                                                          \
            STEP_256X256(0, a00, a10, b00, b10, x00, x10, a01, b01, x01, sa.x, sa.y, sb.x, sb.y);                      \
            STEP_256X256(1, a01, a11, b01, b11, x01, x11, a00, b00, x00, sa.z, sa.w, sb.z, sb.w);                      \
        } else if (b_two) {                                                                                            \
            STEP_128X256(a0, a1, a00, b00, b10, a01, b01, sa.x, sb.x, sb.y);                                           \
            STEP_128X256(a1, a0, a01, b01, b11, a00, b00, sa.z, sb.z, sb.w);                                           \
        } else if (a_two) {                                                                                            \
            STEP_256X128(b0, b1, a00, a10, b00, a01, b01, sa.x, sa.y, sb.x);                                           \
            STEP_256X128(b1, b0, a01, a11, b01, a00, b00, sa.z, sa.w, sb.z);                                           \
        } else {                                                                                                       \
            STEP_128X128(a0, a1, b0, b1, a00, b00, a01, b01, sa.x, sb.x);                                              \
            STEP_128X128(a1, a0, b1, b0, a01, b01, a00, b00, sa.z, sb.z);                                              \
        }                                                                                                              \
        sa = next_sa;                                                                                                  \
        sb = next_sb;                                                                                                  \
        sx = next_sx;                                                                                                  \
    } while (0)
#define NEXT_SCALES()                                                                                                  \
    do {                                                                                                               \
        a_scale_at += 64 * MX_GFX950_LANE_SCALES;                                                                      \
        b_scale_at += 64 * (uint32_t)shape.b_lane_scales;                                                              \
        if (shape.extra)                                                                                               \
            asm volatile("" : "+v"(b_scale_at)); /* one register */                                                    \
    } while (0)

// One tile; with a queue, which takes a shape of 256x256 and plain output, it and those after it while they can follow:
// the fills and scales that the last turn of a tile issues are the next one's first. Then nothing is in flight.
INLINE void multiply_tile(const CONSTANT struct mx_gfx950_tile *tile, struct mx_gfx950_extent extent,
                          struct shape shape, int32_t stride, int64_t stride_out, struct output to, struct queue *q) {
    const bool a_two = shape.a_halves == 2, b_two = shape.b_halves == 2;
    const uint32_t lane = thread_id() & 63, wave = uniform(thread_id() >> 6), wm = wave >> 1, wn = wave & 1;

    struct operands in, next;
    load_rows(&in, tile, wave);
    uint32_t fill_lds = wave * (ROW_BLOCK * STEP), fill_extra_lds = fill_lds / 4;
    // Byte offsets of this lane's 16 bytes in fill i, at step 0, and the last step position at which its 32-element
    // block still exists.
    const uint32_t chunk = (lane & 7) ^ lane >> 3, block_end = (chunk / 2 + 1) * MX_BLOCK;
    const bool exists = block_end <= (uint32_t)extent.depth;
    uint32_t last = exists ? (uint32_t)extent.depth - block_end : UINT32_MAX;
    const uint32_t row = (lane >> 5) * 8 + (lane >> 3 & 3);
    uint32_t base = row * (uint32_t)stride + chunk * 16 + MX_GFX950_FILL_BIAS, first_at[4];
    base = exists ? base : OUTSIDE;
    UNROLL for (uint32_t i = 0; i < 4; i++) first_at[i] =
        base + ((i & 1) * 16 + (i >> 1) * 4) * (uint32_t)stride - i * 1024;

    load_scales(&in, tile, wm, wn);
    uint32_t a_scale_at = lane * MX_GFX950_LANE_SCALES, b_scale_at = lane * (uint32_t)shape.b_lane_scales;
    u32x4 sa = __builtin_amdgcn_raw_buffer_load_b128(in.a_scales, a_scale_at, 0, 0);
    u32x4 sb = __builtin_amdgcn_raw_buffer_load_b128(in.b_scales, b_scale_at, 0, 0);
    uint32_t sx = shape.extra ? __builtin_amdgcn_raw_buffer_load_b32(in.b_scales, b_scale_at + 16, 0, 0) : 0;

    const int a_bytes = shape.a_halves * 2 * TILE_BUFFER_BYTES, b_bytes = shape.b_halves * 2 * TILE_BUFFER_BYTES;
    uint64_t zeros[2] = {}; // two instructions
    asm volatile("" : "+v"(zeros[0]));
    asm volatile("" : "+v"(zeros[1]));
    const u64x2 zero = {zeros[0], zeros[1]};
    if (extent.depth < MX_GFX950_BODY) {
        const uint32_t all = (uint32_t)(a_bytes + b_bytes) + (shape.extra ? 4 * EXTRA_BUFFER_BYTES : 0);
        ROLLED for (uint32_t done = 0; done < all; done += MX_GFX950_THREADS * 16) {
            uint32_t place = done + thread_id() * 16;
            asm volatile("" : "+v"(place)); // not an earlier place and a larger offset: LDS addresses do not wrap
            *(LDS u64x2 *)place = zero;
        }
        WAIT_ALL_WAVES(63);
    }
    uint32_t at[4], position = 0; // of the step to fill, from the group's start
    int32_t turns = extent.bodies;
    FILL_ALL(a00, in.a_half0, first_at);
    FILL_ALL(b00, in.b_half0, first_at);
    if (shape.extra)
        FILL_EXTRA(x00, first_at, 0);
    if (b_two)
        FILL_ALL(b10, in.b_half1, first_at);
    if (shape.extra)
        FILL_EXTRA(x10, first_at, 1);
    if (a_two)
        FILL_ALL(a10, in.a_half1, first_at);
    const uint32_t r = lane & 15, group = lane >> 4, swizzle = r & 7;
    const uint32_t low = r * STEP + ((group ^ swizzle) << 4), high = low ^ 64;
    const uint32_t a_low = wm * 8192 + low, a_high = wm * 8192 + high;
    uint32_t b_low = (uint32_t)a_bytes + wn * 8192 + low, b_high = (uint32_t)a_bytes + wn * 8192 + high;
    uint32_t x_low = (uint32_t)(a_bytes + b_bytes) + wn * 2048 + low, x_high = x_low - low + high;
    asm volatile("" : "+v"(b_low), "+v"(b_high));
    if (shape.extra)
        asm volatile("" : "+v"(x_low), "+v"(x_high));
    position += STEP;
    SET_OFFSETS(at);
    FILL_ALL(a01, in.a_half0, at);
    FILL_ALL(b01, in.b_half0, at);
    if (shape.extra)
        FILL_EXTRA(x01, at, 0);
    if (b_two)
        FILL_ALL(b11, in.b_half1, at);
    if (shape.extra)
        FILL_EXTRA(x11, at, 1);
    if (a_two)
        FILL_ALL(a11, in.a_half1, at);

    KEEP_ORDER();

    f32x4 c[4][4][4], cx[4][4];
    CLEAR_ALL(c);
    if (shape.extra)
        UNROLL for (int i = 0; i < 4; i++) { clear_extra(cx[i], zero); }
    // Until only the fills after a00 and b00 (and x00) are in flight, then until only those of step 1 are.
    if (shape.extra)
        WAIT_ALL_WAVES(27);
    else if (a_two && b_two)
        WAIT_ALL_WAVES(24);
    else if (a_two || b_two)
        WAIT_ALL_WAVES(16);
    else
        WAIT_ALL_WAVES(8);
    if (q)
        hand_out(q);
    i32x8 a0[4], a1[4], b0[4], b1[4], x0, x1;
    UNROLL for (int t = 0; t < 4; t++) {
        READ_A(a0, a00, t);
        READ_B(b0, b00, t);
    }
    if (shape.extra)
        READ_EXTRA(x0, x00);
    if (shape.extra)
        WAIT_ALL_WAVES(18);
    else if (a_two && b_two)
        WAIT_ALL_WAVES(16);
    else if (a_two || b_two)
        WAIT_ALL_WAVES(12);
    else
        WAIT_ALL_WAVES(8);

    const struct sums sums = {{c[0], c[1], c[2], c[3]}, cx};

    if (!q) {
#pragma clang loop unroll(disable)
        do {
            NEXT_SCALES();
            TURN();
        } while (--turns > 0);
        PIN(c[0]);
        if (a_two || b_two)
            PIN(c[1]);
        if (a_two && b_two) {
            PIN(c[2]);
            PIN(c[3]);
        }
        if (shape.extra)
            FINISH_EXTRA();
        if (to.any) {
            WAIT_ALL_WAVES(0); // the last turn's fills, too: they must not reach LDS after this
            store_staged(tile, extent, shape, to, stride_out, sums, wave, lane);
        } else {
            WAIT(0); // nor after this block
            store_direct(tile, extent, shape, to, stride_out, sums, wave, lane);
        }
        return;
    }
    learn(q, &next, wave);
    for (;;) { // once a tile
        ROLLED while (--turns > 0) {
            NEXT_SCALES();
            TURN();
        }
        // Only after and before tiles of a body or more: all lanes' blocks exist in step 0, so that first_at is right,
        // and fills of the next tile's first two steps leave nothing of this one in rows that exist.
        const bool goes_on =
            q->number < q->count && q->extent.depth >= MX_GFX950_BODY && extent.depth >= MX_GFX950_BODY;
        NEXT_SCALES();
        if (goes_on) {
            ask(q);
            in = next;
            last = (uint32_t)q->extent.depth - block_end;
            position = (uint32_t)-STEP;
            a_scale_at = b_scale_at = lane * MX_GFX950_LANE_SCALES;
        }
        TURN();
        PIN(c[0]);
        PIN(c[1]);
        PIN(c[2]);
        PIN(c[3]);
        hand_out(q); // for nobody if it does not go on
        uint32_t out_lane = lane, out_wave = wave;
        int32_t out_stride = (int32_t)stride_out;
        asm volatile("" : "+v"(out_lane), "+s"(out_wave), "+s"(out_stride)); // no addresses before the first tile
        store_direct(tile, extent, shape, to, out_stride, sums, out_wave, out_lane);
        if (!goes_on) {
            WAIT_ALL_WAVES(0);
            return;
        }
        tile = q->next;
        extent = q->extent;
        turns = extent.bodies;
        WAIT_ALL_WAVES(63);
        learn(q, &next, wave);
        CLEAR_ALL(c);
        KEEP_ORDER();
    }
}

// Tiles without products come first, so that accumulators never join a path without any.
INLINE void run_tile(const struct mx_gfx950_plan *plan, int rows, int cols, int64_t stride, int64_t stride_out,
                     struct output to) {
    const CONSTANT struct mx_gfx950_tile *tile =
        (const CONSTANT struct mx_gfx950_tile *)(uintptr_t)plan->workspace + block_id();
    const struct mx_gfx950_extent extent = tile->extent;
    const struct shape shape = {rows / 128, cols / 128, false,
                                cols == 320 ? MX_GFX950_WIDE_LANE_SCALES : MX_GFX950_LANE_SCALES};
    const struct shape wide = {2, 2, true, MX_GFX950_WIDE_LANE_SCALES};
    if (extent.bodies == 0) {
        store_zeros(tile, extent, to, stride_out, (u32x4){});
        __builtin_amdgcn_endpgm(); // rather than return: the compiler joins no paths
    }
    if (cols == 320 && extent.cols > 256) {
        multiply_tile(tile, extent, wide, (int32_t)stride, stride_out, to, nullptr);
        __builtin_amdgcn_endpgm();
    }
    multiply_tile(tile, extent, shape, (int32_t)stride, stride_out, to, nullptr);
    __builtin_amdgcn_endpgm();
}

// The block's first tile, then those that the queue gives.
INLINE void run_tiles(const struct mx_gfx950_plan *plan, int64_t stride, int64_t stride_out, struct output to) {
    const struct shape shape = {2, 2, false, MX_GFX950_LANE_SCALES};
    struct queue q;
    q.tiles = (const CONSTANT struct mx_gfx950_tile *)(uintptr_t)plan->workspace;
    q.counters = (GLOBAL char *)plan->workspace + plan->counters;
    q.count = plan->tiles;
    q.number = (int32_t)block_id();
    do { // nothing is in flight, and no tile has been asked for
        const CONSTANT struct mx_gfx950_tile *tile = q.tiles + q.number;
        const struct mx_gfx950_extent extent = tile->extent;
        ask(&q);
        if (extent.bodies) {
            multiply_tile(tile, extent, shape, (int32_t)stride, stride_out, to, &q);
        } else {
            int64_t out_stride = stride_out;
            u32x4 zeros = {};
            asm volatile("" : "+s"(out_stride), "+v"(zeros)); // no addresses, no zeros before the first tile
            store_zeros(tile, extent, to, out_stride, zeros);
            WAIT_ALL_WAVES(0);
            hand_out(&q);
            WAIT_ALL_WAVES(0);
            struct operands unused;
            learn(&q, &unused, 0);
        }
    } while (q.number < q.count);
    __builtin_amdgcn_endpgm();
}

INLINE struct output output_of(enum mx_type type, int32_t flags, bool bias) {
    return (struct output){type, flags & ADD, bias, flags & ANY};
}

#define ROWS_KERNEL(name, tile_rows, tile_cols, type, flags)                                                           \
    KERNEL void name(struct mx_rows_args args, struct mx_gfx950_plan plan) {                                           \
        if ((flags) & PERSISTENT)                                                                                      \
            run_tiles(&plan, args.k, args.n, output_of(type, flags, (flags) & ANY));                                   \
        run_tile(&plan, tile_rows, tile_cols, args.k, args.n, output_of(type, flags, (flags) & ANY));                  \
    }
#define DEPTH_KERNEL(name, tile_rows, tile_cols, type, flags)                                                          \
    KERNEL void name(struct mx_depth_args args, struct mx_gfx950_plan plan) {                                          \
        if ((flags) & PERSISTENT)                                                                                      \
            run_tiles(&plan, args.depth, args.k, output_of(type, flags, false));                                       \
        run_tile(&plan, tile_rows, tile_cols, args.depth, args.k, output_of(type, flags, false));                      \
    }
#include "kernels.def"
