// sm_90 (H100, H200) grouped MXFP8 GEMMs. Launch, workspace, the two ways of an element and the table of kernels:
// plan.h.
//
//   mx_gemm_rows_sm90, mx_gemm_rows_sm90_swapped(struct mx_rows_args, struct mx_sm90_plan, struct mx_sm90_maps)
//   mx_gemm_depth_sm90(struct mx_depth_args, struct mx_sm90_plan, struct mx_sm90_maps)
//
// out[row][col] (+)= sum over d of P[row][d] Q[col][d] 2^(p_scale + q_scale - 254) (+ bias), where gemm_rows' output is
// the transposed one when swapped. A block walks over tiles of 256 P rows by 128 Q rows, block b those numbered b, b +
// grid size, ...; tiles share no output, so the bits depend on nothing but an element's own two rows.
//
// Operands: E4M3, rows of a multiple of 32 bytes; any alignment (plan.copies where not 16 bytes). Output: aligned to
// its element, rows of any length. Tails: rows of P and Q past the tile's are multiplied and not stored; the
// contraction past its end is 0, by the tensor map's bounds (gemm_rows) or cleared in registers (gemm_depth, where
// other groups lie there).
//
// Warpgroup 0: warp 0 fetches tiles and their references; warps 1, 2 and 3 have the copy engine fill the stages of Q
// and of P's first and second 128 rows. A stage is 128 rows, 128 of the contraction, as two boxes of 64 bytes a row,
// swizzled by 64. Warpgroup 1 converts Q to float16 in shared memory, in K-major rows of 128 bytes, swizzled by 128:
// "halves", as they hold 64 of the contraction. Warpgroups 2 and 3 each have 128 rows of P, which they convert in
// registers and multiply by wgmma.m64n128k16 (float16 in, float32 sums).
//   shared memory: P stages 2 x 3 x 16 KB | Q stages 3 x 16 KB | Q halves 4 x 16 KB | slots 4 x 1216 bytes | barriers
//   registers: 40 a lane in warpgroup 0, 56 in 1, 208 in 2 and 3: 128 accumulators, 32 of P fragments, 16 of P bytes
//
// The contraction is permuted inside each 64: lane quad q of a P fragment has bytes 16 q .. 16 q + 15, of which word j
// goes to the j-th of four wgmma, and Q's halves have the same order. Rows are permuted inside each 32, so that a lane
// has runs of 8 of the product, along Q and along P: row 8 j + 2 q + b of a half is Q's row 8 q + 2 j + b; rows 2 q + b
// and 8 + 2 q + b of a warp's f-th fragment are the 32's rows 8 q + 4 f + b and 8 q + 4 f + 2 + b.
//
// Values derived from the thread's number are hidden from the compiler in places (HIDE): it would keep them in
// registers across the main loop, which has none to spare.
//
// Sources: PTX ISA 8.8, sections on wgmma (fragments, matrix descriptors), mbarrier and cp.async.bulk.tensor.
#include "device.h"

enum {
    P_STAGES = 3,
    Q_STAGES = 3,
    HALVES = 4,
    SLOTS = 4,
    BOX_BYTES = MX_SM90_ROW_BLOCK * 64,
    STAGE_BYTES = 2 * BOX_BYTES, // 128 rows, 128 of the contraction
    HALF_BYTES = MX_SM90_Q * 128,
    // A slot: the tile, P's references and Q's, a byte each, and their factors, a bfloat16 each.
    REFS_AT = sizeof(struct mx_sm90_tile),
    FACTORS_AT = REFS_AT + MX_SM90_P + MX_SM90_Q,
    SLOT_BYTES = FACTORS_AT + 2 * (MX_SM90_P + MX_SM90_Q),
    Q_AT = 2 * P_STAGES * STAGE_BYTES,
    HALVES_AT = Q_AT + Q_STAGES * STAGE_BYTES,
    SLOTS_AT = HALVES_AT + HALVES * HALF_BYTES,
    BARRIERS_AT = SLOTS_AT + SLOTS * SLOT_BYTES,
    PAIRS = 2 * P_STAGES + Q_STAGES + HALVES + SLOTS,
    FILLING_WARPS = 3,
    CONVERTER_WARPS = 4,
    CONSUMER_WARPS = 8,
};
static_assert(BARRIERS_AT + 16 * PAIRS <= MX_SM90_SHARED_BYTES);
static_assert(SLOT_BYTES % 16 == 0 && HALVES_AT % 1024 == 0);
static_assert(__builtin_offsetof(struct mx_sm90_tile, p_rows) == 24 &&
              __builtin_offsetof(struct mx_sm90_tile, p_ref) == 40 &&
              __builtin_offsetof(struct mx_sm90_tile, blocks) == 52); // extent_of

extern SHARED char shared[] __attribute__((aligned(1024)));

// A ring of buffers in shared memory, each with a barrier that says it is full and one that says it is empty.
struct ring {
    uint32_t index, parity;
};
INLINE void advance(struct ring *ring, uint32_t count) {
    if (++ring->index == count)
        *ring = (struct ring){0, ring->parity ^ 1};
}
// Barrier numbers of the rings' first buffers: full ones; the empty ones are PAIRS further.
enum {
    P_RING, // warpgroup 2's, then 3's
    Q_RING = P_RING + 2 * P_STAGES,
    HALF_RING = Q_RING + Q_STAGES,
    SLOT_RING = HALF_RING + HALVES,
};
INLINE uint32_t full(uint32_t ring, uint32_t index) {
    return shared_address(shared) + BARRIERS_AT + 8 * (ring + index);
}
INLINE uint32_t empty(uint32_t ring, uint32_t index) { return full(ring, index) + 8 * PAIRS; }
INLINE void wait_full(uint32_t ring, struct ring at) { barrier_wait(full(ring, at.index), at.parity); }
INLINE void wait_empty(uint32_t ring, struct ring at) { barrier_wait(empty(ring, at.index), at.parity ^ 1); }

