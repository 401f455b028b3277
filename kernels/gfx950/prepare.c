// gfx950: what has to be known or moved before a grouped GEMM runs. One launch per call; layouts and launch: plan.h.
//
//   mx_prepare_rows_gfx950(struct mx_rows_args, struct mx_gfx950_plan)
//   mx_prepare_depth_gfx950(struct mx_depth_args, struct mx_gfx950_plan)
//
// Blocks, in order: TILES_PER_BLOCK tile descriptions each; then A's scales, then B's, BODIES_PER_BLOCK bodies of one
// row block each. Every block finds what it needs of the groups by itself, from offs, with one scan over all groups.
//
// Bad offs are made good first: a group ends at the largest of 0 and the offsets up to its own, and never past the
// operand; in the plain layout its bounds are rounded down to whole 32-element blocks. So for any offs the groups are
// disjoint, in order and inside the operands, and everything counted from them fits the workspace.
//
// Tile order. Tiles are numbered so that 4 neighbours form a 2x2 square of a group's output, and 4 neighbours go to
// one XCD's blocks (block ids that are equal modulo XCDS): they share operand rows in its L2. gemm_depth starts longer
// groups first, by up to SORTED_GROUPS groups; with more there are so many tiles that order does not matter.
#include "device.h"

enum { THREADS = MX_GFX950_THREADS, MAX_UNITS = MX_GFX950_TILES_PER_BLOCK + 4, SORTED = MX_GFX950_SORTED_GROUPS };

#define BLOCK_SYNC()                                                                                                   \
    do {                                                                                                               \
        __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");                                                         \
        __builtin_amdgcn_s_barrier();                                                                                  \
        __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");                                                         \
    } while (0)

// A part of a group: `length` rows or columns from `begin`; `number` is where the group's own count of units starts.
struct unit {
    int32_t begin, length, group, number;
};

static LDS struct unit units[MAX_UNITS] __attribute__((loader_uninitialized));
static LDS int32_t lengths[SORTED] __attribute__((loader_uninitialized));
static LDS uint32_t scan_memory[2][THREADS] __attribute__((loader_uninitialized));

INLINE uint32_t min_u32(uint32_t a, uint32_t b) { return a < b ? a : b; }
INLINE uint32_t max_u32(uint32_t a, uint32_t b) { return a > b ? a : b; }

// The sum (or maximum) of the values of all threads before this one. Every thread of the block calls it.
INLINE uint32_t scan(uint32_t value, int maximum) {
    const uint32_t t = thread_id();
    uint32_t sum = value;
    int side = 0;
    BLOCK_SYNC();
    scan_memory[side][t] = sum;
    ROLLED for (uint32_t step = 1; step < THREADS; step *= 2) {
        BLOCK_SYNC();
        uint32_t other = t >= step ? scan_memory[side][t - step] : 0;
        sum = maximum ? max_u32(sum, other) : sum + other;
        side ^= 1;
        scan_memory[side][t] = sum;
    }
    BLOCK_SYNC();
    return t ? scan_memory[side][t - 1] : 0;
}

// ---- groups ----

enum layout { ROWS, OWN_DEPTH, PLAIN_DEPTH };

// A thread's walk over its share of the groups, in order. ROWS has one more group, the rows past offs[groups - 1].
struct walk {
    const GLOBAL int32_t *offs;
    int32_t groups, limit; // limit: rows or columns of the operand
    uint32_t unit_size;    // rows or columns in a unit
    enum layout layout;
    int32_t group, stop;          // next group, end of the share
    uint32_t end, column, number; // before the next group: offset, column (OWN_DEPTH), units
};

INLINE uint32_t offset_of(const struct walk *w, int32_t group) {
    __builtin_assume(w->limit >= 0); // so that the comparison is unsigned, as those after it are
    return (uint32_t)mx_clamp_offset(w->offs[group], w->limit);
}

