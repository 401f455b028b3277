// MXFP8 quantizer and zero_padding, gfx950 (MI355X): in one read of x, the row-blocked copy, the column-blocked
// transposed copy, or both. Bytes equal those of kernels/cpu/quantize.c.
//
//     scale = mx_scale_of_amax(amax of a block's 32 elements)     E8M0
//     code  = RNE(x * 2^(127 - scale)), saturated to +-448        E4M3, subnormals exact, the sign of 0 kept
//
// Shapes and layout: struct mx_quantize_args (mx_args.h). A block with a NaN or an Inf in it has scale 255 and 32 codes
// 0x7f, in its zero padding too.
//
// Kernels   mx_quantize_<rows|cols|both>_<bf16|f32>_gfx950(struct mx_quantize_args), 256 threads (4 waves).
//           Grid, tiles and tails: mx_quantize.h.
//           x is at least as aligned as its elements, data 16 bytes, scale 1 byte. Nothing else is asked for.
// Lane      lane l of wave w holds rows 32w + 8(l / 16) .. + 7 of columns 8(l % 16) .. + 7: a row-block is 4 lanes side
//           by side, a column-block 4 lanes 16 apart.
// LDS       row_codes [128 rows][128 bytes]: what a wave wrote it also reads.
//           col_codes [128 columns][128 bytes]: chunk p of 16 bytes of column c is at row c ^ (c / 64) and there at
//           chunk p ^ (c / 8) % 8, so that neither 8-byte writes by 16 lanes, 8 columns apart, nor 16-byte reads along
//           columns meet in a bank.
//           row_scale [128 rows][4 blocks], col_scale [128 columns][4 blocks], bytes.
//
// Sources: CDNA4 ISA, section 6 (conversions; of the scale operand the exponent byte alone counts), 11 (LDS: 64 banks).
#include "device.h"

enum {
    LINE_STEP = 8,
    NAN_CODES = 0x7f7f7f7f,
    // Below, bf16's subnormals count, and scale 0 is 2^-127, itself subnormal: what the scaled conversion makes of
    // either is not documented well enough to rely on.
    FAST_SCALE = 11,
};
typedef uint32_t scale_word __attribute__((aligned(1)));

#include "../mx_quantize.h"

typedef uint32_t double_word __attribute__((ext_vector_type(2)));
typedef u32x4 loose_quad __attribute__((aligned(2)));
typedef float float_pair __attribute__((ext_vector_type(2)));
typedef __bf16 bf16_pair __attribute__((ext_vector_type(2)));
typedef int16_t code_pair __attribute__((ext_vector_type(2)));

static LDS uint8_t row_codes[TILE][TILE] __attribute__((loader_uninitialized, aligned(1024)));
static LDS uint8_t col_codes[TILE][TILE] __attribute__((loader_uninitialized, aligned(1024)));
static LDS uint8_t row_scale[TILE][BLOCKS] __attribute__((loader_uninitialized, aligned(16)));
static LDS uint8_t col_scale[TILE][BLOCKS] __attribute__((loader_uninitialized, aligned(16)));

// ------------------------------------------------------------------------------------------------------------- loading

// All ones when i < n: by arithmetic, as dozens of conditions at once do not fit the scalar registers.
INLINE uint32_t mask_below(int32_t i, int32_t n) { return (uint32_t)((i - n) >> 31); }

// Columns of a row to `word`: whole words of what x holds.
INLINE void load_chunk(uint32_t *word, const GLOBAL char *x, int32_t type) {
    UNROLL for (int q = 0; q < (type == MX_BF16 ? 1 : 2); q++) {
        u32x4 v = ((const GLOBAL loose_quad *)x)[q];
        UNROLL for (int k = 0; k < 4; k++)
            word[4 * q + k] = v[k];
    }
}