// What a kernel multiplies: gemm_rows and gemm_depth alike.
struct problem {
    const uint8_t *p, *p_scale, *q, *q_scale;
    int64_t p_rows, q_rows; // of the whole operands
    int64_t stride;         // bytes of an operand row
    const float *bias;
    void *out;
    int64_t out_stride; // elements of an output row
    int32_t type, add;  // of the output; whether to add to it
};
// What is known when a kernel is compiled.
struct kind {
    int swapped, depth;
};

// ----------------------------------------------------------------------------------------------------- tiles, slots

enum { MODERATE = 1 }; // flag of a tile in a slot
INLINE uint32_t slot_address(uint32_t index) { return shared_address(shared) + SLOTS_AT + index * SLOT_BYTES; }
#define TILE_FIELD(slot, field) ((int32_t)load_shared((slot) + __builtin_offsetof(struct mx_sm90_tile, field)))
INLINE int64_t load_shared64(uint32_t at) { return (int64_t)((uint64_t)load_shared(at + 4) << 32 | load_shared(at)); }

// An accumulator is the sum times 2^(2 * 7 - (p - 127) - (q - 127)), with p and q its references. To undo it, it is
// multiplied by a power of two for each, its factor; where references are far from 127 (not MODERATE), by the square
// root of both, twice: what is on the way is then between the first and the last, and overflows or vanishes only if
// that does. The upper half of a factor is that power in bfloat16.
INLINE uint32_t factor_of(uint32_t reference, uint32_t moderate) {
    return __builtin_bit_cast(uint32_t, power_of_two((((int32_t)reference - 134) >> !moderate) + 127));
}
INLINE float other_factor_of(uint32_t reference) {
    return power_of_two((int32_t)reference - 134 - (((int32_t)reference - 134) >> 1) + 127);
}

// Of a tile of the workspace: the quarter, 16 bytes, that has the lane's number modulo 4. Zeros past the last tile.
INLINE u32x4 load_quarter(struct mx_sm90_plan plan, uint32_t index) {
    uint32_t thread = thread_id();
    HIDE(thread); // saves registers
    const int64_t at = index * (int64_t)sizeof(struct mx_sm90_tile) + 16 * (thread & 3);
    return load_constant4_if(index < (uint32_t)plan.tiles, plan.workspace + at);
}

// What says where a tile's references are, from a warp's quarters.
struct extent {
    int32_t p_rows, q_rows, p_ref, q_ref, blocks;
};
INLINE struct extent extent_of(u32x4 quarter) {
    return (struct extent){(int32_t)shuffle(quarter.z, 1), (int32_t)shuffle(quarter.w, 1),
                           (int32_t)shuffle(quarter.z, 2), (int32_t)shuffle(quarter.w, 2),
                           (int32_t)shuffle(quarter.y, 3)};
}

// The four references, a byte each, that a lane of a warp has of 128 of a tile's rows: those of P's first (i = 0) and
// second row block and of Q's. Rows that do not exist have 127, and so has a tile without a contraction.
INLINE uint32_t references_of(struct extent tile, struct mx_sm90_plan plan, uint32_t i) {
    uint32_t thread = thread_id();
    HIDE(thread); // saves registers
    const int p = i < 2;
    const uint32_t none = 127 * 0x01010101, row = 4 * ((thread & 31) + (i == 1 ? 32 : 0));
    const uint8_t *refs =
        plan.workspace + (p ? plan.p_ref : plan.q_ref) + (int64_t)(p ? tile.p_ref : tile.q_ref) * MX_SM90_ROW_BLOCK;
    const int32_t count = tile.blocks > 0 ? (p ? tile.p_rows : tile.q_rows) - (int32_t)row : 0;
    const uint32_t exist = first_bytes(count);
    return (load_constant_if(count > 0, refs + row) & exist) | (none & ~exist);
}

