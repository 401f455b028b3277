// sm_90 (H100, H200) grouped MXFP8 GEMMs. Launch, workspace, the two ways of an element and the table of kernels:
// sm90.h.
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
// Warpgroup 0: warp 0 has the copy engine fill stages of 128 of the contraction, each as two boxes of 64 bytes a row,
// swizzled by 64; warp 1 fetches tiles and their references. Warpgroup 1 converts Q to float16 in shared memory, in
// K-major rows of 128 bytes, swizzled by 128: "halves", since they hold 64 of the contraction. Warpgroups 2 and 3 each
// have 128 rows of P, convert them in registers and multiply by wgmma.m64n128k16 (float16 in, float32 sums).
//   shared memory: P stages 3 x 32 KB | Q stages 3 x 16 KB | Q halves 4 x 16 KB | tiles 4 x 1984 bytes | barriers
//   registers: 40 a lane in warpgroup 0, 56 in 1, 208 in 2 and 3: 128 accumulators, 32 of P fragments, 16 of P bytes
//
// The contraction is permuted inside each 64: lane quad q of a P fragment has bytes 16 q .. 16 q + 15, of which word j
// goes to the j-th of four wgmma, and Q's halves have the same order. Q's rows are permuted inside each 32: row 8 j + 2
// q
// + b of a half is Q's row 8 q + 2 j + b, so that a lane has 8 consecutive columns of the product.
//
// Sources: PTX ISA 8.8, sections on wgmma (fragments, matrix descriptors), mbarrier and cp.async.bulk.tensor.
#include "device_sm90.h"

enum {
    P_STAGES = 3,
    Q_STAGES = 3,
    HALVES = 4,
    SLOTS = 4,
    P_BOX = MX_SM90_P * 64,
    Q_BOX = MX_SM90_Q * 64,
    HALF_BYTES = MX_SM90_Q * 128,
    // A slot: the tile, P's references and Q's, a byte each, and their factors, a float each.
    REFS_AT = sizeof(struct mx_sm90_tile),
    FACTORS_AT = REFS_AT + MX_SM90_P + MX_SM90_Q,
    SLOT_BYTES = FACTORS_AT + 4 * (MX_SM90_P + MX_SM90_Q),
    Q_AT = P_STAGES * 2 * P_BOX,
    HALVES_AT = Q_AT + Q_STAGES * 2 * Q_BOX,
    SLOTS_AT = HALVES_AT + HALVES * HALF_BYTES,
    BARRIERS_AT = SLOTS_AT + SLOTS * SLOT_BYTES,
    PAIRS = P_STAGES + Q_STAGES + HALVES + SLOTS,
    PRODUCER_WARPS = 1,
    CONVERTER_WARPS = 4,
    CONSUMER_WARPS = 8,
};
static_assert(BARRIERS_AT + 16 * PAIRS <= MX_SM90_SHARED_BYTES);
static_assert(SLOT_BYTES % 16 == 0 && HALVES_AT % 1024 == 0 && __builtin_offsetof(struct mx_sm90_tile, flags) == 56);

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
enum { P_RING, Q_RING = P_RING + P_STAGES, HALF_RING = Q_RING + Q_STAGES, SLOT_RING = HALF_RING + HALVES };
INLINE uint32_t full(uint32_t ring, uint32_t index) {
    return shared_address(shared) + BARRIERS_AT + 8 * (ring + index);
}
INLINE uint32_t empty(uint32_t ring, uint32_t index) { return full(ring, index) + 8 * PAIRS; }
INLINE void wait_full(uint32_t ring, struct ring at) { barrier_wait(full(ring, at.index), at.parity); }
INLINE void wait_empty(uint32_t ring, struct ring at) { barrier_wait(empty(ring, at.index), at.parity ^ 1); }

INLINE uint32_t p_stage(uint32_t index) { return shared_address(shared) + index * 2 * P_BOX; }
INLINE uint32_t q_stage(uint32_t index) { return shared_address(shared) + Q_AT + index * 2 * Q_BOX; }

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

