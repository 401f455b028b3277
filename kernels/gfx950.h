// What the gfx950 kernels and their host launcher agree on: tile shapes, the workspace, the launches. Plain C for both.
//
// A GEMM call is two launches on one stream, each of blocks of MX_GFX950_THREADS threads, no dynamic LDS:
//   mx_prepare_<op>_gfx950  (struct mx_<op>_args, struct mx_gfx950_plan)   grid: plan.prepare_blocks
//   a line of MX_GFX950_<OP>_KERNELS  (the same two arguments)            grid: plan.blocks
// The plan comes from sizes alone (mx_gfx950_plan_rows, mx_gfx950_plan_depth), so the host never reads a device value.
// prepare fills the whole of what the GEMM reads of the workspace; nothing in it survives from call to call.
//
// The workspace, plan.bytes long, 64-byte aligned:
//   tiles    [blocks] struct mx_gfx950_tile: what each block of the GEMM does. Blocks that have nothing to do exit.
//   a_scale  [A row blocks][2 wave rows][bodies][64 lanes][16 bytes]
//   b_scale  the same for B
// A body is MX_GFX950_BODY = 256 elements of the contraction: two 128-element steps, what the main loop does in one
// turn. The 16 bytes of lane l are [step][half][fragment]: the scale of row fragment_row(half, wave row, fragment, l %
// 16) of the row block and of the 32-element block 4 * step + l / 16 of the body. It is the order in which the matrix
// instruction takes its scales: dword = (step, half), byte = fragment, picked by op_sel. 0x00 (2^-127) stands where the
// row or the block does not exist; the operands are 0 there.
#pragma once
#include "mx_args.h"

enum {
    MX_GFX950_THREADS = 256,
    MX_GFX950_BODY = 256,
    MX_GFX950_FILL_BIAS = 3072,            // see gemm_gfx950.c
    MX_GFX950_BODY_SCALES = 1024,          // bytes of scales of one body and wave row: 64 lanes of 16
    MX_GFX950_XCDS = 8,                    // blocks go to the XCDs round robin
    MX_GFX950_SORTED_GROUPS = 512,         // up to so many groups are started longest first
    MX_GFX950_TILES_PER_BLOCK = 1024,      // of prepare: tiles, or
    MX_GFX950_BODIES_PER_BLOCK = 16,       // bodies of one row block
    MX_GFX950_MAX_DEPTH = (1 << 23) - 128, // contraction stride: 32 rows take less than 2^28 bytes
    MX_GFX950_MAX_COLS = 1 << 21,          // output row length; offsets within 256 rows are 31-bit
};

// Every GEMM kernel: name, rows and columns of its tile, output type, whether it adds to the output, whether it adds a
// bias, whether it takes output rows of any length and alignment. The others need rows of whole 8 elements and a
// 16-byte aligned output; the `any` ones of gemm_rows take a bias or none.
#define MX_GFX950_ROWS_KERNELS(X)                                                                                      \
    X(mx_gemm_rows_gfx950_256x256_bf16, 256, 256, MX_BF16, 0, 0, 0)                                                    \
    X(mx_gemm_rows_gfx950_256x256_bf16_bias, 256, 256, MX_BF16, 0, 1, 0)                                               \
    X(mx_gemm_rows_gfx950_256x256_bf16_any, 256, 256, MX_BF16, 0, 1, 1)                                                \
    X(mx_gemm_rows_gfx950_256x256_f32, 256, 256, MX_F32, 0, 0, 0)                                                      \
    X(mx_gemm_rows_gfx950_256x256_f32_bias, 256, 256, MX_F32, 0, 1, 0)                                                 \
    X(mx_gemm_rows_gfx950_256x256_f32_any, 256, 256, MX_F32, 0, 1, 1)                                                  \
    X(mx_gemm_rows_gfx950_128x256_bf16, 128, 256, MX_BF16, 0, 0, 0)                                                    \
    X(mx_gemm_rows_gfx950_128x256_bf16_bias, 128, 256, MX_BF16, 0, 1, 0)                                               \
    X(mx_gemm_rows_gfx950_128x256_bf16_any, 128, 256, MX_BF16, 0, 1, 1)                                                \
    X(mx_gemm_rows_gfx950_128x256_f32, 128, 256, MX_F32, 0, 0, 0)                                                      \
    X(mx_gemm_rows_gfx950_128x256_f32_bias, 128, 256, MX_F32, 0, 1, 0)                                                 \
    X(mx_gemm_rows_gfx950_128x256_f32_any, 128, 256, MX_F32, 0, 1, 1)