// Warp 0: each tile of this block with its references and factors, into the next slot. Short contractions go by faster
// than two loads that wait for each other take, so a tile is loaded while the one before it is at work.
INLINE void fetch_tiles(struct mx_sm90_plan plan) {
    const uint32_t lane = thread_id() & 31;
    struct ring slot = {};
    int32_t first_exact = INT32_MAX;
    u32x4 next = load_quarter(plan, block_id());
    for (uint32_t index = block_id();; index += grid_size()) {
        u32x4 quarter = next;
        const struct extent tile = extent_of(quarter);
        uint32_t words[3], lowest[2] = {255, 255}, highest = 0;
        UNROLL for (uint32_t i = 0; i < 3; i++) words[i] = references_of(tile, plan, i);
        next = load_quarter(plan, index + grid_size());
        wait_empty(SLOT_RING, slot);
        const uint32_t at = slot_address(slot.index);
        UNROLL for (uint32_t i = 0; i < 3; i++) {
            UNROLL for (int j = 0; j < 32; j += 8) {
                const uint32_t ref = words[i] >> j & 255;
                lowest[i / 2] = ref < lowest[i / 2] ? ref : lowest[i / 2];
                highest = ref > highest ? ref : highest;
            }
        }
        // An accumulator that is not 0 is at least 2^-46. Times P's factor, and times both, it then is at least 2^-126,
        // and is exact where it had been rounded to bfloat16 before; nor can it overflow on the way.
        const uint32_t p_lowest = lowest_of_warp(lowest[0]), q_lowest = lowest_of_warp(lowest[1]);
        highest = highest_of_warp(highest);
        const uint32_t moderate = p_lowest >= 127 - 48 && p_lowest + q_lowest >= 134 + 134 - 80 && highest <= 127 + 48;
        if (highest == MX_SM90_EXACT)
            first_exact = min32(first_exact, (int32_t)index);
        UNROLL for (uint32_t i = 0; i < 3; i++) {
            const uint32_t row = 4 * (lane + 32 * i);
            store_shared(at + REFS_AT + row, words[i]);
            uint32_t factors[4];
            UNROLL for (int j = 0; j < 4; j++) factors[j] = factor_of(words[i] >> 8 * j & 255, moderate);
            store_shared(at + FACTORS_AT + 2 * row, factors[0] >> 16 | factors[1]);
            store_shared(at + FACTORS_AT + 2 * row + 4, factors[2] >> 16 | factors[3]);
        }
        if (lane < 4) {
            if (lane == 3) {
                quarter.z = moderate ? MODERATE : 0;
                quarter.w = (uint32_t)first_exact;
            }
            store_shared4(at + 16 * lane, quarter.x, quarter.y, quarter.z, quarter.w);
        }
        barrier_arrive(full(SLOT_RING, slot.index));
        advance(&slot, SLOTS);
        if (!tile.p_rows)
            return;
    }
}

// ------------------------------------------------------------------------------------------------------- fill stages

// What one of warps 1 to 3 fills: the stages of a ring, with 128 rows of an operand each.
struct filling {
    uint32_t ring, stages;
    uint32_t to;         // the ring's first stage
    uint64_t map;        // the operand's tensor map, for fill_stages
    const uint8_t *from; // the operand, for copy_stages
    int64_t rows;        // of the whole operand
    uint32_t row_at;     // where a tile in a slot has the first row
    int32_t past_row;    // how far past that the stages begin
};

// One lane has the copy engine fill the ring, tile after tile.
INLINE void fill_stages(struct filling it) {
    struct ring slot = {}, at = {};
    for (;;) {
        wait_full(SLOT_RING, slot);
        const uint32_t tile = slot_address(slot.index);
        if (TILE_FIELD(tile, p_rows) == 0)
            return;
        const int32_t y = (int32_t)load_shared(tile + it.row_at) + it.past_row;
        int32_t x = TILE_FIELD(tile, start);
        for (int32_t blocks = TILE_FIELD(tile, blocks); blocks > 0; blocks -= 4, x += MX_SM90_STEP) {
            const uint32_t to = it.to + at.index * STAGE_BYTES, barrier = full(it.ring, at.index);
            wait_empty(it.ring, at);
            barrier_expect(barrier, STAGE_BYTES);
            copy_box(to, it.map, barrier, x, y);
            copy_box(to + BOX_BYTES, it.map, barrier, x + 64, y);
            advance(&at, it.stages);
        }
        barrier_arrive(empty(SLOT_RING, slot.index));
        advance(&slot, SLOTS);
    }
}

// Does what copy_box does, without a tensor map: a warp copies 128 rows of 64 bytes, zeros for what is outside the
// matrix, of which `rows` rows and `columns` bytes are left from `from` on.
INLINE void copy_bytes(uint32_t to, const uint8_t *from, int64_t stride, int64_t rows, int32_t columns) {
    uint32_t lane = thread_id() & 31;
    HIDE(lane); // saves registers
    ROLLED for (int32_t i = (int32_t)lane; i < MX_SM90_ROW_BLOCK * 16; i += 32) {
        const int32_t row = i / 16, word = i % 16;
        uint32_t bytes = 0;
        if (row < rows && 4 * word < columns)
            ROLLED for (int32_t b = 3; b >= 0; b--) bytes = bytes << 8 | from[row * stride + 4 * word + b];
        store_shared(to + row * 64 + (((word >> 2) ^ (row >> 1 & 3)) << 4) + (word & 3) * 4, bytes);
    }
}

// fill_stages for operands that tensor maps cannot describe: the whole warp copies.
INLINE void copy_stages(struct filling it, int64_t stride) {
    const uint32_t lane = thread_id() & 31;
    struct ring slot = {}, at = {};
    for (;;) {
        wait_full(SLOT_RING, slot);
        const uint32_t tile = slot_address(slot.index);
        if (TILE_FIELD(tile, p_rows) == 0)
            return;
        const int64_t y = (int32_t)load_shared(tile + it.row_at) + it.past_row;
        int32_t x = TILE_FIELD(tile, start);
        for (int32_t blocks = TILE_FIELD(tile, blocks); blocks > 0; blocks -= 4) {
            uint32_t to = it.to + at.index * STAGE_BYTES;
            wait_empty(it.ring, at);
            ROLLED for (int h = 0; h < 2; h++, x += 64, to += BOX_BYTES)
                copy_bytes(to, it.from + y * stride + x, stride, it.rows - y, (int32_t)(stride - x));
            sync_warp();
            if (lane == 0)
                barrier_arrive(full(it.ring, at.index));
            advance(&at, it.stages);
        }
        sync_warp();
        if (lane == 0)
            barrier_arrive(empty(SLOT_RING, slot.index));
        advance(&slot, SLOTS);
    }
}

// ---------------------------------------------------------------------------------------------------------- convert Q