enum { MODERATE = 1, HAS_EXACT = 2 }; // flags of a tile in a slot
INLINE uint32_t slot_address(uint32_t index) { return shared_address(shared) + SLOTS_AT + index * SLOT_BYTES; }
#define TILE_FIELD(slot, field) ((int32_t)load_shared((slot) + __builtin_offsetof(struct mx_sm90_tile, field)))
INLINE int64_t load_shared64(uint32_t at) { return (int64_t)((uint64_t)load_shared(at + 4) << 32 | load_shared(at)); }

// An accumulator is the sum times 2^(2 * 7 - (p - 127) - (q - 127)), with p and q its references. To undo it, it is
// multiplied by a power of two for each, its factor; where references are far from 127 (not MODERATE), by the square
// root of each, twice: then what overflows or vanishes on the way does so in the end.
INLINE float factor_of(uint32_t reference, uint32_t moderate) {
    return power_of_two((((int32_t)reference - 134) >> !moderate) + 127);
}
INLINE float other_factor_of(uint32_t reference) {
    return power_of_two((int32_t)reference - 134 - (((int32_t)reference - 134) >> 1) + 127);
}

// Warp 1: each tile of this block with its references and factors, into the next slot. Rows that do not exist have 127.
INLINE void fetch_tiles(struct mx_sm90_plan plan) {
    const uint32_t lane = thread_id() & 31;
    const struct mx_sm90_tile *tiles = (const struct mx_sm90_tile *)plan.workspace;
    struct ring slot = {};
    for (uint32_t index = block_id();; index += grid_size()) {
        const int exists = index < (uint32_t)plan.tiles && tiles[index].p_rows;
        wait_empty(SLOT_RING, slot);
        const uint32_t at = slot_address(slot.index);
        uint32_t far = 0, exact = 0;
        // 12 references a lane, in words of 4: 64 words of P's and 32 of Q's.
        uint32_t words[3];
        UNROLL for (uint32_t i = 0; i < 3; i++) {
            words[i] = 127 * 0x01010101;
            if (exists && tiles[index].blocks > 0) {
                const struct mx_sm90_tile *tile = &tiles[index];
                const int p = i < 2;
                const uint32_t row = 4 * (lane + (i == 1 ? 32 : 0));
                const uint8_t *refs = plan.workspace + (p ? plan.p_ref : plan.q_ref) +
                                      (int64_t)(p ? tile->p_ref : tile->q_ref) * MX_SM90_ROW_BLOCK;
                const int32_t count = (p ? tile->p_rows : tile->q_rows) - (int32_t)row;
                const uint32_t exist = count >= 4 ? ~0u : count <= 0 ? 0 : (1u << 8 * count) - 1;
                words[i] = (load_constant(refs + row) & exist) | (words[i] & ~exist);
            }
            UNROLL for (int j = 0; j < 32; j += 8) {
                const uint32_t ref = words[i] >> j & 255;
                far |= ref - (127 - 48) > 96; // else any sum of products times the factors stays in range
                exact |= ref == MX_SM90_EXACT;
            }
        }
        const uint32_t moderate = !any_of_warp(far);
        const uint32_t flags = (moderate ? MODERATE : 0) | (any_of_warp(exact) ? HAS_EXACT : 0);
        UNROLL for (uint32_t i = 0; i < 3; i++) {
            const uint32_t row = 4 * (lane + 32 * i);
            store_shared(at + REFS_AT + row, words[i]);
            uint32_t factors[4];
            UNROLL for (int j = 0; j < 4; j++) factors[j] =
                __builtin_bit_cast(uint32_t, factor_of(words[i] >> 8 * j & 255, moderate));
            store_shared4(at + FACTORS_AT + 4 * row, factors[0], factors[1], factors[2], factors[3]);
        }
        if (lane < 4) {
            u32x4 x = exists ? load_constant4((const char *)&tiles[index] + 16 * lane) : (u32x4){};
            if (lane == 3)
                x.z = flags;
            store_shared4(at + 16 * lane, x.x, x.y, x.z, x.w);
        }
        barrier_arrive(full(SLOT_RING, slot.index));
        advance(&slot, SLOTS);
        if (!exists)
            return;
    }
}

// ------------------------------------------------------------------------------------------------------- fill stages

