// MXFP8 quantizer, CPU. In one read of x: the row-blocked copy, the column-blocked transposed copy, or both.
//
//     scale = mx_scale_of_amax(amax of the block's 32 elements)        E8M0
//     data  = RNE(x * 2^(127 - scale)), saturated to +-448             E4M3, subnormals exact, sign of zero kept
//
// Shapes and layout are those of struct mx_quantize_args (mx_args.h). A block with a NaN or Inf in it gets scale 255
// and 32 bytes 0x7f, its zero padding included. Integers only: no floating-point state matters.
//
// Work is cut into tiles of TILE x TILE elements, those into squares of one block by one block. A square is brought to
// L1 as 16-bit words, then both encodings run on 16-bit lanes. Words are x's own bits for bf16; for fp32 they are its
// top 16 bits with the last one set when anything below is not zero (round to odd). E4M3 keeps 3 of a word's 7 mantissa
// bits and every rounding threshold is at most 4 bits long, so no later decision sees the difference. It would where
// the word has fewer bits, in bf16's own subnormals; they can only matter below FAST_SCALE, and such blocks go by
// encode_exact.
//
// Token tiles: with offs, each group starts a tile, so tile t owns exactly columns [t * TILE, (t + 1) * TILE) of the
// transposed copy. The tiles after the last group hold the rows past offs[groups - 1] (row-blocked copy only) and the
// columns that stay zero.
#include <string.h>

#include "cpu.h"
#include "mx_scale.h"

enum {
    TILE = MX_GROUP_ALIGN,
    LINE = 64,              // bytes: a cache line
    STREAM_BYTES = 1 << 20, // outputs from this size on bypass the caches
    STRIP = 1024,           // columns of one task, at most
    TASKS_PER_THREAD = 4,   // at least, as long as there are tiles
    FAST_SCALE = 11,        // smallest scale with |x| < 2^-126 => |x| * 2^(127 - scale) < 2^-10, which rounds to 0
    NAN_SCALE = 255,
    MAX_CODE = 0x7e, // 448
    NAN_CODE = 0x7f,
    // A word's distance above the scale, in units of its last bit, is moved up so that all that are not 0 are positive.
    CODE_OFFSET = 25,
    MIN_NORMAL_CODE = 8,
};

typedef uint16_t words __attribute__((vector_size(64))); // one block
typedef int16_t signed_words __attribute__((vector_size(64)));
typedef uint16_t loose_words __attribute__((vector_size(64), aligned(2)));
typedef uint32_t floats __attribute__((vector_size(128)));
typedef uint32_t loose_floats __attribute__((vector_size(128), aligned(4)));
typedef uint8_t bytes __attribute__((vector_size(32)));
typedef uint8_t loose_bytes __attribute__((vector_size(32), aligned(1)));
typedef uint8_t line __attribute__((vector_size(LINE)));

// One block by one block of x, and per row and per column of it what the encoding needs.
struct lane_scales {
    alignas(64) uint16_t amax[MX_BLOCK];
    alignas(64) uint16_t bias[MX_BLOCK];
    uint8_t scale[MX_BLOCK];
};
struct square {
    words x[MX_BLOCK];
    struct lane_scales row, col;
};

// What a tile's encoded bytes are gathered in before they leave as whole lines.
struct staging {
    alignas(LINE) uint8_t rows[MX_BLOCK][TILE];
    alignas(LINE) uint8_t cols[TILE][TILE];      // not transposed yet
    alignas(LINE) uint8_t lines[MX_BLOCK][TILE]; // some columns, transposed
    uint8_t row_scale[MX_BLOCK][TILE / MX_BLOCK];
    uint8_t col_scale[TILE][TILE / MX_BLOCK];
};

struct plan {
    const struct mx_quantize_args *args;
    const int64_t *tile_end; // [groups] cumulative number of tiles, or null without offs
    int64_t tiles, strips;   // of one matrix
    int64_t strip_cols;
    uint32_t threshold;
    bool stream;
};

