// The GPU quantizers' frame: which tile a block has, where copies go and how they leave.
// Included by a chip's quantize.c, which has what depends on the chip: the lanes' places in a tile, loads, encoding,
// and how codes and scales lie in shared memory. Elementary functions are device.h's, under the same names for every
// chip; a wave is what runs together, a warp on sm_90.
//
// Grid      x: ceil(cols / 128) column tiles. y * z, split in any way: batch * token tiles or more. Token tiles:
//              without offs             ceil(rows / 128); the rows kernels take batch * rows for rows, 1 for batch
//              with offs, both          mx_padded_tokens(rows, groups + 1) / 128
//              with offs, cols          col_k / 128
//           Nothing to launch when either is 0. No workspace, shared memory is static. Fewer than 2^32 token tiles.
// Tile      128 rows x 128 columns. With offs every group starts a token tile, so token tile t has exactly the columns
//           from 128 t of the transposed copy; each wave finds its tile's group itself (find_tile). The tiles after the
//           last group have the rows past offs[groups - 1], which are in no column, and the columns past the last
//           group's, which are zeros. offs may hold anything: what it gives is clamped to x.
// Lane      holds 8 rows of 8 columns: a row-block is 4 lanes, and so is a column-block.
// Tails     rows and columns that x does not have count as zeros. Stores are cut to rows, cols, row_k, col_k: chunks of
//           16 bytes are in or out whole, as those are multiples of 32.
#pragma once
#include "mx_scale.h"

enum {
    TILE = MX_GROUP_ALIGN,
    BLOCKS = TILE / MX_BLOCK,
    THREADS = 256,
    CHUNK = 8,           // rows and columns of a lane
    PAIRS = CHUNK / 2,   // a lane's blocks go by twos, 16 bits each
    GROUPS_PER_LANE = 4, // in find_tile
};

// A token tile.
struct token_tile {
    int64_t row;   // of x, where it starts
    int32_t rows;  // 0..TILE, from there
    bool in_group; // its rows are in the transposed copy
};

// A block's part of x, as [batch * rows][cols].
struct tile {
    int64_t row, col;   // where it starts
    int32_t rows, cols; // 1..TILE, that x has from there
};

// A lane's elements: words [row][column], or with bf16 [row][pair of columns].
struct elements {
    uint32_t word[CHUNK][CHUNK];
};

// Of each of a lane's 8 blocks in one direction, 16 bits: first its amax as a bf16, then what encoding makes of it.
struct blocks {
    uint32_t two[PAIRS]; // blocks (0, 1), (2, 3), ...
};

enum source { ROWS, COLS, ZEROS };

// The seam: what a kernel quantizes is what its loader gives; nothing else knows where x is. A loader gives the lane's
// elements of the tile, as `type`, zeros for rows and columns from tile.rows and tile.cols on, which are at least 1. A
// kernel is a line of QUANTIZE with its loader.
typedef struct elements loader(const struct mx_quantize_args *args, struct tile tile, int32_t type);

// What a chip's quantize.c defines.
// One tile: zeros past the last group, else loads, encodes into shared memory and stores.
INLINE void quantize_tile(const struct mx_quantize_args *args, loader *load, struct token_tile tokens, int64_t matrix,
                          int64_t token, int64_t col, int32_t type, bool want_rows, bool want_cols);
// Which line this thread stores 16 codes of first; the next ones are LINE_STEP lines apart.
INLINE uint32_t first_line(uint32_t lane, uint32_t wave);
// From shared memory, codes 16 * chunk .. + 15 of a line, this thread's k-th; and a line's scales, one scale_word.
INLINE u32x4 codes_at(enum source source, uint32_t line, uint32_t chunk, uint32_t wave, uint32_t k);
INLINE uint32_t scales_at(enum source source, uint32_t line);

INLINE mx_words as_pair(uint32_t v) { return __builtin_bit_cast(mx_words, v); }
INLINE uint32_t of_pair(mx_words v) { return __builtin_bit_cast(uint32_t, v); }
INLINE uint32_t max_pairs(uint32_t a, uint32_t b) { return of_pair(__builtin_elementwise_max(as_pair(a), as_pair(b))); }
INLINE int32_t clamp_tile(int64_t n) { return (int32_t)max64(0, min64(n, TILE)); }

// ------------------------------------------------------------------------------------------------------------- tiles

INLINE struct token_tile plain_tile(int64_t rows, int64_t t) {
    return (struct token_tile){.row = t * TILE, .rows = clamp_tile(rows - t * TILE), .in_group = true};
}

