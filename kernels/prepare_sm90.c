// sm_90: what precedes a grouped GEMM: the list of tiles, and both operands' scales and references, as sm90.h says.
//
//   mx_prepare_rows_sm90(struct mx_rows_args, struct mx_sm90_plan)
//   mx_prepare_depth_sm90(struct mx_depth_args, struct mx_sm90_plan)
//
// Blocks of 256 threads: first plan.tile_blocks of them, which write a tile a thread, then those that write scales,
// half a row block at a time: gemm_rows the tokens' and then the weights'; gemm_depth group by group, P's and then Q's,
// plan.halves_at_once each. Bad offs are clamped here, and whatever they were, no index that leaves this file is out of
// bounds: a group ends at the largest of the offs up to its own, cut to the tokens there are.
#include "device_sm90.h"

enum {
    THREADS = MX_SM90_PREPARE_THREADS,
    HALF = MX_SM90_ROW_BLOCK / 2, // rows that a block writes at once
    LANES = THREADS / HALF,       // threads that share a row
    WORDS_AT_ONCE = 4 * LANES,    // words of scales that they have in flight
};

static SHARED int32_t ends[THREADS], unit_sums[THREADS], block_sums[THREADS]; // of a chunk of groups, inclusive
static SHARED int32_t lengths[MX_SM90_SORTED_GROUPS], order[MX_SM90_SORTED_GROUPS];
static SHARED int32_t totals[THREADS / 32];

INLINE int32_t min32(int32_t a, int32_t b) { return a < b ? a : b; }
INLINE int32_t max32(int32_t a, int32_t b) { return a > b ? a : b; }
INLINE int32_t div_up32(int32_t n, int32_t by) { return (n + by - 1) / by; }

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
    UNROLL for (int32_t i = 0; i < THREADS / 32 - 1; i++) if (i < warp) x =
        maximum ? max32(x, totals[i]) : x + totals[i];
    values[t] = x;
    sync_block();
    return x;
}

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

// The group with number `target`, or that of unit `target`, where a group takes whole units and whole blocks of 128
// tokens. Each thread has its own target; the whole block must call.
INLINE struct place find(struct groups groups, int32_t target, int by_number) {
    const int32_t t = (int32_t)thread_id();
    struct place at = {.group = -1};
    int32_t end = 0, units = 0, blocks = 0;
    for (int32_t base = 0; base < groups.count; base += THREADS) {
        const int32_t given = base + t < groups.count ? groups.offs[base + t] : 0;
        const int32_t bound = min32(max32(given, 0), groups.tokens) & -groups.multiple;
        const int32_t mine = scan(ends, max32(bound, end), 1);
        const int32_t length = mine - (t ? ends[t - 1] : end);
        if (base + t < MX_SM90_SORTED_GROUPS)
            lengths[base + t] = length;
        scan(unit_sums, div_up32(length, groups.unit), 0);
        scan(block_sums, div_up32(length, MX_SM90_ROW_BLOCK), 0);
        int32_t i = target - base;
        if (!by_number) {
            i = 0; // the number of groups that end at or before the target
            for (int32_t step = THREADS / 2; step; step /= 2)
                if (units + unit_sums[i + step - 1] <= target)
                    i += step;
            if (units + unit_sums[i] <= target)
                i++;
        }
        if (at.group < 0 && i >= 0 && i < min32(THREADS, groups.count - base))
            at = (struct place){base + i, i ? ends[i - 1] : end, ends[i], units + (i ? unit_sums[i - 1] : 0),
                                blocks + (i ? block_sums[i - 1] : 0)};
        end = ends[THREADS - 1];
        units += unit_sums[THREADS - 1];
        blocks += block_sums[THREADS - 1];
        sync_block();
    }
    return at.group < 0 ? (struct place){groups.count, end, groups.tokens, units, blocks} : at;
}