INLINE struct unit next_group(struct walk *w) {
    const uint32_t limit = (uint32_t)w->limit, begin = w->end;
    uint32_t end = limit;
    if (w->group < w->groups)
        end = max_u32(begin, offset_of(w, w->group));
    struct unit u = {(int32_t)begin, (int32_t)(end - begin), w->group, (int32_t)w->number};
    if (w->layout == PLAIN_DEPTH) {
        u.begin = (int32_t)(begin & ~(MX_BLOCK - 1u));
        u.length = (int32_t)(end & ~(MX_BLOCK - 1u)) - u.begin;
    } else if (w->layout == OWN_DEPTH) {
        uint32_t blocks = (end - begin + MX_BLOCK - 1) & ~(MX_BLOCK - 1u);
        u.begin = (int32_t)min_u32(w->column, limit);
        u.length = (int32_t)min_u32(blocks, limit - (uint32_t)u.begin);
        w->column += (end - begin + MX_GROUP_ALIGN - 1) & ~(MX_GROUP_ALIGN - 1u);
    }
    w->end = end;
    w->number += ((uint32_t)u.length + w->unit_size - 1) / w->unit_size;
    w->group++;
    return u;
}

// Brings a walk, set up but for its last five fields, to the start of this thread's share. Every thread calls it.
INLINE void start_walk(struct walk *w) {
    const int32_t all = w->groups + (w->layout == ROWS), share = div_up32(all, THREADS);
    const int32_t first = min32((int32_t)thread_id() * share, all);
    w->stop = min32(first + share, all);
    uint32_t largest = 0;
    ROLLED for (int32_t g = first; g < min32(w->stop, w->groups); g++)
        largest = max_u32(largest, offset_of(w, g));
    const uint32_t end = scan(largest, 1);
    struct walk ahead = *w;
    ahead.group = first, ahead.end = end, ahead.column = ahead.number = 0;
    ROLLED while (ahead.group < ahead.stop)
        next_group(&ahead);
    w->group = first, w->end = end;
    w->column = scan(ahead.column, 0);
    w->number = scan(ahead.number, 0);
}

// Fills units[] with the units [first, first + count) of all groups; length 0 for those past the last.
INLINE void find_units(struct walk w, int32_t first, int32_t count) {
    start_walk(&w);
    ROLLED for (int32_t i = (int32_t)thread_id(); i < count; i += THREADS)
        units[i] = (struct unit){0, 0, 0, 0};
    BLOCK_SYNC();
    ROLLED while (w.group < w.stop) {
        struct unit u = next_group(&w);
        ROLLED for (int32_t i = max32(u.number, first); i < min32((int32_t)w.number, first + count); i++) {
            int32_t skip = (i - u.number) * (int32_t)w.unit_size;
            units[i - first] = (struct unit){u.begin + skip, u.length - skip, u.group, u.number};
        }
    }
    BLOCK_SYNC();
}

// Fills units[] with whole groups: entry i is the group that is started as number first + i.
INLINE void find_groups(struct walk w, int32_t first, int32_t count) {
    const int sorted = w.groups <= SORTED;
    start_walk(&w);
    if (sorted) {
        struct walk ahead = w;
        ROLLED while (ahead.group < ahead.stop) {
            struct unit u = next_group(&ahead);
            lengths[u.group] = u.length;
        }
    }
    BLOCK_SYNC();
    ROLLED while (w.group < w.stop) {
        struct unit u = next_group(&w);
        int32_t at = u.group;
        if (sorted) {
            at = 0;
            ROLLED for (int32_t g = 0; g < w.groups; g++)
                at += lengths[g] > u.length || (lengths[g] == u.length && g < u.group);
        }
        if (at >= first && at < first + count)
            units[at - first] = u;
    }
    BLOCK_SYNC();
}

// ---- scales ----

// Which scales a block of prepare shuffles, counted from the first block that does: one chunk of BODIES_PER_BLOCK
// bodies of one row block. `to`: the row block's; a wave row's bodies take wave_bytes.
struct chunk {
    GLOBAL uint8_t *to;
    int64_t wave_bytes;
    int32_t row_block, first_body, lane_bytes;
    bool is_b;
};

