// What the sm_90 kernels and their host launcher agree on: tiles, workspace, tensor maps, launches. Plain C for both.
//
// A GEMM call is two launches on one stream:
//   mx_prepare_<op>_sm90  (struct mx_<op>_args, struct mx_sm90_plan)
//       grid plan.prepare_blocks, MX_SM90_PREPARE_THREADS threads, no dynamic shared memory
//   a ROWS_KERNEL or DEPTH_KERNEL of kernels.def
//       (struct mx_<op>_args, struct mx_sm90_plan, struct mx_sm90_maps)
//       grid plan.blocks, MX_SM90_THREADS threads, MX_SM90_SHARED_BYTES of dynamic shared memory; may start before
//       prepare has ended, for whose end it waits
// The plan comes from sizes alone (mx_sm90_plan_rows, mx_sm90_plan_depth), so the host never reads a device value.
// prepare fills the whole of what the GEMM reads of the workspace; nothing in it survives from call to call.
//
// A GEMM kernel multiplies tiles of MX_SM90_P rows of one operand, P, whose elements go to registers, by MX_SM90_Q rows
// of the other, Q, which go to shared memory. gemm_depth has P = a and Q = b; so has gemm_rows, or, when swapped, P = b
// and Q = a.
//
// An element of the output takes one of two ways, and which one depends on its own two operand rows alone, each cut to
// the contraction of the group ("row" from here on):
//   fast   float16 products. A row's reference is its largest scale; its elements become E4M3 * 2^(scale - reference +
//          7), exact in float16 as long as scale > reference - MX_SM90_WINDOW. Blocks of zeros may have any scale.
//   exact  block by block with the scales applied in float32, for whatever else E8M0 can say: rows with a scale of 255
//          or with a wider range of scales.
// The workspace, plan.bytes long, 64-byte aligned:
//   tiles    [tiles] struct mx_sm90_tile, those that exist first
//   p_scale  [row blocks of 128][steps][128 rows][4]: a block's scale - reference + MX_SM90_WINDOW, in 1 ..
//            MX_SM90_WINDOW; 0 for blocks of zeros below that, for what is outside the row's contraction and for rows
//            that go the exact way, which so add 0 on the fast one (or NaN, if they have NaN codes)
//   q_scale  the same for Q
//   p_ref    [row blocks][128 rows] the reference, or MX_SM90_EXACT; gemm_depth: [groups][row blocks][128 rows]
//   q_ref    the same for Q
#pragma once
#include "../mx_args.h"

enum {
    MX_SM90_THREADS = 512,
    MX_SM90_PREPARE_THREADS = 256,
    MX_SM90_P = 256,
    MX_SM90_Q = 128,
    MX_SM90_ROW_BLOCK = 128,      // rows that the workspace keeps together
    MX_SM90_STEP = 128,           // contraction elements of one turn of the main loop
    MX_SM90_SCALE_BYTES = 512,    // scales of one row block and step
    MX_SM90_WINDOW = 22,          // binades of scales that a row may have on the fast way
    MX_SM90_EXACT = 255,          // reference of a row that goes the exact way
    MX_SM90_SORTED_GROUPS = 1024, // up to so many groups are started longest first
    MX_SM90_MAX_UNITS = 128,      // units that a block of prepare may take
    MX_SM90_SHARED_BYTES = 220 * 1024,
    MX_SM90_MAX_EXTENT = INT32_MAX - MX_SM90_P, // an operand's rows, and elements of a row: coordinates are 32-bit
};

// One tensor map to encode with cuTensorMapEncodeTiled: uint8, rank 2, dimensions {row_bytes, rows}, stride row_bytes,
// box {64, MX_SM90_ROW_BLOCK}, element strides 1, no interleave, swizzle 64B, L2 promotion 128B, no OOB fill but zeros.
struct mx_sm90_map {
    const uint8_t *base;
    int64_t rows, row_bytes;
};

// The encoded maps, P's and Q's: a kernel parameter. Not read when plan.copies.
struct mx_sm90_maps {
    alignas(64) uint8_t p[128];
    uint8_t q[128];
};

struct mx_sm90_tile {
    int64_t out;                // index of its first output element: P row 0, Q row 0
    int64_t bias;               // index of its first bias element
    int32_t p_row, q_row;       // first rows in the operands
    int32_t p_rows, q_rows;     // rows that exist, from 1 on; p_rows = 0: no tile, and none after it
    int32_t p_scale, q_scale;   // first step of the first row block, in MX_SM90_SCALE_BYTES; P's second one: + steps
    int32_t p_ref, q_ref;       // in MX_SM90_ROW_BLOCK bytes
    int32_t start;              // first contraction element, a multiple of MX_BLOCK
    int32_t blocks;             // contraction in MX_BLOCK; 0: the tile's outputs are zeros
    int32_t flags, first_exact; // the GEMM's own
};

