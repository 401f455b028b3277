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
// whole last turn among them, have offsets out of bounds (NEXT_FILLS). The loop itself: loop.h. The output: store.h.
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
#include "loop.h"
#include "store.h"

INLINE void load_rows(struct operands *in, const CONSTANT struct mx_gfx950_tile *tile, uint32_t wave) {
    const CONSTANT struct mx_gfx950_buffer *const rows =
        (const CONSTANT struct mx_gfx950_buffer *)((const CONSTANT char *)tile->wave +
                                                   wave * (uint32_t)sizeof tile->wave[0]);
    in->rows[A0] = load_buffer(&rows[0]), in->rows[A1] = load_buffer(&rows[1]);
    in->rows[B0] = load_buffer(&rows[2]), in->rows[B1] = load_buffer(&rows[3]), in->rows[X0] = load_buffer(&rows[4]);
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

// Accumulators begin as a product of zeros: 16 registers an instruction, by naming the registers (E2M1 operands, which
// take 4 registers, are the fastest). The compiler knows neither what the instruction is nor its latency:
// the fragment reads and wait_all_waves stand between it and the first use.
// The next rows of 4 accumulators to clear, and zeros.
struct clear {
    f32x4 *c;
    u64x2 zero;
};
#define CLEAR(next, r0, r1, r2, r3)                                                                                    \
    do {                                                                                                               \
        asm volatile("v_mfma_f32_32x32x64_f8f6f4 a[" r0 "+12], %4, %4, 0 cbsz:4 blgp:4"                                \
                     : "={a[" r0 "]}"((next).c[0]), "={a[" r1 "]}"((next).c[1]), "={a[" r2 "]}"((next).c[2]),          \
                       "={a[" r3 "]}"((next).c[3])                                                                     \
                     : "v"((next).zero));                                                                              \
        (next).c += 4;                                                                                                 \
    } while (0)
INLINE void clear(f32x4 *c, struct shape shape, u64x2 zero) {
    struct clear next = {c, zero};
    CLEAR(next, "0:3", "4:7", "8:11", "12:15");
    CLEAR(next, "16:19", "20:23", "24:27", "28:31");
    CLEAR(next, "32:35", "36:39", "40:43", "44:47");
    CLEAR(next, "48:51", "52:55", "56:59", "60:63");
    if (shape.a_halves == 2 || shape.b_halves == 2) {
        CLEAR(next, "64:67", "68:71", "72:75", "76:79");
        CLEAR(next, "80:83", "84:87", "88:91", "92:95");
        CLEAR(next, "96:99", "100:103", "104:107", "108:111");
        CLEAR(next, "112:115", "116:119", "120:123", "124:127");
    }
    if (shape.a_halves == 2 && shape.b_halves == 2) {
        CLEAR(next, "128:131", "132:135", "136:139", "140:143");
        CLEAR(next, "144:147", "148:151", "152:155", "156:159");
        CLEAR(next, "160:163", "164:167", "168:171", "172:175");
        CLEAR(next, "176:179", "180:183", "184:187", "188:191");
        CLEAR(next, "192:195", "196:199", "200:203", "204:207");
        CLEAR(next, "208:211", "212:215", "216:219", "220:223");
        CLEAR(next, "224:227", "228:231", "232:235", "236:239");
        CLEAR(next, "240:243", "244:247", "248:251", "252:255");
    }
}

INLINE void clear_extra(f32x4 c[4], u64x2 zero) {
    f32x16 all;
    asm volatile("v_mfma_f32_32x32x64_f8f6f4 %0, %1, %1, 0 cbsz:4 blgp:4" : "=&v"(all) : "v"(zero));
    c[0] = __builtin_shufflevector(all, all, 0, 1, 2, 3);
    c[1] = __builtin_shufflevector(all, all, 4, 5, 6, 7);
    c[2] = __builtin_shufflevector(all, all, 8, 9, 10, 11);
    c[3] = __builtin_shufflevector(all, all, 12, 13, 14, 15);
}

// Keeps the accumulators in AGPRs across the loop.
#define FOR_FRAGMENTS(i, j)                                                                                            \
    UNROLL for (int i = 0; i < 4; i++) UNROLL                                                                          \
        for (int j = 0; j < 4; j++)
INLINE void pin_quadrant(f32x4 c[4][4]) { FOR_FRAGMENTS(i, j) asm volatile("" : "+a"(c[i][j])); }
INLINE void pin(f32x4 (*c)[4][4], struct shape shape) {
    pin_quadrant(c[0]);
    if (shape.a_halves == 2 || shape.b_halves == 2)
        pin_quadrant(c[1]);
    if (shape.a_halves == 2 && shape.b_halves == 2) {
        pin_quadrant(c[2]);
        pin_quadrant(c[3]);
    }
}

// A wave as it is before the first products but for accumulators and fragments; the fills of two steps are in flight.
INLINE struct wave start_tile(struct shape shape, const CONSTANT struct mx_gfx950_tile *tile,
                              struct mx_gfx950_extent extent, int32_t stride, uint32_t *first_at, uint32_t *at,
                              f32x4 (*c)[4][4], f32x4 (*cx)[4]) {
    struct wave w;
    w.c = c, w.cx = cx;
    const uint32_t lane = thread_id() & 63, wave = uniform(thread_id() >> 6), wm = wave >> 1, wn = wave & 1;
    load_rows(&w.in, tile, wave);
    w.fill_lds = wave * (ROW_BLOCK * STEP), w.fill_extra_lds = w.fill_lds / 4;
    // Byte offsets of this lane's 16 bytes in fill i, at step 0, and the last step position at which its 32-element
    // block still exists.
    const uint32_t chunk = (lane & 7) ^ lane >> 3, block_end = (chunk / 2 + 1) * MX_BLOCK;
    const bool exists = block_end <= (uint32_t)extent.depth;
    w.last = exists ? (uint32_t)extent.depth - block_end : UINT32_MAX;
    const uint32_t row = (lane >> 5) * 8 + (lane >> 3 & 3);
    uint32_t base = row * (uint32_t)stride + chunk * 16 + MX_GFX950_FILL_BIAS;
    base = exists ? base : OUTSIDE;
    UNROLL for (uint32_t i = 0; i < 4; i++)
        first_at[i] = base + ((i & 1) * 16 + (i >> 1) * 4) * (uint32_t)stride - i * 1024;

    load_scales(&w.in, tile, wm, wn);
    w.a_scale_at = lane * MX_GFX950_LANE_SCALES, w.b_scale_at = lane * (uint32_t)shape.b_lane_scales;
    w.a_scales = __builtin_amdgcn_raw_buffer_load_b128(w.in.a_scales, w.a_scale_at, 0, 0);
    w.b_scales = __builtin_amdgcn_raw_buffer_load_b128(w.in.b_scales, w.b_scale_at, 0, 0);
    w.x_scales = shape.extra ? __builtin_amdgcn_raw_buffer_load_b32(w.in.b_scales, w.b_scale_at + 16, 0, 0) : 0;

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
        wait_all_waves(63);
    }
    w.position = 0;
    w.turns = extent.bodies;
    fill_step(&w, shape, 0, first_at);
    const uint32_t r = lane & 15, group = lane >> 4, swizzle = r & 7;
    const uint32_t low = r * STEP + ((group ^ swizzle) << 4), high = low ^ 64;
    const uint32_t a_low = wm * 8192 + low, a_high = wm * 8192 + high;
    uint32_t b_low = (uint32_t)a_bytes + wn * 8192 + low, b_high = (uint32_t)a_bytes + wn * 8192 + high;
    uint32_t x_low = (uint32_t)(a_bytes + b_bytes) + wn * 2048 + low, x_high = x_low - low + high;
    asm volatile("" : "+v"(b_low), "+v"(b_high));
    if (shape.extra)
        asm volatile("" : "+v"(x_low), "+v"(x_high));
    w.a_low = a_low, w.a_high = a_high, w.b_low = b_low, w.b_high = b_high, w.x_low = x_low, w.x_high = x_high;
    w.zero = zero, w.lane = lane, w.number = wave, w.a_bytes = a_bytes, w.b_bytes = b_bytes, w.block_end = block_end;
    NEXT_FILLS(w, first_at, at);
    fill_step(&w, shape, 1, at);
    KEEP_ORDER();
    return w;
}