// The elements of x. What the tile does not have is read elsewhere in it, so that no load leaves x, and then cleared.
INLINE struct elements load_plain(const struct mx_quantize_args *args, struct tile tile, int32_t type) {
    const int32_t size = type == MX_BF16 ? 2 : 4, words = type == MX_BF16 ? PAIRS : CHUNK;
    const GLOBAL char *x = (const GLOBAL char *)args->x + (tile.row * args->cols + tile.col) * size;
    const int64_t stride = args->cols * size;
    int32_t rows = tile.rows, cols = tile.cols;
    uint32_t lane = lane_id();
    int32_t lane_row = (int32_t)(wave_id() * MX_BLOCK + lane / 16 * CHUNK), lane_col = (int32_t)(lane % 16 * CHUNK);
    struct elements e;
    if ((rows == TILE) & (cols == TILE)) {
        const GLOBAL char *from = x + lane_row * stride + lane_col * size;
        UNROLL for (int i = 0; i < CHUNK; i++)
            load_chunk(e.word[i], from + i * stride, type);
        return e;
    }
    if (cols % CHUNK == 0) {
        int32_t col = lane_col < cols ? lane_col : 0;
        UNROLL for (int i = 0; i < CHUNK; i++) {
            int32_t row = lane_row + i < rows ? lane_row + i : rows - 1;
            load_chunk(e.word[i], x + row * stride + col * size, type);
        }
        uint32_t col_mask = mask_below(lane_col, cols);
        UNROLL for (int i = 0; i < CHUNK; i++) {
            uint32_t mask = mask_below(lane_row + i, rows) & col_mask;
            UNROLL for (int j = 0; j < words; j++)
                e.word[i][j] &= mask;
        }
        return e;
    }
    UNROLL for (int i = 0; i < CHUNK; i++) {
        int32_t row = lane_row + i < rows ? lane_row + i : rows - 1;
        const GLOBAL char *from = x + row * stride + lane_col * size;
        uint32_t mask = mask_below(lane_row + i, rows), v[CHUNK] = {};
        UNROLL for (int j = 0; j < CHUNK; j++) {
            if (lane_col + j < cols)
                v[j] = type == MX_F32 ? ((const GLOBAL uint32_t *)from)[j] : ((const GLOBAL uint16_t *)from)[j];
        }
        UNROLL for (int j = 0; j < words; j++) {
            e.word[i][j] = (type == MX_F32 ? v[j] : v[2 * j] | v[2 * j + 1] << 16) & mask;
        }
    }
    return e;
}

// -------------------------------------------------------------------------------------------------------------- scales

// Largest magnitudes of the lane's own elements, of rows (0, 1), (2, 3), ... and of columns (0, 1), (2, 3), ...
INLINE void lane_amax(const struct elements *e, int32_t type, struct blocks *rows, struct blocks *cols) {
    if (type == MX_BF16) {
        uint32_t row[CHUNK] = {}, col[PAIRS] = {};
        UNROLL for (int i = 0; i < CHUNK; i++) {
            UNROLL for (int j = 0; j < PAIRS; j++) {
                uint32_t magnitude = e->word[i][j] & 0x7fff7fff;
                row[i] = j ? max_pairs(row[i], magnitude) : magnitude;
                col[j] = i ? max_pairs(col[j], magnitude) : magnitude;
            }
        }
        UNROLL for (int p = 0; p < PAIRS; p++) {
            rows->two[p] = max_pairs(low_halves(row[2 * p], row[2 * p + 1]), high_halves(row[2 * p], row[2 * p + 1]));
            cols->two[p] = col[p];
        }
        return;
    }
    uint32_t row[CHUNK] = {}, col[CHUNK] = {};
    UNROLL for (int i = 0; i < CHUNK; i++) {
        UNROLL for (int j = 0; j < CHUNK; j++) {
            uint32_t magnitude = e->word[i][j] & 0x7fffffff;
            row[i] = __builtin_elementwise_max(row[i], magnitude);
            col[j] = __builtin_elementwise_max(col[j], magnitude);
        }
    }
    UNROLL for (int p = 0; p < PAIRS; p++) {
        rows->two[p] = mx_word_of(row[2 * p]) | mx_word_of(row[2 * p + 1]) << 16;
        cols->two[p] = mx_word_of(col[2 * p]) | mx_word_of(col[2 * p + 1]) << 16;
    }
}