// The scale of the workspace that lies at bit `shift` of a word, as a pair of float16 factors.
#define SCALE_FACTOR(scales, shift) (((scales) >> (shift) & 255) * 0x04000400)

// Warpgroup 1: a thread has one of Q's rows, the r-th of a stage, which becomes row n of a half; the pairing makes both
// the reads and the writes of a warp free of bank conflicts.
INLINE void convert_q(struct mx_sm90_plan plan, int masked) {
    const uint32_t warp = thread_id() >> 5 & 3, lane = thread_id() & 31;
    const uint32_t b = lane & 1, quad = lane >> 1 & 3, j = (quad + (lane >> 3)) & 3;
    const uint32_t r = warp * 32 + 8 * quad + 2 * j + b, n = warp * 32 + 8 * j + 2 * quad + b;
    const uint32_t from = shared_address(shared) + Q_AT + r * 64, from_swizzle = (r >> 1 & 3) << 4;
    const uint32_t to = shared_address(shared) + HALVES_AT + n * 128, to_swizzle = (n & 7) << 4;
    struct ring slot = {}, q = {}, half = {};
    for (;;) {
        wait_full(SLOT_RING, slot);
        const uint32_t tile = slot_address(slot.index);
        if (TILE_FIELD(tile, p_rows) == 0)
            return;
        const int32_t blocks = TILE_FIELD(tile, blocks);
        const uint8_t *scale =
            plan.workspace + plan.q_scale + (int64_t)TILE_FIELD(tile, q_scale) * MX_SM90_SCALE_BYTES + 4 * r;
        uint32_t next = blocks > 0 ? load_constant(scale) : 0;
        for (int32_t block = 0; block < blocks; block += 4) {
            const uint32_t scales = next;
            scale += MX_SM90_SCALE_BYTES;
            if (block + 4 < blocks)
                next = load_constant(scale);
            wait_full(Q_RING, q);
            UNROLL for (int h = 0; h < 2; h++) {
                const uint32_t at = from + q.index * STAGE_BYTES + h * BOX_BYTES;
                uint32_t x[16];
                UNROLL for (int c = 0; c < 4; c++) LOAD_SHARED4(x + 4 * c, at + (16 * c ^ from_swizzle));
                if (masked && block + 4 > blocks) {
                    const uint32_t low = block + 2 * h < blocks ? ~0u : 0, high = block + 2 * h + 1 < blocks ? ~0u : 0;
                    UNROLL for (int i = 0; i < 16; i++) x[i] &= i < 8 ? low : high;
                }
                const uint32_t low = SCALE_FACTOR(scales, 16 * h), high = SCALE_FACTOR(scales, 16 * h + 8);
                wait_empty(HALF_RING, half);
                const uint32_t out = to + half.index * HALF_BYTES;
                UNROLL for (int i = 0; i < 4; i++) {
                    uint32_t even[4], odd[4]; // what is 0 .. 7 and 8 .. 15 of a wgmma's contraction
                    UNROLL for (int c = 0; c < 4; c++) {
                        decode_e4m3(x[4 * c + i], &even[c], &odd[c]);
                        even[c] = multiply_f16x2(even[c], c < 2 ? low : high);
                        odd[c] = multiply_f16x2(odd[c], c < 2 ? low : high);
                    }
                    store_shared4(out + (32 * i ^ to_swizzle), even[0], even[1], even[2], even[3]);
                    store_shared4(out + ((32 * i + 16) ^ to_swizzle), odd[0], odd[1], odd[2], odd[3]);
                }
                fence_shared_async();
                sync_warp();
                if (lane == 0)
                    barrier_arrive(full(HALF_RING, half.index));
                advance(&half, HALVES);
            }
            if (lane == 0)
                barrier_arrive(empty(Q_RING, q.index));
            advance(&q, Q_STAGES);
        }
        sync_warp();
        if (lane == 0)
            barrier_arrive(empty(SLOT_RING, slot.index));
        advance(&slot, SLOTS);
    }
}

// ----------------------------------------------------------------------------------------------------------- multiply

#define OUT4(d, i) "+f"((d)[i]), "+f"((d)[(i) + 1]), "+f"((d)[(i) + 2]), "+f"((d)[(i) + 3])
#define OUT16(d, i) OUT4(d, i), OUT4(d, (i) + 4), OUT4(d, (i) + 8), OUT4(d, (i) + 12)
#define OUT64(d) OUT16(d, 0), OUT16(d, 16), OUT16(d, 32), OUT16(d, 48)

// d[64][128] += a[64][16] b[128][16]^T: a from registers, b from shared memory. Asynchronous.
#define WGMMA(d, a0, a1, a2, a3, b)                                                                                    \
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, "  \
                 "%11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, "     \
                 "%30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, "     \
                 "%49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%64, %65, %66, %67}, "  \
                 "%68, 1, 1, 1, 0;"                                                                                    \
                 : OUT64(d)                                                                                            \
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b))
#define WGMMA_WAIT(pending) asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory")

// A half in shared memory: K-major, swizzled by 128 bytes, 8-row groups 1024 bytes apart.
INLINE uint64_t describe_half(uint32_t index) {
    const uint32_t at = shared_address(shared) + HALVES_AT + index * HALF_BYTES;
    return (at & 0x3ffff) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// Multiplies a fragment of 64 rows by a half: four wgmma, one group.
#define MULTIPLY(d, fragment, b)                                                                                       \
    do {                                                                                                               \
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");                                                        \
        UNROLL for (int i = 0; i < 4; i++) WGMMA(d, (fragment)[4 * i], (fragment)[4 * i + 1], (fragment)[4 * i + 2],   \
                                                 (fragment)[4 * i + 3], (b) + 2 * i);                                  \
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");                                                 \
    } while (0)

