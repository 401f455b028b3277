// What the gfx950 kernels and their host launcher agree on: tile shapes, the workspace, the launches. Plain C for both.
//
// A GEMM call is two launches on one stream, each of blocks of MX_GFX950_THREADS threads, no dynamic LDS:
//   mx_prepare_<op>_gfx950  (struct mx_<op>_args, struct mx_gfx950_plan)   grid: plan.prepare_blocks
//   a line of kernels.def for that op  (the same two arguments)           grid: plan.blocks
// The plan comes from sizes alone (mx_gfx950_plan_rows, mx_gfx950_plan_depth), so the host never reads a device value.
// prepare fills the whole of what the GEMM reads of the workspace; nothing in it survives from call to call.
//
// The workspace, plan.bytes long, 64-byte aligned:
//   tiles    [tiles] struct mx_gfx950_tile: what the blocks of the GEMM do, one each. A persistent kernel's blocks
//            do the first ones and then those of their XCD that no other block has taken. Tiles may have nothing to do
//   counters [XCDS][COUNTER_BYTES], the first 4 an int32_t: number of the XCD's next tile
//   a_scale  [A row blocks][2 wave rows][bodies][64 lanes][16 bytes]
//   b_scale  [B row blocks][2 wave rows][bodies][64 lanes][16 bytes, or 20 for kernels with tiles of 320 columns]
// A body is MX_GFX950_BODY = 256 elements of the contraction: two 128-element steps, what the main loop does in one
// turn. The first 16 bytes of lane l are [step][half][fragment]: the scale of row fragment_row(half, wave row,
// fragment, l % 16) of the row block and of the 32-element block 4 * step + l / 16 of the body. It is the order in
// which the matrix instruction takes its scales: dword = (step, half), byte = fragment, picked by op_sel. The 4 bytes
// after them are [step][half] of the fragments that make 320 columns of 256. 0x00 (2^-127) stands where the row or the
// block does not exist; the operands are 0 there.
#pragma once
#include "../mx_args.h"

enum {
    MX_GFX950_THREADS = 256,
    MX_GFX950_BODY = 256,
    MX_GFX950_FILL_BIAS = 3072,            // see gemm.c
    MX_GFX950_LANE_SCALES = 16,            // bytes of scales of one lane, body and wave row
    MX_GFX950_WIDE_LANE_SCALES = 20,       // same for B where tiles may have 320 columns
    MX_GFX950_CUS = 256,                   // each holds one block at a time, two of 128x128
    MX_GFX950_XCDS = 8,                    // blocks go to the XCDs round robin
    MX_GFX950_COUNTER_BYTES = 64,          // from one XCD's counter to the next's
    MX_GFX950_SORTED_GROUPS = 512,         // up to so many groups are started longest first
    MX_GFX950_TILES_PER_BLOCK = 1024,      // of prepare: tiles, or
    MX_GFX950_BODIES_PER_BLOCK = 16,       // bodies of one row block
    MX_GFX950_MAX_DEPTH = (1 << 23) - 128, // contraction stride: 32 rows take less than 2^28 bytes
    MX_GFX950_MAX_COLS = 1 << 21,          // output row length; offsets within 256 rows are 31-bit
};

// Flags of a GEMM kernel, as kernels.def explains them.
enum { PLAIN = 0, ANY = 1, ADD = 2, PERSISTENT = 4 };

struct mx_gfx950_kernel {
    int32_t tile_rows, tile_cols, type, flags;
};
#define ROWS_KERNEL(name, tile_rows, tile_cols, type, flags) {tile_rows, tile_cols, type, flags},
static const struct mx_gfx950_kernel mx_gfx950_rows_kernels[] = {
#include "kernels.def"
};
#define DEPTH_KERNEL(name, tile_rows, tile_cols, type, flags) {tile_rows, tile_cols, type, flags},
static const struct mx_gfx950_kernel mx_gfx950_depth_kernels[] = {
#include "kernels.def"
};

// A buffer resource, as the hardware takes it: 48 bits of address, size in bytes, type.
struct mx_gfx950_buffer {
    uint32_t word[4];
};

// What one block computes: out[0:rows][0:cols] (+)= a . b^T over `depth` elements, `bodies` bodies. bodies = 0: writes
// zeros to the tile's rows, of which there may be none. More than 256 columns: a 256x320 tile.
struct mx_gfx950_extent {
    int32_t rows, cols, depth, bodies;
};
struct mx_gfx950_tile {
    // Rows that a wave fills, MX_GFX950_FILL_BIAS bytes early: [a, b][half] the 32 from half * 128 + wave * 32, and of
    // b the 16 from 256 + wave * 16. The size ends at the last element of the last row that exists; 0 if none does.
    struct mx_gfx950_wave_rows {
        struct mx_gfx950_buffer operand[2][2], wide;
    } wave[4];
    struct mx_gfx950_buffer scale[2][2]; // [a, b][wave row]: the tile's bodies
    void *out;
    const float *bias; // of the tile's first column, or null
    struct mx_gfx950_extent extent;
};