#define MX_GFX950_DEPTH_KERNELS(X)                                                                                     \
    X(mx_gemm_depth_gfx950_256x256_bf16, 256, 256, MX_BF16, 0, 0, 0)                                                   \
    X(mx_gemm_depth_gfx950_256x256_bf16_any, 256, 256, MX_BF16, 0, 0, 1)                                               \
    X(mx_gemm_depth_gfx950_256x256_f32, 256, 256, MX_F32, 0, 0, 0)                                                     \
    X(mx_gemm_depth_gfx950_256x256_f32_any, 256, 256, MX_F32, 0, 0, 1)                                                 \
    X(mx_gemm_depth_gfx950_256x256_add, 256, 256, MX_F32, 1, 0, 0)                                                     \
    X(mx_gemm_depth_gfx950_256x256_add_any, 256, 256, MX_F32, 1, 0, 1)

// A buffer resource, as the hardware takes it: 48 bits of address, size in bytes, type.
struct mx_gfx950_buffer {
    uint32_t word[4];
};

// What one block computes: out[0:rows][0:cols] (+)= a . b^T over `depth` elements, `bodies` bodies. bodies = 0: writes
// zeros to the tile's rows, of which there may be none.
struct mx_gfx950_tile {
    // [wave][a, b][half]: the 32 rows from half * 128 + wave * 32, MX_GFX950_FILL_BIAS bytes early. The size ends at
    // the last element of the last row that exists; 0 if none does.
    struct mx_gfx950_buffer operand[4][2][2];
    struct mx_gfx950_buffer scale[2][2]; // [a, b][wave row]: the tile's bodies
    void *out;
    const float *bias; // of the tile's first column, or null
    int32_t rows, cols, depth, bodies;
    uint32_t unused[8]; // to whole 128 bytes
};

struct mx_gfx950_plan {
    uint8_t *workspace;
    int64_t a_scale, b_scale, bytes; // byte offsets in the workspace, its size
    int64_t bodies;                  // bodies of one wave row in a_scale and b_scale
    int32_t tile_rows, tile_cols;    // shape of a tile
    int32_t row_tiles, col_tiles;    // depth: of one group. rows: row_tiles is the most that any offs make
    int32_t a_chunks, b_chunks;      // blocks of prepare that shuffle A's and B's scales
    int32_t blocks, prepare_blocks;  // grids
};

static inline int64_t mx_gfx950_div_up(int64_t n, int64_t by) { return (n + by - 1) / by; }

static inline void mx_gfx950_finish_plan(struct mx_gfx950_plan *plan, int64_t tiles, int64_t a_blocks,
                                         int64_t b_blocks) {
    const int64_t row = 2 * plan->bodies * MX_GFX950_BODY_SCALES;
    const int64_t chunks = mx_gfx950_div_up(plan->bodies, MX_GFX950_BODIES_PER_BLOCK);
    plan->blocks = (int32_t)mx_round_up(tiles, (int64_t)4 * MX_GFX950_XCDS);
    plan->a_scale = plan->blocks * (int64_t)sizeof(struct mx_gfx950_tile);
    plan->b_scale = plan->a_scale + a_blocks * row;
    plan->bytes = plan->b_scale + b_blocks * row;
    plan->a_chunks = (int32_t)(a_blocks * chunks);
    plan->b_chunks = (int32_t)(b_blocks * chunks);
    plan->prepare_blocks =
        (int32_t)mx_gfx950_div_up(plan->blocks, MX_GFX950_TILES_PER_BLOCK) + plan->a_chunks + plan->b_chunks;
}

