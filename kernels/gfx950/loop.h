// The main loop of the gfx950 GEMMs: a wave's registers and LDS buffers, and what it reads, fills and multiplies when.
// The tables of the schedule are near the end. Layouts, and why they are right: gemm.c.
//
// A step of 256x256, and of 256x320 with what is in parentheses. Every quadrant hides the reads of a later one's
// operand and the fills, for two steps ahead, of the half-step buffer that was read last:
//   products        reads           fills     then
//   a0 b0 (x0)      b1 (x1)         a0        wait for reads
//   a0 b1 (x1)      a1              b0 (x0)   all waves wait: fills but those of one step, reads
//   a1 b0 (x0)      next step's a0  b1 (x1)
//   a1 b1 (x1)      next step's b0 (x0)  a1   all waves wait
//
// The state of a wave is in three kinds of variables, for the compiler's sake. Steps get `struct wave` by value, and
// the macros here change the caller's: so it becomes registers before calls are inlined. What loops index are arrays by
// themselves, with pointers to them in `struct fragments`, and indices in calls are constants.
#pragma once
#include "device.h"

enum { STEP = 128, ROW_BLOCK = 32, TILE_BUFFER_BYTES = 16384, EXTRA_BUFFER_BYTES = 4096 };
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

// Halves of the operands. X: of B's rows past 256.
enum part { A0, A1, B0, B1, X0, X1 };
static LDS char *const buffers[6][2] = {{a00, a01}, {a10, a11}, {b00, b01}, {b10, b11}, {x00, x01}, {x10, x11}};

// A tile, constant in each use.
struct shape {
    int a_halves, b_halves;
    bool extra;        // 64 columns more
    int b_lane_scales; // bytes of B's scales of a lane and body
};
INLINE bool has(struct shape shape, enum part part) {
    return part == A1 ? shape.a_halves == 2 : part == B1 ? shape.b_halves == 2 : part < X0 || shape.extra;
}
// A wave's fills of a step.
INLINE int step_fills(struct shape shape) { return 4 * (shape.a_halves + shape.b_halves) + 2 * shape.extra; }

// What a wave reads of a tile: the rows that it fills, the scales of its products.
struct operands {
    buffer rows[5]; // A0, A1, B0, B1, X0 with X1
    buffer a_scales, b_scales;
};

// What a step takes of a wave, but for fragments and fill offsets. The order is the compiler's for registers.
struct wave {
    int32_t turns;
    uint32_t position;                                    // of the step to fill, from the group's start
    uint32_t x_scales;                                    // of the body: [step][half]
    u32x4 b_scales, a_scales;                             // [step][half][fragment]
    uint32_t b_scale_at, a_scale_at;                      // of the next body's
    uint32_t fill_extra_lds, fill_lds;                    // of the wave in a buffer
    uint32_t last;                                        // position at which this lane's 32-element block still exists
    uint32_t block_end, lane, number;                     // `last` is the depth less block_end
    int a_bytes, b_bytes;                                 // of LDS
    u64x2 zero;                                           // to clear with
    uint32_t a_low, a_high, b_high, b_low, x_high, x_low; // LDS places that the lane reads: two chunks of a row
    f32x4 (*c)[4][4], (*cx)[4]; // accumulators by quadrant; of the columns past 256 by half of A and of B
    struct operands in;
};

// [operand][half]: 4 fragments each of A and B, one of X.
struct fragments {
    i32x8 *a0, *a1, *b0, *b1, *x0, *x1;
};

// ---- order ----

#define KEEP_ORDER() __builtin_amdgcn_sched_barrier(0)

// s_waitcnt: at most n vector memory operations in flight, no LDS or scalar ones. The compiler counts this builtin's
// waits; it puts none of its own on fills.
#define WAIT(n) __builtin_amdgcn_s_waitcnt(((n) & 15) | (n) >> 4 << 14 | 0x70)
INLINE void wait(int n) {
    n == 0    ? WAIT(0)
    : n == 8  ? WAIT(8)
    : n == 12 ? WAIT(12)
    : n == 16 ? WAIT(16)
    : n == 18 ? WAIT(18)
    : n == 24 ? WAIT(24)
    : n == 27 ? WAIT(27)
              : WAIT(63);
}