// Over the 4 lanes of a row-block: lane q of them gets the maximum of pair q.
INLINE uint32_t reduce_rows(const struct blocks *amax) {
    uint32_t lane = lane_id(), half[2];
    UNROLL for (int i = 0; i < 2; i++) {
        uint32_t keep = lane & 2 ? amax->two[i + 2] : amax->two[i];
        uint32_t give = lane & 2 ? amax->two[i] : amax->two[i + 2];
        half[i] = max_pairs(keep, DPP_ALL(give, QUAD_PERM(2, 3, 0, 1)));
    }
    uint32_t keep = lane & 1 ? half[1] : half[0], give = lane & 1 ? half[0] : half[1];
    return max_pairs(keep, DPP_ALL(give, QUAD_PERM(1, 0, 3, 2)));
}

// The other way round: pair q from lane q.
INLINE struct blocks spread_rows(uint32_t v) {
    return (struct blocks){{DPP_ALL(v, QUAD_PERM(0, 0, 0, 0)), DPP_ALL(v, QUAD_PERM(1, 1, 1, 1)),
                            DPP_ALL(v, QUAD_PERM(2, 2, 2, 2)), DPP_ALL(v, QUAD_PERM(3, 3, 3, 3))}};
}

// Exchanges lanes 16..31 of a with 0..15 of b and 48..63 with 32..47; or 32..63 of a with 0..31 of b.
INLINE void swap16(uint32_t *a, uint32_t *b) {
    double_word v = __builtin_bit_cast(double_word, __builtin_amdgcn_permlane16_swap(*a, *b, false, false));
    *a = v.x, *b = v.y;
}
INLINE void swap32(uint32_t *a, uint32_t *b) {
    double_word v = __builtin_bit_cast(double_word, __builtin_amdgcn_permlane32_swap(*a, *b, false, false));
    *a = v.x, *b = v.y;
}

// Over the 4 lanes of a column-block: the lane in 16-lane group g gets the maximum of pair g.
INLINE uint32_t reduce_cols(const struct blocks *amax) {
    uint32_t a = amax->two[0], b = amax->two[1], c = amax->two[2], d = amax->two[3];
    swap32(&a, &c);
    swap32(&b, &d);
    a = max_pairs(a, c), b = max_pairs(b, d);
    swap16(&a, &b);
    return max_pairs(a, b);
}

// The other way round: pair g from group g.
INLINE struct blocks spread_cols(uint32_t v) {
    uint32_t a = v, b = v;
    swap16(&a, &b);
    uint32_t c = a, d = b;
    swap32(&a, &c);
    swap32(&b, &d);
    return (struct blocks){{a, b, c, d}};
}

// What encode_fast takes: blocks of zeros may have any scale.
INLINE mx_words fast_scale(mx_words scale) {
    return __builtin_elementwise_min(__builtin_elementwise_max(scale, (mx_words)FAST_SCALE),
                                     (mx_words)(MX_SCALE_NAN - 1));
}

// Nonzero where that changes what comes out.
INLINE mx_words is_special(mx_words scale, mx_words amax) {
    return __builtin_elementwise_min(fast_scale(scale) ^ scale, amax);
}

// ------------------------------------------------------------------------------------------------------------ encoding

// Where the lane's 8 codes of its row i, or of its column j, are put.
INLINE LDS double_word *row_slot(int i) {
    uint32_t lane = lane_id();
    return (LDS double_word *)&row_codes[wave_id() * MX_BLOCK + lane / 16 * CHUNK + (uint32_t)i][lane % 16 * CHUNK];
}

INLINE LDS double_word *col_slot(int j) {
    uint32_t lane = lane_id(), chunk = lane % 16, group = lane / 16, flip = chunk / 8;
    uint32_t column = chunk * CHUNK + (uint32_t)j + (j % 2 ? 0 - flip : flip);
    uint32_t at = ((wave_id() * 2 + group / 2) ^ chunk % 8) * 16 + group % 2 * 8;
    return (LDS double_word *)&col_codes[column][at];
}