// Token tile `wanted`: each lane takes some groups, so 128 or 256 groups are one step.
INLINE struct token_tile find_tile(const struct mx_quantize_args *args, uint32_t wanted, bool want_rows) {
    const GLOBAL int32_t *offs = (const GLOBAL int32_t *)args->offs;
    int32_t rows = (int32_t)min64(args->rows, INT32_MAX), groups = (int32_t)args->groups, last = 0;
    uint32_t first = 0, lane = lane_id(); // first: of the tiles of this step's groups
    ROLLED for (int32_t base = 0; base < groups; base += LANES * GROUPS_PER_LANE) {
        int32_t end[GROUPS_PER_LANE + 1], row = 0, stop = 0;
        uint32_t tiles[GROUPS_PER_LANE], sum = 0;
        UNROLL for (int i = 0; i <= GROUPS_PER_LANE; i++) {
            int32_t g = base + (int32_t)lane * GROUPS_PER_LANE + i - 1;
            int32_t bound = offs[g < 0 ? 0 : g < groups ? g : groups - 1];
            bound = g < 0 || bound < 0 ? 0 : bound;
            end[i] = bound < rows ? bound : rows;
        }
        UNROLL for (int i = 0; i < GROUPS_PER_LANE; i++) {
            int32_t length = end[i + 1] - end[i];
            tiles[i] = length > 0 ? ((uint32_t)length + TILE - 1) / TILE : 0;
            sum += tiles[i];
        }
        uint32_t through = first + prefix_sum(sum), before = through - sum;
        bool found = false;
        UNROLL for (int i = 0; i < GROUPS_PER_LANE; i++) {
            uint32_t index = wanted - before; // holds for anything in offs: it is below tiles[i], so row is below end
            if (index < tiles[i]) {
                row = end[i] + (int32_t)(index * TILE);
                stop = end[i + 1];
                found = true;
            }
            before += tiles[i];
        }
        lane_mask where = ballot(found);
        if (where) {
            int source = __builtin_ctzg(where);
            row = read_lane(row, source);
            stop = read_lane(stop, source);
            return (struct token_tile){.row = row, .rows = clamp_tile(stop - row), .in_group = true};
        }
        first = (uint32_t)read_lane((int32_t)through, LANES - 1);
        last = read_lane(end[GROUPS_PER_LANE], LANES - 1);
    }
    int64_t row = last + (int64_t)(wanted > first ? wanted - first : 0) * TILE;
    return (struct token_tile){.row = row, .rows = want_rows ? clamp_tile(args->rows - row) : 0, .in_group = false};
}

// ------------------------------------------------------------------------------------------------------------- storing

// One of the copies, at the tile. Lines are rows of the row copy or columns of x.
struct target {
    GLOBAL uint8_t *data, *scale;
    int64_t stride; // from line to line, of data
    int32_t lines;  // that exist, 0..TILE
    int32_t width;  // of a line, 0..TILE
};

INLINE struct target target_at(uint8_t *data, uint8_t *scale, int64_t line, int64_t stride, int64_t at, int32_t lines) {
    int64_t start = line * stride + at;
    return (struct target){.data = (GLOBAL uint8_t *)data + start,
                           .scale = (GLOBAL uint8_t *)scale + start / MX_BLOCK,
                           .stride = stride,
                           .lines = lines,
                           .width = clamp_tile(stride - at)};
}

// 128 lines of 128 bytes.
INLINE void store_codes(const struct target *to, enum source source) {
    uint32_t lane = lane_id(), wave = wave_id(), chunk = thread_id() % 8, first = first_line(lane, wave);
    GLOBAL uint8_t *at = to->data + first * to->stride + chunk * 16;
    UNROLL for (uint32_t k = 0; k < TILE * 8 / THREADS; k++) {
        uint32_t line = first + k * LINE_STEP;
        u32x4 v = {};
        if (source != ZEROS)
            v = codes_at(source, line, chunk, wave, k);
        if ((int32_t)line < to->lines && (int32_t)chunk * 16 < to->width)
            *(GLOBAL u32x4 *)(at + k * LINE_STEP * to->stride) = v;
    }
}

// By half of the threads, one line each.
INLINE void store_scales(const struct target *to, enum source source) {
    uint32_t line = thread_id() % TILE, v = 0;
    if (source != ZEROS)
        v = scales_at(source, line);
    if ((int32_t)line >= to->lines)
        return;
    GLOBAL uint8_t *at = to->scale + line * (to->stride / MX_BLOCK);
    if (to->width == TILE && (uintptr_t)at % alignof(scale_word) == 0) {
        *(GLOBAL scale_word *)at = v;
        return;
    }
    UNROLL for (int b = 0; b < BLOCKS; b++) {
        if (b * MX_BLOCK < to->width)
            at[b] = (uint8_t)(v >> 8 * b);
    }
}

// ------------------------------------------------------------------------------------------------------------- kernels

// The columns of the transposed copy past the last group's.
INLINE void store_zeros(const struct target *by_cols, bool first_half) {
    store_codes(by_cols, ZEROS);
    if (first_half)
        store_scales(by_cols, ZEROS);
}

INLINE void store_copies(const struct target *by_rows, const struct target *by_cols, bool want_rows, bool want_cols,
                         bool first_half) {
    if (want_rows)
        store_codes(by_rows, ROWS);
    if (want_cols)
        store_codes(by_cols, COLS);
    if (want_rows && first_half)
        store_scales(by_rows, ROWS);
    if (want_cols && !first_half)
        store_scales(by_cols, COLS);
}

INLINE void quantize(struct mx_quantize_args args, loader *load, int32_t type, bool want_rows, bool want_cols) {
    if (!want_cols) {
        args.rows *= args.batch;
        args.batch = 1;
    }
    bool by_group = args.grouped && want_cols;
    int64_t tokens = args.rows + TILE - 1;
    if (by_group)
        tokens = want_rows ? mx_padded_tokens(args.rows, args.groups + 1) : args.col_k;
    uint32_t tiles = (uint32_t)(tokens / TILE);
    uint32_t t = block_z() * grid_y() + block_y(), matrix = 0;
    if (args.batch > 1) {
        matrix = t / tiles;
        t -= matrix * tiles;
    }
    if (matrix >= args.batch || t >= tiles)
        return;
    int64_t col = (int64_t)block_id() * TILE;
    struct token_tile tile = by_group ? find_tile(&args, t, want_rows) : plain_tile(args.rows, t);
    quantize_tile(&args, load, tile, matrix, (int64_t)t * TILE, col, type, want_rows, want_cols);
}

// Where what zero_padding clears begins: all after the last group.
INLINE int64_t padding_start(const struct mx_padding_args *args) {
    int64_t used = args->groups ? ((const GLOBAL int32_t *)args->offs)[args->groups - 1] : 0;
    return max64(0, min64(used, args->depth)) / MX_BLOCK * MX_BLOCK;
}