// The waits precede the barrier: after it every wave's fills are in LDS and every wave's reads are out of it.
INLINE void wait_all_waves(int n) {
    wait(n);
    __builtin_amdgcn_s_barrier();
    asm volatile("" ::: "memory");
    KEEP_ORDER();
}

// ---- fills ----

#define LOAD_LDS(to, from, at, position, i)                                                                            \
    __builtin_amdgcn_raw_ptr_buffer_load_lds(from, (LDS void *)(to), 16, at, position, (i) * 1024, 0)

// Fill i of the 4 of a wave's 32 rows: 8 rows of 128 bytes. One M0 value (the LDS address) serves all 4. A wave has 8
// rows of X0, which are those of fill 0, and of X1, of fill 2.
INLINE void fill(const struct wave *w, enum part part, int parity, const uint32_t at[4], int i) {
    LDS char *const to =
        part < X0 ? buffers[part][parity] + w->fill_lds : buffers[part][parity] + w->fill_extra_lds - i * 1024;
    const buffer from = w->in.rows[part < X0 ? part : X0];
    i == 0   ? LOAD_LDS(to, from, at[0], w->position, 0)
    : i == 1 ? LOAD_LDS(to, from, at[1], w->position, 1)
    : i == 2 ? LOAD_LDS(to, from, at[2], w->position, 2)
             : LOAD_LDS(to, from, at[3], w->position, 3);
}
INLINE void fill_part(const struct wave *w, struct shape shape, enum part part, int parity, const uint32_t at[4]) {
    if (!has(shape, part))
        return;
    if (part != X1)
        fill(w, part, parity, at, 0);
    if (part < X0)
        fill(w, part, parity, at, 1);
    if (part != X0)
        fill(w, part, parity, at, 2);
    if (part < X0)
        fill(w, part, parity, at, 3);
}
// In the order in which the prologue waits for them.
INLINE void fill_step(const struct wave *w, struct shape shape, int parity, const uint32_t at[4]) {
    fill_part(w, shape, A0, parity, at);
    fill_part(w, shape, B0, parity, at);
    fill_part(w, shape, X0, parity, at);
    fill_part(w, shape, B1, parity, at);
    fill_part(w, shape, X1, parity, at);
    fill_part(w, shape, A1, parity, at);
}

// Goes on by a step: its fill offsets. A lane that is past the contraction's end is past it by 32 to 448 elements
// (an even number of 32s up to the end of the body after the last), and its offset is that << 23: at least
// 2^28, which is past every buffer's end, and short of wrapping.
// (The compiler knows no better than one subtraction and four shift-and-adds, so it is kept from looking for it.)
#define NEXT_FILLS(w, first_at, at)                                                                                    \
    do {                                                                                                               \
        (w).position += STEP;                                                                                          \
        asm volatile("" : "+s"((w).position), "+s"((w).fill_lds), "+s"((w).fill_extra_lds));                           \
        uint32_t past_ = __builtin_elementwise_sub_sat((w).position, (w).last);                                        \
        asm volatile("" : "+v"(past_));                                                                                \
        UNROLL for (int i_ = 0; i_ < 4; i_++)                                                                          \
            (at)[i_] = (past_ << 23) + (first_at)[i_];                                                                 \
    } while (0)

// ---- fragments and products ----

// Of an operand with one half a step's fragments are those of its parity, so that the next step's can be read
// meanwhile.
INLINE i32x8 *fragments_of(struct fragments f, struct shape shape, enum part part, int parity) {
    const int a = shape.a_halves == 2 ? part : parity, b = shape.b_halves == 2 ? part - B0 : parity;
    return part <= A1 ? (a ? f.a1 : f.a0) : part <= B1 ? (b ? f.b1 : f.b0) : part == X1 ? f.x1 : f.x0;
}

INLINE i32x8 read_fragment(const LDS char *from, uint32_t low, uint32_t high, int t) {
    i32x4 lo = *(const LDS i32x4 *)(from + low + t * 16 * STEP), hi = *(const LDS i32x4 *)(from + high + t * 16 * STEP);
    return __builtin_shufflevector(lo, hi, 0, 1, 2, 3, 4, 5, 6, 7);
}

