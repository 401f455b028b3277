// MXFP8 quantizer, CPU: in one read of x, the row-blocked copy, the column-blocked transposed copy, or both.
//
//     scale = mx_scale_of_amax(amax of a block's 32 elements)     E8M0
//     code  = RNE(x * 2^(127 - scale)), saturated to +-448        E4M3, subnormals exact, the sign of 0 kept
//
// Shapes and layout: struct mx_quantize_args (mx_args.h). A block with a NaN or an Inf in it has scale 255 and 32 codes
// 0x7f, in its zero padding too. Integers only: no floating-point state matters.
//
// x is cut into tiles of TILE x TILE elements and those into bands, one block high. A band is brought to L1 as 16-bit
// words, which both encodings then run on. A word is bf16's own bits, or fp32's top 16 with the last one set when any
// bit below is (round to odd). It has 7 mantissa bits where E4M3 keeps 3 and a rounding mode's threshold needs 4, so no
// later decision can tell the difference. Only bf16's subnormals have fewer bits; where they matter, in blocks whose
// scale is below FAST_SCALE, the codes are made from x itself, one by one.
//
// With offs every group starts a token tile, so tile t has exactly the columns from t * TILE of the transposed copy.
// The tiles after the last group have the rows past offs[groups - 1], which are in no column, and the columns past the
// last group's, which are zeros.
#include <string.h>

#include "../mx_scale.h"
#include "cpu.h"

enum {
    TILE = MX_GROUP_ALIGN,
    BLOCKS = TILE / MX_BLOCK,
    LINE = 64,              // bytes of a cache line
    STREAM_BYTES = 1 << 20, // outputs of this size and more are not worth cache space
    TASK_TILES = 8,         // side by side in one task, at most
    TASKS_PER_THREAD = 4,   // wanted, so that threads finish together
    FAST_SCALE = 11,        // from here on any |x| < 2^-126 becomes less than 2^-10, so 0
    NAN_CODE = 0x7f,
    MAX_CODE = 0x7e, // 448
    // Codes are made with this much added, which puts MAX_CODE where packing to bytes saturates.
    CODE_OFFSET = 255 - MAX_CODE,
    // What a word's distance from the scale needs added before its low 4 bits are dropped: that, and half less an ulp.
    ROUNDING = CODE_OFFSET * 16 + 7,
    // With the offset, subnormal codes are SUBNORMAL_CODES values from here on. Such codes are not right yet.
    LOWEST_SUBNORMAL = CODE_OFFSET - 24,
    SUBNORMAL_CODES = 32,
};

typedef uint16_t words __attribute__((vector_size(64))); // one block
typedef int16_t signed_words __attribute__((vector_size(64)));
typedef uint16_t loose_words __attribute__((vector_size(64), aligned(2)));
typedef uint32_t floats __attribute__((vector_size(128)));
typedef uint32_t loose_floats __attribute__((vector_size(128), aligned(4)));
typedef uint8_t bytes __attribute__((vector_size(32)));
typedef uint8_t loose_bytes __attribute__((vector_size(32), aligned(1)));
typedef uint8_t line __attribute__((vector_size(LINE)));
typedef uint8_t loose_line __attribute__((vector_size(LINE), aligned(1)));

// The blocks of a band in one direction.
struct blocks {
    alignas(64) uint16_t amax[TILE]; // as words
    alignas(64) uint16_t bias[TILE]; // what encode subtracts
    alignas(64) uint8_t scale[TILE];
};

// What a thread works in: stays in L1, and gathers codes until they can leave as whole lines.
struct staging {
    words x[MX_BLOCK][BLOCKS];                       // of the band
    struct blocks row, col;                          // of the band: [row][block of columns], [column]
    alignas(LINE) uint8_t row_codes[MX_BLOCK][TILE]; // of the band
    alignas(LINE) uint8_t col_codes[TILE][TILE];     // of the tile, not yet transposed
    alignas(LINE) uint8_t lines[MX_BLOCK][TILE];     // some columns of the tile, transposed
    uint8_t col_scale[BLOCKS][TILE];                 // of the tile
};

