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
// and of P's first and second 128 rows. Warpgroup 1 converts Q to float16 in shared memory. Warpgroups 2 and 3 each
// have 128 rows of P, which they convert in registers and multiply by wgmma.m64n128k16 (float16 in, float32 sums).
//   registers: 40 a lane in warpgroup 0, 56 in 1, 208 in 2 and 3: 128 accumulators, 32 of P fragments, 16 of P bytes
//
// Rows are permuted inside each 32 and the contraction inside each 64, so that what a lane reads of P, and what it has
// of the product along P and along Q, are runs. Lane 8 s + 4 b + q of a warp (s and q 0 .. 3, b 0 or 1) has
//
//   of P, the 8 rows from 8 s on of its warp's 32, every other one from b on:
//     row of the 8           b         2 + b     4 + b     6 + b
//     fragment: its row      0: 2s+b   0: 8+2s+b 1: 2s+b   1: 8+2s+b
//     registers of a wgmma   a0, a2    a1, a3    a0, a2    a1, a3
//   of these, in each half, the 16 bytes from 16 q on, four for each of its four wgmma; Q has the same order:
//     bytes of the 16        0 1    2 3     4 5    6 7     8 9    10 11   12 13  14 15
//     wgmma: its place in 16 0: 2q  0: 8+2q 1: 2q  1: 8+2q 2: 2q  2: 8+2q 3: 2q  3: 8+2q   and one more
//     register               a0 a1  a2 a3   a0 a1  a2 a3   a0 a1  a2 a3   a0 a1  a2 a3     of its two rows
//   of Q, the 8 rows from 8 q on of the i-th 32, which are columns of the product:
//     row of the 8           0      1      2      3      4      5      6      7
//     row of the half's 32   2q     2q+1   8+2q   9+2q   16+2q  17+2q  24+2q  25+2q
//     sum, from 16 i on      0 2    1 3    4 6    5 7    8 10   9 11   12 14  13 15  of a fragment's two rows
//
// Values derived from the thread's number are hidden from the compiler in places (HIDE): it would keep them in
// registers across the main loop, which has none to spare.
//
// Sources: PTX ISA 8.8, sections on wgmma (fragments, matrix descriptors), mbarrier and cp.async.bulk.tensor.
#include "exact.h"
#include "pipeline.h"
#include "store.h"

// ------------------------------------------------------------------------------------------------------- fetch tiles

// Writes a tile's references, four a lane in each word, and their factors.
INLINE void write_factors(uint32_t at, const uint32_t *words, uint32_t moderate, uint32_t lane) {
    UNROLL for (uint32_t i = 0; i < 3; i++) {
        const uint32_t row = 4 * (lane + 32 * i);
        store_shared(at + REFS_AT + row, words[i]);
        uint32_t factors[4];
        UNROLL for (int j = 0; j < 4; j++)
            factors[j] = factor_of(words[i] >> 8 * j & 255, moderate);
        store_shared(at + FACTORS_AT + 2 * row, factors[0] >> 16 | factors[1]);
        store_shared(at + FACTORS_AT + 2 * row + 4, factors[2] >> 16 | factors[3]);
    }
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
        UNROLL for (uint32_t i = 0; i < 3; i++)
            words[i] = references_of(tile, plan, i);
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
        write_factors(at, words, moderate, lane);
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
    uint64_t map;        // the operand's tensor map, if not for copies
    const uint8_t *from; // the operand
    int64_t rows;        // of the whole operand
    int32_t past_row;    // how far past a tile's first row the stages begin
    uint32_t row_at;     // where a tile in a slot has that
};

// Does what copy_box does, without a tensor map: a warp copies 128 rows of 64 bytes, zeros for what is outside the
// matrix, of which `rows` rows and `columns` bytes are left from `from` on.
INLINE void copy_bytes(uint32_t to, const uint8_t *from, int64_t stride, int64_t rows, int32_t columns) {
    uint32_t lane = thread_id() & 31;
    HIDE(lane); // saves registers
    ROLLED for (int32_t i = (int32_t)lane; i < MX_SM90_ROW_BLOCK * 16; i += 32) {
        const int32_t row = i / 16, word = i % 16;
        uint32_t bytes = 0;
        if (row < rows && 4 * word < columns) ROLLED
            for (int32_t b = 3; b >= 0; b--)
                bytes = bytes << 8 | from[row * stride + 4 * word + b];
        store_shared(to + row * 64 + (((word >> 2) ^ (row >> 1 & 3)) << 4) + (word & 3) * 4, bytes);
    }
}