// A strip of one tile of rows, as one task handles it.
struct strip {
    const char *x;               // its first element
    int64_t matrix, row;         // where x starts
    int64_t first_col, last_col; // of x
    int64_t token;               // first column of the transposed copy
    int rows;                    // of x, 0..TILE
    int tokens;                  // of those, how many are in the transposed copy: rows or 0
    int width;                   // columns of the transposed copy to write, 0..TILE
};

[[gnu::always_inline]] static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
[[gnu::always_inline]] static inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
[[gnu::always_inline]] static inline int64_t element_size(int32_t type) { return type == MX_BF16 ? 2 : 4; }

[[gnu::always_inline]] static inline words load_block(const char *x, int32_t type) {
    if (type == MX_BF16)
        return *(const loose_words *)x;
    floats v = *(const loose_floats *)x;
    return __builtin_convertvector((v | ((v & 0xffff) + 0xffff)) >> 16, words);
}

[[gnu::always_inline]] static inline words load_part(const char *x, int count, int32_t type) {
    alignas(64) char padded[MX_BLOCK * 4] = {};
    memcpy(padded, x, (size_t)(count * element_size(type)));
    return load_block(padded, type);
}

// Rows past `rows` of the square are not filled; columns past `count` are zeros.
[[gnu::always_inline]] static inline void load_square(struct square *square, const char *x, const char *next,
                                                      int64_t stride, int rows, int count, int32_t type) {
    signed_words col_amax = {};
    for (int r = 0; r < rows; r++) {
        words v = count == MX_BLOCK ? load_block(x + r * stride, type) : load_part(x + r * stride, count, type);
        signed_words magnitude = (signed_words)(v & 0x7fff);
        square->x[r] = v;
        square->row.amax[r] = (uint16_t)__builtin_reduce_max(magnitude);
        col_amax = __builtin_elementwise_max(col_amax, magnitude);
        if (next) {
            __builtin_prefetch(next + r * stride);
            if (type == MX_F32)
                __builtin_prefetch(next + r * stride + LINE);
        }
    }
    *(signed_words *)square->col.amax = col_amax;
}

// True when some block has to be done by encode_exact.
[[gnu::always_inline]] static inline bool find_scales(struct lane_scales *lane, uint32_t threshold) {
    uint32_t exact = 0;
    for (int i = 0; i < MX_BLOCK; i++) {
        uint32_t amax = lane->amax[i];
        uint32_t scale = mx_scale_of_amax(amax << 16, threshold);
        uint32_t fast = scale < FAST_SCALE ? FAST_SCALE : scale;
        exact |= (uint32_t)(scale == NAN_SCALE) | ((uint32_t)(scale < FAST_SCALE) & (uint32_t)(amax != 0));
        lane->scale[i] = (uint8_t)scale;
        lane->bias[i] = (uint16_t)(((fast - 7) << 7) - (CODE_OFFSET * 16 + 7));
    }
    return exact;
}

[[gnu::always_inline]] static inline bytes narrow(signed_words v) {
    signed_words low = {}, high = low + 255;
    return __builtin_convertvector(__builtin_elementwise_min(__builtin_elementwise_max(v, low), high), bytes);
}

// `rounded` is magnitude + its bit 4 (ties to even; bias holds the rest of the rounding). *odd_codes gathers the codes'
// lanes so that any lane below MIN_NORMAL_CODE + CODE_OFFSET - 1 tells that the code is subnormal and not right yet.
[[gnu::always_inline]] static inline bytes encode(words rounded, words bias, bytes *lowest) {
    bytes code = narrow((signed_words)(rounded - bias) >> 4);
    *lowest = __builtin_elementwise_min(*lowest, code - 1);
    bytes offset = (bytes){} + CODE_OFFSET, top = (bytes){} + MAX_CODE;
    return __builtin_elementwise_min(__builtin_elementwise_sub_sat(code, offset), top);
}