struct plan {
    const struct mx_quantize_args *args;
    bool grouped;            // offs cut the transposed copy
    const int64_t *tile_end; // then: [groups] token tiles up to the group's end
    int64_t tiles;           // token tiles of one matrix
    int64_t task_cols;       // columns of a task, a multiple of TILE
    int64_t tasks_across;
    uint32_t threshold; // of the rounding mode
    bool stream;
};

struct tile {
    int64_t matrix;   // of the batch
    int64_t row, col; // where it starts in x
    int64_t token;    // where it starts in the transposed copy
    int rows, cols;   // 0..TILE
    int tokens;       // rows that are in the transposed copy: all or none
    int width;        // columns of the transposed copy, zeros from `tokens` on
};

// The seam: what is quantized is what this gives, and nothing else reads x. `count` elements of a row of x, all
// matrices as one, from column `col` on, then zeros: as float32 bits.
[[gnu::always_inline]] static inline floats load_block(const struct mx_quantize_args *args, int64_t row, int64_t col,
                                                       int count, int32_t type) {
    const char *x = (const char *)args->x + (row * args->cols + col) * mx_type_bytes(type);
    alignas(64) char padded[MX_BLOCK * 4] = {};
    if (count < MX_BLOCK)
        x = memcpy(padded, x, (size_t)(count * mx_type_bytes(type)));
    if (type == MX_BF16)
        return __builtin_convertvector(*(const loose_words *)x, floats) << 16;
    return *(const loose_floats *)x;
}

// With it: a tile's row is going to be loaded. To L2: bands are far apart in memory and power-of-two strides would push
// it out of L1 again.
[[gnu::always_inline]] static inline void fetch_row(const struct mx_quantize_args *args, int64_t row, int64_t col,
                                                    int32_t type) {
    const char *x = (const char *)args->x + (row * args->cols + col) * mx_type_bytes(type);
    for (int i = 0; i < TILE * mx_type_bytes(type); i += LINE)
        __builtin_prefetch(x + i, 0, 2);
}

[[gnu::always_inline]] static inline words words_of(floats v, int32_t type) {
    if (type == MX_BF16)
        return __builtin_convertvector(v >> 16, words);
    return __builtin_convertvector((v | ((v & 0xffff) + 0xffff)) >> 16, words);
}

// Rows and columns of x, all its matrices as one.
struct place {
    int64_t row, col;
};

[[gnu::always_inline]] static inline void load_rows(struct staging *s, const struct mx_quantize_args *args,
                                                    struct place at, struct place next, int rows, int cols,
                                                    int32_t type, bool whole, bool want_rows, bool want_cols) {
    signed_words col_amax[BLOCKS] = {};
    for (int r = 0; r < rows; r++) {
#pragma clang loop unroll(full)
        for (int b = 0; b < BLOCKS; b++) {
            int part = whole ? MX_BLOCK : cols - b * MX_BLOCK;
            if (part <= 0)
                break;
            int count = part < MX_BLOCK ? part : MX_BLOCK;
            words v = words_of(load_block(args, at.row + r, at.col + (int64_t)b * MX_BLOCK, count, type), type);
            signed_words magnitude = (signed_words)(v & 0x7fff);
            s->x[r][b] = v;
            if (want_rows)
                s->row.amax[r * BLOCKS + b] = (uint16_t)__builtin_reduce_max(magnitude);
            if (want_cols)
                col_amax[b] = __builtin_elementwise_max(col_amax[b], magnitude);
        }
        fetch_row(args, next.row + r, next.col, type);
    }
    memcpy(s->col.amax, col_amax, sizeof col_amax);
}

