// sm_90: what precedes a grouped GEMM: the list of tiles, and both operands' scales and references, as plan.h says.
//
//   mx_prepare_rows_sm90(struct mx_rows_args, struct mx_sm90_plan)
//   mx_prepare_depth_sm90(struct mx_depth_args, struct mx_sm90_plan)
//
// Blocks of 256 threads: first plan.tile_blocks of them, which write a tile a thread, then those that write scales, in
// units of 256 rows, plan.units_at_once each: gemm_rows the tokens' and then the weights'; gemm_depth P's and then Q's,
// the same rows for one group after the other. Bad offs are clamped here, and whatever they were, no index that leaves
// this file is out of bounds: a group ends at the largest of the offs up to its own, cut to the tokens there are.
#include "device.h"

enum {
    THREADS = MX_SM90_PREPARE_THREADS,
    BOUNDS = MX_SM90_SORTED_GROUPS, // groups whose bounds are in shared memory at once
};
static_assert(2 * MX_SM90_ROW_BLOCK == THREADS && BOUNDS % THREADS == 0); // rows of a unit: one a thread

// Of those groups, inclusive: ends, and sums of units and of row blocks up to here.
static SHARED int32_t ends[BOUNDS], unit_sums[BOUNDS], block_sums[BOUNDS];
static SHARED int32_t order[BOUNDS], totals[THREADS / 32];
static SHARED i32x4 lengths[BOUNDS / 4];

// What a block of threads has to write, in order: for gemm_rows the row blocks of its units, for gemm_depth the groups'
// parts of the contraction.
static SHARED struct run {
    int32_t first, rows; // row of the operand; rows that exist, or less than 0: nothing is written
} runs[THREADS];
static SHARED struct depth {
    int32_t start, blocks, step; // kept inside the operands and the workspace
} depths[THREADS];
static_assert(2 * MX_SM90_MAX_UNITS <= THREADS);

// Inclusive running maximum, or sum, over the block's threads; left in `values` as well.
INLINE int32_t scan(SHARED int32_t *values, int32_t x, int maximum) {
    const int32_t t = (int32_t)thread_id(), lane = t % 32, warp = t / 32;
    UNROLL for (int32_t back = 1; back < 32; back *= 2) {
        const int32_t other = (int32_t)shuffle((uint32_t)x, (uint32_t)(lane - back));
        if (lane >= back)
            x = maximum ? max32(x, other) : x + other;
    }
    if (lane == 31)
        totals[warp] = x;
    sync_block();
    UNROLL for (int32_t i = 0; i < THREADS / 32 - 1; i++)
        if (i < warp)
            x = maximum ? max32(x, totals[i]) : x + totals[i];
    values[t] = x;
    sync_block();
    return x;
}

// What the groups before one sum up to.
struct sums {
    int32_t end, units, blocks;
};

// A group of tokens, or, with group = groups, the tokens past the last one.
struct place {
    int32_t group, begin, end;
    int32_t units, blocks; // of the groups before
};

struct groups {
    const int32_t *offs;
    int32_t count, tokens;
    int32_t multiple; // that bounds are rounded down to
    int32_t unit;     // tokens of a unit
};

INLINE SHARED int32_t *block_sums_of(struct groups groups) {
    return groups.unit == MX_SM90_ROW_BLOCK ? unit_sums : block_sums;
}

// Fills ends and sums for the groups from `base` on.
INLINE void load_bounds(struct groups groups, int32_t base, struct sums before) {
    const int32_t t = (int32_t)thread_id(), count = min32(BOUNDS, groups.count - base);
    sync_block();
    ROLLED for (int32_t first = 0; first < count; first += THREADS) {
        const int32_t i = first + t;
        const int32_t given = i < count ? groups.offs[base + i] : 0;
        const int32_t bound = mx_clamp_offset(given, groups.tokens) & -groups.multiple;
        const int32_t end = scan(ends + first, max32(bound, before.end), 1);
        const int32_t length = end - (t ? ends[i - 1] : before.end);
        scan(unit_sums + first, div_up32(length, groups.unit) + (t ? 0 : before.units), 0);
        if (groups.unit != MX_SM90_ROW_BLOCK)
            scan(block_sums + first, div_up32(length, MX_SM90_ROW_BLOCK) + (t ? 0 : before.blocks), 0);
        const int32_t last = first + THREADS - 1;
        before = (struct sums){ends[last], unit_sums[last], block_sums_of(groups)[last]};
    }
}