// bf16 only. An exponent that the scaled conversion takes: of its operand nothing else counts.
INLINE float exponent_at(const struct blocks *blocks, int i) {
    return __builtin_bit_cast(float, blocks->two[i / 2] << (i % 2 ? 7 : 23));
}

// A conversion writes half a register and keeps the other half. What an empty asm leaves in one costs nothing; its
// input only tells one such asm from another.
#define ANY_CODES(different)                                                                                           \
    ({                                                                                                                 \
        code_pair codes_;                                                                                              \
        asm("" : "=v"(codes_) : "v"(different));                                                                       \
        codes_;                                                                                                        \
    })

// Between the two conversions into a register, which LLVM lets follow at once: the ISA's table of wait states can be
// read to forbid that. LLVM leaves a wait state after any asm.
INLINE void separate(code_pair *a, code_pair *b) { asm("" : "+v"(*a), "+v"(*b)); }

INLINE code_pair fast_pair(code_pair codes, uint32_t v, float exponent, bool high) {
    bf16_pair values = __builtin_bit_cast(bf16_pair, v);
    return high ? __builtin_amdgcn_cvt_scalef32_pk_fp8_bf16(codes, values, exponent, true)
                : __builtin_amdgcn_cvt_scalef32_pk_fp8_bf16(codes, values, exponent, false);
}

INLINE double_word fast_codes(uint32_t a, uint32_t b, uint32_t c, uint32_t d, float exponent) {
    code_pair ab = fast_pair(ANY_CODES(a), a, exponent, false), cd = fast_pair(ANY_CODES(c), c, exponent, false);
    separate(&ab, &cd);
    ab = fast_pair(ab, b, exponent, true), cd = fast_pair(cd, d, exponent, true);
    return (double_word){__builtin_bit_cast(uint32_t, ab), __builtin_bit_cast(uint32_t, cd)};
}

INLINE void encode_rows_fast(const struct elements *e, const struct blocks *rows) {
    UNROLL for (int i = 0; i < CHUNK; i++) {
        float exponent = exponent_at(rows, i);
        const uint32_t *word = e->word[i];
        *row_slot(i) = fast_codes(word[0], word[1], word[2], word[3], exponent);
    }
}

INLINE void encode_cols_fast(const struct elements *e, const struct blocks *cols) {
    UNROLL for (int j = 0; j < CHUNK; j++) {
        float exponent = exponent_at(cols, j);
        uint32_t down[PAIRS]; // the column's elements by twos
        UNROLL for (int p = 0; p < PAIRS; p++) {
            uint32_t a = e->word[2 * p][j / 2], b = e->word[2 * p + 1][j / 2];
            down[p] = j % 2 ? high_halves(a, b) : low_halves(a, b);
        }
        *col_slot(j) = fast_codes(down[0], down[1], down[2], down[3], exponent);
    }
}

// Columns 2p and 2p + 1 of row i.
INLINE float_pair values_at(const struct elements *e, int i, int p, int32_t type) {
    if (type == MX_F32)
        return (float_pair){__builtin_bit_cast(float, e->word[i][2 * p]),
                            __builtin_bit_cast(float, e->word[i][2 * p + 1])};
    return (float_pair){__builtin_bit_cast(float, e->word[i][p] << 16),
                        __builtin_bit_cast(float, e->word[i][p] & 0xffff0000)};
}

// 2^(127 - scale); negative for MX_SCALE_NAN.
INLINE float factor_at(const struct blocks *blocks, int i) {
    uint32_t scale = blocks->two[i / 2] >> i % 2 * 16 & 0xff;
    return __builtin_bit_cast(float, (254 - scale) << 23);
}

INLINE code_pair exact_pair(code_pair codes, float a, float b, bool high) {
    int old = __builtin_bit_cast(int, codes);
    a = __builtin_amdgcn_fmed3f(a, 448, -448), b = __builtin_amdgcn_fmed3f(b, 448, -448);
    return __builtin_bit_cast(code_pair, high ? __builtin_amdgcn_cvt_pk_fp8_f32(a, b, old, true)
                                              : __builtin_amdgcn_cvt_pk_fp8_f32(a, b, old, false));
}