// Brings a band to L1 and finds its blocks' maxima, 0 for blocks that it does not have. `next` is what to fetch ahead.
[[gnu::noinline]] static void load_band(struct staging *s, const struct mx_quantize_args *args, struct place at,
                                        struct place next, int rows, int cols, bool want_rows, bool want_cols) {
    bool bf16 = args->x_type == MX_BF16;
    if (rows < MX_BLOCK || cols < TILE)
        memset(s->row.amax, 0, sizeof s->row.amax);
#define MX_LOAD(type, whole, want_rows, want_cols)                                                                     \
    load_rows(s, args, at, next, rows, cols, type, whole, want_rows, want_cols)
    if (cols < TILE && bf16)
        MX_LOAD(MX_BF16, false, true, true);
    else if (cols < TILE)
        MX_LOAD(MX_F32, false, true, true);
    else if (bf16 && want_rows && want_cols)
        MX_LOAD(MX_BF16, true, true, true);
    else if (bf16 && want_rows)
        MX_LOAD(MX_BF16, true, true, false);
    else if (bf16)
        MX_LOAD(MX_BF16, true, false, true);
    else if (want_rows && want_cols)
        MX_LOAD(MX_F32, true, true, true);
    else if (want_rows)
        MX_LOAD(MX_F32, true, true, false);
    else
        MX_LOAD(MX_F32, true, false, true);
#undef MX_LOAD
}

static bool is_fast(uint32_t scale) { return scale >= FAST_SCALE && scale != MX_SCALE_NAN; }

// True when encode_band cannot do some block.
[[gnu::noinline]] static bool find_scales(struct blocks *blocks, uint32_t threshold) {
    uint32_t slow = 0;
    for (int i = 0; i < TILE; i++) {
        uint32_t amax = blocks->amax[i];
        uint32_t scale = mx_scale_of_amax(amax << 16, threshold);
        uint32_t fast = scale < FAST_SCALE ? FAST_SCALE : scale;
        slow |= (uint32_t)!is_fast(scale) & (uint32_t)(amax != 0);
        blocks->scale[i] = (uint8_t)scale;
        blocks->bias[i] = (uint16_t)(((fast - 7) << 7) - ROUNDING);
    }
    return slow;
}

// Saturating, to 0..255.
[[gnu::always_inline]] static inline bytes narrow(signed_words v) {
    signed_words low = {}, high = low + 255;
    return __builtin_convertvector(__builtin_elementwise_min(__builtin_elementwise_max(v, low), high), bytes);
}

// Bit 7 of each element is its sign; saturating keeps it and is one instruction where shifting is not.
[[gnu::always_inline]] static inline bytes sign_of(words x) {
    signed_words low = (signed_words){} - 128, high = (signed_words){} + 127;
    signed_words v = __builtin_elementwise_min(__builtin_elementwise_max((signed_words)x, low), high);
    return __builtin_convertvector(v, bytes) & 0x80;
}

// `rounded` is the magnitude, plus 1 where the last bit that is kept is set: ties to even. The minimum of *lowest falls
// below SUBNORMAL_CODES when some code is subnormal.
[[gnu::always_inline]] static inline bytes encode(words rounded, words bias, bytes *lowest) {
    bytes code = narrow((signed_words)(rounded - bias) >> 4);
    *lowest = __builtin_elementwise_min(*lowest, code - LOWEST_SUBNORMAL);
    return __builtin_elementwise_sub_sat(code, (bytes){} + CODE_OFFSET);
}

// Subnormals included: such a code is the number of midpoints that the magnitude is past.
[[gnu::always_inline]] static inline bytes encode_any(words magnitude, words bias) {
    // In units of a word's last bit, from where E4M3's exponent field is 0.
    static const int16_t midpoints[] = {-384, -193, -96, -33, 16, 47, 80, 111};
    signed_words distance = (signed_words)(magnitude - bias - ROUNDING), code = {};
    for (size_t i = 0; i < sizeof midpoints / sizeof *midpoints; i++)
        code -= distance > midpoints[i];
    bytes ignored = {};
    return __builtin_elementwise_max(narrow(code), encode(magnitude + (magnitude >> 4 & 1), bias, &ignored));
}