// Fills the ring, tile after tile: one lane has the copy engine do it, or, for operands that tensor maps cannot
// describe, the whole warp `copies`.
INLINE void fill_stages(struct filling it, int64_t stride, int copies) {
    const uint32_t lane = thread_id() & 31;
    struct ring slot = {}, at = {};
    for (; wait_for_tile(slot); advance(&slot, SLOTS)) {
        const uint32_t tile = slot_address(slot.index);
        const int64_t y = (int32_t)load_shared(tile + it.row_at) + it.past_row;
        int32_t x = TILE_FIELD(tile, start);
        for (int32_t blocks = TILE_FIELD(tile, blocks); blocks > 0; blocks -= 4) {
            uint32_t to = it.to + at.index * STAGE_BYTES;
            const uint32_t barrier = full(it.ring, at.index);
            wait_empty(it.ring, at);
            if (copies) {
                ROLLED for (int h = 0; h < 2; h++, x += 64, to += BOX_BYTES)
                    copy_bytes(to, it.from + y * stride + x, stride, it.rows - y, (int32_t)(stride - x));
                sync_warp();
                if (lane == 0)
                    barrier_arrive(barrier);
            } else {
                barrier_expect(barrier, STAGE_BYTES);
                copy_box(to, it.map, barrier, x, (int32_t)y);
                copy_box(to + BOX_BYTES, it.map, barrier, x + 64, (int32_t)y);
                x += MX_SM90_STEP;
            }
            advance(&at, it.stages);
        }
        if (copies)
            sync_warp();
        if (!copies || lane == 0)
            barrier_arrive(empty(SLOT_RING, slot.index));
    }
}

// ---------------------------------------------------------------------------------------------------------- convert Q

// The scale of the workspace that lies at bit `shift` of a word, as a pair of float16 factors.
INLINE uint32_t scale_factor(uint32_t scales, uint32_t shift) { return (scales >> shift & 255) * 0x04000400; }

// 64 bytes of one of Q's rows, two blocks with a factor each, become a row of a half.
INLINE void convert_row(uint32_t to, uint32_t swizzle, const uint32_t *x, uint32_t low, uint32_t high) {
    UNROLL for (int i = 0; i < 4; i++) {
        uint32_t even[4], odd[4]; // what is 0 .. 7 and 8 .. 15 of a wgmma's contraction
        UNROLL for (int c = 0; c < 4; c++) {
            decode_e4m3(x[4 * c + i], &even[c], &odd[c]);
            even[c] = multiply_f16x2(even[c], c < 2 ? low : high);
            odd[c] = multiply_f16x2(odd[c], c < 2 ? low : high);
        }
        store_shared4(to + (32 * i ^ swizzle), even[0], even[1], even[2], even[3]);
        store_shared4(to + ((32 * i + 16) ^ swizzle), odd[0], odd[1], odd[2], odd[3]);
    }
}

// Warpgroup 1: a thread has one of Q's rows, the r-th of a stage, which becomes row n of a half; the pairing makes both
// the reads and the writes of a warp free of bank conflicts.
INLINE void convert_q(struct mx_sm90_plan plan, int masked) {
    const uint32_t warp = thread_id() >> 5 & 3, lane = thread_id() & 31;
    const uint32_t b = lane & 1, quad = lane >> 1 & 3, j = (quad + (lane >> 3)) & 3;
    const uint32_t r = warp * 32 + 8 * quad + 2 * j + b, n = warp * 32 + 8 * j + 2 * quad + b;
    const uint32_t from = shared_address(shared) + Q_AT + r * 64, from_swizzle = (r >> 1 & 3) << 4;
    const uint32_t to = shared_address(shared) + HALVES_AT + n * 128, to_swizzle = (n & 7) << 4;
    struct ring slot = {}, q = {}, half = {};
    for (; wait_for_tile(slot); advance(&slot, SLOTS)) {
        const uint32_t tile = slot_address(slot.index);
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
                UNROLL for (int c = 0; c < 4; c++)
                    load_shared4(x + 4 * c, at + (16 * c ^ from_swizzle));
                if (masked && block + 4 > blocks) {
                    const uint32_t low = block + 2 * h < blocks ? ~0u : 0, high = block + 2 * h + 1 < blocks ? ~0u : 0;
                    UNROLL for (int i = 0; i < 16; i++)
                        x[i] &= i < 8 ? low : high;
                }
                const uint32_t low = scale_factor(scales, 16 * h), high = scale_factor(scales, 16 * h + 8);
                wait_empty(HALF_RING, half);
                convert_row(to + half.index * HALF_BYTES, to_swizzle, x, low, high);
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
    }
}