struct mx_gfx950_plan {
    uint8_t *workspace;
    int64_t counters, a_scale, b_scale, bytes; // byte offsets in the workspace, its size
    int64_t bodies;                            // bodies of one wave row in a_scale and b_scale
    int32_t tile_rows, tile_cols;              // shape of a tile but for the wide ones
    int32_t wide_tiles;                        // the first so many columns of tiles have 320 columns
    int32_t b_lane_scales;                     // bytes
    int32_t row_tiles, col_tiles;              // depth: of one group. rows: row_tiles is the most that any offs make
    int32_t a_chunks, b_chunks;                // blocks of prepare that shuffle A's and B's scales
    int32_t tiles;                             // in the workspace
    int32_t blocks, prepare_blocks;            // grids
};

// How many of the tiles that cover so many columns have 320 rather than 256: least over, then fewest tiles. Five of 256
// are four of 320, so 0 to 4 of 256 are enough: exact for every multiple of 64 from 768 up.
static inline int32_t mx_gfx950_wide_tiles(int64_t cols) {
    int64_t best = 0, least = INT64_MAX;
    for (int64_t narrow = 0; narrow <= 4; narrow++) {
        const int64_t wide = div_up(max64(cols - 256 * narrow, 0), 320);
        if (320 * wide + 256 * narrow < least)
            best = wide, least = 320 * wide + 256 * narrow;
    }
    return (int32_t)best;
}

// Sets the columns of tiles.
static inline void mx_gfx950_plan_cols(struct mx_gfx950_plan *plan, int64_t cols, int32_t tile_cols) {
    const int wide = tile_cols == 320;
    plan->tile_cols = wide ? 256 : tile_cols;
    plan->wide_tiles = wide ? mx_gfx950_wide_tiles(cols) : 0;
    plan->b_lane_scales = wide ? MX_GFX950_WIDE_LANE_SCALES : MX_GFX950_LANE_SCALES;
    plan->col_tiles = plan->wide_tiles + (int32_t)div_up(max64(cols - 320ll * plan->wide_tiles, 0), plan->tile_cols);
}

static inline void mx_gfx950_finish_plan(struct mx_gfx950_plan *plan, const struct mx_gfx950_kernel *kernel,
                                         int64_t tiles, int64_t a_blocks, int64_t b_blocks) {
    const int64_t row = 2 * plan->bodies * 64; // lanes
    const int64_t chunks = div_up(plan->bodies, MX_GFX950_BODIES_PER_BLOCK);
    plan->tiles = (int32_t)mx_round_up(tiles, (int64_t)4 * MX_GFX950_XCDS);
    plan->blocks = kernel->flags & PERSISTENT ? (int32_t)min64(plan->tiles, MX_GFX950_CUS) : plan->tiles;
    plan->counters = plan->tiles * (int64_t)sizeof(struct mx_gfx950_tile);
    plan->a_scale = plan->counters + (int64_t)MX_GFX950_XCDS * MX_GFX950_COUNTER_BYTES;
    plan->b_scale = plan->a_scale + a_blocks * row * MX_GFX950_LANE_SCALES;
    plan->bytes = plan->b_scale + b_blocks * row * plan->b_lane_scales;
    plan->a_chunks = (int32_t)(a_blocks * chunks);
    plan->b_chunks = (int32_t)(b_blocks * chunks);
    plan->prepare_blocks = (int32_t)div_up(plan->tiles, MX_GFX950_TILES_PER_BLOCK) + plan->a_chunks + plan->b_chunks;
}

// out[r] = a[r] . b[g]^T: row tiles begin at each group's first row; the rows past the last group are a group as well.
static inline struct mx_gfx950_plan mx_gfx950_plan_rows(const struct mx_rows_args *args, void *workspace,
                                                        const struct mx_gfx950_kernel *kernel) {
    struct mx_gfx950_plan plan = {.workspace = (uint8_t *)workspace, .tile_rows = kernel->tile_rows};
    mx_gfx950_plan_cols(&plan, args->n, kernel->tile_cols);
    plan.row_tiles = (int32_t)((args->m + (kernel->tile_rows - 1) * (args->groups + 1)) / kernel->tile_rows);
    plan.bodies = args->k ? div_up(args->k, MX_GFX950_BODY) : 1;
    mx_gfx950_finish_plan(&plan, kernel, (int64_t)plan.row_tiles * plan.col_tiles, plan.row_tiles,
                          args->groups * plan.col_tiles);
    return plan;
}

