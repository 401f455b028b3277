// MXFP8 quantizer and zero_padding, sm_90 (H100, H200): in one read of x, the row-blocked copy, the column-blocked
// transposed copy, or both. Bytes equal those of kernels/cpu/quantize.c.
//
//     scale = mx_scale_of_amax(amax of a block's 32 elements)     E8M0
//     code  = RNE(x * 2^(127 - scale)), saturated to +-448        E4M3, subnormals exact, the sign of 0 kept
//
// Shapes and layout: struct mx_quantize_args (mx_args.h). A block with a NaN or an Inf in it has scale 255 and 32 codes
// 0x7f, in its zero padding too. The product is an fp32 one without flushing: exact, or below half of E4M3's smallest.
//
// Kernels   mx_quantize_<rows|cols|both>_<bf16|f32>_sm90(struct mx_quantize_args), 256 threads (8 warps).
//           Grid, tiles and tails: mx_quantize.h.
//           x is at least as aligned as its elements, data 16 bytes, scale 1 byte. Nothing else is asked for; rows of
//           x that start at multiples of 16 bytes are read 16 bytes at a time, others by elements.
// Lane      lane l of warp w holds rows 32 (w / 2) + 8 (l / 8) .. + 7 of columns 64 (w % 2) + 8 (l % 8) .. + 7: a
//           row-block is 4 lanes side by side, a column-block 4 lanes 8 apart.
// Shared    row_codes [128 rows][128 bytes]: bytes 8 d .. + 7 of row r are double word d ^ (r / 8) % 2 * 8 there.
//           col_codes [128 columns][128 bytes]: of column c, double word d ^ (c / 8) % 8 * 2.
//           So the 16 lanes of an 8-byte write and the 8 lanes of a 16-byte read each meet every bank once.
//           row_scale [128 rows][4 blocks], col_scale [128 columns][4 blocks], bytes.
// Registers both: 64 with bf16, 126 with f32; rows or cols: 48 and 80. No spills.
//
// Source: PTX ISA 8.8 (cvt.rn.satfinite.e4m3x2: NaN gives 0x7f; 16-bit max; shfl.sync).
#include "device.h"

enum {
    WARP_COLS = 64,
    LINE_STEP = 32,
    NAN_FACTOR = 0x7fff, // bf16
};
typedef uint32_t scale_word;

#include "../mx_quantize.h"

typedef uint32_t double_word __attribute__((ext_vector_type(2)));

static SHARED double_word row_codes[TILE][TILE / CHUNK] __attribute__((loader_uninitialized, aligned(128)));
static SHARED double_word col_codes[TILE][TILE / CHUNK] __attribute__((loader_uninitialized, aligned(128)));
static SHARED uint8_t row_scale[TILE][BLOCKS] __attribute__((loader_uninitialized, aligned(16)));
static SHARED uint8_t col_scale[TILE][BLOCKS] __attribute__((loader_uninitialized, aligned(16)));

INLINE uint32_t lane_row(void) { return wave_id() / 2 * MX_BLOCK + lane_id() / CHUNK * CHUNK; }
INLINE uint32_t lane_col(void) { return wave_id() % 2 * WARP_COLS + lane_id() % CHUNK * CHUNK; }

// ------------------------------------------------------------------------------------------------------------- loading