// Where wave row 0's scales of a row block begin.
INLINE GLOBAL uint8_t *scales_of(const struct mx_gfx950_plan *plan, bool is_b, int64_t row_block) {
    const int64_t lane_bytes = is_b ? plan->b_lane_scales : MX_GFX950_LANE_SCALES;
    return (GLOBAL uint8_t *)plan->workspace + (is_b ? plan->b_scale : plan->a_scale) +
           row_block * 2 * plan->bodies * 64 * lane_bytes;
}

INLINE struct chunk find_chunk(const struct mx_gfx950_plan *plan, int32_t block) {
    const int32_t chunks = (int32_t)div_up(plan->bodies, MX_GFX950_BODIES_PER_BLOCK);
    struct chunk c = {.is_b = block >= plan->a_chunks};
    block -= c.is_b ? plan->a_chunks : 0;
    c.row_block = block / chunks;
    c.first_body = (block - c.row_block * chunks) * MX_GFX950_BODIES_PER_BLOCK;
    c.lane_bytes = c.is_b ? plan->b_lane_scales : MX_GFX950_LANE_SCALES;
    c.wave_bytes = plan->bodies * 64 * c.lane_bytes;
    c.to = scales_of(plan, c.is_b, c.row_block);
    return c;
}

// The scale of a row and a block of 32, 0 where there is none.
INLINE uint32_t scale_or_zero(const GLOBAL uint8_t *src, int64_t stride, int32_t row, int32_t rows, int32_t block,
                              int32_t blocks) {
    if (row < rows && block < blocks)
        return src[row * stride + block];
    return 0;
}

// One body: src = [rows][stride] scale bytes of which `blocks` (1 to 8) a row are the body's. Half a block of threads
// calls it, t = 0 to 127.
INLINE void shuffle_body(struct chunk c, int64_t body, const GLOBAL uint8_t *src, int64_t stride, int32_t rows,
                         int32_t blocks, uint32_t t) {
    const uint32_t lane = t & 63, wave = t >> 6, first = fragment_row(lane & 15);
    GLOBAL uint32_t *to = (GLOBAL uint32_t *)(c.to + wave * c.wave_bytes + (body * 64 + lane) * c.lane_bytes);
    UNROLL for (int step = 0; step < 2; step++) {
        const int32_t block = step * 4 + (int32_t)(lane >> 4);
        UNROLL for (int half = 0; half < 2; half++) {
            uint32_t word = 0;
            UNROLL for (int fragment = 0; fragment < 4; fragment++) {
                const int32_t row =
                    (int32_t)(half * 128 + wave * 64 + first) + (fragment & 1) * 4 + (fragment >> 1) * 32;
                word |= scale_or_zero(src, stride, row, rows, block, blocks) << 8 * fragment;
            }
            to[step * 2 + half] = word;
        }
    }
    if (c.lane_bytes == MX_GFX950_LANE_SCALES)
        return;
    uint32_t word = 0;
    UNROLL for (int byte = 0; byte < 4; byte++) {
        const int32_t row = (int32_t)(256 + wave * 32 + first) + (byte & 1) * 4;
        const int32_t block = (byte >> 1) * 4 + (int32_t)(lane >> 4);
        word |= scale_or_zero(src, stride, row, rows, block, blocks) << 8 * byte;
    }
    to[4] = word;
}

// A chunk of a row block whose rows lie whole in memory: gemm_rows.
INLINE void shuffle_rows(struct chunk c, int64_t bodies, const GLOBAL uint8_t *src, int64_t row_scales, int32_t rows) {
    ROLLED for (int64_t body = c.first_body + (thread_id() >> 7);
                body < c.first_body + MX_GFX950_BODIES_PER_BLOCK && body < bodies; body += 2) {
        const int64_t left = row_scales - body * 8;
        shuffle_body(c, body, src + body * 8, row_scales, rows, left < 8 ? (int32_t)left : 8, thread_id() & 127);
    }
}