// Warp 0: both operands' stages, tile after tile. One lane is enough.
INLINE void fill_stages(uint64_t p_map) {
    struct ring slot = {}, p = {}, q = {};
    for (;;) {
        wait_full(SLOT_RING, slot);
        const uint32_t tile = slot_address(slot.index);
        if (TILE_FIELD(tile, p_rows) == 0)
            return;
        const int32_t p_row = TILE_FIELD(tile, p_row), q_row = TILE_FIELD(tile, q_row);
        int32_t x = TILE_FIELD(tile, start);
        for (int32_t blocks = TILE_FIELD(tile, blocks); blocks > 0; blocks -= 4, x += MX_SM90_STEP) {
            const uint32_t q_to = q_stage(q.index), q_full = full(Q_RING, q.index);
            wait_empty(Q_RING, q);
            barrier_expect(q_full, 2 * Q_BOX);
            copy_box(q_to, p_map + 128, q_full, x, q_row);
            copy_box(q_to + Q_BOX, p_map + 128, q_full, x + 64, q_row);
            advance(&q, Q_STAGES);
            const uint32_t p_to = p_stage(p.index), p_full = full(P_RING, p.index);
            wait_empty(P_RING, p);
            barrier_expect(p_full, 2 * P_BOX);
            copy_box(p_to, p_map, p_full, x, p_row);
            copy_box(p_to + P_BOX, p_map, p_full, x + 64, p_row);
            advance(&p, P_STAGES);
        }
        barrier_arrive(empty(SLOT_RING, slot.index));
        advance(&slot, SLOTS);
    }
}

// Does what copy_box does, without a tensor map: a warp copies `count` rows of 64 bytes, zeros for what is outside the
// matrix, of which `rows` rows and `columns` bytes are left from `from` on.
INLINE void copy_bytes(uint32_t to, const uint8_t *from, int64_t stride, int64_t rows, int32_t columns, int32_t count) {
    uint32_t lane = thread_id() & 31;
    HIDE(lane); // saves registers
    ROLLED for (int32_t i = (int32_t)lane; i < count * 16; i += 32) {
        const int32_t row = i / 16, word = i % 16;
        uint32_t bytes = 0;
        if (row < rows && 4 * word < columns)
            ROLLED for (int32_t b = 3; b >= 0; b--) bytes = bytes << 8 | from[row * stride + 4 * word + b];
        store_shared(to + row * 64 + (((word >> 2) ^ (row >> 1 & 3)) << 4) + (word & 3) * 4, bytes);
    }
}

// Waits for a stage, fills it, says so.
INLINE void copy_stage(uint32_t ring, struct ring at, uint32_t to, const uint8_t *from, int64_t stride, int64_t rows,
                       int32_t x, int32_t y, int32_t count) {
    wait_empty(ring, at);
    ROLLED for (int32_t end = x + MX_SM90_STEP; x < end; x += 64, to += 64 * count)
        copy_bytes(to, from + y * stride + x, stride, rows - y, (int32_t)(stride - x), count);
    sync_warp();
    if ((thread_id() & 31) == 0)
        barrier_arrive(full(ring, at.index));
}

// fill_stages for operands that tensor maps cannot describe.
INLINE void copy_stages(struct problem problem) {
    const uint32_t lane = thread_id() & 31;
    struct ring slot = {}, p = {}, q = {};
    for (;;) {
        wait_full(SLOT_RING, slot);
        const uint32_t tile = slot_address(slot.index);
        if (TILE_FIELD(tile, p_rows) == 0)
            return;
        int32_t x = TILE_FIELD(tile, start);
        for (int32_t blocks = TILE_FIELD(tile, blocks); blocks > 0; blocks -= 4, x += MX_SM90_STEP) {
            copy_stage(Q_RING, q, q_stage(q.index), problem.q, problem.stride, problem.q_rows, x,
                       TILE_FIELD(tile, q_row), MX_SM90_Q);
            advance(&q, Q_STAGES);
            copy_stage(P_RING, p, p_stage(p.index), problem.p, problem.stride, problem.p_rows, x,
                       TILE_FIELD(tile, p_row), MX_SM90_P);
            advance(&p, P_STAGES);
        }
        sync_warp();
        if (lane == 0)
            barrier_arrive(empty(SLOT_RING, slot.index));
        advance(&slot, SLOTS);
    }
}

// ---------------------------------------------------------------------------------------------------------- convert Q