// The elements of x.
INLINE struct elements load_plain(const struct mx_quantize_args *args, struct tile tile, int32_t type) {
    const int32_t size = type == MX_BF16 ? 2 : 4, in_quad = 16 / size, quads = CHUNK / in_quad;
    const GLOBAL char *x = (const GLOBAL char *)args->x + (tile.row * args->cols + tile.col) * size;
    const int64_t stride = args->cols * size;
    int32_t rows = tile.rows, cols = tile.cols, row = (int32_t)lane_row(), col = (int32_t)lane_col();
    const GLOBAL char *from = x + row * stride + col * size;
    struct elements e;
    if (((uintptr_t)x | (uint64_t)stride) % 16 == 0) { // then cols cuts no quad
        UNROLL for (int i = 0; i < CHUNK; i++) {
            UNROLL for (int q = 0; q < quads; q++) {
                u32x4 v = {};
                if (row + i < rows && col + q * in_quad < cols)
                    v = *(const GLOBAL u32x4 *)(from + i * stride + q * 16);
                UNROLL for (int k = 0; k < 4; k++)
                    e.word[i][4 * q + k] = v[k];
            }
        }
        return e;
    }
    UNROLL for (int i = 0; i < CHUNK; i++) {
        uint32_t v[CHUNK] = {};
        UNROLL for (int j = 0; j < CHUNK; j++) {
            const GLOBAL char *at = from + i * stride + j * size;
            if (row + i < rows && col + j < cols)
                v[j] = type == MX_F32 ? *(const GLOBAL uint32_t *)at : *(const GLOBAL uint16_t *)at;
        }
        UNROLL for (int j = 0; j < 4 * quads; j++) {
            e.word[i][j] = type == MX_F32 ? v[j] : low_halves(v[2 * j], v[2 * j + 1]);
        }
        asm volatile("" ::: "memory"); // a row at a time: more do not fit the registers
    }
    return e;
}

// Keeps the compiler from holding on to what it computed from the elements, which does not fit the registers.
INLINE void forget(struct elements *e, int32_t type) {
    UNROLL for (int i = 0; i < CHUNK; i++) {
        UNROLL for (int j = 0; j < (type == MX_BF16 ? PAIRS : CHUNK); j++)
            asm volatile("" : "+r"(e->word[i][j]));
    }
}

// -------------------------------------------------------------------------------------------------------------- scales

// Largest magnitudes of the lane's own elements, of rows (0, 1), (2, 3), ...
INLINE struct blocks row_amax(const struct elements *e, int32_t type) {
    struct blocks amax;
    UNROLL for (int p = 0; p < PAIRS; p++) {
        uint32_t row[2] = {};
        UNROLL for (int i = 0; i < 2; i++) {
            UNROLL for (int j = 0; j < (type == MX_BF16 ? PAIRS : CHUNK); j++) {
                uint32_t v = e->word[2 * p + i][j];
                row[i] = type == MX_BF16 ? max_pairs(row[i], v & 0x7fff7fff)
                                         : __builtin_elementwise_max(row[i], v & 0x7fffffff);
            }
        }
        amax.two[p] = type == MX_BF16 ? max_pairs(low_halves(row[0], row[1]), high_halves(row[0], row[1]))
                                      : mx_word_of(row[0]) | mx_word_of(row[1]) << 16;
    }
    return amax;
}

// Of columns (0, 1), (2, 3), ...
INLINE struct blocks col_amax(const struct elements *e, int32_t type) {
    struct blocks amax;
    UNROLL for (int p = 0; p < PAIRS; p++) {
        uint32_t col[2] = {};
        UNROLL for (int i = 0; i < CHUNK; i++) {
            if (type == MX_BF16) {
                col[0] = max_pairs(col[0], e->word[i][p] & 0x7fff7fff);
            } else {
                UNROLL for (int j = 0; j < 2; j++) {
                    col[j] = __builtin_elementwise_max(col[j], e->word[i][2 * p + j] & 0x7fffffff);
                }
            }
        }
        amax.two[p] = type == MX_BF16 ? col[0] : mx_word_of(col[0]) | mx_word_of(col[1]) << 16;
    }
    return amax;
}

// Over the 4 lanes of a block, `step` apart: the q-th of them gets the maximum of pair q.
INLINE uint32_t reduce(const struct blocks *amax, uint32_t step) {
    uint32_t lane = lane_id(), half[2];
    UNROLL for (int i = 0; i < 2; i++) {
        bool upper = lane & 2 * step;
        uint32_t keep = upper ? amax->two[i + 2] : amax->two[i], give = upper ? amax->two[i] : amax->two[i + 2];
        half[i] = max_pairs(keep, from_lane_xor(give, 2 * step));
    }
    bool odd = lane & step;
    return max_pairs(odd ? half[1] : half[0], from_lane_xor(odd ? half[0] : half[1], step));
}

// The other way round: pair q from the q-th lane.
INLINE struct blocks spread(uint32_t v, uint32_t step) {
    uint32_t first = lane_id() & ~(3 * step);
    return (struct blocks){{from_lane(v, first), from_lane(v, first + step), from_lane(v, first + 2 * step),
                            from_lane(v, first + 3 * step)}};
}