// Makes the use of values follow what precedes this line.
#define PIN64(d) asm volatile("" : OUT64(d))
#define PIN4(x) asm volatile("" : "+r"((x)[0]), "+r"((x)[1]), "+r"((x)[2]), "+r"((x)[3])::"memory")
#define PIN(x)                                                                                                         \
    do {                                                                                                               \
        PIN4(x);                                                                                                       \
        PIN4((x) + 4);                                                                                                 \
    } while (0)

// Reads 16 bytes of each of a lane's two rows of fragment f, of which `at` is where those of its first row would be
// without the swizzle: two rows further, the next one of four chunks has the number that the lane reads.
#define LOAD_FRAGMENT(x, at, f)                                                                                        \
    do {                                                                                                               \
        LOAD_SHARED4(x, ((at) ^ 32 * (f)) + 256 * (f));                                                                \
        LOAD_SHARED4((x) + 4, ((at) ^ (32 * (f) + 16)) + 256 * (f) + 128);                                             \
    } while (0)

INLINE void clear_unless(uint32_t *x, uint32_t mask) { UNROLL for (int i = 0; i < 8; i++) x[i] &= mask; }

// The bytes of two rows and their factors -> the fragments of four wgmma.
INLINE void convert_fragment(uint32_t *fragment, const uint32_t *x, uint32_t factor0, uint32_t factor1) {
    UNROLL for (int i = 0; i < 4; i++) {
        uint32_t low, high;
        decode_e4m3(x[i], &low, &high);
        fragment[4 * i] = multiply_f16x2(low, factor0);
        fragment[4 * i + 2] = multiply_f16x2(high, factor0);
        decode_e4m3(x[4 + i], &low, &high);
        fragment[4 * i + 1] = multiply_f16x2(low, factor1);
        fragment[4 * i + 3] = multiply_f16x2(high, factor1);
    }
}

// ------------------------------------------------------------------------------------------------------------- store

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
        UNROLL for (int k = 0; k < 7; k++) x[k] = x[k + 1];
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
        UNROLL for (int i = 0; i < 4; i++) UNROLL for (int j = 0; j < 4; j++) {
            const uint32_t both = q_references(part, i, j);
            UNROLL for (int b = 0; b < 2; b++) {
                const uint32_t q = both >> 8 * b & 255;
                float *x = &d[16 * i + 4 * j + 2 * h + b];
                *x *= p_factor * other_factor_of(q);
            }
        }
    }
}

// Of a lane's row first_row + 2 r: the 8 elements of the i-th 32 columns.
INLINE void scale_run(float *x, const float *d0, const float *d1, int r, int i, uint32_t p, const uint32_t *q,
                      const float *bias) {
    UNROLL for (int j = 0; j < 8; j++) x[j] =
        __builtin_fmaf((r < 2 ? d0 : d1)[16 * i + 4 * (j / 2) + 2 * (r % 2) + j % 2],
                       second_of(p) * (j % 2 ? second_of(q[j / 2]) : first_of(q[j / 2])), bias[j]);
}
// As bfloat16, of a MODERATE tile: rounded first, which leaves less to multiply.
INLINE u32x4 scale_packed_run(const float *d0, const float *d1, int r, int i, uint32_t p, const uint32_t *q) {
    u32x4 run;
    UNROLL for (int j = 0; j < 4; j++) {
        const float *d = (r < 2 ? d0 : d1) + 16 * i + 4 * j + 2 * (r % 2);
        run[j] = multiply_bf16x2(multiply_bf16x2(pack_bf16(d[0], d[1]), p), q[j]);
    }
    return run;
}