// Of scaled values.
INLINE double_word exact_codes(const float *v, float factor) {
    code_pair low = exact_pair(ANY_CODES(v[0]), v[0], v[1], false),
              high = exact_pair(ANY_CODES(v[4]), v[4], v[5], false);
    separate(&low, &high);
    low = exact_pair(low, v[2], v[3], true), high = exact_pair(high, v[6], v[7], true);
    double_word codes = {__builtin_bit_cast(uint32_t, low), __builtin_bit_cast(uint32_t, high)};
    return factor < 0 ? (double_word){NAN_CODES, NAN_CODES} : codes;
}

INLINE void encode_rows_exact(const struct elements *e, const struct blocks *rows, int32_t type) {
    UNROLL for (int i = 0; i < CHUNK; i++) {
        float v[CHUNK], factor = factor_at(rows, i);
        UNROLL for (int p = 0; p < PAIRS; p++) {
            float_pair scaled = values_at(e, i, p, type) * factor;
            v[2 * p] = scaled.x, v[2 * p + 1] = scaled.y;
        }
        *row_slot(i) = exact_codes(v, factor);
    }
}

INLINE void encode_cols_exact(const struct elements *e, const struct blocks *cols, int32_t type) {
    UNROLL for (int p = 0; p < PAIRS; p++) {
        float v[2][CHUNK];
        float_pair factor = {factor_at(cols, 2 * p), factor_at(cols, 2 * p + 1)};
        UNROLL for (int i = 0; i < CHUNK; i++) {
            float_pair scaled = values_at(e, i, p, type) * factor;
            v[0][i] = scaled.x, v[1][i] = scaled.y;
        }
        *col_slot(2 * p) = exact_codes(v[0], factor.x);
        *col_slot(2 * p + 1) = exact_codes(v[1], factor.y);
    }
}

// ------------------------------------------------------------------------------------------------------------- storing

INLINE uint32_t first_line(uint32_t lane, uint32_t wave) { return wave * 32 + lane / 8; }

INLINE u32x4 codes_at(enum source source, uint32_t line, uint32_t chunk, uint32_t wave, uint32_t k) {
    if (source == ROWS)
        return *(const LDS u32x4 *)&row_codes[line][chunk * 16];
    return *(const LDS u32x4 *)&col_codes[line ^ wave / 2][(chunk ^ (wave * 4 + k) % 8) * 16];
}

INLINE uint32_t scales_at(enum source source, uint32_t line) {
    return *(const LDS uint32_t *)(source == ROWS ? row_scale[line] : col_scale[line]);
}

// ------------------------------------------------------------------------------------------------------------- kernels