// B's buffers lie past what an LDS instruction's offset reaches; its lane offsets begin at A's end and make up for it.
INLINE void read(struct fragments f, struct shape shape, const struct wave *w, enum part part, int parity, int t) {
    const LDS char *const from = buffers[part][parity];
    i32x8 *const to = fragments_of(f, shape, part, parity);
    if (part <= A1)
        to[t] = read_fragment(from, w->a_low, w->a_high, t);
    else if (part <= B1)
        to[t] = read_fragment(from - w->a_bytes, w->b_low, w->b_high, t);
    else
        *to = read_fragment(from - w->a_bytes - w->b_bytes, w->x_low, w->x_high, 0);
}

struct factor {
    i32x8 fragment;
    uint32_t scales; // a byte a fragment
};
#define MULTIPLY(c, a, i, b, j)                                                                                        \
    __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4((b).fragment, (a).fragment, c, 0, 0, j, (b).scales, i, (a).scales)
#define MULTIPLY_ROW(c, a, i, b, j)                                                                                    \
    ((j) == 0   ? MULTIPLY(c, a, i, b, 0)                                                                              \
     : (j) == 1 ? MULTIPLY(c, a, i, b, 1)                                                                              \
     : (j) == 2 ? MULTIPLY(c, a, i, b, 2)                                                                              \
                : MULTIPLY(c, a, i, b, 3))

// c + a b, fragments i and j, which are immediates of the instruction.
INLINE f32x4 multiply(i32x8 b_fragment, i32x8 a_fragment, f32x4 c, uint32_t b_scales, uint32_t a_scales, int i, int j) {
    const struct factor a = {a_fragment, a_scales}, b = {b_fragment, b_scales};
    return i == 0   ? MULTIPLY_ROW(c, a, 0, b, j)
           : i == 1 ? MULTIPLY_ROW(c, a, 1, b, j)
           : i == 2 ? MULTIPLY_ROW(c, a, 2, b, j)
                    : MULTIPLY_ROW(c, a, 3, b, j);
}

// The same with the fragment x of B's rows past 256. Its accumulators are VGPRs, of which there are no more AGPRs; as a
// builtin the compiler would copy them to some and back. It knows nothing of the latency: every other use of c stands
// at least a quadrant or finish_extra away.
INLINE f32x4 multiply_extra(f32x4 c, i32x8 a, uint32_t a_scales, int i, i32x8 x, uint32_t x_scales, int x_byte) {
    asm("v_mfma_scale_f32_16x16x128_f8f6f4 %0, %1, %2, %0, %3, %4 op_sel:[%5,%6,0] op_sel_hi:[%7,%8,0]"
        : "+v"(c)
        : "v"(x), "v"(a), "v"(x_scales), "v"(a_scales), "i"(x_byte & 1), "i"(i & 1), "i"(x_byte >> 1), "i"(i >> 1));
    return c;
}
// 12 wait states: the latency of the last of them.
INLINE void finish_extra(void) {
    KEEP_ORDER();
    asm volatile("s_nop 11");
    KEEP_ORDER();
}

// ---- schedule ----

// What a product hides: a fragment's read, of this step or of the next one, or fill i of a part. Source order is the
// schedule. Parts that a shape does not have are left out.
enum what { NOTHING, READ_NOW, READ_NEXT, SYNC_READ_NEXT, FILL, FILL_TWO };
struct slot {
    enum what what;
    enum part part;
    int i;
};

// One quadrant, one step: 16 products, each of the first 12 followed by a slot; 4 with the columns past 256, the first
// of them followed by one; then a wait for the wave's own reads, or all waves' for all but the newest step's fills.
enum then { GO_ON, AWAIT_READS, SYNC };
struct quadrant {
    int c;
    enum part a, b;
    struct slot slots[12], extra_slot;
    enum then then;
};

