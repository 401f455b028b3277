// sm_90: what precedes a grouped GEMM: the list of tiles, and both operands' scales and references, as sm90.h says.
//
//   mx_prepare_rows_sm90(struct mx_rows_args, struct mx_sm90_plan)
//   mx_prepare_depth_sm90(struct mx_depth_args, struct mx_sm90_plan)
//
// Blocks of 256 threads: first plan.tile_blocks of them, which write a tile a thread, then those that write row blocks
// of scales, MX_SM90_BLOCKS_PER_PREPARE each: gemm_rows the tokens' and then the weights'; gemm_depth group by group,
// P's and then Q's. Bad offs are clamped here, and whatever they were, no index that leaves this file is out of bounds:
// a group ends at the largest of the offs up to its own, cut to the tokens there are.
#include "device_sm90.h"

enum {
    THREADS = MX_SM90_PREPARE_THREADS,
    AT_ONCE = 4, // words of scales that a thread has in flight
};

static SHARED int32_t ends[THREADS], unit_sums[THREADS], block_sums[THREADS]; // of a chunk of groups, inclusive
static SHARED int32_t lengths[MX_SM90_SORTED_GROUPS], order[MX_SM90_SORTED_GROUPS];
static SHARED int32_t tops[THREADS], exact_rows[THREADS];

INLINE int32_t min32(int32_t a, int32_t b) { return a < b ? a : b; }
INLINE int32_t max32(int32_t a, int32_t b) { return a > b ? a : b; }
INLINE int32_t div_up32(int32_t n, int32_t by) { return (n + by - 1) / by; }