// The group with number `target`, or that of unit `target`, where a group takes whole units and whole blocks of 128
// tokens. Each thread has its own target; the whole block must call, `again` after the first time.
INLINE struct place find(struct groups groups, int32_t target, int by_number, int again) {
    struct place at = {.group = -1};
    struct sums before = {};
    ROLLED for (int32_t base = 0; base < groups.count; base += BOUNDS) {
        const int32_t count = min32(BOUNDS, groups.count - base);
        if (!again || groups.count > BOUNDS)
            load_bounds(groups, base, before);
        int32_t i = target - base;
        if (!by_number) {
            i = 0; // the number of groups that end at or before the target
            ROLLED for (int32_t step = BOUNDS; step; step /= 2)
                if (i + step <= count && unit_sums[i + step - 1] <= target)
                    i += step;
        }
        const SHARED int32_t *blocks = block_sums_of(groups);
        if (at.group < 0 && i >= 0 && i < count)
            at = (struct place){base + i, i ? ends[i - 1] : before.end, ends[i], i ? unit_sums[i - 1] : before.units,
                                i ? blocks[i - 1] : before.blocks};
        before = (struct sums){ends[count - 1], unit_sums[count - 1], blocks[count - 1]};
    }
    return at.group < 0 ? (struct place){groups.count, before.end, groups.tokens, before.units, before.blocks} : at;
}

// A row of scales from its first block of the contraction on, and where they and its reference go.
struct row {
    const uint8_t *scale;
    uint8_t *to, *ref;
    int32_t exists;
};

// How rows of scales are read: bytes at any address; whole words; or four words at once, of which the first few may lie
// before the row.
enum reading { BYTES, WORDS, QUADS };

// Words of scales, of 4 blocks each, that a thread has in registers: as many as fit, with what else it needs.
INLINE int32_t held_words(enum reading reading) { return reading == QUADS ? 16 : 8; }

// What rows have in common.
struct share {
    const uint8_t *data, *scales; // of the operand
    enum reading reading;
    int32_t blocks; // of the contraction
    int32_t lanes;  // threads that share a row: 1, 2 or 4
};

// `alignment` has the bits of the rows' distances from each other and from the operand; a row begins `skip` words after
// a quad.
INLINE struct share share_rows(const uint8_t *data, const uint8_t *scales, uint64_t alignment, int32_t blocks,
                               int32_t skip) {
    alignment |= (uintptr_t)scales;
    const enum reading reading = alignment % 4 ? BYTES : alignment % 16 ? WORDS : QUADS;
    const int32_t words = div_up32(blocks, 4) + skip, held = held_words(reading);
    return (struct share){data, scales, reading, blocks, words <= held ? 1 : words <= 2 * held ? 2 : 4};
}

// Whether a block of 32 elements is all zeros, of either sign.
INLINE int is_zero_block(const uint8_t *data) {
    uint32_t any = 0;
    if (((uintptr_t)data & 15) == 0) {
        const u32x4 x = load_constant4(data) | load_constant4(data + 16);
        any = x.x | x.y | x.z | x.w;
    } else {
        ROLLED for (int32_t i = 0; i < MX_BLOCK; i++)
            any |= data[i];
    }
    return (any & 0x7f7f7f7f) == 0;
}

// Whether a thread's share of a row has a block that is below the window and not all zeros. Rarely asked.
INLINE int has_elements_below(struct row x, struct share share, int32_t lane, int32_t reference) {
    const uint8_t *data = share.data + (x.scale - share.scales) * MX_BLOCK;
    ROLLED for (int32_t block = lane; block < share.blocks; block += share.lanes)
        if (x.scale[block] <= reference - MX_SM90_WINDOW && !is_zero_block(data + (int64_t)block * MX_BLOCK))
            return 1;
    return 0;
}