// A scale of the workspace, as it lies in byte `selector` of `scales`, as a pair of float16 factors.
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
                const uint32_t at = from + q.index * 2 * Q_BOX + h * Q_BOX;
                uint32_t x[16];
                UNROLL for (int c = 0; c < 4; c++) LOAD_SHARED4(x + 4 * c, at + (16 * c ^ from_swizzle));
                if (masked) {
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

// Reads 16 bytes of each of a lane's two rows, 8 apart, of a fragment of 64.
#define LOAD_FRAGMENT(x, at)                                                                                           \
    do {                                                                                                               \
        LOAD_SHARED4(x, at);                                                                                           \
        LOAD_SHARED4((x) + 4, (at) + 512);                                                                             \
    } while (0)

// The bytes of two rows and their factors -> the fragments of four wgmma. `mask` clears the bytes.
INLINE void convert_fragment(uint32_t *fragment, const uint32_t *x, uint32_t factor0, uint32_t factor1, uint32_t mask) {
    UNROLL for (int i = 0; i < 4; i++) {
        uint32_t low, high;
        decode_e4m3(x[i] & mask, &low, &high);
        fragment[4 * i] = multiply_f16x2(low, factor0);
        fragment[4 * i + 2] = multiply_f16x2(high, factor0);
        decode_e4m3(x[4 + i] & mask, &low, &high);
        fragment[4 * i + 1] = multiply_f16x2(low, factor1);
        fragment[4 * i + 3] = multiply_f16x2(high, factor1);
    }
}

// ------------------------------------------------------------------------------------------------------------- store

INLINE void store_one(struct problem problem, int64_t index, float x) {
    if (problem.type == MX_BF16)
        ((uint16_t *)problem.out)[index] = round_bf16(x);
    else
        ((float *)problem.out)[index] = problem.add ? ((float *)problem.out)[index] + x : x;
}

// 8 consecutive outputs, of which `count` exist; `vector`: the address is a multiple of 16 bytes.
INLINE void store_run(struct problem problem, int64_t index, float *x, int32_t count, int vector) {
    if (!vector || count < 8) {
        ROLLED for (int32_t i = 0; i < count; i++) {
            store_one(problem, index + i, x[0]);
            UNROLL for (int j = 0; j < 7; j++) x[j] = x[j + 1];
            if (i == 7)
                return;
        }
    } else if (problem.type == MX_BF16) {
        *(u32x4 *)((uint16_t *)problem.out + index) =
            (u32x4){pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7])};
    } else {
        f32x4 *at = (f32x4 *)((float *)problem.out + index);
        f32x4 low = {x[0], x[1], x[2], x[3]}, high = {x[4], x[5], x[6], x[7]};
        if (problem.add) {
            low += at[0];
            high += at[1];
        }
        at[0] = low;
        at[1] = high;
    }
}

// What a consumer thread knows of its part of a tile: rows first_row + {0, 8, 64, 72}, columns 32 i + 8 quad + 0 .. 7.
// The accumulator of row 64 f + 8 h and column 32 i + 8 quad + 2 j + b is number 16 i + 4 j + 2 h + b of fragment f.
struct part {
    uint32_t slot;
    int32_t first_row, quad;
    int32_t p_rows, q_rows;
    int64_t out, bias; // bias: -1 for none
    uint32_t flags;
};
INLINE uint32_t p_reference(struct part part, int f, int h) {
    return load_shared_byte(part.slot + REFS_AT + part.first_row + 64 * f + 8 * h);
}
INLINE float p_factor(struct part part, int f, int h) {
    return load_shared_float(part.slot + FACTORS_AT + 4 * (part.first_row + 64 * f + 8 * h));
}
// Of columns 2 j and 2 j + 1 of the i-th 8.
INLINE uint32_t q_references(struct part part, int i, int j) {
    return load_shared_half(part.slot + REFS_AT + MX_SM90_P + 32 * i + 8 * part.quad + 2 * j);
}
INLINE f32x2 q_factors(struct part part, int i, int j) {
    return load_shared_float2(part.slot + FACTORS_AT + 4 * (MX_SM90_P + 32 * i + 8 * part.quad + 2 * j));
}