#define FOUR(what, part) {what, part, 0}, {what, part, 1}, {what, part, 2}, {what, part, 3}
#define SPREAD_FILLS(part, what, other)                                                                                \
    {FILL, part, 0}, {what, other, 0}, {FILL, part, 1}, {}, {FILL, part, 2}, {}, {FILL, part, 3}, {}
#define PAIR(t)                                                                                                        \
    {READ_NEXT, A0, t}, { READ_NEXT, B0, t }

static const struct quadrant step_256x256[] = {
    // A wait for b1: with the columns past 256 it is long there.
    {0, A0, B0, {FOUR(READ_NOW, B1), SPREAD_FILLS(A0, READ_NOW, X1)}, {}, AWAIT_READS},
    {1, A0, B1, {FOUR(READ_NOW, A1), SPREAD_FILLS(B0, NOTHING, A0)}, {FILL, X0, 0}, SYNC},
    {2, A1, B0, {FOUR(READ_NEXT, A0), SPREAD_FILLS(B1, NOTHING, A0)}, {FILL, X1, 2}, GO_ON},
    {3, A1, B1, {FOUR(READ_NEXT, B0), SPREAD_FILLS(A1, READ_NEXT, X0)}, {}, SYNC},
};
static const struct quadrant step_128x256[] = {
    {0, A0, B0, {FOUR(READ_NOW, B1), FOUR(FILL, A0), FOUR(FILL, B0)}, {}, SYNC},
    {1, A0, B1, {FOUR(READ_NEXT, A0), FOUR(READ_NEXT, B0), FOUR(FILL, B1)}, {}, SYNC},
};
static const struct quadrant step_256x128[] = {
    {0, A0, B0, {FOUR(READ_NOW, A1), FOUR(FILL, A0), FOUR(FILL, B0)}, {}, SYNC},
    {1, A1, B0, {FOUR(READ_NEXT, A0), FOUR(READ_NEXT, B0), FOUR(FILL, A1)}, {}, SYNC},
};
#define TWO_PAIRS(part) {FILL_TWO, part, 0}, {FILL_TWO, part, 2}
static const struct quadrant step_128x128[] = {
    {0,
     A0,
     B0,
     {TWO_PAIRS(A0), TWO_PAIRS(B0), {SYNC_READ_NEXT, A0, 0}, {READ_NEXT, B0, 0}, PAIR(1), PAIR(2), PAIR(3)},
     {},
     SYNC},
};

INLINE void run_slot(struct fragments f, struct shape shape, const struct wave *w, const struct slot *s, int parity,
                     const uint32_t at[4]) {
    if (!has(shape, s->part))
        return;
    if (s->what == SYNC_READ_NEXT)
        wait_all_waves(step_fills(shape));
    if (s->what == READ_NOW)
        read(f, shape, w, s->part, parity, s->i);
    if (s->what == READ_NEXT || s->what == SYNC_READ_NEXT)
        read(f, shape, w, s->part, !parity, s->i);
    if (s->what == FILL || s->what == FILL_TWO)
        fill(w, s->part, parity, at, s->i);
    if (s->what == FILL_TWO)
        fill(w, s->part, parity, at, s->i + 1);
}

INLINE void run_product(struct fragments f, struct shape shape, const struct wave *w, const struct quadrant *q,
                        int parity, const uint32_t at[4], int i, int j) {
    const i32x8 *const a = fragments_of(f, shape, q->a, parity), *const b = fragments_of(f, shape, q->b, parity);
    f32x4 *const c = &w->c[q->c][i][j];
    *c = multiply(b[j], a[i], *c, w->b_scales[parity * 2 + q->b - B0], w->a_scales[parity * 2 + q->a - A0], i, j);
    if (i < 3) {
        run_slot(f, shape, w, &q->slots[i * 4 + j], parity, at);
        KEEP_ORDER();
    }
}
INLINE void run_row(struct fragments f, struct shape shape, const struct wave *w, const struct quadrant *q, int parity,
                    const uint32_t at[4], int i) {
    run_product(f, shape, w, q, parity, at, i, 0);
    run_product(f, shape, w, q, parity, at, i, 1);
    run_product(f, shape, w, q, parity, at, i, 2);
    run_product(f, shape, w, q, parity, at, i, 3);
}
INLINE void run_extra(struct fragments f, struct shape shape, const struct wave *w, const struct quadrant *q,
                      int parity, int i) {
    const int half = q->b - B0;
    f32x4 *const c = &w->cx[q->c][i];
    *c = multiply_extra(*c, fragments_of(f, shape, q->a, parity)[i], w->a_scales[parity * 2 + q->a - A0], i,
                        *fragments_of(f, shape, X0 + half, parity), w->x_scales, parity * 2 + half);
}