// ----------------------------------------------------------------------------------------------------------- multiply

#define OUT4(d, i) "+f"((d)[i]), "+f"((d)[(i) + 1]), "+f"((d)[(i) + 2]), "+f"((d)[(i) + 3])
#define OUT16(d, i) OUT4(d, i), OUT4(d, (i) + 4), OUT4(d, (i) + 8), OUT4(d, (i) + 12)
#define OUT64(d) OUT16(d, 0), OUT16(d, 16), OUT16(d, 32), OUT16(d, 48)

// d[64][128] += a[64][16] b[128][16]^T: a from registers, b from shared memory. Asynchronous.
INLINE void wgmma(float *d, const uint32_t *a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, "
                 "%11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, "
                 "%30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, "
                 "%49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%64, %65, %66, %67}, "
                 "%68, 1, 1, 1, 0;"
                 : OUT64(d)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// Waits until no more than `pending` groups of them are at work.
#define WGMMA_WAIT(pending) asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory")

// A half in shared memory: K-major, swizzled by 128 bytes, 8-row groups 1024 bytes apart.
INLINE uint64_t describe_half(uint32_t index) {
    const uint32_t at = shared_address(shared) + HALVES_AT + index * HALF_BYTES;
    return (at & 0x3ffff) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// Multiplies a fragment of 64 rows by a half: four wgmma, one group.
INLINE void multiply(float *d, const uint32_t *fragment, uint64_t half) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    UNROLL for (int i = 0; i < 4; i++)
        wgmma(d, &fragment[4 * i], half + 2 * i);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Make the use of values follow what precedes this line.
INLINE void pin_sums(float *d) { asm volatile("" : OUT64(d)); }
INLINE void pin_bytes(uint32_t *x) {
    UNROLL for (int i = 0; i < 8; i += 4)
        asm volatile("" : "+r"(x[i]), "+r"(x[i + 1]), "+r"(x[i + 2]), "+r"(x[i + 3]) : : "memory");
}

// Reads 16 bytes of each of a lane's two rows of fragment f, of which `at` is where those of its first row would be
// without the swizzle: two rows further, the next one of four chunks has the number that the lane reads.
INLINE void load_fragment(uint32_t *x, uint32_t at, uint32_t f) {
    load_shared4(x, (at ^ 32 * f) + 256 * f);
    load_shared4(x + 4, (at ^ (32 * f + 16)) + 256 * f + 128);
}

INLINE void clear_unless(uint32_t *x, uint32_t mask) {
    UNROLL for (int i = 0; i < 8; i++)
        x[i] &= mask;
}

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
    UNROLL for (int r = 0; r < 4; r++)
        tile->scales[r] = load_constant(tile->scale + 4 * (2 * r));
    tile->scale += MX_SM90_SCALE_BYTES;
}
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

// A consumer's registers: sums, fragments and the bytes of the next ones, of fragments 0 and 1; and what stays the
// same.
struct work {
    float *d0, *d1;
    uint32_t *f0, *f1, *x0, *x1;
    uint32_t p_ring, from, lane, zero; // from: the lane's bytes in the ring's first stage
};
// Half of a step of four blocks: its stage, P's factors and what clears them past the contraction's end.
struct half_step {
    uint32_t at, release, factors[4], mask;
    int more, partial; // whether a step follows; whether the contraction ends in this one
    int32_t block;
};

// Both fragments times half h of a step, a group of wgmma each. While one's runs, the other's bytes are converted, in
// registers that the group before it leaves, and those of the next half loaded. Returns the half's number in its ring,
// for the next call to release: its products may still be at work.
INLINE uint32_t multiply_half(struct ring *p, struct ring *half, uint32_t previous, struct work w,
                              struct half_step step, int h) {
    WGMMA_WAIT(1);
    pin_bytes(w.x0);
    if (step.partial)
        clear_unless(w.x0, step.mask);
    convert_fragment(w.f0, w.x0, step.factors[0], step.factors[1]);
    if (h == 0) {
        load_fragment(w.x0, step.at + BOX_BYTES, 0);
    } else {
        advance(p, P_STAGES);
        if (step.more) {
            wait_full(w.p_ring, *p);
            load_fragment(w.x0, w.from + p->index * STAGE_BYTES, 0);
        }
    }
    wait_full(HALF_RING, *half);
    const uint32_t index = half->index;
    const uint64_t b = describe_half(index);
    multiply(w.d0, w.f0, b);

    WGMMA_WAIT(1);
    pin_bytes(w.x1);
    if ((h == 1 || step.block) && w.lane == 0)
        barrier_arrive(empty(HALF_RING, previous));
    advance(half, HALVES);
    if (step.partial)
        clear_unless(w.x1, step.mask);
    convert_fragment(w.f1, w.x1, step.factors[2], step.factors[3]);
    if (h == 0) {
        load_fragment(w.x1, step.at + BOX_BYTES, 1);
    } else {
        // An arrive does not wait for earlier loads: its address depends on the last loaded value.
        sync_warp();
        if (w.lane == 0)
            barrier_arrive(step.release + (w.f1[15] & w.zero));
        if (step.more)
            load_fragment(w.x1, w.from + p->index * STAGE_BYTES, 1);
    }
    multiply(w.d1, w.f1, b);
    return index;
}

// Warpgroups 2 and 3.
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
        load_fragment(x0, from + p.index * STAGE_BYTES, 0);
        load_fragment(x1, from + p.index * STAGE_BYTES, 1);
        for (int32_t block = 0; block < tile.blocks; block += 4) {
            const uint32_t at = from + p.index * STAGE_BYTES, release = empty(p_ring, p.index);
            uint32_t low[4], high[4]; // the scales' factors, of both halves
            UNROLL for (int i = 0; i < 4; i++) {
                low[i] = scale_factor(tile.scales[i], shift);
                high[i] = scale_factor(tile.scales[i], shift + 16);
            }
            const int32_t mine = block + (int32_t)(quad >> 1);
            const int partial = kind.depth && block + 4 > tile.blocks;
            const uint32_t low_mask = mine < tile.blocks ? ~0u : 0, high_mask = mine + 2 < tile.blocks ? ~0u : 0;
            const int more = block + 4 < tile.blocks;
            if (more)
                load_scales(&tile);
            const struct work w = {d0, d1, f0, f1, x0, x1, p_ring, from, lane, (uint32_t)plan.zero};
            const struct half_step first = {at,      release, {low[0], low[1], low[2], low[3]}, low_mask, more,
                                            partial, block};
            const struct half_step second = {at,      release, {high[0], high[1], high[2], high[3]}, high_mask, more,
                                             partial, block};
            previous = multiply_half(&p, &half, previous, w, first, 0);
            previous = multiply_half(&p, &half, previous, w, second, 1);
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
        pin_sums(d0);
        pin_sums(d1);
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

INLINE void init_barriers(void) {
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

INLINE void gemm(struct problem problem, struct mx_sm90_plan plan, uint64_t p_map, struct kind kind) {
    const uint32_t warpgroup = shuffle(thread_id() >> 7, 0); // so the compiler knows it to be the same in a warp
    if (thread_id() == 0)
        init_barriers();
    wait_for_previous(); // prepare's workspace
    sync_block();
    if (warpgroup == 0) {
        SET_REGISTERS_DOWN(40);
        const uint32_t warp = shuffle(thread_id() >> 5, 0), base = shared_address(shared);
        if (warp == 0) {
            fetch_tiles(plan);
            return;
        }
        struct filling it = {Q_RING, Q_STAGES, base + Q_AT, p_map + 128, problem.q, problem.q_rows, 0, TILE_AT(q_row)};
        if (warp > 1) {
            const uint32_t first = (warp - 2) * P_STAGES;
            it = (struct filling){P_RING + first,
                                  P_STAGES,
                                  base + first * STAGE_BYTES,
                                  p_map,
                                  problem.p,
                                  problem.p_rows,
                                  (int32_t)(warp - 2) * MX_SM90_ROW_BLOCK,
                                  TILE_AT(p_row)};
        }
        if (plan.copies)
            fill_stages(it, problem.stride, 1);
        else if ((thread_id() & 31) == 0)
            fill_stages(it, problem.stride, 0);
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