// out[g] (+)= a[:, group g] . b[:, group g]^T: a scale row has the bodies of all groups, each group's own.
static inline struct mx_gfx950_plan mx_gfx950_plan_depth(const struct mx_depth_args *args, void *workspace,
                                                         const struct mx_gfx950_kernel *kernel) {
    struct mx_gfx950_plan plan = {.workspace = (uint8_t *)workspace, .tile_rows = kernel->tile_rows};
    mx_gfx950_plan_cols(&plan, args->k, kernel->tile_cols);
    plan.row_tiles = (int32_t)div_up(args->n, kernel->tile_rows);
    plan.bodies = (args->depth + (MX_GFX950_BODY - MX_BLOCK) * args->groups) / MX_GFX950_BODY;
    mx_gfx950_finish_plan(&plan, kernel, args->groups * plan.row_tiles * plan.col_tiles, plan.row_tiles,
                          plan.col_tiles);
    return plan;
}

static inline int mx_gfx950_needs_any(int64_t cols, const void *out) { return cols % 8 != 0 || ((uintptr_t)out & 15); }

// What a tile takes, in cycles of a CU: its matrix instructions; its operands at 32 bytes a cycle (for 256x256 they
// then count as much as the products, as they do in energy by the model of `make report`); and what nothing overlaps:
// the first fills and the stores. An estimate that has not met hardware.
static inline int64_t mx_gfx950_tile_cycles(int64_t rows, int64_t cols, int64_t bodies) {
    return bodies * (rows * cols / 16 + (rows + cols) * 8) + 4096 + rows * cols / 16;
}

// `products` products of [rows][depth] and [cols][depth]; the rows are cut into `groups` groups, 0: not at all.
struct mx_gfx950_problem {
    int64_t products, rows, groups, cols, depth;
};

// Cycles of a problem in tiles of a kernel: rounds of one tile a CU. A group's last tile is half empty on average. Of
// what a tile does not overlap, a persistent kernel saves some 2048 cycles in each round after the first, if
// contractions are whole bodies.
static inline int64_t mx_gfx950_cycles(struct mx_gfx950_problem problem, const struct mx_gfx950_kernel *kernel) {
    const int64_t bodies = div_up(problem.depth, MX_GFX950_BODY), tile_rows = kernel->tile_rows;
    struct mx_gfx950_plan plan;
    mx_gfx950_plan_cols(&plan, problem.cols, kernel->tile_cols);
    int64_t row_tiles = div_up(problem.rows, tile_rows);
    if (problem.groups)
        row_tiles = max64(min64(problem.rows, problem.groups), problem.rows / tile_rows + problem.groups / 2);
    const int64_t tiles = problem.products * row_tiles * plan.col_tiles;
    const int64_t all_cols =
        plan.wide_tiles * mx_gfx950_tile_cycles(tile_rows, 320, bodies) +
        (plan.col_tiles - plan.wide_tiles) * mx_gfx950_tile_cycles(tile_rows, plan.tile_cols, bodies);
    const int64_t rounds = div_up(tiles, MX_GFX950_CUS);
    const int saves = (kernel->flags & PERSISTENT) && problem.depth >= MX_GFX950_BODY && rounds > 1;
    return rounds * all_cols / max64(plan.col_tiles, 1) - (saves ? (rounds - 1) * 2048 : 0);
}

// The kernel that writes such an output, flags PLAIN, ANY or ANY | ADD, in the fewest cycles; the first such line of
// the table among equals.
static inline int mx_gfx950_choose(const struct mx_gfx950_kernel *kernels, int count, struct mx_gfx950_problem problem,
                                   int32_t type, int32_t flags) {
    int best = -1;
    int64_t least = 0;
    for (int i = 0; i < count; i++) {
        if (kernels[i].type != type || (kernels[i].flags & ~PERSISTENT) != flags)
            continue;
        const int64_t cycles = mx_gfx950_cycles(problem, &kernels[i]);
        if (best < 0 || cycles < least)
            best = i, least = cycles;
    }
    return best;
}

// The kernel of a call: an index into mx_gfx950_rows_kernels or mx_gfx950_depth_kernels. The tile follows from sizes.
static inline int mx_gfx950_choose_rows(const struct mx_rows_args *args) {
    const struct mx_gfx950_problem problem = {1, args->m, args->groups, args->n, args->k};
    const int any = args->bias || mx_gfx950_needs_any(args->n, args->out);
    return mx_gfx950_choose(mx_gfx950_rows_kernels, sizeof mx_gfx950_rows_kernels / sizeof *mx_gfx950_rows_kernels,
                            problem, args->out_type, any ? ANY : PLAIN);
}

static inline int mx_gfx950_choose_depth(const struct mx_depth_args *args) {
    const struct mx_gfx950_problem problem = {args->groups, args->n, 0, args->k, args->depth / max64(args->groups, 1)};
    const int any = mx_gfx950_needs_any(args->k, args->out);
    return mx_gfx950_choose(mx_gfx950_depth_kernels, sizeof mx_gfx950_depth_kernels / sizeof *mx_gfx950_depth_kernels,
                            problem, args->out_type,
                            args->accumulate ? ANY | ADD
                            : any            ? ANY
                                             : PLAIN);
}