INLINE i16x2 even_bytes(uint32_t x) { return __builtin_bit_cast(i16x2, x & 0x00ff00ff); }

// Four scales relative to the window, 0 for what is below it; they are at most the reference.
INLINE uint32_t move_scales(uint32_t codes, int32_t reference) {
    const i16x2 by = (int16_t)(MX_SM90_WINDOW - reference), zero = 0;
    const i16x2 even = __builtin_elementwise_max(even_bytes(codes) + by, zero);
    const i16x2 odd = __builtin_elementwise_max(even_bytes(codes >> 8) + by, zero);
    return __builtin_bit_cast(uint32_t, even) | __builtin_bit_cast(uint32_t, odd) << 8;
}

INLINE uint32_t max_of_lanes(uint32_t x, int32_t lanes) {
    ROLLED for (int32_t step = 1; step < lanes; step *= 2) {
        const uint32_t other = shuffle(x, (thread_id() & 31) ^ (uint32_t)step);
        x = x > other ? x : other;
    }
    return x;
}

// Four words of scales, `apart` words apart, from word `first` of a row on; 0 for blocks from `limit` on.
INLINE u32x4 load_codes(const uint8_t *scale, int32_t first, int32_t apart, int32_t limit, enum reading reading) {
    if (reading == QUADS)
        return load_constant4_if(4 * first < limit, scale + 4 * first);
    u32x4 codes = {};
    UNROLL for (int i = 0; i < 4; i++) {
        const int32_t block = 4 * (first + apart * i);
        if (reading == WORDS)
            codes[i] = load_constant_if(block < limit, scale + block);
        else ROLLED
            for (int32_t j = 0; j < min32(4, limit - block); j++)
                codes[i] |= (uint32_t)scale[block + j] << 8 * j;
    }
    return codes;
}

// All words that a thread holds, fours 4 * lanes words apart.
INLINE void load_held(u32x4 *codes, const uint8_t *scale, int32_t first, int32_t lanes, int32_t limit,
                      enum reading reading) {
    const int32_t apart = reading == QUADS ? 1 : lanes;
    UNROLL for (int q = 0; q < held_words(reading) / 4; q++)
        codes[q] = load_codes(scale, first + 4 * lanes * q, apart, limit, reading);
}

// The bytes of a word that are scales of the row. `whole`: no word that is read has others as well.
INLINE uint32_t bytes_of_row(int32_t word, int32_t skip, int32_t limit, int whole) {
    if (whole)
        return 4 * word < limit ? ~0u : 0;
    return word < skip ? 0 : first_bytes(limit - 4 * word);
}