// Rows of an operand, of which `rows` exist, each cut to `blocks` blocks of the contraction.
struct row_block {
    const uint8_t *data, *scale; // of the first row's first block
    int64_t stride;              // of data rows; of scale rows / MX_BLOCK
    int32_t rows, blocks;
};

// Mask of the first `count` bytes of a word.
INLINE uint32_t first_bytes(int32_t count) { return count >= 4 ? ~0u : (1u << 8 * max32(count, 0)) - 1; }

// How a row of scales is read: bytes at any address; whole words; or four words at once.
enum reading { BYTES, WORDS, QUADS };

// A thread's four words of scales, of 4 blocks each, that lie in the WORDS_AT_ONCE from `word` on: see word_of. 0 for
// blocks past `blocks`.
INLINE int32_t word_of(int32_t word, int i, enum reading reading) {
    const int32_t lane = (int32_t)thread_id() % LANES;
    return reading == QUADS ? word + 4 * lane + i : word + lane + LANES * i;
}
INLINE u32x4 load_codes(const uint8_t *scale, int32_t word, int32_t blocks, enum reading reading) {
    if (reading == QUADS)
        return load_constant4_if(4 * word_of(word, 0, reading) < blocks, scale + 4 * word_of(word, 0, reading));
    u32x4 codes = {};
    UNROLL for (int i = 0; i < 4; i++) {
        const int32_t first = 4 * word_of(word, i, reading);
        if (reading == WORDS) {
            codes[i] = load_constant_if(first < blocks, scale + first);
            continue;
        }
        ROLLED for (int32_t j = 0; j < min32(4, blocks - first); j++) codes[i] |= (uint32_t)scale[first + j] << 8 * j;
    }
    if (reading == WORDS && blocks % 4 != 0) {
        UNROLL for (int i = 0; i < 4; i++) codes[i] &= first_bytes(blocks - 4 * word_of(word, i, reading));
    }
    return codes;
}

// Whether a block of 32 elements is all zeros, of either sign.
INLINE int is_zero_block(const uint8_t *data) {
    uint32_t any = 0;
    if (((uintptr_t)data & 15) == 0) {
        const u32x4 x = load_constant4(data) | load_constant4(data + 16);
        any = x.x | x.y | x.z | x.w;
    } else {
        ROLLED for (int32_t i = 0; i < MX_BLOCK; i++) any |= data[i];
    }
    return (any & 0x7f7f7f7f) == 0;
}