// Redoes the rows in `which`, a bit a row.
[[gnu::noinline]] static void repair_subnormals(struct staging *s, uint32_t which, int top, int blocks, bool want_rows,
                                                bool want_cols) {
    for (; which; which &= which - 1) {
        int r = __builtin_ctz(which);
        for (int b = 0; b < blocks; b++) {
            words x = s->x[r][b], magnitude = x & 0x7fff;
            words row_bias = (words){} + s->row.bias[r * BLOCKS + b], col_bias = ((const words *)s->col.bias)[b];
            if (want_rows)
                ((bytes *)s->row_codes[r])[b] = encode_any(magnitude, row_bias) | sign_of(x);
            if (want_cols)
                ((bytes *)s->col_codes[top + r])[b] = encode_any(magnitude, col_bias) | sign_of(x);
        }
    }
}

// Gives the rows in which some code is subnormal, a bit a row.
[[gnu::always_inline]] static inline uint32_t encode_rows(struct staging *s, int top, int rows, int blocks,
                                                          bool want_rows, bool want_cols) {
    uint32_t subnormal = 0;
    for (int r = 0; r < rows; r++) {
        bytes lowest = (bytes){} + 0xff;
        for (int b = 0; b < blocks; b++) {
            words x = s->x[r][b], magnitude = x & 0x7fff, rounded = magnitude + (magnitude >> 4 & 1);
            words row_bias = (words){} + s->row.bias[r * BLOCKS + b], col_bias = ((const words *)s->col.bias)[b];
            bytes sign = sign_of(x);
            if (want_rows)
                ((bytes *)s->row_codes[r])[b] = encode(rounded, row_bias, &lowest) | sign;
            if (want_cols)
                ((bytes *)s->col_codes[top + r])[b] = encode(rounded, col_bias, &lowest) | sign;
        }
        bool any = __builtin_reduce_or((bytes)(lowest < SUBNORMAL_CODES));
        subnormal |= (uint32_t)any << r;
    }
    return subnormal;
}

// The band starts at row `top` of the tile.
[[gnu::noinline]] static void encode_band(struct staging *s, int top, int rows, int blocks, bool want_rows,
                                          bool want_cols) {
    uint32_t subnormal = 0;
    if (want_rows && want_cols)
        subnormal = encode_rows(s, top, rows, blocks, true, true);
    else if (want_rows)
        subnormal = encode_rows(s, top, rows, blocks, true, false);
    else
        subnormal = encode_rows(s, top, rows, blocks, false, true);
    if (subnormal)
        repair_subnormals(s, subnormal, top, blocks, want_rows, want_cols);
}

// Any value (its fp32 bits) under any scale.
static uint8_t encode_exact(uint32_t bits, uint32_t scale) {
    if (scale == MX_SCALE_NAN)
        return NAN_CODE;
    uint8_t sign = (uint8_t)(bits >> 24 & 0x80);
    int exponent = (int)(bits >> 23 & 0xff);
    uint64_t significand = bits & 0x7fffff;
    if (exponent)
        significand |= 1 << 23;
    else
        exponent = 1;
    if (!significand)
        return sign;

    int top = 63 - __builtin_clzll(significand);
    int field = exponent + top - 23 - (int)scale + 7; // E4M3's exponent field if at least 1, else it is subnormal
    int drop = top - 3 + (field < 1 ? 1 - field : 0) + 8;
    significand <<= 8; // keeps drop positive
    if (drop > 40)
        return sign;
    uint64_t code = (significand + (UINT64_C(1) << (drop - 1)) - 1 + (significand >> drop & 1)) >> drop;
    if (field > 1)
        code += (uint64_t)(field - 1) * 8;
    return sign | (uint8_t)(code < MAX_CODE ? code : MAX_CODE);
}

// A block's elements where their words do not say enough.
[[gnu::noinline]] static floats load_again(const struct mx_quantize_args *args, struct place at, int cols) {
    int count = cols < MX_BLOCK ? cols : MX_BLOCK;
    return args->x_type == MX_BF16 ? load_block(args, at.row, at.col, count, MX_BF16)
                                   : load_block(args, at.row, at.col, count, MX_F32);
}