// Writes a row's scales and its reference; the threads of a warp call together.
INLINE void write_row_as(struct row x, struct share share, enum reading reading, int whole) {
    int32_t lanes = share.lanes;
    HIDE(lanes); // or what follows from it would be computed for all readings before any
    const int32_t held = held_words(reading), lane = (int32_t)thread_id() & (lanes - 1);
    const int32_t skip = reading == QUADS && !whole ? (int32_t)((uintptr_t)x.scale / 4 % 4) : 0;
    const int32_t words = skip + div_up32(share.blocks, 4);
    const int32_t limit = x.exists ? 4 * skip + share.blocks : 0;
    // A thread's words: fours that begin 4 * lanes apart.
    const int32_t own = reading == QUADS ? 4 * lane : lane, apart = reading == QUADS ? 1 : lanes;
    const uint8_t *scale = x.scale - 4 * skip;
    u32x4 codes[4] = {};
    i16x2 tops = 0;
    ROLLED for (int32_t base = 0; base < words; base += held * lanes) {
        int32_t first = base + own;
        HIDE(first); // or what follows from it would be computed before the loop, into registers
        load_held(codes, scale, first, lanes, limit, reading);
        UNROLL for (int q = 0; q < held / 4; q++) {
            if (base + 4 * lanes * q >= words)
                break;
            UNROLL for (int i = 0; i < 4; i++) {
                if (!whole)
                    codes[q][i] &= bytes_of_row(first + 4 * lanes * q + apart * i, skip, limit, whole);
                tops = __builtin_elementwise_max(tops, even_bytes(codes[q][i]));
                tops = __builtin_elementwise_max(tops, even_bytes(codes[q][i] >> 8));
            }
        }
    }
    const int32_t reference = (int32_t)max_of_lanes((uint32_t)max32(tops.x, tops.y), lanes);
    uint32_t low = 0; // whether a scale is below the window
    uint8_t *to = x.to - skip * MX_SM90_SCALE_BYTES;
    ROLLED for (int32_t base = 0; base < words; base += held * lanes) {
        int32_t first = base + own;
        HIDE(first);
        if (words > held * lanes)
            load_held(codes, scale, first, lanes, limit, reading);
        UNROLL for (int q = 0; q < held / 4; q++) {
            if (base + 4 * lanes * q >= words)
                break;
            UNROLL for (int i = 0; i < 4; i++) {
                const int32_t four = first + 4 * lanes * q, word = four + apart * i;
                const int32_t tested = reading == QUADS && whole ? four : word; // whole: the same for all four
                const uint32_t inside = bytes_of_row(tested, skip, limit, whole);
                const uint32_t moved = move_scales(codes[q][i], reference) & inside;
                low |= has_zero_byte(moved | ~inside);
                if (tested >= skip && tested < words)
                    *(uint32_t *)(to + (int64_t)word * MX_SM90_SCALE_BYTES) = moved;
            }
        }
    }
    uint32_t exact = reference == 255;
    if (max_of_lanes(low, lanes) && !exact)
        exact = (uint32_t)has_elements_below(x, share, lane, reference);
    exact = max_of_lanes(exact, lanes);
    if (exact) // each word by the thread that wrote it before
        ROLLED
        for (int32_t four = own; four < words; four += 4 * lanes) ROLLED
            for (int32_t word = four; word < four + 4 * apart; word += apart)
                if (word >= skip && word < words)
                    *(uint32_t *)(to + (int64_t)word * MX_SM90_SCALE_BYTES) = 0;
    if (lane == 0)
        *x.ref = !x.exists ? 127 : exact ? MX_SM90_EXACT : (uint8_t)reference;
}

// `whole` and `whole_quads`: a word, or a quad, of which the row has a part has nothing else.
INLINE void write_row(struct row x, struct share share, int whole, int whole_quads) {
    if (share.reading == QUADS && whole_quads)
        write_row_as(x, share, QUADS, 1);
    else if (share.reading == QUADS)
        write_row_as(x, share, QUADS, 0);
    else if (share.reading == WORDS)
        write_row_as(x, share, WORDS, whole);
    else
        write_row_as(x, share, BYTES, 0);
}

// Where a thread is in the pass-th pass over rows that are written by units; there are share.lanes passes a unit.
struct position {
    int32_t block, row; // row block, and row in it
};
INLINE struct position position_in(int32_t pass, int32_t lanes) {
    const int32_t shift = lanes / 2; // lanes are 1 << shift
    const int32_t unit = pass >> shift, row = ((pass & (lanes - 1)) * THREADS + (int32_t)thread_id()) >> shift;
    return (struct position){2 * unit + row / MX_SM90_ROW_BLOCK, row % MX_SM90_ROW_BLOCK};
}

INLINE void write_tile(struct mx_sm90_plan plan, int32_t index, struct mx_sm90_tile tile) {
    if (index < plan.tiles)
        ((struct mx_sm90_tile *)plan.workspace)[index] = tile;
}

// The index-th tile of a grid, walked in bands of `raster` rows; inside a band, the column changes last. So the tiles
// that run at once share their operands' rows, in the L2 cache.
struct grid_place {
    int32_t row, column;
};
INLINE struct grid_place place_in_grid(int32_t index, int32_t rows, int32_t columns, int32_t raster) {
    const int32_t band = index / (raster * columns) * raster, in_band = index - band * columns;
    const int32_t height = max32(min32(raster, rows - band), 1), column = in_band / height;
    return (struct grid_place){band + in_band - column * height, column};
}