// Whether a thread's share of a row has a block that is below the window and not all zeros. Rarely asked.
INLINE int has_elements_below(const uint8_t *data, const uint8_t *scale, int32_t blocks, int32_t reference) {
    ROLLED for (int32_t block = (int32_t)thread_id() % LANES; block < blocks;
                block += LANES) if (scale[block] <= reference - MX_SM90_WINDOW &&
                                    !is_zero_block(data + (int64_t)block * MX_BLOCK)) return 1;
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

INLINE uint32_t has_zero_byte(uint32_t x) { return (x - 0x01010101) & ~x & 0x80808080; }

INLINE uint32_t max_of_lanes(uint32_t x) {
    UNROLL for (uint32_t step = 1; step < LANES; step *= 2) {
        const uint32_t other = shuffle(x, (thread_id() & 31) ^ step);
        x = x > other ? x : other;
    }
    return x;
}

// Writes HALF rows' scales to `to` and references to `ref`; LANES threads share a row.
INLINE void write_half_as(struct row_block x, uint8_t *to, uint8_t *ref, enum reading reading) {
    uint32_t thread = thread_id();
    HIDE(thread); // or what follows from it would stay in registers from one call to the next
    const int32_t row = (int32_t)thread / LANES, words = div_up32(x.blocks, 4);
    const uint8_t *scale = x.scale + row * (x.stride / MX_BLOCK);
    const int32_t blocks = row < x.rows ? x.blocks : 0;
    u32x4 codes = {};
    i16x2 tops = 0;
    ROLLED for (int32_t word = 0; word < words; word += WORDS_AT_ONCE) {
        codes = load_codes(scale, word, blocks, reading);
        UNROLL for (int i = 0; i < 4; i++) {
            tops = __builtin_elementwise_max(tops, even_bytes(codes[i]));
            tops = __builtin_elementwise_max(tops, even_bytes(codes[i] >> 8));
        }
    }
    const int32_t reference = (int32_t)max_of_lanes((uint32_t)max32(tops.x, tops.y));
    uint32_t low = 0; // whether a scale is below the window
    to += 4 * row;
    ROLLED for (int32_t word = 0; word < words; word += WORDS_AT_ONCE) {
        if (words > WORDS_AT_ONCE)
            codes = load_codes(scale, word, blocks, reading);
        UNROLL for (int i = 0; i < 4; i++) {
            const int32_t at = word_of(word, i, reading);
            uint32_t moved = move_scales(codes[i], reference), outside = 0;
            if (blocks % 4 != 0)
                outside = ~first_bytes(blocks - 4 * at);
            moved &= ~outside;
            if (at < words)
                *(uint32_t *)(to + (uint32_t)at * MX_SM90_SCALE_BYTES) = moved;
            if (4 * at < blocks)
                low |= has_zero_byte(moved | outside);
        }
    }
    uint32_t exact = reference == 255;
    if (max_of_lanes(low) && !exact)
        exact = (uint32_t)has_elements_below(x.data + row * x.stride, scale, blocks, reference);
    exact = max_of_lanes(exact);
    if (exact)
        ROLLED for (int32_t at = (int32_t)thread % LANES; at < words; at += LANES) *
            (uint32_t *)(to + (uint32_t)at * MX_SM90_SCALE_BYTES) = 0;
    if (thread % LANES == 0)
        ref[row] = row >= x.rows ? 127 : exact ? MX_SM90_EXACT : (uint8_t)reference;
}

INLINE void write_half(struct row_block x, uint8_t *to, uint8_t *ref, int quads) {
    const uint64_t odd = (uintptr_t)x.scale | (uint64_t)x.stride / MX_BLOCK;
    if (quads && odd % 16 == 0)
        write_half_as(x, to, ref, QUADS);
    else if (odd % 4 == 0)
        write_half_as(x, to, ref, WORDS);
    else
        write_half_as(x, to, ref, BYTES);
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
        find((struct groups){args.offs, groups, (int32_t)args.m, 1, token_rows}, index / columns, 0);
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

// A chunk of the tokens' halves, or of the weights'.
INLINE void write_halves_of_rows(struct mx_rows_args args, struct mx_sm90_plan plan, int32_t chunk, int tokens) {
    const struct groups groups = {args.offs, (int32_t)args.groups, (int32_t)args.m, 1, MX_SM90_ROW_BLOCK};
    const int p = tokens != plan.swapped;
    const int32_t per_group = 2 * plan.group_blocks, begin = chunk * plan.halves_at_once;
    const int32_t end = min32(begin + plan.halves_at_once, tokens ? 2 * plan.token_blocks : groups.count * per_group);
    struct place at = {};
    int32_t group_end = 0; // of tokens: the first half past the group
    ROLLED for (int32_t half = begin; half < end; half++) {
        if (tokens && half >= group_end) {
            at = find(groups, half / 2, 0);
            if (at.group == groups.count)
                return;
            group_end = 2 * (at.blocks + div_up32(at.end - at.begin, MX_SM90_ROW_BLOCK));
        }
        const int32_t group = half / per_group, row = (half - (tokens ? 2 * at.blocks : group * per_group)) * HALF;
        const int64_t first = (tokens ? at.begin : group * args.n) + row;
        const int32_t rows = tokens ? at.end - (int32_t)first : (int32_t)args.n - row;
        uint8_t *scale = plan.workspace + (p ? plan.p_scale : plan.q_scale) + half % 2 * 4 * HALF;
        uint8_t *ref = plan.workspace + (p ? plan.p_ref : plan.q_ref);
        write_half((struct row_block){(tokens ? args.a : args.b) + first * args.k,
                                      (tokens ? args.a_scale : args.b_scale) + first * (args.k / MX_BLOCK), args.k,
                                      rows, (int32_t)(args.k / MX_BLOCK)},
                   scale + (int64_t)(half / 2) * plan.steps * MX_SM90_SCALE_BYTES, ref + half * HALF, 1);
    }
}

KERNEL(mx_prepare_rows_sm90, 256, 4)(const struct mx_rows_args args, const struct mx_sm90_plan plan) {
    const int32_t chunk = (int32_t)block_id() - plan.tile_blocks;
    const int32_t token_chunks = div_up32(2 * plan.token_blocks, plan.halves_at_once);
    if (chunk < 0)
        write_tile_of_rows(args, plan);
    else
        write_halves_of_rows(args, plan, chunk < token_chunks ? chunk : chunk - token_chunks, chunk < token_chunks);
}

// ------------------------------------------------------------------------------------------------------ gemm_depth

// A group's part of the contraction, kept inside the operands and the workspace.
struct depth {
    int32_t start, blocks, step;
};
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

// Fills `order` with the groups' numbers, longest first.
INLINE void sort_groups(int32_t groups) {
    for (int32_t i = (int32_t)thread_id(); i < groups; i += THREADS) {
        int32_t rank = 0;
        for (int32_t j = 0; j < groups; j++)
            rank += lengths[j] > lengths[i] || (lengths[j] == lengths[i] && j < i);
        order[rank] = i;
    }
    sync_block();
}

INLINE void write_tile_of_depth(struct mx_depth_args args, struct mx_sm90_plan plan) {
    const int32_t index = (int32_t)(block_id() * THREADS + thread_id());
    const int32_t per_group = plan.p_tiles * plan.q_tiles, groups = (int32_t)args.groups;
    int32_t group = min32(index / per_group, groups - 1);
    if (groups <= MX_SM90_SORTED_GROUPS) {
        find(groups_of(args), 0, 1); // for the lengths
        sort_groups(groups);
        group = order[group];
    }
    const struct depth depth = depth_of(args, plan, find(groups_of(args), group, 1));
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

KERNEL(mx_prepare_depth_sm90, 256, 4)(const struct mx_depth_args args, const struct mx_sm90_plan plan) {
    const int32_t chunk = (int32_t)block_id() - plan.tile_blocks;
    if (chunk < 0) {
        write_tile_of_depth(args, plan);
        return;
    }
    const int32_t halves = 2 * (plan.p_blocks + plan.q_blocks);
    const int32_t chunks = div_up32(halves, plan.halves_at_once), group = chunk / chunks;
    const struct depth depth = depth_of(args, plan, find(groups_of(args), group, 1));
    const int32_t first = (chunk - group * chunks) * plan.halves_at_once;
    const int32_t end = min32(first + plan.halves_at_once, halves);
    ROLLED for (int32_t both = first; both < end; both++) {
        const int p = both < 2 * plan.p_blocks;
        const int32_t half = p ? both : both - 2 * plan.p_blocks;
        const int64_t row = half * HALF, block = row * (args.depth / MX_BLOCK) + depth.start / MX_BLOCK;
        uint8_t *scale = plan.workspace + (p ? plan.p_scale : plan.q_scale) + half % 2 * 4 * HALF;
        uint8_t *ref = plan.workspace + (p ? plan.p_ref : plan.q_ref);
        write_half((struct row_block){(p ? args.a : args.b) + block * MX_BLOCK,
                                      (p ? args.a_scale : args.b_scale) + block, args.depth,
                                      (int32_t)((p ? args.n : args.k) - row), depth.blocks},
                   scale + ((int64_t)(half / 2) * plan.steps + depth.step) * MX_SM90_SCALE_BYTES,
                   ref + ((int64_t)group * 2 * (p ? plan.p_blocks : plan.q_blocks) + half) * HALF, 0);
    }
}