// The same with subnormal codes right: such a code is the number of rounding midpoints that the magnitude is above.
[[gnu::always_inline]] static inline bytes encode_subnormal(words magnitude, words bias) {
    static const int16_t midpoints[] = {-384, -193, -96, -33, 16, 47, 80, 111};
    bytes unused = {};
    words normal = __builtin_convertvector(encode(magnitude + ((magnitude >> 4) & 1), bias, &unused), words);
    signed_words distance = (signed_words)(magnitude - bias - (CODE_OFFSET * 16 + 7));
    signed_words passed = {};
    for (size_t i = 0; i < sizeof midpoints / sizeof *midpoints; i++)
        passed -= distance > midpoints[i];
    return narrow(__builtin_elementwise_max(passed, (signed_words)normal));
}

[[gnu::always_inline]] static inline bytes sign_of(words x) { return __builtin_convertvector((x >> 8) & 0x80, bytes); }

// Redoes the rows in `which`, a bit a row.
[[gnu::noinline]] static void repair_subnormals(const struct square *square, uint32_t which, uint8_t *row_codes,
                                                uint8_t *col_codes) {
    for (; which; which &= which - 1) {
        int r = __builtin_ctz(which);
        words x = square->x[r], magnitude = x & 0x7fff;
        if (row_codes)
            *(bytes *)(row_codes + r * TILE) =
                encode_subnormal(magnitude, (words){} + square->row.bias[r]) | sign_of(x);
        if (col_codes)
            *(bytes *)(col_codes + r * TILE) =
                encode_subnormal(magnitude, *(const words *)square->col.bias) | sign_of(x);
    }
}

// row_codes and col_codes: a row each TILE bytes.
[[gnu::always_inline]] static inline void encode_square(const struct square *square, int rows, uint8_t *row_codes,
                                                        uint8_t *col_codes) {
    words col_bias = *(const words *)square->col.bias;
    uint32_t subnormal = 0;
    for (int r = 0; r < rows; r++) {
        words x = square->x[r], magnitude = x & 0x7fff;
        words rounded = magnitude + ((magnitude >> 4) & 1);
        bytes sign = sign_of(x), lowest = (bytes){} + 0xff;
        if (row_codes)
            *(bytes *)(row_codes + r * TILE) = encode(rounded, (words){} + square->row.bias[r], &lowest) | sign;
        if (col_codes)
            *(bytes *)(col_codes + r * TILE) = encode(rounded, col_bias, &lowest) | sign;
        bool low = __builtin_reduce_min(lowest) < CODE_OFFSET + MIN_NORMAL_CODE - 1;
        subnormal |= (uint32_t)low << r;
    }
    if (subnormal)
        repair_subnormals(square, subnormal, row_codes, col_codes);
}

// Any fp32 value (its bits) under any scale.
static uint8_t encode_exact(uint32_t bits, uint32_t scale) {
    if (scale == NAN_SCALE)
        return NAN_CODE;
    int exponent = (int)(bits >> 23 & 0xff);
    uint64_t significand = bits & 0x7fffff;
    uint8_t sign = (uint8_t)(bits >> 24 & 0x80);
    if (exponent)
        significand |= 1 << 23;
    else
        exponent = 1;
    if (!significand)
        return sign;

    int top = 63 - __builtin_clzll(significand);
    int field = exponent + top - 23 - (int)scale + 7; // E4M3's exponent field; below 1 for its subnormals
    int drop = top - 3 + (field < 1 ? 1 - field : 0) + 8;
    significand <<= 8; // so that drop is positive
    if (drop > 40)
        return sign;
    uint64_t code = (significand + (UINT64_C(1) << (drop - 1)) - 1 + (significand >> drop & 1)) >> drop;
    if (field > 1)
        code += (uint64_t)(field - 1) * 8;
    return sign | (uint8_t)(code < MAX_CODE ? code : MAX_CODE);
}

// Redoes the blocks of one direction that encode_square cannot do. Block i starts at x + i * next_block, its elements
// are `step` apart and `count` of them exist; its codes lie likewise at codes, by code_next and code_step.
[[gnu::noinline]] static void repair_exact(const struct lane_scales *lane, int blocks, const char *x,
                                           int64_t next_block, int64_t step, int count, int32_t type, uint8_t *codes,
                                           int code_next, int code_step) {
    for (int i = 0; i < blocks; i++) {
        uint32_t scale = lane->scale[i];
        if (!lane->amax[i] || (scale >= FAST_SCALE && scale != NAN_SCALE))
            continue;
        for (int j = 0; j < MX_BLOCK; j++) {
            uint32_t bits = 0;
            const char *element = x + i * next_block + j * step;
            if (j < count && type == MX_F32)
                memcpy(&bits, element, 4);
            if (j < count && type == MX_BF16)
                memcpy((char *)&bits + 2, element, 2);
            codes[i * code_next + j * code_step] = encode_exact(bits, scale);
        }
    }
}