// 2^(127 - scale) as a bf16; a NaN for MX_SCALE_NAN, which makes every product NaN.
INLINE uint32_t factor_of(uint32_t scale) { return scale == MX_SCALE_NAN ? NAN_FACTOR : (254 - scale) << 7; }

// The lane's blocks' factors. The scales of the pair that it reduces go to `first` and `second`.
INLINE struct blocks find_factors(const struct blocks *amax, uint32_t step, uint32_t threshold, SHARED uint8_t *first,
                                  SHARED uint8_t *second) {
    uint32_t v = reduce(amax, step);
    uint32_t low = mx_scale_of_amax(v << 16, threshold), high = mx_scale_of_amax(v & 0xffff0000, threshold);
    *first = (uint8_t)low;
    *second = (uint8_t)high;
    return spread(low_halves(factor_of(low), factor_of(high)), step);
}

// ------------------------------------------------------------------------------------------------------------ encoding

// bf16 number i of some that lie in words by twos.
INLINE float bf16_at(const uint32_t *two, int i) {
    uint32_t w = two[i / 2];
    return __builtin_bit_cast(float, i % 2 ? w & 0xffff0000 : w << 16);
}

INLINE float value_at(const struct elements *e, int i, int j, int32_t type) {
    return type == MX_F32 ? __builtin_bit_cast(float, e->word[i][j]) : bf16_at(e->word[i], j);
}

INLINE uint32_t two_codes(float low, float high) {
    uint16_t codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
}

INLINE double_word eight_codes(const float *v, float factor) {
    double_word codes;
    UNROLL for (int i = 0; i < 2; i++) {
        uint32_t low = two_codes(v[4 * i] * factor, v[4 * i + 1] * factor);
        uint32_t high = two_codes(v[4 * i + 2] * factor, v[4 * i + 3] * factor);
        codes[i] = low_halves(low, high);
    }
    return codes;
}

INLINE void encode_rows(const struct elements *e, int32_t type, uint32_t threshold) {
    struct blocks amax = row_amax(e, type);
    uint32_t line = lane_row() + lane_id() % 4 * 2, block = lane_col() / MX_BLOCK;
    struct blocks factors = find_factors(&amax, 1, threshold, &row_scale[line][block], &row_scale[line + 1][block]);
    UNROLL for (int i = 0; i < CHUNK; i++) {
        float v[CHUNK];
        UNROLL for (int j = 0; j < CHUNK; j++)
            v[j] = value_at(e, i, j, type);
        uint32_t row = lane_row() + (uint32_t)i;
        row_codes[row][lane_col() / CHUNK ^ row / 8 % 2 * 8] = eight_codes(v, bf16_at(factors.two, i));
    }
}

INLINE void encode_cols(const struct elements *e, int32_t type, uint32_t threshold) {
    struct blocks amax = col_amax(e, type);
    uint32_t line = lane_col() + lane_id() / CHUNK * 2, block = lane_row() / MX_BLOCK;
    struct blocks factors = find_factors(&amax, CHUNK, threshold, &col_scale[line][block], &col_scale[line + 1][block]);
    UNROLL for (int j = 0; j < CHUNK; j++) {
        float v[CHUNK];
        UNROLL for (int i = 0; i < CHUNK; i++)
            v[i] = value_at(e, i, j, type);
        uint32_t col = lane_col() + (uint32_t)j;
        col_codes[col][lane_row() / CHUNK ^ col / 8 % 8 * 2] = eight_codes(v, bf16_at(factors.two, j));
    }
}

// ------------------------------------------------------------------------------------------------------------- storing

INLINE uint32_t first_line(uint32_t, uint32_t) { return thread_id() / 8; }

INLINE u32x4 codes_at(enum source source, uint32_t line, uint32_t chunk, uint32_t, uint32_t) {
    if (source == ROWS)
        return *(const SHARED u32x4 *)&row_codes[line][chunk * 2 ^ line / 8 % 2 * 8];
    return *(const SHARED u32x4 *)&col_codes[line][chunk * 2 ^ line / 8 % 8 * 2];
}