// A chunk of a row block of gemm_depth: units[] says where each body's columns are.
INLINE void shuffle_depth(struct chunk c, const GLOBAL uint8_t *src, int64_t row_scales, int32_t rows) {
    ROLLED for (int32_t i = (int32_t)(thread_id() >> 7); i < MX_GFX950_BODIES_PER_BLOCK; i += 2) {
        const struct unit u = units[i];
        if (u.length > 0)
            shuffle_body(c, c.first_body + i, src + u.begin / MX_BLOCK, row_scales, rows, min32(u.length / MX_BLOCK, 8),
                         thread_id() & 127);
    }
}

// ---- tiles ----

// The blocks of a persistent kernel begin with the first tiles.
INLINE void set_counters(const struct mx_gfx950_plan *plan) {
    const int32_t xcd = (int32_t)thread_id();
    if (block_id() == 0 && xcd < MX_GFX950_XCDS)
        *(GLOBAL int32_t *)(plan->workspace + plan->counters + xcd * MX_GFX950_COUNTER_BYTES) = plan->blocks + xcd;
}

// The tile that a block of the GEMM does: neighbours go to one XCD.
INLINE int64_t tile_of_block(int64_t block) { return (block & ~31ll) | (block & 7) << 2 | (block >> 3 & 3); }

// Position `at` of an order over [rows][cols] tiles that goes down and right through bands of two rows.
INLINE void tile_position(uint32_t at, uint32_t rows, uint32_t cols, uint32_t *row, uint32_t *col) {
    const uint32_t band = at / (2 * cols), in_band = at - band * 2 * cols;
    const uint32_t high = min_u32(2, rows - 2 * band);
    *col = high == 2 ? in_band >> 1 : in_band;
    *row = 2 * band + (high == 2 ? in_band & 1 : 0);
}

INLINE struct mx_gfx950_buffer buffer_of(uint64_t address, uint32_t bytes) {
    return (struct mx_gfx950_buffer){{(uint32_t)address, (uint32_t)(address >> 32) & 0xffff, bytes, 0x20000}};
}

INLINE void set_depth(struct mx_gfx950_tile *tile, int32_t depth) {
    tile->extent.depth = depth;
    tile->extent.bodies = div_up32(depth, MX_GFX950_BODY);
}

// `rows` rows of an operand from `data`, of which the buffer gets up to `most` from row `first`.
INLINE struct mx_gfx950_buffer rows_buffer(const struct mx_gfx950_tile *tile, const uint8_t *data, int64_t stride,
                                           int32_t rows, int32_t first, int32_t most) {
    const int32_t left = min32(rows - first, most);
    const int32_t bytes = (left - 1) * (int32_t)stride + tile->extent.depth + MX_GFX950_FILL_BIAS;
    return buffer_of((uintptr_t)data + (uint64_t)(first * stride - MX_GFX950_FILL_BIAS),
                     left > 0 ? (uint32_t)bytes : 0);
}

// The buffers of one operand's tile, `rows` rows from `data`, and of its scales, which begin with `first_body` of a row
// block.
INLINE void describe_operand(const struct mx_gfx950_plan *plan, struct mx_gfx950_tile *tile, bool is_b,
                             const uint8_t *data, int64_t stride, int32_t rows, int64_t row_block, int64_t first_body) {
    UNROLL for (int32_t wave = 0; wave < 4; wave++) {
        UNROLL for (int32_t half = 0; half < 2; half++)
            tile->wave[wave].operand[is_b][half] = rows_buffer(tile, data, stride, rows, half * 128 + wave * 32, 32);
        if (is_b)
            tile->wave[wave].wide = rows_buffer(tile, data, stride, rows, 256 + wave * 16, 16);
    }
    const int64_t body_bytes = 64 * (is_b ? plan->b_lane_scales : MX_GFX950_LANE_SCALES);
    UNROLL for (int wave_row = 0; wave_row < 2; wave_row++)
        tile->scale[is_b][wave_row] = buffer_of((uintptr_t)scales_of(plan, is_b, row_block) +
                                                    (uint64_t)((wave_row * plan->bodies + first_body) * body_bytes),
                                                (uint32_t)(tile->extent.bodies * body_bytes));
}