[[gnu::noinline]] static void repair_rows(struct staging *s, const struct mx_quantize_args *args, struct place at,
                                          int rows, int cols) {
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < cols; c += MX_BLOCK) {
            uint32_t scale = s->row.scale[r * BLOCKS + c / MX_BLOCK];
            if (is_fast(scale))
                continue;
            floats x = load_again(args, (struct place){at.row + r, at.col + c}, cols - c);
            for (int i = 0; i < MX_BLOCK; i++)
                s->row_codes[r][c + i] = encode_exact(x[i], scale);
        }
}

[[gnu::noinline]] static void repair_cols(struct staging *s, const struct mx_quantize_args *args, struct place at,
                                          int top, int rows, int cols) {
    for (int c = 0; c < cols; c += MX_BLOCK) {
        int count = cols - c < MX_BLOCK ? cols - c : MX_BLOCK;
        bool slow = false;
        for (int i = 0; i < count; i++)
            slow |= !is_fast(s->col.scale[c + i]);
        if (!slow)
            continue;
        floats x[MX_BLOCK] = {};
        for (int r = 0; r < rows; r++)
            x[r] = load_again(args, (struct place){at.row + r, at.col + c}, count);
        for (int i = 0; i < count; i++)
            for (int r = 0; r < MX_BLOCK && !is_fast(s->col.scale[c + i]); r++)
                s->col_codes[top + r][c + i] = encode_exact(x[r][i], s->col.scale[c + i]);
    }
}

// Copies blocks of codes. A line with only half of it here goes by the caches, where the other half will meet it.
[[gnu::always_inline]] static inline void store_blocks(uint8_t *to, const uint8_t *from, int size, bool stream) {
    int i = 0;
    if (stream && (uintptr_t)to % MX_BLOCK == 0) {
        if ((uintptr_t)to % LINE && size) {
            *(bytes *)to = *(const bytes *)from;
            i = MX_BLOCK;
        }
        for (; i + LINE <= size; i += LINE)
            __builtin_nontemporal_store(*(const loose_line *)(from + i), (line *)(to + i));
    }
    for (; i < size; i += MX_BLOCK)
        *(loose_bytes *)(to + i) = *(const bytes *)(from + i);
}

[[gnu::always_inline]] static inline void store_scales(uint8_t *to, const uint8_t *from, int count) {
    if (count == BLOCKS)
        memcpy(to, from, BLOCKS);
    else
        for (int i = 0; i < count; i++)
            to[i] = from[i];
}

// Sends the band's rows of the row-blocked copy.
static void flush_rows(const struct plan *plan, const struct tile *tile, const struct staging *s, int top, int rows) {
    const struct mx_quantize_args *args = plan->args;
    int blocks = div_up32(tile->cols, MX_BLOCK);
    int64_t start = (tile->matrix * args->rows + tile->row + top) * args->row_k + tile->col;
    uint8_t *data = args->row_data + start, *scale = args->row_scale + start / MX_BLOCK;
    for (int r = 0; r < rows; r++) {
        store_blocks(data + r * args->row_k, s->row_codes[r], blocks * MX_BLOCK, plan->stream);
        store_scales(scale + r * (args->row_k / MX_BLOCK), s->row.scale + (int64_t)r * BLOCKS, blocks);
    }
}