// Inclusive running maximum, or sum, over the block's threads; left in `values` as well.
INLINE int32_t scan(SHARED int32_t *values, int32_t x, int maximum) {
    const int32_t t = (int32_t)thread_id();
    values[t] = x;
    sync_block();
    for (int32_t back = 1; back < THREADS; back *= 2) {
        const int32_t other = t >= back ? values[t - back] : 0;
        sync_block();
        x = maximum ? max32(x, other) : x + other;
        values[t] = x;
        sync_block();
    }
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

// Four bytes, of which only the first `count` are read; the others are 0.
INLINE uint32_t load_bytes(const uint8_t *from, int32_t count) {
    if (((uintptr_t)from & 3) == 0 && (count >= 4 || count <= 0))
        return load_constant_if(count > 0, from);
    uint32_t x = 0;
    for (int32_t i = 0; i < 4; i++)
        if (i < count)
            x |= (uint32_t)from[i] << 8 * i;
    return x;
}

// Whether a block of 32 elements is all zeros, of either sign.
INLINE int is_zero_block(const uint8_t *data) {
    uint32_t any = 0;
    if (((uintptr_t)data & 15) == 0) {
        const u32x4 x = load_constant4(data) | load_constant4(data + 16);
        any = x.x | x.y | x.z | x.w;
    } else {
        for (int32_t i = 0; i < MX_BLOCK; i += 4)
            any |= load_bytes(data + i, 4);
    }
    return (any & 0x7f7f7f7f) == 0;
}

// Four scales relative to the window; `low` is set if one of the first `count` is below it.
INLINE uint32_t move_scales(uint32_t codes, int32_t count, int32_t reference, int *low) {
    uint32_t moved = 0;
    UNROLL for (int i = 0; i < 4; i++) {
        const int32_t above = (int32_t)(codes >> 8 * i & 255) - reference + MX_SM90_WINDOW;
        moved |= i < count && above > 0 ? (uint32_t)above << 8 * i : 0;
        *low |= i < count && above <= 0;
    }
    return moved;
}

// Whether one of the `count` blocks from `first` on, of these scales, is below the window and not all zeros.
INLINE int has_elements_below(const uint8_t *row, uint32_t codes, int32_t first, int32_t count, int32_t reference) {
    for (int32_t i = 0; i < count; i++)
        if ((int32_t)(codes >> 8 * i & 255) <= reference - MX_SM90_WINDOW &&
            !is_zero_block(row + (int64_t)(first + i) * MX_BLOCK))
            return 1;
    return 0;
}

// 128 rows of an operand, of which `rows` exist, each cut to `blocks` blocks of the contraction.
struct row_block {
    const uint8_t *data, *scale; // of the first row's first block
    int64_t stride;              // of data rows; of scale rows / MX_BLOCK
    int32_t rows, blocks;
};

// Writes a row block's scales to `to`, references to `ref`. Thread t has row t % 128 and every second step.
INLINE void write_row_block(struct row_block x, uint8_t *to, uint8_t *ref) {
    const int32_t t = (int32_t)thread_id(), row = t % MX_SM90_ROW_BLOCK, half = t / MX_SM90_ROW_BLOCK;
    const uint8_t *scale = x.scale + row * (x.stride / MX_BLOCK), *data = x.data + row * x.stride;
    const int32_t blocks = row < x.rows ? x.blocks : 0;
    uint32_t top = 0;
    for (int32_t block = 4 * half; block < blocks; block += 8 * AT_ONCE) {
        uint32_t codes[AT_ONCE];
        UNROLL for (int i = 0; i < AT_ONCE; i++) codes[i] = load_bytes(scale + block + 8 * i, blocks - block - 8 * i);
        UNROLL for (int i = 0; i < 4 * AT_ONCE; i++) {
            const uint32_t code = codes[i / 4] >> 8 * (i % 4) & 255;
            top = top > code ? top : code;
        }
    }
    tops[t] = (int32_t)top;
    sync_block();
    const int32_t reference = max32((int32_t)top, tops[t ^ MX_SM90_ROW_BLOCK]);
    int exact = reference == 255;
    for (int32_t block = 4 * half; block < x.blocks; block += 8 * AT_ONCE) {
        uint32_t codes[AT_ONCE];
        UNROLL for (int i = 0; i < AT_ONCE; i++) codes[i] = load_bytes(scale + block + 8 * i, blocks - block - 8 * i);
        UNROLL for (int i = 0; i < AT_ONCE; i++) {
            const int32_t first = block + 8 * i;
            int low = 0;
            const uint32_t moved = move_scales(codes[i], blocks - first, reference, &low);
            if (first < x.blocks)
                *(uint32_t *)(to + first / 4 * MX_SM90_SCALE_BYTES + 4 * row) = moved;
            if (low && !exact)
                exact = has_elements_below(data, codes[i], first, min32(4, blocks - first), reference);
        }
    }
    exact_rows[t] = exact;
    sync_block();
    exact |= exact_rows[t ^ MX_SM90_ROW_BLOCK];
    if (exact)
        for (int32_t block = 4 * half; block < blocks; block += 8)
            *(uint32_t *)(to + block / 4 * MX_SM90_SCALE_BYTES + 4 * row) = 0;
    if (half == 0)
        ref[row] = row >= x.rows ? 127 : exact ? MX_SM90_EXACT : (uint8_t)reference;
}

INLINE void write_tile(struct mx_sm90_plan plan, int32_t index, struct mx_sm90_tile tile) {
    if (index < plan.tiles)
        ((struct mx_sm90_tile *)plan.workspace)[index] = tile;
}

// ------------------------------------------------------------------------------------------------------- gemm_rows

INLINE void write_tile_of_rows(struct mx_rows_args args, struct mx_sm90_plan plan) {
    const int32_t index = (int32_t)(block_id() * THREADS + thread_id());
    const int32_t token_rows = plan.swapped ? MX_SM90_Q : MX_SM90_P, weight_rows = plan.swapped ? MX_SM90_P : MX_SM90_Q;
    const int32_t columns = plan.p_tiles, groups = (int32_t)args.groups;
    const struct place at =
        find((struct groups){args.offs, groups, (int32_t)args.m, 1, token_rows}, index / columns, 0);
    const int32_t rows = div_up32(at.end - at.begin, token_rows), local = index - at.units * columns;
    // Bands of plan.raster token tiles; inside one, the weight tile changes last.
    const int32_t band = local / (plan.raster * columns) * plan.raster, in_band = local - band * columns;
    const int32_t height = max32(min32(plan.raster, rows - band), 1), column = in_band / height;
    const int32_t row = band + in_band - column * height;
    if (row >= rows) { // past the last tile of all
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

INLINE void write_block_of_rows(struct mx_sm90_plan plan, int p, int32_t block, struct row_block rows) {
    uint8_t *scale = plan.workspace + (p ? plan.p_scale : plan.q_scale);
    uint8_t *ref = plan.workspace + (p ? plan.p_ref : plan.q_ref);
    write_row_block(rows, scale + (int64_t)block * plan.steps * MX_SM90_SCALE_BYTES, ref + block * MX_SM90_ROW_BLOCK);
}

KERNEL mx_prepare_rows_sm90(const struct mx_rows_args args, const struct mx_sm90_plan plan) {
    LAUNCH_BOUNDS(MX_SM90_PREPARE_THREADS);
    int32_t chunk = (int32_t)block_id() - plan.tile_blocks;
    if (chunk < 0) {
        write_tile_of_rows(args, plan);
        return;
    }
    const int32_t blocks = (int32_t)(args.k / MX_BLOCK);
    const int32_t token_chunks = div_up32(plan.token_blocks, MX_SM90_BLOCKS_PER_PREPARE);
    if (chunk < token_chunks) {
        const struct groups groups = {args.offs, (int32_t)args.groups, (int32_t)args.m, 1, MX_SM90_ROW_BLOCK};
        for (int32_t i = 0; i < MX_SM90_BLOCKS_PER_PREPARE; i++) {
            const int32_t block = chunk * MX_SM90_BLOCKS_PER_PREPARE + i;
            const struct place at = find(groups, block, 0);
            if (at.group == groups.count)
                return;
            const int64_t first = at.begin + (int64_t)(block - at.blocks) * MX_SM90_ROW_BLOCK;
            write_block_of_rows(plan, !plan.swapped, block,
                                (struct row_block){args.a + first * args.k, args.a_scale + first * (args.k / MX_BLOCK),
                                                   args.k, at.end - (int32_t)first, blocks});
        }
        return;
    }
    chunk -= token_chunks;
    const int32_t weight_blocks = (int32_t)args.groups * plan.group_blocks;
    for (int32_t i = 0; i < MX_SM90_BLOCKS_PER_PREPARE; i++) {
        const int32_t block = chunk * MX_SM90_BLOCKS_PER_PREPARE + i;
        if (block >= weight_blocks)
            return;
        const int32_t group = block / plan.group_blocks;
        const int32_t row = (block - group * plan.group_blocks) * MX_SM90_ROW_BLOCK;
        const int64_t first = group * args.n + row;
        write_block_of_rows(plan, plan.swapped, block,
                            (struct row_block){args.b + first * args.k, args.b_scale + first * (args.k / MX_BLOCK),
                                               args.k, (int32_t)args.n - row, blocks});
    }
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
    const int32_t local = index % per_group, column = local / plan.p_tiles, row = local - column * plan.p_tiles;
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

KERNEL mx_prepare_depth_sm90(const struct mx_depth_args args, const struct mx_sm90_plan plan) {
    LAUNCH_BOUNDS(MX_SM90_PREPARE_THREADS);
    const int32_t chunk = (int32_t)block_id() - plan.tile_blocks;
    if (chunk < 0) {
        write_tile_of_depth(args, plan);
        return;
    }
    const int32_t row_blocks = plan.p_blocks + plan.q_blocks;
    const int32_t chunks = div_up32(row_blocks, MX_SM90_BLOCKS_PER_PREPARE), group = chunk / chunks;
    const struct depth depth = depth_of(args, plan, find(groups_of(args), group, 1));
    for (int32_t i = 0; i < MX_SM90_BLOCKS_PER_PREPARE; i++) {
        const int32_t both = (chunk - group * chunks) * MX_SM90_BLOCKS_PER_PREPARE + i;
        if (both >= row_blocks)
            return;
        const int p = both < plan.p_blocks;
        const int32_t block = p ? both : both - plan.p_blocks;
        const int64_t row = (int64_t)block * MX_SM90_ROW_BLOCK, from = row * args.depth + depth.start;
        uint8_t *scale = plan.workspace + (p ? plan.p_scale : plan.q_scale);
        uint8_t *ref = plan.workspace + (p ? plan.p_ref : plan.q_ref);
        write_row_block((struct row_block){(p ? args.a : args.b) + from,
                                           (p ? args.a_scale : args.b_scale) + from / MX_BLOCK, args.depth,
                                           (int32_t)((p ? args.n : args.k) - row), depth.blocks},
                        scale + ((int64_t)block * plan.steps + depth.step) * MX_SM90_SCALE_BYTES,
                        ref + ((int64_t)group * (p ? plan.p_blocks : plan.q_blocks) + block) * MX_SM90_ROW_BLOCK);
    }
}