// ------------------------------------------------------------------------------------------------------- gemm_rows

INLINE void write_tile_of_rows(struct mx_rows_args args, struct mx_sm90_plan plan) {
    const int32_t index = (int32_t)(block_id() * THREADS + thread_id());
    const int32_t token_rows = plan.swapped ? MX_SM90_Q : MX_SM90_P, weight_rows = plan.swapped ? MX_SM90_P : MX_SM90_Q;
    const int32_t columns = plan.p_tiles, groups = (int32_t)args.groups;
    const struct place at =
        find((struct groups){args.offs, groups, (int32_t)args.m, 1, token_rows}, index / columns, 0, 0);
    const int32_t rows = div_up32(at.end - at.begin, token_rows), local = index - at.units * columns;
    const struct grid_place place = place_in_grid(local, rows, columns, plan.raster);
    const int32_t row = place.row, column = place.column;
    if (local >= rows * columns) { // past the last tile of all
        write_tile(plan, index, (struct mx_sm90_tile){});
        return;
    }
    const int none = at.group == groups;
    const int32_t token = at.begin + row * token_rows, first = column * weight_rows;
    const int32_t token_count = min32(token_rows, at.end - token);
    const int32_t weight_count = min32(weight_rows, (int32_t)args.n - first);
    const int32_t token_block = none ? 0 : at.blocks + row * (token_rows / MX_SM90_ROW_BLOCK);
    const int32_t weight_block = none ? 0 : at.group * plan.group_blocks + first / MX_SM90_ROW_BLOCK;
    const int32_t weight = none ? 0 : (int32_t)(at.group * args.n) + first;
    write_tile(plan, index,
               (struct mx_sm90_tile){
                   .out = token * args.n + first,
                   .bias = none ? -1 : at.group * args.n + first,
                   .p_row = plan.swapped ? weight : token,
                   .q_row = plan.swapped ? token : weight,
                   .p_rows = plan.swapped ? weight_count : token_count,
                   .q_rows = plan.swapped ? token_count : weight_count,
                   .p_scale = (plan.swapped ? weight_block : token_block) * plan.steps,
                   .q_scale = (plan.swapped ? token_block : weight_block) * plan.steps,
                   .p_ref = plan.swapped ? weight_block : token_block,
                   .q_ref = plan.swapped ? token_block : weight_block,
                   .blocks = none ? 0 : (int32_t)(args.k / MX_BLOCK),
               });
}

// The run of row block number `block` of the tokens or of the weights; the whole block of threads must call.
INLINE struct run find_run(struct mx_rows_args args, struct mx_sm90_plan plan, int32_t block, int tokens) {
    struct place at = {.group = block / plan.group_blocks, .end = (int32_t)args.n};
    if (tokens)
        at = find((struct groups){args.offs, (int32_t)args.groups, (int32_t)args.m, 1, MX_SM90_ROW_BLOCK}, block, 0, 0);
    if (at.group >= args.groups)
        return (struct run){0, -1};
    const int32_t row = (block - (tokens ? at.blocks : at.group * plan.group_blocks)) * MX_SM90_ROW_BLOCK;
    return (struct run){(tokens ? at.begin : at.group * (int32_t)args.n) + row, max32(at.end - at.begin - row, 0)};
}