// 16 rows of 32 bytes -> 32 rows of 16 bytes; rows are TILE bytes apart in both.
[[gnu::always_inline]] static inline void transpose(const uint8_t *from, uint8_t *to) {
    typedef uint8_t half __attribute__((vector_size(16)));
    bytes v[16], t[16];
#pragma clang loop unroll(full)
    for (int64_t i = 0; i < 16; i++)
        v[i] = *(const bytes *)(from + i * TILE);
#pragma clang loop unroll(full)
    for (int stage = 0; stage < 4; stage++) { // interleaves rows i and i + 8, within each half
#pragma clang loop unroll(full)
        for (int64_t i = 0; i < 8; i++) {
            t[2 * i] = __builtin_shufflevector(v[i], v[i + 8], 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39,
                                               16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55);
            t[2 * i + 1] =
                __builtin_shufflevector(v[i], v[i + 8], 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47,
                                        24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63);
        }
        memcpy(v, t, sizeof v);
    }
#pragma clang loop unroll(full)
    for (int64_t i = 0; i < 16; i++) {
        *(half *)(to + i * TILE) =
            __builtin_shufflevector(v[i], v[i], 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        *(half *)(to + (i + 16) * TILE) =
            __builtin_shufflevector(v[i], v[i], 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31);
    }
}

// Sends the tile's columns of the transposed copy.
static void flush_cols(const struct plan *plan, const struct tile *tile, struct staging *s) {
    const struct mx_quantize_args *args = plan->args;
    int64_t start = (tile->matrix * args->cols + tile->col) * args->col_k + tile->token;
    uint8_t *data = args->col_data + start, *scale = args->col_scale + start / MX_BLOCK;
    int filled = (int)mx_round_up(tile->tokens, MX_BLOCK);
    if (filled < tile->width)
        memset(s->lines, 0, sizeof s->lines);
    for (int b = filled / MX_BLOCK; b < BLOCKS; b++)
        memset(s->col_scale[b], 0, TILE);

    for (int c = 0; c < tile->cols; c += MX_BLOCK) {
        for (int t = 0; t < filled; t += 16)
            transpose(&s->col_codes[t][c], &s->lines[0][t]);
        int lines = (int)min64(tile->cols - c, MX_BLOCK);
        for (int i = 0; i < lines; i++)
            store_blocks(data + (c + i) * args->col_k, s->lines[i], tile->width, plan->stream);
    }
    uint8_t scales[TILE][BLOCKS];
    for (int c = 0; c < TILE; c++)
        for (int b = 0; b < BLOCKS; b++)
            scales[c][b] = s->col_scale[b][c];
    for (int c = 0; c < tile->cols; c++)
        store_scales(scale + c * (args->col_k / MX_BLOCK), scales[c], tile->width / MX_BLOCK);
}

static struct place place_of(const struct mx_quantize_args *args, const struct tile *tile) {
    return (struct place){tile->matrix * args->rows + tile->row, tile->col};
}

// `following` is what to fetch ahead at the end of the tile.
static void quantize_tile(const struct plan *plan, const struct tile *tile, struct place following, struct staging *s) {
    const struct mx_quantize_args *args = plan->args;
    struct place first = place_of(args, tile);
    bool want_rows = args->wants & MX_ROWS, want_cols = args->wants & MX_COLS;
    for (int top = 0; top < tile->rows; top += MX_BLOCK) {
        int rows = (int)min64(tile->rows - top, MX_BLOCK);
        struct place at = {first.row + top, first.col};
        struct place next = top + MX_BLOCK < tile->rows ? (struct place){at.row + MX_BLOCK, at.col} : following;
        load_band(s, args, at, next, rows, tile->cols, want_rows, want_cols);
        bool slow_rows = want_rows && find_scales(&s->row, plan->threshold);
        bool slow_cols = want_cols && find_scales(&s->col, plan->threshold);
        encode_band(s, top, rows, div_up32(tile->cols, MX_BLOCK), want_rows, want_cols);
        if (want_cols && rows < MX_BLOCK)
            memset(s->col_codes[top + rows], 0, (size_t)(MX_BLOCK - rows) * TILE);
        if (slow_rows)
            repair_rows(s, args, at, rows, tile->cols);
        if (slow_cols)
            repair_cols(s, args, at, top, rows, tile->cols);
        if (want_rows)
            flush_rows(plan, tile, s, top, rows);
        if (want_cols)
            memcpy(s->col_scale[top / MX_BLOCK], s->col.scale, TILE);
    }
    if (want_cols && tile->width)
        flush_cols(plan, tile, s);
}

// Token tile `index` of the whole batch, columns from `col` on.
static struct tile find_tile(const struct plan *plan, int64_t index, int64_t col) {
    const struct mx_quantize_args *args = plan->args;
    int64_t t = index % plan->tiles, first_tile = 0, start = 0, end = args->rows;
    bool in_group = true;
    if (plan->grouped) {
        int64_t low = 0, high = args->groups; // to the first group with t < tile_end[group], or past them all
        while (low < high) {
            int64_t middle = low + (high - low) / 2;
            if (t < plan->tile_end[middle])
                high = middle;
            else
                low = middle + 1;
        }
        in_group = low < args->groups;
        if (low)
            first_tile = plan->tile_end[low - 1], start = args->offs[low - 1];
        if (in_group)
            end = args->offs[low];
        else if (!(args->wants & MX_ROWS))
            end = start;
    }
    int64_t matrix = index / plan->tiles, row = start + (t - first_tile) * TILE;
    int rows = (int)max64(0, min64(end - row, TILE));
    return (struct tile){
        .matrix = matrix,
        .row = row,
        .col = col,
        .token = t * TILE,
        .rows = rows,
        .cols = (int)min64(args->cols - col, TILE),
        .tokens = in_group ? rows : 0,
        .width = (int)max64(0, min64(args->col_k - t * TILE, TILE)),
    };
}

static void quantize_strip(int64_t index, int, void *context) {
    const struct plan *plan = context;
    int64_t token_tile = index / plan->tasks_across, col = index % plan->tasks_across * plan->task_cols;
    int64_t end = min64(col + plan->task_cols, plan->args->cols);
    struct staging staging;
    for (; col < end; col += TILE) {
        struct tile tile = find_tile(plan, token_tile, col);
        struct place following = place_of(plan->args, &tile);
        if (col + TILE < end)
            following.col += TILE;
        quantize_tile(plan, &tile, following, &staging);
    }
#if defined(__x86_64__)
    __builtin_ia32_sfence(); // non-temporal stores are not ordered by what tells others that the task is done
#endif
}

int64_t mx_cpu_quantize_workspace(const struct mx_quantize_args *args, const struct mx_exec *) {
    return args->grouped ? args->groups * (int64_t)sizeof(int64_t) : 0;
}

int mx_cpu_quantize(const struct mx_quantize_args *args, const struct mx_exec *exec, struct mx_error *error) {
    if (args->grouped && mx_cpu_check_offs(args->offs, args->groups, args->rows, 1, error))
        return 1;
    struct plan plan = {.args = args, .threshold = mx_rounding_threshold(args->rounding)};
    plan.tiles = div_up(args->rows, TILE);
    plan.grouped = args->grouped && args->wants & MX_COLS;
    if (plan.grouped) {
        int64_t *tile_end = exec->workspace, tiles = 0, start = 0;
        for (int64_t g = 0; g < args->groups; start = args->offs[g++])
            tile_end[g] = tiles += div_up(args->offs[g] - start, TILE);
        if (args->wants & MX_ROWS)
            tiles += div_up(args->rows - start, TILE);
        plan.tile_end = tile_end;
        plan.tiles = max64(tiles, args->col_k / TILE);
    }
    int64_t row_bytes = args->wants & MX_ROWS ? args->batch * args->rows * args->row_k : 0;
    int64_t col_bytes = args->wants & MX_COLS ? args->batch * args->cols * args->col_k : 0;
    plan.stream = row_bytes + col_bytes >= STREAM_BYTES;

    int64_t tiles = args->batch * plan.tiles, across = div_up(args->cols, TILE);
    int64_t task_tiles = max64(1, min64(tiles * across / TASKS_PER_THREAD / exec->threads, TASK_TILES));
    plan.task_cols = task_tiles * TILE;
    plan.tasks_across = div_up(across, task_tiles);
    return mx_cpu_run(tiles * plan.tasks_across, quantize_strip, &plan, exec, error);
}