[[gnu::always_inline]] static inline void store_lines(uint8_t *to, const uint8_t *from, int size, bool stream) {
    if (stream && (((uintptr_t)to | (uintptr_t)size) & (LINE - 1)) == 0) {
        for (int i = 0; i < size; i += LINE)
            __builtin_nontemporal_store(*(const line *)(from + i), (line *)(to + i));
    } else {
        for (int i = 0; i < size; i += (int)sizeof(bytes))
            *(loose_bytes *)(to + i) = *(const bytes *)(from + i);
    }
}

// Sends the band's rows of the row-blocked copy: `squares` blocks of columns from `col` on.
[[gnu::always_inline]] static inline void flush_rows(const struct plan *plan, const struct strip *strip,
                                                     const struct staging *staging, int band, int rows, int64_t col,
                                                     int squares) {
    const struct mx_quantize_args *args = plan->args;
    int64_t start = (strip->matrix * args->rows + strip->row + band) * args->row_k + col;
    uint8_t *data = args->row_data + start, *scale = args->row_scale + start / MX_BLOCK;
    for (int r = 0; r < rows; r++) {
        store_lines(data + r * args->row_k, staging->rows[r], squares * MX_BLOCK, plan->stream);
        memcpy(scale + r * (args->row_k / MX_BLOCK), staging->row_scale[r], (size_t)squares);
    }
}