INLINE uint32_t scales_at(enum source source, uint32_t line) {
    return *(const SHARED uint32_t *)(source == ROWS ? row_scale[line] : col_scale[line]);
}

// ------------------------------------------------------------------------------------------------------------- kernels

// The targets are found where they are needed: kept from the start, they would take registers from the elements.
INLINE void quantize_tile(const struct mx_quantize_args *args, loader *load, struct token_tile tokens, int64_t matrix,
                          int64_t token, int64_t col, int32_t type, bool want_rows, bool want_cols) {
    bool first_half = thread_id() < THREADS / 2;
    int32_t cols = clamp_tile(args->cols - col);
    int64_t row = matrix * args->rows + tokens.row, line = matrix * args->cols + col;
    if (want_cols && !tokens.in_group) {
        struct target by_cols = target_at(args->col_data, args->col_scale, line, args->col_k, token, cols);
        store_zeros(&by_cols, first_half);
        want_cols = false;
    }
    if (tokens.rows == 0)
        return;

    struct elements e = load(args, (struct tile){row, col, tokens.rows, cols}, type);
    uint32_t threshold = mx_rounding_threshold(args->rounding);
    if (want_rows)
        encode_rows(&e, type, threshold);
    if (want_rows && want_cols)
        forget(&e, type);
    if (want_cols)
        encode_cols(&e, type, threshold);
    sync_block();

    struct target by_rows = target_at(args->row_data, args->row_scale, row, args->row_k, col, tokens.rows);
    struct target by_cols = target_at(args->col_data, args->col_scale, line, args->col_k, token, cols);
    store_copies(&by_rows, &by_cols, want_rows, want_cols, first_half);
}

#define QUANTIZE(name, load, type, want_rows, want_cols, blocks)                                                       \
    KERNEL(mx_quantize_##name##_sm90, 256, blocks)(struct mx_quantize_args args) {                                     \
        quantize(args, load, type, want_rows, want_cols);                                                              \
    }
QUANTIZE(rows_bf16, load_plain, MX_BF16, true, false, 5)
QUANTIZE(cols_bf16, load_plain, MX_BF16, false, true, 5)
QUANTIZE(both_bf16, load_plain, MX_BF16, true, true, 4)
QUANTIZE(rows_f32, load_plain, MX_F32, true, false, 3)
QUANTIZE(cols_f32, load_plain, MX_F32, false, true, 3)
QUANTIZE(both_f32, load_plain, MX_F32, true, true, 2)

// Thread `first` of `step` does its share, by 16 bytes where that is possible.
INLINE void clear(GLOBAL uint8_t *at, int64_t bytes, int64_t first, int64_t step) {
    if (((uintptr_t)at | (uint64_t)bytes) % 16 == 0) {
        GLOBAL u32x4 *quads = (GLOBAL u32x4 *)at;
        ROLLED for (int64_t i = first; i < bytes / 16; i += step)
            quads[i] = (u32x4)0;
    } else {
        ROLLED for (int64_t i = first; i < bytes; i += step)
            at[i] = 0;
    }
}

// Clears the columns of a plain-layout operand from offs[groups - 1] on: struct mx_padding_args, of any alignment, one
// warp a row. Grid x: ceil(rows / 8) blocks, y: blocks along the columns, 512 bytes of them a step; blocks stride over
// what is left.
KERNEL(mx_zero_padding_sm90, 256, 8)(struct mx_padding_args args) {
    int64_t used = padding_start(&args);
    int64_t bytes = args.depth - used, first = (int64_t)block_y() * LANES + lane_id(), step = (int64_t)grid_y() * LANES;
    int64_t first_row = (int64_t)block_id() * (THREADS / LANES) + wave_id();
    ROLLED for (int64_t row = first_row; row < args.rows; row += (int64_t)grid_size() * (THREADS / LANES)) {
        int64_t start = row * args.depth + used;
        clear((GLOBAL uint8_t *)args.data + start, bytes, first, step);
        clear((GLOBAL uint8_t *)args.scale + start / MX_BLOCK, bytes / MX_BLOCK, first, step);
    }
}