INLINE void clear_all(struct wave w, struct shape shape) {
    clear(w.c[0][0], shape, w.zero);
    if (shape.extra) UNROLL
        for (int i = 0; i < 4; i++) {
            clear_extra(w.cx[i], w.zero);
        }
}

INLINE void read_first(struct fragments f, struct shape shape, struct wave w) {
    UNROLL for (int t = 0; t < 4; t++) {
        read(f, shape, &w, A0, 0, t);
        read(f, shape, &w, B0, 0, t);
    }
    if (shape.extra)
        read(f, shape, &w, X0, 0, 0);
    wait_all_waves(step_fills(shape));
}

// One tile.
INLINE void multiply_tile(const CONSTANT struct mx_gfx950_tile *tile, struct mx_gfx950_extent extent,
                          struct shape shape, int32_t stride, int64_t stride_out, struct output to) {
    f32x4 c[4][4][4], cx[4][4];
    i32x8 x0, x1, b0[4], a0[4];
    struct second { // a struct: alone, each array would become one value of 32 registers
        i32x8 a[4], b[4];
    } second;
    uint32_t at[4], first_at[4];
    struct wave w;
    const struct fragments f = {a0, second.a, b0, second.b, &x0, &x1};
    const struct sums sums = {{c[0], c[1], c[2], c[3]}, cx};
    w = start_tile(shape, tile, extent, stride, first_at, at, c, cx);
    clear_all(w, shape);
    // Until only the fills after a00 and b00 (and x00) are in flight, then until only those of step 1 are.
    wait_all_waves(2 * step_fills(shape) - 8 - shape.extra);
    read_first(f, shape, w);
#pragma clang loop unroll(disable)
    do {
        NEXT_SCALES(w, shape);
        TURN(f, shape, w, first_at, at);
    } while (--w.turns > 0);
    pin(c, shape);
    if (shape.extra)
        finish_extra();
    if (to.any) {
        wait_all_waves(0); // the last turn's fills, too: they must not reach LDS after this
        store_staged(tile, extent, shape, to, stride_out, sums, w.number, w.lane);
    } else {
        wait(0); // nor after this block
        store_direct(tile, extent, shape, to, stride_out, sums, w.number, w.lane);
    }
}