// out[r] = a[r] . b[g]^T: row tiles begin at each group's first row; the rows past the last group are a group as well.
static inline struct mx_gfx950_plan mx_gfx950_plan_rows(const struct mx_rows_args *args, void *workspace,
                                                        int32_t tile_rows, int32_t tile_cols) {
    struct mx_gfx950_plan plan = {.workspace = (uint8_t *)workspace, .tile_rows = tile_rows, .tile_cols = tile_cols};
    plan.row_tiles = (int32_t)((args->m + (tile_rows - 1) * (args->groups + 1)) / tile_rows);
    plan.col_tiles = (int32_t)mx_gfx950_div_up(args->n, tile_cols);
    plan.bodies = mx_gfx950_div_up(args->k, MX_GFX950_BODY);
    mx_gfx950_finish_plan(&plan, (int64_t)plan.row_tiles * plan.col_tiles, plan.row_tiles,
                          args->groups * plan.col_tiles);
    return plan;
}

// out[g] (+)= a[:, group g] . b[:, group g]^T: a scale row has the bodies of all groups, each group's own.
static inline struct mx_gfx950_plan mx_gfx950_plan_depth(const struct mx_depth_args *args, void *workspace,
                                                         int32_t tile_rows, int32_t tile_cols) {
    struct mx_gfx950_plan plan = {.workspace = (uint8_t *)workspace, .tile_rows = tile_rows, .tile_cols = tile_cols};
    plan.row_tiles = (int32_t)mx_gfx950_div_up(args->n, tile_rows);
    plan.col_tiles = (int32_t)mx_gfx950_div_up(args->k, tile_cols);
    plan.bodies = (args->depth + (MX_GFX950_BODY - MX_BLOCK) * args->groups) / MX_GFX950_BODY;
    mx_gfx950_finish_plan(&plan, args->groups * plan.row_tiles * plan.col_tiles, plan.row_tiles, plan.col_tiles);
    return plan;
}

// Whether the kernels take such a call: the contraction's stride, the output's row length, both operands' data.
static inline int mx_gfx950_fits(int64_t stride, int64_t cols, const uint8_t *a, const uint8_t *b) {
    return stride <= MX_GFX950_MAX_DEPTH && cols <= MX_GFX950_MAX_COLS && (((uintptr_t)a | (uintptr_t)b) & 15) == 0;
}

// One line of a kernel table.
struct mx_gfx950_kernel {
    int32_t tile_rows, tile_cols, type, add, bias, any;
};
#define MX_GFX950_KERNEL_LINE(name, tile_rows, tile_cols, type, add, bias, any)                                        \
    {tile_rows, tile_cols, type, add, bias, any},

// The first of `count` kernels with tiles of so many rows that writes such an output, or -1.
static inline int mx_gfx950_find_kernel(const struct mx_gfx950_kernel *kernels, int count, int32_t tile_rows,
                                        int32_t type, int add, int bias, int any) {
    for (int i = 0; i < count; i++)
        if (kernels[i].tile_rows == tile_rows && kernels[i].type == type && kernels[i].add == add &&
            kernels[i].any == any && (any || kernels[i].bias == bias))
            return i;
    return -1;
}

// Rows of gemm_rows' tiles. A group's last tile is half empty on average; a 128-row tile wastes half as much, and needs
// 5 operand bytes where the 256-row one needs 4 for the same products. Not measured on hardware.
static inline int32_t mx_gfx950_choose_tile_rows(int64_t m, int64_t groups) { return m <= 256 * groups ? 128 : 256; }

static inline int mx_gfx950_needs_any(int64_t cols, const void *out) { return cols % 8 != 0 || ((uintptr_t)out & 15); }

// The kernel of a call: an index into MX_GFX950_ROWS_KERNELS or MX_GFX950_DEPTH_KERNELS.
static inline int mx_gfx950_choose_rows(const struct mx_rows_args *args) {
    static const struct mx_gfx950_kernel kernels[] = {MX_GFX950_ROWS_KERNELS(MX_GFX950_KERNEL_LINE)};
    return mx_gfx950_find_kernel(kernels, sizeof kernels / sizeof *kernels,
                                 mx_gfx950_choose_tile_rows(args->m, args->groups), args->out_type, 0, args->bias != 0,
                                 mx_gfx950_needs_any(args->n, args->out));
}

static inline int mx_gfx950_choose_depth(const struct mx_depth_args *args) {
    static const struct mx_gfx950_kernel kernels[] = {MX_GFX950_DEPTH_KERNELS(MX_GFX950_KERNEL_LINE)};
    return mx_gfx950_find_kernel(kernels, sizeof kernels / sizeof *kernels, 256, args->out_type, args->accumulate, 0,
                                 mx_gfx950_needs_any(args->k, args->out));
}