// 16 rows of 32 bytes at `from` -> 32 rows of 16 bytes at `to`; rows are TILE apart in both.
[[gnu::always_inline]] static inline void transpose(const uint8_t *from, uint8_t *to) {
    typedef uint8_t half __attribute__((vector_size(16)));
    bytes v[16], t[16];
#pragma clang loop unroll(full)
    for (int i = 0; i < 16; i++)
        v[i] = *(const bytes *)(from + i * TILE);
#pragma clang loop unroll(full)
    for (int stage = 0; stage < 4; stage++) {
#pragma clang loop unroll(full)
        for (int i = 0; i < 8; i++) {
            t[2 * i] = __builtin_shufflevector(v[i], v[i + 8], 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39,
                                               16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55);
            t[2 * i + 1] =
                __builtin_shufflevector(v[i], v[i + 8], 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47,
                                        24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63);
        }
#pragma clang loop unroll(full)
        for (int i = 0; i < 16; i++)
            v[i] = t[i];
    }
#pragma clang loop unroll(full)
    for (int i = 0; i < 16; i++) {
        *(half *)(to + i * TILE) =
            __builtin_shufflevector(v[i], v[i], 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        *(half *)(to + (i + 16) * TILE) =
            __builtin_shufflevector(v[i], v[i], 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31);
    }
}

// Sends columns [col, col + count) of the tile: `filled` tokens are staged, the others up to strip->width are zeros.
[[gnu::always_inline]] static inline void flush_cols(const struct plan *plan, const struct strip *strip,
                                                     struct staging *staging, int64_t col, int count, int filled) {
    const struct mx_quantize_args *args = plan->args;
    int64_t start = (strip->matrix * args->cols + col) * args->col_k + strip->token;
    uint8_t *data = args->col_data + start, *scale = args->col_scale + start / MX_BLOCK;
    if (filled < strip->width)
        memset(staging->lines, 0, sizeof staging->lines);
    for (int c = 0; c < count; c += MX_BLOCK) {
        for (int t = 0; t < filled; t += 16)
            transpose(&staging->cols[t][c], &staging->lines[0][t]);
        int block = (int)min64(count - c, MX_BLOCK);
        for (int i = 0; i < block; i++)
            store_lines(data + (c + i) * args->col_k, staging->lines[i], strip->width, plan->stream);
    }
    for (int c = 0; c < count; c++)
        memcpy(scale + c * (args->col_k / MX_BLOCK), staging->col_scale[c], (size_t)strip->width / MX_BLOCK);
}

// One tile of at most TILE columns, a multiple of which is whole squares unless x ends there.
[[gnu::always_inline]] static inline void quantize_tile(const struct plan *plan, const struct strip *strip, int64_t col,
                                                        struct staging *staging, int32_t type, bool want_rows,
                                                        bool want_cols) {
    const struct mx_quantize_args *args = plan->args;
    int64_t size = element_size(type), stride = args->cols * size;
    int count = (int)min64(strip->last_col - col, TILE), squares = (count + MX_BLOCK - 1) / MX_BLOCK;
    const char *tile = strip->x + (col - strip->first_col) * size;

    if (want_cols && strip->tokens < strip->width)
        memset(staging->col_scale, 0, sizeof staging->col_scale);
    for (int band = 0; band < strip->rows; band += MX_BLOCK) {
        int rows = (int)min64(strip->rows - band, MX_BLOCK);
        bool in_cols = want_cols && band < strip->tokens;
        const char *next = nullptr;
        if (band + MX_BLOCK < strip->rows)
            next = tile + (band + MX_BLOCK) * stride;
        else if (col + TILE < strip->last_col)
            next = tile + TILE * size;
        if (in_cols && rows < MX_BLOCK)
            memset(staging->cols[band + rows], 0, (size_t)((MX_BLOCK - rows) * TILE));

        for (int s = 0; s < squares; s++) {
            int first = s * MX_BLOCK, part = (int)min64(count - first, MX_BLOCK);
            const char *x = tile + band * stride + first * size;
            uint8_t *row_codes = staging->rows[0] + first, *col_codes = staging->cols[band] + first;
            struct square square;
            load_square(&square, x, next ? next + first * size : nullptr, stride, rows, part, type);
            bool exact_rows = want_rows && find_scales(&square.row, plan->threshold);
            bool exact_cols = in_cols && find_scales(&square.col, plan->threshold);
            encode_square(&square, rows, want_rows ? row_codes : nullptr, in_cols ? col_codes : nullptr);
            if (exact_rows)
                repair_exact(&square.row, rows, x, stride, size, part, type, row_codes, TILE, 1);
            if (exact_cols)
                repair_exact(&square.col, part, x, size, stride, rows, type, col_codes, 1, TILE);
            if (want_rows)
                for (int r = 0; r < rows; r++)
                    staging->row_scale[r][s] = square.row.scale[r];
            if (in_cols)
                for (int c = 0; c < MX_BLOCK; c++)
                    staging->col_scale[first + c][band / MX_BLOCK] = square.col.scale[c];
        }
        if (want_rows)
            flush_rows(plan, strip, staging, band, rows, col, squares);
    }
    if (want_cols && strip->width)
        flush_cols(plan, strip, staging, col, count, (int)mx_round_up(strip->tokens, MX_BLOCK));
}

// Tile `tile` of the token groups, columns [first_col, last_col).
static struct strip grouped_strip(const struct plan *plan, int64_t tile) {
    const struct mx_quantize_args *args = plan->args;
    int64_t low = 0, high = args->groups; // first group with tile < tile_end[group]; args->groups after them all
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (tile < plan->tile_end[middle])
            high = middle;
        else
            low = middle + 1;
    }
    int64_t start = low ? args->offs[low - 1] : 0, first_tile = low ? plan->tile_end[low - 1] : 0;
    int64_t end = low < args->groups ? args->offs[low] : args->row_data ? args->rows : start;
    int64_t row = start + (tile - first_tile) * TILE;
    int rows = (int)max64(0, min64(end - row, TILE));
    return (struct strip){.row = row, .rows = rows, .tokens = low < args->groups ? rows : 0};
}