struct mx_sm90_plan {
    uint8_t *workspace;
    int64_t p_scale, q_scale, p_ref, q_ref, bytes; // byte offsets in the workspace, its size
    int32_t tiles;                                 // the most that any offs make
    int32_t steps;                                 // of one row block in p_scale and q_scale
    int32_t p_tiles, q_tiles;       // tiles of one group along P and Q; gemm_rows: only along the weights
    int32_t token_blocks;           // gemm_rows: row blocks of tokens, the most that any offs make
    int32_t group_blocks;           // gemm_rows: row blocks of one group's weights
    int32_t weight_blocks;          // gemm_rows: row blocks of all weights
    int32_t p_blocks, q_blocks;     // gemm_depth: row blocks
    int32_t units_at_once;          // pairs of row blocks that a block of prepare takes, one after the other
    int32_t raster;                 // rows of tiles that are walked together, for the L2 cache
    int32_t swapped;                // P is the weights
    int32_t copies;                 // operands not 16-byte aligned: the kernel copies bytes, with no tensor maps
    int32_t zero;                   // 0, where the compiler must not know it
    int32_t tile_blocks;            // blocks of prepare that write tiles
    int32_t prepare_blocks, blocks; // grids
    struct mx_sm90_map p_map, q_map;
};

// A count as plans have them. Where one is cut to INT32_MAX, the launcher refuses the call.
static inline int32_t mx_sm90_count(int64_t n) { return n < INT32_MAX ? (int32_t)n : INT32_MAX; }

static inline int64_t mx_sm90_place(int64_t *end, int64_t bytes) {
    const int64_t at = *end;
    *end += mx_round_up(bytes, 64);
    return at;
}

// Lays the workspace out and sets the grids. One row block more than counted: a tile of P always reads two.
static inline void mx_sm90_finish_plan(struct mx_sm90_plan *plan, int64_t tiles, int64_t p_blocks, int64_t q_blocks,
                                       int64_t p_refs, int64_t q_refs, int64_t scale_blocks, int32_t multiprocessors) {
    const int64_t tile_blocks = div_up(tiles, MX_SM90_PREPARE_THREADS);
    plan->tiles = mx_sm90_count(tiles);
    mx_sm90_place(&plan->bytes, tiles * (int64_t)sizeof(struct mx_sm90_tile)); // at 0
    plan->p_scale = mx_sm90_place(&plan->bytes, (p_blocks + 1) * plan->steps * MX_SM90_SCALE_BYTES);
    plan->q_scale = mx_sm90_place(&plan->bytes, q_blocks * plan->steps * MX_SM90_SCALE_BYTES);
    plan->p_ref = mx_sm90_place(&plan->bytes, (p_refs + 1) * MX_SM90_ROW_BLOCK);
    plan->q_ref = mx_sm90_place(&plan->bytes, q_refs * MX_SM90_ROW_BLOCK);
    plan->tile_blocks = mx_sm90_count(tile_blocks);
    plan->prepare_blocks = mx_sm90_count(tile_blocks + scale_blocks);
    plan->blocks = tiles < multiprocessors ? (int32_t)tiles : multiprocessors;
}

// So many that all blocks of prepare run at once, four a multiprocessor, with those that write tiles if these are few.
static inline int32_t mx_sm90_units_at_once(int64_t units, int64_t tiles, int32_t multiprocessors) {
    const int64_t least = 3 * (int64_t)multiprocessors;
    const int64_t left = 4 * (int64_t)multiprocessors - div_up(tiles, MX_SM90_PREPARE_THREADS);
    const int64_t each = div_up(units, left > least ? left : least);
    return each < 1 ? 1 : each < MX_SM90_MAX_UNITS ? (int32_t)each : MX_SM90_MAX_UNITS;
}

static inline int32_t mx_sm90_unaligned(const uint8_t *a, const uint8_t *b) {
    return (((uintptr_t)a | (uintptr_t)b) & 15) != 0;
}

// Whether gemm_rows takes P from the weights: tiles of 128 instead of 256 tokens waste less where groups are short, and
// tiles of 256 weight rows more where n is narrow; storing them transposed costs as much as a tenth of the products.
static inline int mx_sm90_choose_swapped(const struct mx_rows_args *args) {
    const int64_t as_is = (2 * args->m + MX_SM90_P * args->groups) * div_up(args->n, MX_SM90_Q);
    const int64_t swapped = (2 * args->m + MX_SM90_Q * args->groups) * 2 * div_up(args->n, MX_SM90_P);
    return swapped * 11 < as_is * 10;
}