INLINE void run_quadrant(struct fragments f, struct shape shape, const struct wave *w, const struct quadrant *q,
                         int parity, const uint32_t at[4]) {
    run_row(f, shape, w, q, parity, at, 0);
    run_row(f, shape, w, q, parity, at, 1);
    run_row(f, shape, w, q, parity, at, 2);
    run_row(f, shape, w, q, parity, at, 3);
    KEEP_ORDER();
    if (shape.extra) {
        run_extra(f, shape, w, q, parity, 0);
        run_slot(f, shape, w, &q->extra_slot, parity, at);
        KEEP_ORDER();
        run_extra(f, shape, w, q, parity, 1);
        run_extra(f, shape, w, q, parity, 2);
        run_extra(f, shape, w, q, parity, 3);
        KEEP_ORDER();
    }
    if (q->then == AWAIT_READS) {
        wait(63);
        KEEP_ORDER();
    } else if (q->then == SYNC) {
        wait_all_waves(step_fills(shape));
    }
}

INLINE void run_step(struct fragments f, struct shape shape, struct wave w, int parity, const uint32_t at[4]) {
    const int quadrants = shape.a_halves * shape.b_halves;
    const struct quadrant *const schedule = quadrants == 4        ? step_256x256
                                            : shape.b_halves == 2 ? step_128x256
                                            : shape.a_halves == 2 ? step_256x128
                                                                  : step_128x128;
    run_quadrant(f, shape, &w, &schedule[0], parity, at);
    if (quadrants > 1)
        run_quadrant(f, shape, &w, &schedule[1], parity, at);
    if (quadrants > 2) {
        run_quadrant(f, shape, &w, &schedule[2], parity, at);
        run_quadrant(f, shape, &w, &schedule[3], parity, at);
    }
}

#define NEXT_SCALES(w, shape)                                                                                          \
    do {                                                                                                               \
        (w).a_scale_at += 64 * MX_GFX950_LANE_SCALES;                                                                  \
        (w).b_scale_at += 64 * (uint32_t)(shape).b_lane_scales;                                                        \
        if ((shape).extra)                                                                                             \
            asm volatile("" : "+v"((w).b_scale_at)); /* one register */                                                \
    } while (0)

// The two steps of a body. The scales of the one after are at a_scale_at and b_scale_at, one register if they can be.
#define TURN(f, shape, w, first_at, at)                                                                                \
    do {                                                                                                               \
        const u32x4 a_scales_ = __builtin_amdgcn_raw_buffer_load_b128((w).in.a_scales, (w).a_scale_at, 0, 0);          \
        const u32x4 b_scales_ = __builtin_amdgcn_raw_buffer_load_b128(                                                 \
            (w).in.b_scales, (shape).b_lane_scales == MX_GFX950_LANE_SCALES ? (w).a_scale_at : (w).b_scale_at, 0, 0);  \
        const uint32_t x_scales_ =                                                                                     \
            (shape).extra ? __builtin_amdgcn_raw_buffer_load_b32((w).in.b_scales, (w).b_scale_at + 16, 0, 0) : 0;      \
        KEEP_ORDER();                                                                                                  \
        NEXT_FILLS(w, first_at, at);                                                                                   \
        run_step(f, shape, w, 0, at);                                                                                  \
        NEXT_FILLS(w, first_at, at);                                                                                   \
        run_step(f, shape, w, 1, at);                                                                                  \
        (w).a_scales = a_scales_;                                                                                      \
        (w).b_scales = b_scales_;                                                                                      \
        (w).x_scales = x_scales_;                                                                                      \
    } while (0)