INLINE void quantize_tile(const struct mx_quantize_args *args, loader *load, struct token_tile tokens, int64_t matrix,
                          int64_t token, int64_t col, int32_t type, bool want_rows, bool want_cols) {
    uint32_t lane = lane_id(), wave = wave_id(), chunk = lane % 16, group = lane / 16;
    bool first_half = wave < THREADS / LANES / 2;
    int32_t cols = clamp_tile(args->cols - col);
    int64_t row = matrix * args->rows + tokens.row;
    struct target by_rows = target_at(args->row_data, args->row_scale, row, args->row_k, col, tokens.rows);
    struct target by_cols =
        target_at(args->col_data, args->col_scale, matrix * args->cols + col, args->col_k, token, cols);
    if (want_cols && !tokens.in_group) {
        store_zeros(&by_cols, first_half);
        want_cols = false;
    }
    if (tokens.rows == 0)
        return;

    struct tile tile = {row, col, tokens.rows, cols};
    struct elements e = load(args, tile, type);
    struct blocks row_amax, col_amax;
    lane_amax(&e, type, &row_amax, &col_amax);
    uint16_t bump = mx_rounding_bump(args->rounding);
    mx_words rows_pair = {}, cols_pair = {}, special = {};
    if (want_rows) {
        mx_words amax = as_pair(reduce_rows(&row_amax));
        rows_pair = mx_scales_of_words(amax, bump);
        special |= is_special(rows_pair, amax);
        uint32_t line = wave * MX_BLOCK + group * CHUNK + lane % 4 * 2;
        row_scale[line][chunk / 4] = (uint8_t)rows_pair.x;
        row_scale[line + 1][chunk / 4] = (uint8_t)rows_pair.y;
    }
    if (want_cols) {
        mx_words amax = as_pair(reduce_cols(&col_amax));
        cols_pair = mx_scales_of_words(amax, bump);
        special |= is_special(cols_pair, amax);
        uint32_t line = chunk * CHUNK + group * 2;
        col_scale[line][wave] = (uint8_t)cols_pair.x;
        col_scale[line + 1][wave] = (uint8_t)cols_pair.y;
    }

    // Only these modes never saturate.
    bool fits = args->rounding == MX_ROUND_rceil || args->rounding == MX_ROUND_ceil;
    bool fast = type == MX_BF16 && fits && !ballot(of_pair(special));
    if (want_rows) {
        struct blocks blocks = spread_rows(of_pair(fast ? fast_scale(rows_pair) : rows_pair));
        if (fast)
            encode_rows_fast(&e, &blocks);
        else
            encode_rows_exact(&e, &blocks, type);
    }
    if (want_cols) {
        struct blocks blocks = spread_cols(of_pair(fast ? fast_scale(cols_pair) : cols_pair));
        if (fast)
            encode_cols_fast(&e, &blocks);
        else
            encode_cols_exact(&e, &blocks, type);
    }
    sync_block();

    store_copies(&by_rows, &by_cols, want_rows, want_cols, first_half);
}

// `waves` is what the registers must leave room for on each SIMD: LDS allows no more than 4 of both.
#define QUANTIZE(name, load, type, want_rows, want_cols, waves)                                                        \
    KERNEL __attribute__((amdgpu_waves_per_eu(waves))) void mx_quantize_##name##_gfx950(                               \
        struct mx_quantize_args args) {                                                                                \
        quantize(args, load, type, want_rows, want_cols);                                                              \
    }
QUANTIZE(rows_bf16, load_plain, MX_BF16, true, false, 4)
QUANTIZE(cols_bf16, load_plain, MX_BF16, false, true, 4)
QUANTIZE(both_bf16, load_plain, MX_BF16, true, true, 4)
QUANTIZE(rows_f32, load_plain, MX_F32, true, false, 4)
QUANTIZE(cols_f32, load_plain, MX_F32, false, true, 4)
QUANTIZE(both_f32, load_plain, MX_F32, true, true, 3)

// Clears the columns of a plain-layout operand from offs[groups - 1] on: struct mx_padding_args, one wave a row.
// Grid x: ceil(rows / 4) blocks, y: blocks along the columns, 1 KB of them a step; blocks stride over what is left.
KERNEL void mx_zero_padding_gfx950(struct mx_padding_args args) {
    int64_t used = padding_start(&args);
    int64_t rows_step = (int64_t)grid_size() * (THREADS / LANES), step = (int64_t)grid_y() * LANES;
    int64_t first_row = (int64_t)block_id() * (THREADS / LANES) + wave_id();
    int64_t first = (int64_t)block_y() * LANES + lane_id();
    int64_t chunks = (args.depth - used) / 16, blocks = (args.depth - used) / MX_BLOCK;
    for (int64_t row = first_row; row < args.rows; row += rows_step) {
        GLOBAL u32x4 *data = (GLOBAL u32x4 *)((GLOBAL uint8_t *)args.data + row * args.depth + used);
        GLOBAL uint8_t *scale = (GLOBAL uint8_t *)args.scale + (row * args.depth + used) / MX_BLOCK;
        for (int64_t i = first; i < chunks; i += step)
            data[i] = (u32x4)0;
        for (int64_t i = first; i < blocks; i += step)
            scale[i] = 0;
    }
}