[[gnu::always_inline]] static inline void quantize_strip(const struct plan *plan, int64_t index, int32_t type,
                                                         bool want_rows, bool want_cols) {
    const struct mx_quantize_args *args = plan->args;
    int64_t tile = index / plan->strips % plan->tiles, first_col = index % plan->strips * plan->strip_cols;
    int64_t matrix = index / plan->strips / plan->tiles;
    struct strip strip;
    if (plan->tile_end) {
        strip = grouped_strip(plan, tile);
    } else {
        int rows = (int)min64(args->rows - tile * TILE, TILE);
        strip = (struct strip){.row = tile * TILE, .rows = rows, .tokens = rows};
    }
    strip.matrix = matrix;
    strip.token = tile * TILE;
    strip.width = (int)max64(0, min64(args->col_k - strip.token, TILE));
    strip.first_col = first_col;
    strip.last_col = min64(first_col + plan->strip_cols, args->cols);
    strip.x = args->x;
    if (strip.rows)
        strip.x += ((matrix * args->rows + strip.row) * args->cols + first_col) * element_size(type);

    struct staging staging;
    for (int64_t col = strip.first_col; col < strip.last_col; col += TILE)
        quantize_tile(plan, &strip, col, &staging, type, want_rows, want_cols);
#if defined(__x86_64__)
    __builtin_ia32_sfence(); // whoever is told that the task is done must see its non-temporal stores
#endif
}

#define MX_QUANTIZE_TASKS(X)                                                                                           \
    X(MX_BF16, 1, 0) X(MX_BF16, 0, 1) X(MX_BF16, 1, 1) X(MX_F32, 1, 0) X(MX_F32, 0, 1) X(MX_F32, 1, 1)
#define MX_QUANTIZE_TASK(type, rows, cols)                                                                             \
    static void type##_##rows##cols(int64_t index, int, void *plan) { quantize_strip(plan, index, type, rows, cols); }
MX_QUANTIZE_TASKS(MX_QUANTIZE_TASK)
#undef MX_QUANTIZE_TASK

int64_t mx_cpu_quantize_workspace(const struct mx_quantize_args *args, const struct mx_exec *) {
    return args->offs ? args->groups * (int64_t)sizeof(int64_t) : 0;
}

int mx_cpu_quantize(const struct mx_quantize_args *args, const struct mx_exec *exec, struct mx_error *error) {
    if (args->offs && mx_cpu_check_offs(args->offs, args->groups, args->rows, 1, error))
        return 1;
    struct plan plan = {.args = args, .threshold = mx_rounding_threshold(args->rounding)};
    int64_t matrices = args->batch;
    plan.tiles = (args->rows + TILE - 1) / TILE;
    if (args->offs && args->col_data) {
        int64_t *tile_end = exec->workspace, tiles = 0, start = 0;
        for (int64_t g = 0; g < args->groups; start = args->offs[g++])
            tile_end[g] = tiles += (args->offs[g] - start + TILE - 1) / TILE;
        if (args->row_data)
            tiles += (args->rows - start + TILE - 1) / TILE;
        plan.tile_end = tile_end;
        plan.tiles = max64(tiles, args->col_k / TILE);
    }
    int64_t tiles = matrices * plan.tiles, col_tiles = (args->cols + TILE - 1) / TILE;
    int64_t strip_tiles = max64(1, min64(tiles * col_tiles / (exec->threads * TASKS_PER_THREAD), STRIP / TILE));
    plan.strip_cols = strip_tiles * TILE;
    plan.strips = (col_tiles + strip_tiles - 1) / strip_tiles;
    int64_t outputs = (args->row_data ? matrices * args->rows * args->row_k : 0) +
                      (args->col_data ? matrices * args->cols * args->col_k : 0);
    plan.stream = outputs >= STREAM_BYTES;

    void (*task)(int64_t, int, void *) = nullptr;
#define MX_QUANTIZE_CHOOSE(type, rows, cols)                                                                           \
    if (args->x_type == type && !args->row_data == !rows && !args->col_data == !cols)                                  \
        task = type##_##rows##cols;
    MX_QUANTIZE_TASKS(MX_QUANTIZE_CHOOSE)
#undef MX_QUANTIZE_CHOOSE
    return task ? mx_cpu_run(tiles * plan.strips, task, &plan, exec, error) : 0;
}