// Columns of tiles: the wide ones first.
INLINE int64_t first_col_of(const struct mx_gfx950_plan *plan, int32_t col_tile) {
    return (int64_t)col_tile * plan->tile_cols + 64 * min32(col_tile, plan->wide_tiles);
}
INLINE int32_t cols_of(const struct mx_gfx950_plan *plan, int32_t col_tile, int64_t all) {
    const int64_t left = all - first_col_of(plan, col_tile);
    const int32_t most = col_tile < plan->wide_tiles ? 320 : plan->tile_cols;
    return left < most ? (int32_t)left : most;
}

INLINE void write_tile(const struct mx_gfx950_plan *plan, int64_t block, const struct mx_gfx950_tile *tile) {
    ((GLOBAL struct mx_gfx950_tile *)plan->workspace)[block] = *tile;
}

KERNEL void mx_prepare_rows_gfx950(struct mx_rows_args args, struct mx_gfx950_plan plan) {
    const int64_t row_scales = args.k / MX_BLOCK;
    const int32_t tile_blocks = plan.prepare_blocks - plan.a_chunks - plan.b_chunks;
    const struct walk walk = {.offs = (const GLOBAL int32_t *)args.offs,
                              .groups = (int32_t)args.groups,
                              .limit = (int32_t)args.m,
                              .unit_size = (uint32_t)plan.tile_rows,
                              .layout = ROWS};
    const int32_t block = (int32_t)block_id();
    set_counters(&plan);
    if (block < tile_blocks) {
        const int32_t first = block * MX_GFX950_TILES_PER_BLOCK, band = 2 * plan.col_tiles;
        const int32_t first_row = first / band * 2;
        const int32_t last_row = (first + MX_GFX950_TILES_PER_BLOCK - 1) / band * 2 + 1;
        find_units(walk, first_row, last_row + 1 - first_row);
        ROLLED for (int32_t i = first + (int32_t)thread_id(); i < first + MX_GFX950_TILES_PER_BLOCK && i < plan.tiles;
                    i += THREADS) {
            const int64_t at = tile_of_block(i);
            struct mx_gfx950_tile tile = {};
            if (at < (int64_t)plan.row_tiles * plan.col_tiles) {
                uint32_t row, col;
                tile_position((uint32_t)at, (uint32_t)plan.row_tiles, (uint32_t)plan.col_tiles, &row, &col);
                const struct unit u = units[(int32_t)row - first_row];
                const int64_t first_col = first_col_of(&plan, (int32_t)col), b_row = u.group * args.n + first_col;
                const int padding = u.group == args.groups;
                tile.out = (char *)args.out + (u.begin * args.n + first_col) * mx_type_bytes(args.out_type);
                tile.bias = args.bias && !padding ? args.bias + b_row : 0;
                tile.extent.rows = min32(u.length, plan.tile_rows);
                tile.extent.cols = cols_of(&plan, (int32_t)col, args.n);
                if (!padding && u.length > 0) {
                    set_depth(&tile, (int32_t)args.k);
                    tile.extent.bodies = max32(1, tile.extent.bodies); // of zeros when k is 0: the bias counts still
                    describe_operand(&plan, &tile, 0, args.a + u.begin * args.k, args.k, tile.extent.rows, row, 0);
                    describe_operand(&plan, &tile, 1, args.b + b_row * args.k, args.k, tile.extent.cols,
                                     (int64_t)u.group * plan.col_tiles + col, 0);
                }
            }
            write_tile(&plan, i, &tile);
        }
        return;
    }
    const struct chunk chunk = find_chunk(&plan, block - tile_blocks);
    if (chunk.is_b) {
        const int32_t group = chunk.row_block / plan.col_tiles, col = chunk.row_block - group * plan.col_tiles;
        shuffle_rows(chunk, plan.bodies,
                     (const GLOBAL uint8_t *)args.b_scale + (group * args.n + first_col_of(&plan, col)) * row_scales,
                     row_scales, cols_of(&plan, col, args.n));
        return;
    }
    find_units(walk, chunk.row_block, 1);
    const struct unit u = units[0];
    if (u.length > 0 && u.group < walk.groups)
        shuffle_rows(chunk, plan.bodies, (const GLOBAL uint8_t *)args.a_scale + u.begin * row_scales, row_scales,
                     min32(u.length, plan.tile_rows));
}