// The second factors, where they are not 1.
INLINE void apply_other_factors(float *d, struct part part, int f) {
    UNROLL for (int h = 0; h < 2; h++) {
        const float p_factor = other_factor_of(p_reference(part, f, h));
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

INLINE void store_tile(float *d0, float *d1, struct part part, struct problem problem) {
    const int64_t first = part.out + part.first_row * problem.out_stride + 8 * part.quad;
    const int64_t bytes = problem.type == MX_BF16 ? 2 : 4;
    const int vector = (((uintptr_t)problem.out + first * bytes) | problem.out_stride * bytes) % 16 == 0;
    UNROLL for (int f = 0; f < 2; f++) UNROLL for (int h = 0; h < 2; h++) {
        const int32_t row = 64 * f + 8 * h;
        const float p = p_factor(part, f, h);
        const int64_t index = first + row * problem.out_stride;
        if (part.first_row + row >= part.p_rows)
            continue;
        UNROLL for (int i = 0; i < 4; i++) {
            const int32_t count = part.q_rows - 32 * i - 8 * part.quad;
            float x[8];
            UNROLL for (int j = 0; j < 8; j += 2) {
                const f32x2 q = q_factors(part, i, j / 2);
                x[j] = (f ? d1 : d0)[16 * i + 2 * j + 2 * h] * p * q.x;
                x[j + 1] = (f ? d1 : d0)[16 * i + 2 * j + 2 * h + 1] * p * q.y;
            }
            if (part.bias >= 0) {
                UNROLL for (int j = 0; j < 8; j++) if (j < count) x[j] +=
                    problem.bias[part.bias + 32 * i + 8 * part.quad + j];
            }
            store_run(problem, index + 32 * i, x, count, vector);
        }
    }
}

// The swapped tile's output has P's rows as its columns. float16-sized outputs go through movmatrix, which transposes
// 8 x 8 of them between the lanes, so that a lane stores two neighbours.
INLINE void store_swapped_tile(float *d0, float *d1, struct part part, struct problem problem) {
    const int32_t group = (int32_t)(thread_id() >> 2 & 7);
    UNROLL for (int f = 0; f < 2; f++) UNROLL for (int h = 0; h < 2; h++) {
        const int32_t row = part.first_row + 64 * f + 8 * h, pair = row - group + 2 * part.quad;
        const float p = p_factor(part, f, h);
        const float bias = part.bias >= 0 && row < part.p_rows ? problem.bias[part.bias + row] : 0;
        UNROLL for (int i = 0; i < 4; i++) UNROLL for (int j = 0; j < 4; j++) {
            const f32x2 q = q_factors(part, i, j);
            float x[2];
            UNROLL for (int b = 0; b < 2; b++) {
                x[b] = (f ? d1 : d0)[16 * i + 4 * j + 2 * h + b] * p * q[b];
                if (part.bias >= 0)
                    x[b] += bias;
            }
            if (problem.type == MX_BF16) {
                const int32_t token = 32 * i + 8 * (group >> 1) + 2 * j + (group & 1);
                const uint32_t two = transpose_8x8(pack_bf16(x[0], x[1]));
                uint16_t *at = (uint16_t *)problem.out + part.out + token * problem.out_stride + pair;
                if (token < part.q_rows && pair + 1 < part.p_rows && ((uintptr_t)at & 3) == 0) {
                    *(uint32_t *)at = two;
                } else if (token < part.q_rows) {
                    if (pair < part.p_rows)
                        at[0] = (uint16_t)two;
                    if (pair + 1 < part.p_rows)
                        at[1] = (uint16_t)(two >> 16);
                }
            } else {
                UNROLL for (int b = 0; b < 2; b++) {
                    const int32_t token = 32 * i + 8 * part.quad + 2 * j + b;
                    if (token < part.q_rows && row < part.p_rows)
                        store_one(problem, part.out + token * problem.out_stride + row, x[b]);
                }
            }
        }
    }
}

// Zeros all over a tile, every eighth row of the output by a warp.
INLINE void clear_tile(struct part part, struct problem problem, struct kind kind) {
    const int32_t rows = kind.swapped ? part.q_rows : part.p_rows, columns = kind.swapped ? part.p_rows : part.q_rows;
    const int32_t warp = (int32_t)(thread_id() >> 5) - 8, lane = (int32_t)(thread_id() & 31);
    ROLLED for (int32_t row = warp; row < rows; row += CONSUMER_WARPS)
        ROLLED for (int32_t column = lane; column < columns; column += 32)
            store_one(problem, part.out + row * problem.out_stride + column, 0);
}

// ---------------------------------------------------------------------------------------------------------- the exact
// way

INLINE int32_t min32(int32_t a, int32_t b) { return a < b ? a : b; }

// 8 E4M3 codes from any address, as four pairs of float16.
INLINE void load8(const uint8_t *from, uint32_t *x0, uint32_t *x1, uint32_t *x2, uint32_t *x3) {
    uint64_t codes = 0;
    if (((uintptr_t)from & 7) == 0)
        codes = *(const uint64_t *)from;
    else
        ROLLED for (int i = 0; i < 8; i++) codes |= (uint64_t)from[i] << 8 * i;
    decode_e4m3((uint32_t)codes, x0, x1);
    decode_e4m3((uint32_t)(codes >> 32), x2, x3);
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
    if (!any_of_warp(wanted))
        return;

    // Rows that do not exist stand in for by the last one that does.
    const int64_t scale_stride = problem.stride / MX_BLOCK, q_loaded = min32(column + group, q_last);
    const uint8_t *q = problem.q + (tile->q_row + q_loaded) * problem.stride + tile->start + 8 * quad;
    const uint8_t *p[2], *p_scale[2], *q_scale[2];
    UNROLL for (int i = 0; i < 2; i++) {
        const int64_t p_row = tile->p_row + min32(rows[i], p_last), q_row = tile->q_row + min32(columns[i], q_last);
        p[i] = problem.p + p_row * problem.stride + tile->start + 8 * quad;
        p_scale[i] = problem.p_scale + p_row * scale_stride + tile->start / MX_BLOCK;
        q_scale[i] = problem.q_scale + q_row * scale_stride + tile->start / MX_BLOCK;
    }
    float sums[4] = {};
    ROLLED for (int32_t block = 0; block < tile->blocks; block++) {
        uint32_t a[8], b[4];
        float d[4] = {};
        UNROLL for (int h = 0; h < 2; h++) load8(p[h] + block * MX_BLOCK, &a[h], &a[2 + h], &a[4 + h], &a[6 + h]);
        load8(q + block * MX_BLOCK, &b[0], &b[1], &b[2], &b[3]);
        mma(d, a[0], a[1], a[2], a[3], b[0], b[1]);
        mma(d, a[4], a[5], a[6], a[7], b[2], b[3]);
        UNROLL for (int i = 0; i < 4; i++) sums[i] += scale_exactly(d[i], p_scale[i / 2][block], q_scale[i % 2][block]);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        if (!(wanted >> i & 1))
            continue;
        const int32_t across = kind.swapped ? columns[i % 2] : rows[i / 2];
        const int32_t along = kind.swapped ? rows[i / 2] : columns[i % 2];
        if (problem.bias)
            sums[i] += problem.bias[tile->bias + along];
        store_one(problem, tile->out + across * problem.out_stride + along, sums[i]);
    }
}

// The consumers, when all tiles are stored: whatever goes the exact way, in this block's tiles.
INLINE void do_rest_exactly(struct problem problem, struct mx_sm90_plan plan, struct kind kind) {
    asm volatile("barrier.cta.sync.aligned 1, 256;" ::: "memory");
    const struct mx_sm90_tile *tiles = (const struct mx_sm90_tile *)plan.workspace;
    ROLLED for (uint32_t index = block_id(); index < (uint32_t)plan.tiles; index += grid_size()) {
        if (tiles[index].p_rows == 0)
            return;
        ROLLED for (int32_t part = (int32_t)(thread_id() >> 5) - 8; part < 256; part += CONSUMER_WARPS)
            do_exactly(&tiles[index], part / 16 * 16, part % 16 * 8, problem, plan, kind);
    }
}

// ------------------------------------------------------------------------------------------------------------ consume

// What an open tile needs of its slot and workspace, and the scales of the next step of a lane's rows, which are 0, 8,
// 64 and 72 past its first.
struct open_tile {
    uint32_t slot;
    int32_t blocks;
    const uint8_t *scale;
    uint32_t scales[4];
};
INLINE void load_scales(struct open_tile *tile) {
    tile->scales[0] = load_constant(tile->scale);
    tile->scales[1] = load_constant(tile->scale + 32);
    tile->scales[2] = load_constant(tile->scale + 256);
    tile->scales[3] = load_constant(tile->scale + 288);
    tile->scale += MX_SM90_SCALE_BYTES;
}
INLINE struct open_tile open_tile(struct ring slot, struct mx_sm90_plan plan, uint32_t warpgroup, uint32_t row) {
    wait_full(SLOT_RING, slot);
    struct open_tile tile = {.slot = slot_address(slot.index)};
    tile.blocks = TILE_FIELD(tile.slot, blocks);
    const int64_t index = TILE_FIELD(tile.slot, p_scale) + (int64_t)warpgroup * plan.steps;
    tile.scale = plan.workspace + plan.p_scale + index * MX_SM90_SCALE_BYTES + 4 * row;
    if (tile.blocks > 0)
        load_scales(&tile);
    return tile;
}

INLINE struct part part_of(uint32_t slot, struct problem problem) {
    uint32_t thread = thread_id();
    HIDE(thread); // or what follows from it would stay in registers all along
    return (struct part){
        .slot = slot,
        .first_row = (int32_t)(((thread >> 7) - 2) * 128 + (thread >> 5 & 3) * 16 + (thread >> 2 & 7)),
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
INLINE void consume(struct problem problem, struct mx_sm90_plan plan, struct kind kind) {
    const uint32_t lane = thread_id() & 31, quad = lane & 3;
    const uint32_t warpgroup = (thread_id() >> 7) - 2, row = (thread_id() >> 5 & 3) * 16 + (lane >> 2);
    const uint32_t from = p_stage(0) + (warpgroup * 128 + row) * 64 + ((quad ^ (row >> 1 & 3)) << 4);
    const uint32_t shift = quad >> 1 << 3; // of this lane's block in the low half of a step's scales
    struct ring slot = {}, p = {}, half = {};
    uint32_t seen = 0;
    struct open_tile tile = open_tile(slot, plan, warpgroup, row);
    while (TILE_FIELD(tile.slot, p_rows)) {
        if (tile.blocks <= 0) {
            const struct part part = part_of(tile.slot, problem);
            if (!problem.add)
                clear_tile(part, problem, kind);
            sync_warp();
            if (lane == 0)
                barrier_arrive(empty(SLOT_RING, slot.index));
            advance(&slot, SLOTS);
            tile = open_tile(slot, plan, warpgroup, row);
            continue;
        }
        float d0[64] = {}, d1[64] = {};
        uint32_t f0[16], f1[16], x0[8], x1[8], previous = 0;
        wait_full(P_RING, p);
        LOAD_FRAGMENT(x0, from + p.index * 2 * P_BOX);
        LOAD_FRAGMENT(x1, from + p.index * 2 * P_BOX + 64 * 64);
        for (int32_t block = 0; block < tile.blocks; block += 4) {
            const uint32_t at = from + p.index * 2 * P_BOX, release = empty(P_RING, p.index);
            uint32_t low[4], high[4]; // the scales' factors, of both halves
            UNROLL for (int i = 0; i < 4; i++) {
                low[i] = SCALE_FACTOR(tile.scales[i], shift);
                high[i] = SCALE_FACTOR(tile.scales[i], shift + 16);
            }
            const int32_t mine = block + (int32_t)(quad >> 1);
            const uint32_t low_mask = !kind.depth || mine < tile.blocks ? ~0u : 0;
            const uint32_t high_mask = !kind.depth || mine + 2 < tile.blocks ? ~0u : 0;
            const int more = block + 4 < tile.blocks;
            if (more)
                load_scales(&tile);

            WGMMA_WAIT(1);
            PIN(x0);
            convert_fragment(f0, x0, low[0], low[1], low_mask);
            LOAD_FRAGMENT(x0, at + P_BOX);
            wait_full(HALF_RING, half);
            uint64_t b = describe_half(half.index);
            MULTIPLY(d0, f0, b);
            WGMMA_WAIT(1);
            PIN(x1);
            if (block && lane == 0)
                barrier_arrive(empty(HALF_RING, previous));
            previous = half.index;
            advance(&half, HALVES);
            convert_fragment(f1, x1, low[2], low[3], low_mask);
            LOAD_FRAGMENT(x1, at + P_BOX + 64 * 64);
            MULTIPLY(d1, f1, b);

            WGMMA_WAIT(1);
            PIN(x0);
            convert_fragment(f0, x0, high[0], high[1], high_mask);
            advance(&p, P_STAGES);
            if (more) {
                wait_full(P_RING, p);
                LOAD_FRAGMENT(x0, from + p.index * 2 * P_BOX);
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
            convert_fragment(f1, x1, high[2], high[3], high_mask);
            // An arrive does not wait for earlier loads: its address depends on the last loaded value.
            sync_warp();
            if (lane == 0)
                barrier_arrive(release + (f1[15] & (uint32_t)plan.zero));
            if (more)
                LOAD_FRAGMENT(x1, from + p.index * 2 * P_BOX + 64 * 64);
            MULTIPLY(d1, f1, b);
        }
        HIDE64(problem.out_stride);
        HIDE64(problem.out);
        const struct part part = part_of(tile.slot, problem);
        const uint32_t done = slot.index;
        seen |= part.flags;
        advance(&slot, SLOTS);
        tile = open_tile(slot, plan, warpgroup, row);
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
            store_swapped_tile(d0, d1, part, problem);
        else
            store_tile(d0, d1, part, problem);
        sync_warp();
        if (lane == 0)
            barrier_arrive(empty(SLOT_RING, done));
    }
    if (seen & HAS_EXACT)
        do_rest_exactly(problem, plan, kind);
}

// ------------------------------------------------------------------------------------------------------------ kernels

INLINE void gemm(struct problem problem, struct mx_sm90_plan plan, uint64_t p_map, struct kind kind) {
    const uint32_t warpgroup = thread_id() >> 7;
    if (thread_id() == 0) {
        const uint32_t arrivals[] = {1, 1, CONVERTER_WARPS, 32};
        const uint32_t releases[] = {CONSUMER_WARPS, CONVERTER_WARPS, CONSUMER_WARPS,
                                     PRODUCER_WARPS + CONVERTER_WARPS + CONSUMER_WARPS};
        const uint32_t firsts[] = {P_RING, Q_RING, HALF_RING, SLOT_RING, PAIRS};
        UNROLL for (int ring = 0; ring < 4; ring++) {
            UNROLL for (uint32_t i = firsts[ring]; i < firsts[ring + 1]; i++) {
                barrier_init(full(i, 0), arrivals[ring]);
                barrier_init(empty(i, 0), releases[ring]);
            }
        }
        fence_barrier_init();
    }
    sync_block();
    if (warpgroup == 0) {
        SET_REGISTERS_DOWN(40);
        if (thread_id() < 32) {
            if (plan.copies)
                copy_stages(problem);
            else if (thread_id() == 0)
                fill_stages(p_map);
        } else if (thread_id() < 64) {
            fetch_tiles(plan);
        }
    } else if (warpgroup == 1) {
        SET_REGISTERS_DOWN(56);
        convert_q(plan, kind.depth);
    } else {
        SET_REGISTERS_UP(208);
        consume(problem, plan, kind);
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
    KERNEL name(const struct mx_rows_args args, const struct mx_sm90_plan plan,                                        \
                [[maybe_unused]] const struct mx_sm90_maps maps) {                                                     \
        LAUNCH_BOUNDS(MX_SM90_THREADS);                                                                                \
        uint64_t p_map;                                                                                                \
        PARAMETER_ADDRESS(p_map, name, 2);                                                                             \
        gemm(problem_of_rows(args, swapped), plan, p_map, (struct kind){swapped, 0});                                  \
    }
MX_SM90_ROWS_KERNELS(ROWS_KERNEL)

KERNEL mx_gemm_depth_sm90(const struct mx_depth_args args, const struct mx_sm90_plan plan,
                          [[maybe_unused]] const struct mx_sm90_maps maps) {
    LAUNCH_BOUNDS(MX_SM90_THREADS);
    uint64_t p_map;
    PARAMETER_ADDRESS(p_map, mx_gemm_depth_sm90, 2);
    const struct problem problem = {args.a,     args.a_scale, args.b,   args.b_scale, args.n,        args.k,
                                    args.depth, nullptr,      args.out, args.k,       args.out_type, args.accumulate};
    gemm(problem, plan, p_map, (struct kind){0, 1});
}