// out[r] = a[r] . b[g]^T: token tiles begin at each group's first row; the rows past the last group are a group too.
static inline struct mx_sm90_plan mx_sm90_plan_rows(const struct mx_rows_args *args, void *workspace, int swapped,
                                                    int32_t multiprocessors) {
    struct mx_sm90_plan plan = {.workspace = (uint8_t *)workspace, .swapped = swapped, .raster = 8};
    const int64_t token_rows = swapped ? MX_SM90_Q : MX_SM90_P, weight_rows = swapped ? MX_SM90_P : MX_SM90_Q;
    const int64_t token_tiles = (args->m + (token_rows - 1) * (args->groups + 1)) / token_rows;
    const int64_t weight_tiles = div_up(args->n, weight_rows);
    const int64_t token_blocks = (args->m + (MX_SM90_ROW_BLOCK - 1) * args->groups) / MX_SM90_ROW_BLOCK;
    const int64_t group_blocks = weight_tiles * weight_rows / MX_SM90_ROW_BLOCK;
    const int64_t weight_blocks = args->groups * group_blocks;
    const struct mx_sm90_map tokens = {args->a, args->m, args->k};
    const struct mx_sm90_map weights = {args->b, args->groups * args->n, args->k};
    plan.p_map = swapped ? weights : tokens;
    plan.q_map = swapped ? tokens : weights;
    plan.copies = mx_sm90_unaligned(args->a, args->b);
    plan.steps = mx_sm90_count(div_up(args->k, MX_SM90_STEP));
    plan.p_tiles = plan.q_tiles = mx_sm90_count(weight_tiles);
    plan.token_blocks = mx_sm90_count(token_blocks);
    plan.group_blocks = mx_sm90_count(group_blocks);
    plan.weight_blocks = mx_sm90_count(weight_blocks);
    const int64_t p_blocks = swapped ? weight_blocks : token_blocks;
    const int64_t q_blocks = swapped ? token_blocks : weight_blocks;
    const int64_t token_units = div_up(token_blocks, 2), weight_units = div_up(weight_blocks, 2);
    plan.units_at_once = mx_sm90_units_at_once(token_units + weight_units, token_tiles * weight_tiles, multiprocessors);
    const int64_t scale_blocks = div_up(token_units, plan.units_at_once) + div_up(weight_units, plan.units_at_once);
    mx_sm90_finish_plan(&plan, token_tiles * weight_tiles, p_blocks, q_blocks, p_blocks, q_blocks, scale_blocks,
                        multiprocessors);
    return plan;
}

// out[g] (+)= a[:, group g] . b[:, group g]^T: a row block's steps are those of all groups, each group's own.
static inline struct mx_sm90_plan mx_sm90_plan_depth(const struct mx_depth_args *args, void *workspace,
                                                     int32_t multiprocessors) {
    struct mx_sm90_plan plan = {.workspace = (uint8_t *)workspace, .raster = 8};
    plan.p_map = (struct mx_sm90_map){args->a, args->n, args->depth};
    plan.q_map = (struct mx_sm90_map){args->b, args->k, args->depth};
    plan.copies = mx_sm90_unaligned(args->a, args->b);
    const int64_t p_tiles = div_up(args->n, MX_SM90_P), q_tiles = div_up(args->k, MX_SM90_Q);
    const int64_t p_blocks = p_tiles * (MX_SM90_P / MX_SM90_ROW_BLOCK), q_blocks = q_tiles;
    plan.steps = mx_sm90_count((args->depth + (MX_SM90_STEP - MX_BLOCK) * args->groups) / MX_SM90_STEP);
    plan.p_tiles = mx_sm90_count(p_tiles);
    plan.q_tiles = mx_sm90_count(q_tiles);
    plan.p_blocks = mx_sm90_count(p_blocks);
    plan.q_blocks = mx_sm90_count(q_blocks);
    const int64_t p_units = args->groups * p_tiles, q_units = args->groups * div_up(q_blocks, 2);
    plan.units_at_once = mx_sm90_units_at_once(p_units + q_units, args->groups * p_tiles * q_tiles, multiprocessors);
    const int64_t scale_blocks = div_up(p_units, plan.units_at_once) + div_up(q_units, plan.units_at_once);
    mx_sm90_finish_plan(&plan, args->groups * p_tiles * q_tiles, p_blocks, q_blocks, args->groups * p_blocks,
                        args->groups * q_blocks, scale_blocks, multiprocessors);
    return plan;
}