// Stores a lane's part, run by run: whatever is to be stored. `whole`: has_whole_runs.
INLINE void store_runs(const float *d0, const float *d1, struct part part, struct problem problem, int whole,
                       enum output output) {
    UNROLL for (int i = 0; i < 4; i++) {
        const int32_t column = 32 * i + 8 * part.quad;
        uint32_t q[4];
        float bias[8];
        LOAD_SHARED4(q, q_factors_address(part, i, 0));
        UNROLL for (int j = 0; j < 8; j++) bias[j] = part.bias >= 0 && column + j < part.q_rows
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
    UNROLL for (int r = 0; r < 4; r++) p[r] = p_factor(part, r);
    UNROLL for (int line = 0; line < 4 / runs; line++) {
        uint32_t q[2][4];
        UNROLL for (int run = 0; run < runs; run++) LOAD_SHARED4(q[run], q_factors_address(part, runs * line + run, 0));
        const int32_t rows = column + 32 * runs * line < part.q_rows ? part.p_rows - row : 0;
        const int64_t at = first + 32 * runs * line;
        UNROLL for (int r = 0; r < 4; r++) {
            u32x4 mine[2];
            if (output == BF16_OUT) {
                UNROLL for (int c = 0; c < 2; c++) mine[c] = scale_packed_run(d0, d1, r, 2 * line + c, p[r], q[c]);
            } else {
                float x[8];
                scale_run(x, d0, d1, r, line, p[r], q[0], zeros);
                UNROLL for (int c = 0; c < 2; c++) mine[c] = chunk_of(x + 4 * c, output);
            }
            u32x4 lines[2]; // a chunk of the even row's and one of the odd row's
            UNROLL for (int k = 0; k < 4; k++) {
                const struct pair both = trade(mine[0][k], mine[1][k], odd);
                lines[0][k] = both.first;
                lines[1][k] = both.second;
            }
            UNROLL for (int s = 0; s < 2 && output == ADD_OUT; s++) lines[s] =
                add_old_if(2 * r + s < rows, problem.out, at + (2 * r + s) * problem.out_stride, lines[s]);
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
    UNROLL for (int i = 0; i < 4; i++) UNROLL for (int j = 0; j < 4; j++) {
        const uint32_t q = load_shared(q_factors_address(part, i, j));
        int32_t token = 32 * i + 8 * (output == BF16_OUT ? pair : part.quad) + 2 * j + odd;
        HIDE(token); // or all the addresses would be computed first
        const int64_t index = part.out + token * problem.out_stride + column;
        const int32_t count = token < part.q_rows ? part.p_rows - column : 0;
        u32x4 pairs;
        float x[8];
        UNROLL for (int r = 0; r < 4; r++) {
            const float *d = (r < 2 ? d0 : d1) + 16 * i + 4 * j + 2 * (r % 2);
            if (packed) {
                pairs[r] = transpose_8x8(multiply_bf16x2(multiply_bf16x2(pack_bf16(d[0], d[1]), p[r]), q));
                continue;
            }
            const float first = __builtin_fmaf(d[0], second_of(p[r]) * first_of(q), bias[r]);
            const float second = __builtin_fmaf(d[1], second_of(p[r]) * second_of(q), bias[r]);
            if (output == BF16_OUT) {
                pairs[r] = transpose_8x8(pack_bf16(first, second));
                x[2 * r] = first_of(pairs[r]);
                x[2 * r + 1] = second_of(pairs[r]);
            } else {
                const struct pair both =
                    trade(__builtin_bit_cast(uint32_t, first), __builtin_bit_cast(uint32_t, second), odd);
                x[2 * r] = __builtin_bit_cast(float, both.first);
                x[2 * r + 1] = __builtin_bit_cast(float, both.second);
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
    ROLLED for (int32_t row = warp; row < rows; row += CONSUMER_WARPS)
        ROLLED for (int32_t column = lane; column < columns; column += 32)
            store_one(problem.out, part.out + row * problem.out_stride + column,
                      part.bias >= 0 ? problem.bias[part.bias + column] : 0, output_of(problem));
}

// ---------------------------------------------------------------------------------------------------------- the exact
// way

// 8 bytes from any address.
INLINE uint64_t load8(const uint8_t *from) {
    uint64_t bytes = 0;
    if (((uintptr_t)from & 7) == 0)
        return *(const uint64_t *)from;
    ROLLED for (int i = 0; i < 8; i++) bytes |= (uint64_t)from[i] << 8 * i;
    return bytes;
}

// d[16][8] += a[16][16] b[8][16]^T, one warp, float16 in.
INLINE void mma(float *d, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : OUT4(d, 0)
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

INLINE float scale_exactly(float x, uint32_t p, uint32_t q) {
    return p == 255 || q == 255 ? __builtin_nanf("") : scale_float(x, (int32_t)(p + q) - 254);
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
    uint32_t wanted = 0; // bit 2 h + b
    UNROLL for (int h = 0; h < 2; h++)
        UNROLL for (int b = 0; b < 2; b++) if (rows[h] <= p_last && columns[b] <= q_last &&
                                               (p_ref[rows[h]] == MX_SM90_EXACT || q_ref[columns[b]] == MX_SM90_EXACT))
            wanted |= 1u << (2 * h + b);

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
            uint32_t a[8], b[4];
            float d[4] = {};
            UNROLL for (int h = 0; h < 2; h++) {
                decode_e4m3((uint32_t)codes[i][h], &a[h], &a[2 + h]);
                decode_e4m3((uint32_t)(codes[i][h] >> 32), &a[4 + h], &a[6 + h]);
                decode_e4m3((uint32_t)(codes[i][2] >> 32 * h), &b[2 * h], &b[2 * h + 1]);
            }
            mma(d, a[0], a[1], a[2], a[3], b[0], b[1]);
            mma(d, a[4], a[5], a[6], a[7], b[2], b[3]);
            UNROLL for (int j = 0; j < 4; j++) if (block + i < blocks) sums[j] +=
                scale_exactly(d[j], scales[i][j / 2], scales[i][2 + j % 2]);
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
        UNROLL for (uint32_t i = 0; i < 3; i++) exact[i] =
            lanes_where(has_zero_byte(references_of(tile, plan, i) ^ MX_SM90_EXACT * 0x01010101u));
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

// ------------------------------------------------------------------------------------------------------------ consume

// What an open tile needs of its slot and workspace, and the scales of the next step of a lane's rows, which are 0, 2,
// 4 and 6 past its first.
struct open_tile {
    uint32_t slot;
    int32_t blocks;
    const uint8_t *scale;
    uint32_t scales[4];
};
INLINE void load_scales(struct open_tile *tile) {
    UNROLL for (int r = 0; r < 4; r++) tile->scales[r] = load_constant(tile->scale + 4 * (2 * r));
    tile->scale += MX_SM90_SCALE_BYTES;
}
// A lane's first row among a warpgroup's 128.
INLINE uint32_t first_row_of(uint32_t thread) { return (thread & 0x60) + (thread >> 3 & 3) * 8 + (thread >> 2 & 1); }

INLINE struct open_tile open_tile(struct ring slot, struct mx_sm90_plan plan, uint32_t warpgroup) {
    uint32_t thread = thread_id();
    HIDE(thread); // or what follows from it would stay in registers all along
    wait_full(SLOT_RING, slot);
    struct open_tile tile = {.slot = slot_address(slot.index)};
    tile.blocks = TILE_FIELD(tile.slot, blocks);
    const int64_t index = TILE_FIELD(tile.slot, p_scale) + (int64_t)warpgroup * plan.steps;
    tile.scale = plan.workspace + plan.p_scale + index * MX_SM90_SCALE_BYTES + 4 * first_row_of(thread);
    if (tile.blocks > 0)
        load_scales(&tile);
    return tile;
}

INLINE struct part part_of(uint32_t slot, struct problem problem) {
    uint32_t thread = thread_id();
    HIDE(thread); // as above
    return (struct part){
        .slot = slot,
        .first_row = (int32_t)(((thread >> 7) - 2) * 128 + first_row_of(thread)),
        .quad = (int32_t)(thread & 3),
        .p_rows = TILE_FIELD(slot, p_rows),
        .q_rows = TILE_FIELD(slot, q_rows),
        .out = load_shared64(slot + __builtin_offsetof(struct mx_sm90_tile, out)),
        .bias = problem.bias ? load_shared64(slot + __builtin_offsetof(struct mx_sm90_tile, bias)) : -1,
        .flags = (uint32_t)TILE_FIELD(slot, flags),
    };
}

// Warpgroups 2 and 3. A step has two halves of the contraction and two fragments of rows: four groups of wgmma, of
// which two are in flight; while they run, the next fragment's bytes are loaded and converted.
INLINE void consume(struct problem problem, struct mx_sm90_plan plan, uint32_t warpgroup, struct kind kind) {
    const uint32_t lane = thread_id() & 31, quad = lane & 3;
    const uint32_t p_ring = P_RING + warpgroup * P_STAGES;
    const uint32_t from =
        shared_address(shared) + warpgroup * P_STAGES * STAGE_BYTES + first_row_of(thread_id()) * 64 + quad * 16;
    const uint32_t shift = quad >> 1 << 3; // of this lane's block in the low half of a step's scales
    struct ring slot = {}, p = {}, half = {};
    struct open_tile tile = open_tile(slot, plan, warpgroup);
    while (TILE_FIELD(tile.slot, p_rows)) {
        if (tile.blocks <= 0) {
            const struct part part = part_of(tile.slot, problem);
            if (!problem.add)
                store_empty_tile(part, problem, kind);
            sync_warp();
            if (lane == 0)
                barrier_arrive(empty(SLOT_RING, slot.index));
            advance(&slot, SLOTS);
            tile = open_tile(slot, plan, warpgroup);
            continue;
        }
        float d0[64] = {}, d1[64] = {};
        uint32_t f0[16], f1[16], x0[8], x1[8], previous = 0;
        wait_full(p_ring, p);
        LOAD_FRAGMENT(x0, from + p.index * STAGE_BYTES, 0);
        LOAD_FRAGMENT(x1, from + p.index * STAGE_BYTES, 1);
        for (int32_t block = 0; block < tile.blocks; block += 4) {
            const uint32_t at = from + p.index * STAGE_BYTES, release = empty(p_ring, p.index);
            uint32_t low[4], high[4]; // the scales' factors, of both halves
            UNROLL for (int i = 0; i < 4; i++) {
                low[i] = SCALE_FACTOR(tile.scales[i], shift);
                high[i] = SCALE_FACTOR(tile.scales[i], shift + 16);
            }
            const int32_t mine = block + (int32_t)(quad >> 1);
            const int partial = kind.depth && block + 4 > tile.blocks;
            const uint32_t low_mask = mine < tile.blocks ? ~0u : 0, high_mask = mine + 2 < tile.blocks ? ~0u : 0;
            const int more = block + 4 < tile.blocks;
            if (more)
                load_scales(&tile);

            WGMMA_WAIT(1);
            PIN(x0);
            if (partial)
                clear_unless(x0, low_mask);
            convert_fragment(f0, x0, low[0], low[1]);
            LOAD_FRAGMENT(x0, at + BOX_BYTES, 0);
            wait_full(HALF_RING, half);
            uint64_t b = describe_half(half.index);
            MULTIPLY(d0, f0, b);
            WGMMA_WAIT(1);
            PIN(x1);
            if (block && lane == 0)
                barrier_arrive(empty(HALF_RING, previous));
            previous = half.index;
            advance(&half, HALVES);
            if (partial)
                clear_unless(x1, low_mask);
            convert_fragment(f1, x1, low[2], low[3]);
            LOAD_FRAGMENT(x1, at + BOX_BYTES, 1);
            MULTIPLY(d1, f1, b);

            WGMMA_WAIT(1);
            PIN(x0);
            if (partial)
                clear_unless(x0, high_mask);
            convert_fragment(f0, x0, high[0], high[1]);
            advance(&p, P_STAGES);
            if (more) {
                wait_full(p_ring, p);
                LOAD_FRAGMENT(x0, from + p.index * STAGE_BYTES, 0);
            }
            wait_full(HALF_RING, half);
            b = describe_half(half.index);
            MULTIPLY(d0, f0, b);
            WGMMA_WAIT(1);
            PIN(x1);
            if (lane == 0)
                barrier_arrive(empty(HALF_RING, previous));
            previous = half.index;
            advance(&half, HALVES);
            if (partial)
                clear_unless(x1, high_mask);
            convert_fragment(f1, x1, high[2], high[3]);
            // An arrive does not wait for earlier loads: its address depends on the last loaded value.
            sync_warp();
            if (lane == 0)
                barrier_arrive(release + (f1[15] & (uint32_t)plan.zero));
            if (more)
                LOAD_FRAGMENT(x1, from + p.index * STAGE_BYTES, 1);
            MULTIPLY(d1, f1, b);
        }
        struct problem here = problem; // a copy that the compiler does not compute with before
        HIDE64(here.out_stride);
        HIDE64(here.out);
        HIDE64(here.bias);
        const struct part part = part_of(tile.slot, problem);
        const uint32_t done = slot.index;
        advance(&slot, SLOTS);
        tile = open_tile(slot, plan, warpgroup);
        WGMMA_WAIT(0);
        PIN64(d0);
        PIN64(d1);
        if (lane == 0)
            barrier_arrive(empty(HALF_RING, previous));
        if (!(part.flags & MODERATE)) {
            apply_other_factors(d0, part, 0);
            apply_other_factors(d1, part, 1);
        }
        if (kind.swapped)
            store_swapped_tile(d0, d1, part, here);
        else
            store_tile(d0, d1, part, here);
        sync_warp();
        if (lane == 0)
            barrier_arrive(empty(SLOT_RING, done));
    }
    const int32_t first_exact = TILE_FIELD(tile.slot, first_exact);
    if (first_exact < plan.tiles)
        do_rest_exactly(problem, plan, (uint32_t)first_exact, kind);
}

// ------------------------------------------------------------------------------------------------------------ kernels

INLINE void gemm(struct problem problem, struct mx_sm90_plan plan, uint64_t p_map, struct kind kind) {
    const uint32_t warpgroup = shuffle(thread_id() >> 7, 0); // so the compiler knows it to be the same in a warp
    if (thread_id() == 0) {
        const uint32_t arrivals[] = {1, 1, CONVERTER_WARPS, 32};
        const uint32_t releases[] = {CONSUMER_WARPS / 2, CONVERTER_WARPS, CONSUMER_WARPS,
                                     FILLING_WARPS + CONVERTER_WARPS + CONSUMER_WARPS};
        const uint32_t firsts[] = {P_RING, Q_RING, HALF_RING, SLOT_RING, PAIRS};
        UNROLL for (int ring = 0; ring < 4; ring++) {
            UNROLL for (uint32_t i = firsts[ring]; i < firsts[ring + 1]; i++) {
                barrier_init(full(i, 0), arrivals[ring]);
                barrier_init(empty(i, 0), releases[ring]);
            }
        }
        fence_barrier_init();
    }
    wait_for_previous(); // prepare's workspace
    sync_block();
    if (warpgroup == 0) {
        SET_REGISTERS_DOWN(40);
        const uint32_t warp = shuffle(thread_id() >> 5, 0), base = shared_address(shared);
        if (warp == 0) {
            fetch_tiles(plan);
            return;
        }
        struct filling it = {Q_RING,
                             Q_STAGES,
                             base + Q_AT,
                             p_map + 128,
                             problem.q,
                             problem.q_rows,
                             __builtin_offsetof(struct mx_sm90_tile, q_row),
                             0};
        if (warp > 1) {
            const uint32_t first = (warp - 2) * P_STAGES;
            it = (struct filling){P_RING + first,
                                  P_STAGES,
                                  base + first * STAGE_BYTES,
                                  p_map,
                                  problem.p,
                                  problem.p_rows,
                                  __builtin_offsetof(struct mx_sm90_tile, p_row),
                                  (int32_t)(warp - 2) * MX_SM90_ROW_BLOCK};
        }
        if (plan.copies)
            copy_stages(it, problem.stride);
        else if ((thread_id() & 31) == 0)
            fill_stages(it);
    } else if (warpgroup == 1) {
        SET_REGISTERS_DOWN(56);
        convert_q(plan, kind.depth);
    } else {
        SET_REGISTERS_UP(208);
        consume(problem, plan, warpgroup - 2, kind);
    }
}

INLINE struct problem problem_of_rows(struct mx_rows_args args, int swapped) {
    const int64_t weights = args.groups * args.n;
    return swapped ? (struct problem){args.b, args.b_scale, args.a,   args.a_scale, weights,       args.m,
                                      args.k, args.bias,    args.out, args.n,       args.out_type, 0}
                   : (struct problem){args.a, args.a_scale, args.b,   args.b_scale, args.m,        weights,
                                      args.k, args.bias,    args.out, args.n,       args.out_type, 0};
}

#define ROWS_KERNEL(name, swapped)                                                                                     \
    KERNEL(name, 512, 1)(const struct mx_rows_args args, const struct mx_sm90_plan plan,                               \
                         [[maybe_unused]] const struct mx_sm90_maps maps) {                                            \
        uint64_t p_map;                                                                                                \
        PARAMETER_ADDRESS(p_map, name, 2);                                                                             \
        gemm(problem_of_rows(args, swapped), plan, p_map, (struct kind){swapped, 0});                                  \
    }
#include "kernels.def"

KERNEL(mx_gemm_depth_sm90, 512, 1)(const struct mx_depth_args args, const struct mx_sm90_plan plan,
                                   [[maybe_unused]] const struct mx_sm90_maps maps) {
    uint64_t p_map;
    PARAMETER_ADDRESS(p_map, mx_gemm_depth_sm90, 2);
    const struct problem problem = {args.a,     args.a_scale, args.b,   args.b_scale, args.n,        args.k,
                                    args.depth, nullptr,      args.out, args.k,       args.out_type, args.accumulate};
    gemm(problem, plan, p_map, (struct kind){0, 1});
}
