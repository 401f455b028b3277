// sm_90 GEMM: what its warps share. Shared memory, rings of buffers that some warps fill and others use:
//   P stages 2 x 3 x 16 KB | Q stages 3 x 16 KB | Q halves 4 x 16 KB | slots 4 x 1216 bytes | barriers
// A stage is 128 rows, 128 of the contraction, as two boxes of 64 bytes a row, swizzled by 64. A half is 128 rows of
// Q, 64 of the contraction, as float16 in K-major rows of 128 bytes, swizzled by 128. A slot is a tile.
#pragma once
#include "device.h"

enum {
    P_STAGES = 3,
    Q_STAGES = 3,
    HALVES = 4,
    SLOTS = 4,
    BOX_BYTES = MX_SM90_ROW_BLOCK * 64,
    STAGE_BYTES = 2 * BOX_BYTES,
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
#define TILE_AT(field) __builtin_offsetof(struct mx_sm90_tile, field)
#define TILE_FIELD(slot, field) ((int32_t)load_shared((slot) + TILE_AT(field)))
// Waits for a slot: whether there is a tile in it, or it is past the last one.
INLINE int32_t wait_for_tile(struct ring slot) {
    wait_full(SLOT_RING, slot);
    return TILE_FIELD(slot_address(slot.index), p_rows);
}
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
    static_assert(TILE_AT(p_rows) == 24 && TILE_AT(p_ref) == 40 && TILE_AT(blocks) == 52);
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