KERNEL void mx_prepare_depth_gfx950(struct mx_depth_args args, struct mx_gfx950_plan plan) {
    const int64_t row_scales = args.depth / MX_BLOCK;
    const int32_t tile_blocks = plan.prepare_blocks - plan.a_chunks - plan.b_chunks;
    const struct walk walk = {.offs = (const GLOBAL int32_t *)args.offs,
                              .groups = (int32_t)args.groups,
                              .limit = (int32_t)args.depth,
                              .unit_size = MX_GFX950_BODY,
                              .layout = args.plain ? PLAIN_DEPTH : OWN_DEPTH};
    const int32_t block = (int32_t)block_id();
    set_counters(&plan);
    if (block < tile_blocks) {
        const int32_t first = block * MX_GFX950_TILES_PER_BLOCK, per_group = plan.row_tiles * plan.col_tiles;
        const int32_t first_group = first / per_group;
        find_groups(walk, first_group, MX_GFX950_TILES_PER_BLOCK + 1);
        ROLLED for (int32_t i = first + (int32_t)thread_id(); i < first + MX_GFX950_TILES_PER_BLOCK && i < plan.tiles;
                    i += THREADS) {
            const int64_t at = tile_of_block(i);
            struct mx_gfx950_tile tile = {};
            if (at < args.groups * per_group) {
                const int32_t place = (int32_t)at / per_group;
                uint32_t row, col;
                tile_position((uint32_t)((int32_t)at - place * per_group), (uint32_t)plan.row_tiles,
                              (uint32_t)plan.col_tiles, &row, &col);
                const struct unit u = units[place - first_group];
                const int64_t first_row = (int64_t)row * plan.tile_rows, first_col = first_col_of(&plan, (int32_t)col);
                tile.out = (char *)args.out +
                           ((u.group * args.n + first_row) * args.k + first_col) * mx_type_bytes(args.out_type);
                tile.extent.rows =
                    min32(args.n - first_row < plan.tile_rows ? (int32_t)(args.n - first_row) : plan.tile_rows,
                          args.accumulate && !u.length ? 0 : plan.tile_rows);
                tile.extent.cols = cols_of(&plan, (int32_t)col, args.k);
                set_depth(&tile, u.length);
                describe_operand(&plan, &tile, 0, args.a + first_row * args.depth + u.begin, args.depth,
                                 tile.extent.rows, row, u.number);
                describe_operand(&plan, &tile, 1, args.b + first_col * args.depth + u.begin, args.depth,
                                 tile.extent.cols, col, u.number);
            }
            write_tile(&plan, i, &tile);
        }
        return;
    }
    const struct chunk chunk = find_chunk(&plan, block - tile_blocks);
    const int64_t first_row =
        chunk.is_b ? first_col_of(&plan, chunk.row_block) : (int64_t)chunk.row_block * plan.tile_rows;
    const int32_t rows = chunk.is_b                            ? cols_of(&plan, chunk.row_block, args.k)
                         : args.n - first_row < plan.tile_rows ? (int32_t)(args.n - first_row)
                                                               : plan.tile_rows;
    find_units(walk, chunk.first_body, MX_GFX950_BODIES_PER_BLOCK);
    shuffle_depth(chunk, (const GLOBAL uint8_t *)(chunk.is_b ? args.b_scale : args.a_scale) + first_row * row_scales,
                  row_scales, rows);
}