// A chunk of the tokens' units, or of the weights'.
INLINE void write_units_of_rows(struct mx_rows_args args, struct mx_sm90_plan plan, int32_t chunk, int tokens) {
    const int p = tokens != plan.swapped;
    const uint8_t *data = tokens ? args.a : args.b, *scales = tokens ? args.a_scale : args.b_scale;
    uint8_t *to = plan.workspace + (p ? plan.p_scale : plan.q_scale);
    uint8_t *refs = plan.workspace + (p ? plan.p_ref : plan.q_ref);
    const int64_t stride = args.k / MX_BLOCK;
    const struct share share = share_rows(data, scales, (uint64_t)stride, (int32_t)stride, 0);
    const int32_t first = 2 * chunk * plan.units_at_once, row_blocks = tokens ? plan.token_blocks : plan.weight_blocks;
    runs[thread_id()] = find_run(args, plan, first + (int32_t)thread_id(), tokens);
    sync_block();
    const int32_t units = min32(plan.units_at_once, div_up32(row_blocks - first, 2));
    ROLLED for (int32_t pass = 0; pass < units * share.lanes; pass++) {
        const struct position at = position_in(pass, share.lanes);
        const struct run run = runs[at.block];
        if (first + at.block >= row_blocks || run.rows < 0)
            continue;
        const int64_t block = first + at.block, index = ((int64_t)run.first + at.row) * stride;
        write_row((struct row){scales + index, to + block * plan.steps * MX_SM90_SCALE_BYTES + 4 * at.row,
                               refs + block * MX_SM90_ROW_BLOCK + at.row, at.row < run.rows},
                  share, 1, 1);
    }
}

KERNEL(mx_prepare_rows_sm90, 256, 4)(const struct mx_rows_args args, const struct mx_sm90_plan plan) {
    launch_dependents();
    const int32_t chunk = (int32_t)block_id() - plan.tile_blocks;
    const int32_t token_chunks = div_up32(div_up32(plan.token_blocks, 2), plan.units_at_once);
    if (chunk < 0)
        write_tile_of_rows(args, plan);
    else
        write_units_of_rows(args, plan, chunk < token_chunks ? chunk : chunk - token_chunks, chunk < token_chunks);
}

// ------------------------------------------------------------------------------------------------------ gemm_depth

INLINE struct depth depth_of(struct mx_depth_args args, struct mx_sm90_plan plan, struct place at) {
    const int32_t step = min32(at.blocks, plan.steps), length = at.end - at.begin;
    const int32_t start = min32(args.plain ? at.begin : at.blocks * MX_SM90_STEP, (int32_t)args.depth);
    const int32_t room = min32(((int32_t)args.depth - start) / MX_BLOCK, (plan.steps - step) * 4);
    return (struct depth){start, min32(div_up32(length, MX_BLOCK), room), step};
}

INLINE struct groups groups_of(struct mx_depth_args args) {
    return (struct groups){args.offs, (int32_t)args.groups, (int32_t)args.depth, args.plain ? MX_BLOCK : 1,
                           MX_SM90_STEP};
}

// Fills `order` with the groups' numbers, longest first, where their bounds are in shared memory.
INLINE void sort_groups(int32_t groups) {
    for (int32_t i = (int32_t)thread_id(); i < BOUNDS; i += THREADS)
        ((SHARED int32_t *)lengths)[i] = i < groups ? ends[i] - (i ? ends[i - 1] : 0) : -1;
    sync_block();
    ROLLED for (int32_t i = (int32_t)thread_id(); i < groups; i += THREADS) {
        const int32_t mine = ((SHARED int32_t *)lengths)[i];
        int32_t rank = 0;
        ROLLED for (int32_t j = 0; j < groups; j += 4) {
            const i32x4 others = lengths[j / 4];
            UNROLL for (int32_t e = 0; e < 4; e++)
                rank += others[e] >= mine + (j + e >= i);
        }
        order[rank] = i;
    }
    sync_block();
}