// A tile of 256x256 with plain output, and those that the queue gives while they can follow: the fills and scales that
// the last turn of a tile issues are the next one's first. Then nothing is in flight.
INLINE void multiply_tiles(const CONSTANT struct mx_gfx950_tile *tile, struct mx_gfx950_extent extent,
                           struct shape shape, int32_t stride, int64_t stride_out, struct output to, struct queue *q) {
    f32x4 c[4][4][4], cx[4][4];
    i32x8 x0, x1, b0[4], a0[4];
    struct second { // a struct: alone, each array would become one value of 32 registers
        i32x8 a[4], b[4];
    } second;
    uint32_t at[4], first_at[4];
    struct wave w;
    const struct fragments f = {a0, second.a, b0, second.b, &x0, &x1};
    const struct sums sums = {{c[0], c[1], c[2], c[3]}, cx};
    struct operands next;
    w = start_tile(shape, tile, extent, stride, first_at, at, c, cx);
    clear_all(w, shape);
    // Until only the fills after a00 and b00 (and x00) are in flight, then until only those of step 1 are.
    wait_all_waves(2 * step_fills(shape) - 8 - shape.extra);
    hand_out(q);
    read_first(f, shape, w);
    learn(q, &next, w.number);
    for (;;) { // once a tile
        ROLLED while (--w.turns > 0) {
            NEXT_SCALES(w, shape);
            TURN(f, shape, w, first_at, at);
        }
        // Only after and before tiles of a body or more: all lanes' blocks exist in step 0, so that first_at is right,
        // and fills of the next tile's first two steps leave nothing of this one in rows that exist.
        const bool goes_on =
            q->number < q->count && q->extent.depth >= MX_GFX950_BODY && extent.depth >= MX_GFX950_BODY;
        NEXT_SCALES(w, shape);
        if (goes_on) {
            ask(q);
            w.in = next;
            w.last = (uint32_t)q->extent.depth - w.block_end;
            w.position = (uint32_t)-STEP;
            w.a_scale_at = w.b_scale_at = w.lane * MX_GFX950_LANE_SCALES;
        }
        TURN(f, shape, w, first_at, at);
        pin(c, shape);
        hand_out(q); // for nobody if it does not go on
        uint32_t out_lane = w.lane, out_wave = w.number;
        int32_t out_stride = (int32_t)stride_out;
        asm volatile("" : "+v"(out_lane), "+s"(out_wave), "+s"(out_stride)); // no addresses before the first tile
        store_direct(tile, extent, shape, to, out_stride, sums, out_wave, out_lane);
        if (!goes_on) {
            wait_all_waves(0);
            return;
        }
        tile = q->next;
        extent = q->extent;
        w.turns = extent.bodies;
        wait_all_waves(63);
        learn(q, &next, w.number);
        clear_all(w, shape);
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
        multiply_tile(tile, extent, wide, (int32_t)stride, stride_out, to);
        __builtin_amdgcn_endpgm();
    }
    multiply_tile(tile, extent, shape, (int32_t)stride, stride_out, to);
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
            multiply_tiles(tile, extent, shape, (int32_t)stride, stride_out, to, &q);
        } else {
            int64_t out_stride = stride_out;
            u32x4 zeros = {};
            asm volatile("" : "+s"(out_stride), "+v"(zeros)); // no addresses, no zeros before the first tile
            store_zeros(tile, extent, to, out_stride, zeros);
            wait_all_waves(0);
            hand_out(&q);
            wait_all_waves(0);
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