INLINE void write_tile_of_depth(struct mx_depth_args args, struct mx_sm90_plan plan) {
    const int32_t index = (int32_t)(block_id() * THREADS + thread_id());
    const int32_t per_group = plan.p_tiles * plan.q_tiles, groups = (int32_t)args.groups;
    int32_t group = min32(index / per_group, groups - 1);
    if (groups <= MX_SM90_SORTED_GROUPS) {
        load_bounds(groups_of(args), 0, (struct sums){});
        sort_groups(groups);
        group = order[group];
    }
    const struct depth depth = depth_of(args, plan, find(groups_of(args), group, 1, groups <= MX_SM90_SORTED_GROUPS));
    const struct grid_place place = place_in_grid(index % per_group, plan.p_tiles, plan.q_tiles, plan.raster);
    const int32_t row = place.row, column = place.column;
    const int32_t p_block = row * (MX_SM90_P / MX_SM90_ROW_BLOCK);
    const int64_t p_row = row * MX_SM90_P, q_row = column * MX_SM90_Q;
    write_tile(plan, index,
               (struct mx_sm90_tile){
                   .out = (group * args.n + p_row) * args.k + q_row,
                   .bias = -1,
                   .p_row = (int32_t)p_row,
                   .q_row = (int32_t)q_row,
                   .p_rows = min32(MX_SM90_P, (int32_t)(args.n - p_row)),
                   .q_rows = min32(MX_SM90_Q, (int32_t)(args.k - q_row)),
                   .p_scale = p_block * plan.steps + depth.step,
                   .q_scale = column * plan.steps + depth.step,
                   .p_ref = group * plan.p_blocks + p_block,
                   .q_ref = group * plan.q_blocks + column,
                   .start = depth.start,
                   .blocks = depth.blocks,
               });
}

// A chunk of P's units, or of Q's. They are numbered group by group for the same rows: what groups have in a row lies
// side by side.
INLINE void write_units_of_depth(struct mx_depth_args args, struct mx_sm90_plan plan, int32_t chunk, int p) {
    const int32_t groups = (int32_t)args.groups, blocks = p ? plan.p_blocks : plan.q_blocks;
    const uint8_t *data = p ? args.a : args.b, *scales = p ? args.a_scale : args.b_scale;
    uint8_t *to = plan.workspace + (p ? plan.p_scale : plan.q_scale);
    uint8_t *refs = plan.workspace + (p ? plan.p_ref : plan.q_ref);
    const int32_t rows = (int32_t)(p ? args.n : args.k), stride = (int32_t)(args.depth / MX_BLOCK);
    const int64_t first = (int64_t)chunk * plan.units_at_once, left = (int64_t)groups * div_up32(blocks, 2) - first;
    const int32_t count = left < plan.units_at_once ? (int32_t)left : plan.units_at_once;
    int32_t unit = (int32_t)(first / groups), group = (int32_t)(first % groups);
    const int32_t target = (group + (int32_t)thread_id()) % groups;
    depths[thread_id()] = depth_of(args, plan, find(groups_of(args), target, 1, 0));
    sync_block();
    ROLLED for (int32_t i = 0; i < count; i++) {
        const struct depth depth = depths[i];
        const int32_t start = depth.start / MX_BLOCK;
        const uint64_t alignment = (uint64_t)(stride | start % 4);
        const struct share share = share_rows(data, scales, alignment, depth.blocks, start / 4 % 4);
        ROLLED for (int32_t pass = 0; pass < (depth.blocks > 0 ? share.lanes : 0); pass++) {
            const struct position at = position_in(pass, share.lanes);
            const int64_t block = 2 * unit + at.block, row = block * MX_SM90_ROW_BLOCK + at.row;
            const int64_t index = row * stride + start;
            if (block >= blocks)
                break;
            write_row((struct row){scales + index,
                                   to + (block * plan.steps + depth.step) * MX_SM90_SCALE_BYTES + 4 * at.row,
                                   refs + ((int64_t)group * blocks + block) * MX_SM90_ROW_BLOCK + at.row, row < rows},
                      share, 0, (start | depth.blocks) % 16 == 0);
        }
        if (++group == groups) {
            group = 0;
            unit++;
        }
    }
}

KERNEL(mx_prepare_depth_sm90, 256, 4)(const struct mx_depth_args args, const struct mx_sm90_plan plan) {
    launch_dependents();
    const int32_t chunk = (int32_t)block_id() - plan.tile_blocks;
    const int64_t p_units = args.groups * (plan.p_blocks / 2);
    const int32_t p_chunks = (int32_t)((p_units + plan.units_at_once - 1) / plan.units_at_once);
    if (chunk < 0)
        write_tile_of_depth(args, plan);
    else
        write_units_of_depth(args, plan, chunk < p_chunks ? chunk : chunk - p_chunks, chunk < p_chunks);
}
