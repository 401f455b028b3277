// MXFP8 quantizer and zero_padding, sm_90 (H100, H200): in one read of x, the row-blocked copy, the column-blocked
// transposed copy, or both. Bytes equal those of quantize_cpu.c.
#include <stdint.h>

#include "mx_args.h"
#include "mx_scale.h"

#define GLOBAL __attribute__((address_space(1)))
#define SHARED __attribute__((address_space(3)))
#define INLINE static inline __attribute__((always_inline))
#define KERNEL __attribute__((device_kernel))
#define UNROLL _Pragma("clang loop unroll(full)")
#define ROLLED _Pragma("clang loop unroll(disable)")

typedef uint32_t u32x4 __attribute__((ext_vector_type(4)));

enum {
    TILE = MX_GROUP_ALIGN,
    BLOCKS = TILE / MX_BLOCK,
    WARP = 32,
    THREADS = 256,
    CHUNK = 8,           // rows and columns of a lane
    PAIRS = CHUNK / 2,   // a lane's blocks go by twos, 16 bits each
    HALF = 64,           // columns of a warp
    GROUPS_PER_LANE = 4, // in find_tile
    NAN_SCALE = 255,
    NAN_FACTOR = 0x7fff, // bf16
};
#ifndef RASTER
#define RASTER 1
#endif
#ifndef ROWS_DIRECT
#define ROWS_DIRECT 0
#endif
#ifndef COLS_DIRECT
#define COLS_DIRECT 0
#endif
#ifndef LOAD_HINT
#define LOAD_HINT ".nc.L1::no_allocate"
#endif
#ifndef STORE_HINT
#define STORE_HINT ""
#endif

enum : uint32_t { ALL_LANES = 0xffffffff };

typedef uint16_t pair __attribute__((ext_vector_type(2)));
typedef uint32_t double_word __attribute__((ext_vector_type(2)));

static SHARED double_word row_codes[TILE][TILE / CHUNK] __attribute__((loader_uninitialized, aligned(128)));
static SHARED double_word col_codes[TILE][TILE / CHUNK] __attribute__((loader_uninitialized, aligned(128)));
static SHARED uint8_t row_scale[TILE][BLOCKS] __attribute__((loader_uninitialized, aligned(16)));
static SHARED uint8_t col_scale[TILE][BLOCKS] __attribute__((loader_uninitialized, aligned(16)));

struct tile {
    int64_t row;   // of x, where it starts
    int32_t rows;  // 0..TILE, from there
    bool in_group; // its rows are in the transposed copy
};

// A lane's elements: words [row][column], or with bf16 [row][pair of columns].
struct elements {
    uint32_t word[CHUNK][CHUNK];
};

// Of each of a lane's 8 blocks in one direction, 16 bits: first its amax as a bf16, then 2^(127 - scale) as a bf16.
struct blocks {
    uint32_t two[PAIRS]; // blocks (0, 1), (2, 3), ...
};

INLINE uint32_t thread_id(void) { return (uint32_t)__nvvm_read_ptx_sreg_tid_x(); }
INLINE uint32_t lane_id(void) { return thread_id() % WARP; }
INLINE uint32_t warp_id(void) { return thread_id() / WARP; }
INLINE uint32_t lane_row(void) { return warp_id() / 2 * MX_BLOCK + lane_id() / CHUNK * CHUNK; }
INLINE uint32_t lane_col(void) { return warp_id() % 2 * HALF + lane_id() % CHUNK * CHUNK; }
INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int32_t clamp_tile(int64_t n) { return (int32_t)max64(0, min64(n, TILE)); }

INLINE uint32_t max_pairs(uint32_t a, uint32_t b) {
    pair v = __builtin_elementwise_max(__builtin_bit_cast(pair, a), __builtin_bit_cast(pair, b));
    return __builtin_bit_cast(uint32_t, v);
}
INLINE uint32_t shuffle(uint32_t v, uint32_t from) {
    return (uint32_t)__nvvm_shfl_sync_idx_i32(ALL_LANES, (int)v, (int)from, WARP - 1);
}
INLINE uint32_t shuffle_xor(uint32_t v, uint32_t mask) {
    return (uint32_t)__nvvm_shfl_sync_bfly_i32(ALL_LANES, (int)v, (int)mask, WARP - 1);
}

INLINE uint32_t prefix_sum(uint32_t v) {
    UNROLL for (uint32_t step = 1; step < WARP; step *= 2) {
        uint32_t below = (uint32_t)__nvvm_shfl_sync_up_i32(ALL_LANES, (int)v, (int)step, 0);
        v += lane_id() >= step ? below : 0;
    }
    return v;
}

INLINE struct tile plain_tile(int64_t rows, int64_t t) {
    return (struct tile){.row = t * TILE, .rows = clamp_tile(rows - t * TILE), .in_group = true};
}

INLINE struct tile find_tile(const GLOBAL int32_t *offs, int64_t all_rows, int32_t groups, uint32_t wanted,
                             bool want_rows) {
    int32_t rows = (int32_t)min64(all_rows, INT32_MAX), last = 0;
    uint32_t first = 0, lane = lane_id();
    ROLLED for (int32_t base = 0; base < groups; base += WARP * GROUPS_PER_LANE) {
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
            uint32_t index = wanted - before;
            if (index < tiles[i]) {
                row = end[i] + (int32_t)(index * TILE);
                stop = end[i + 1];
                found = true;
            }
            before += tiles[i];
        }
        uint32_t where = (uint32_t)__nvvm_vote_ballot_sync(ALL_LANES, found);
        if (where) {
            uint32_t source = (uint32_t)__builtin_ctz(where);
            row = (int32_t)shuffle((uint32_t)row, source);
            stop = (int32_t)shuffle((uint32_t)stop, source);
            return (struct tile){.row = row, .rows = clamp_tile(stop - row), .in_group = true};
        }
        first = shuffle(through, WARP - 1);
        last = (int32_t)shuffle((uint32_t)end[GROUPS_PER_LANE], WARP - 1);
    }
    int64_t row = last + (int64_t)(wanted > first ? wanted - first : 0) * TILE;
    return (struct tile){.row = row, .rows = want_rows ? clamp_tile(all_rows - row) : 0, .in_group = false};
}

INLINE u32x4 load_quad(const GLOBAL char *from) {
    u32x4 v;
    asm volatile("ld.global" LOAD_HINT ".v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
    return v;
}
INLINE void store_quad(GLOBAL uint8_t *to, u32x4 v) {
    asm volatile("st.global" STORE_HINT ".v4.b32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
INLINE void store_double(GLOBAL uint8_t *to, double_word v) {
    asm volatile("st.global" STORE_HINT ".v2.b32 [%0], {%1, %2};" : : "l"(to), "r"(v.x), "r"(v.y) : "memory");
}

// The lane's elements of the tile at x, which has rows x cols of them. What it does not have is zero.
INLINE struct elements load(const GLOBAL char *x, int64_t stride, int32_t rows, int32_t cols, int32_t type) {
    const int32_t size = type == MX_BF16 ? 2 : 4, quads = type == MX_BF16 ? 1 : 2;
    int32_t first_row = (int32_t)lane_row(), first_col = (int32_t)lane_col();
    const GLOBAL char *from = x + first_row * stride + first_col * size;
    struct elements e;
    bool aligned = ((uintptr_t)x | (uint64_t)stride) % 16 == 0;
    if (aligned && rows == TILE && cols == TILE) {
        UNROLL for (int i = 0; i < CHUNK; i++) {
            UNROLL for (int q = 0; q < quads; q++) {
                u32x4 v = load_quad(from + i * stride + q * 16);
                UNROLL for (int k = 0; k < 4; k++) e.word[i][4 * q + k] = v[k];
            }
        }
        return e;
    }
    UNROLL for (int i = 0; i < CHUNK; i++) {
        UNROLL for (int q = 0; q < quads; q++) {
            u32x4 v = {};
            // With aligned, what x holds of a row is a multiple of these 16 bytes.
            if (aligned && first_row + i < rows && first_col + q * 4 < cols)
                v = load_quad(from + i * stride + q * 16);
            UNROLL for (int k = 0; k < 4; k++) e.word[i][4 * q + k] = v[k];
        }
    }
    if (aligned)
        return e;
    UNROLL for (int i = 0; i < CHUNK; i++) {
        uint32_t v[CHUNK] = {};
        UNROLL for (int j = 0; j < CHUNK; j++) {
            if (first_row + i < rows && first_col + j < cols) {
                const GLOBAL char *at = from + i * stride + j * size;
                v[j] = type == MX_F32 ? *(const GLOBAL uint32_t *)at : *(const GLOBAL uint16_t *)at;
            }
        }
        UNROLL for (int j = 0; j < 4 * quads; j++) {
            e.word[i][j] = type == MX_F32 ? v[j] : v[2 * j] | v[2 * j + 1] << 16;
        }
        asm volatile("" : : : "memory"); // a row at a time: more do not fit the registers
    }
    return e;
}

// An fp32 magnitude as a bf16 that compares alike with bf16 values and with every threshold: its top half, with the
// last bit set when any bit below is (round to odd).
INLINE uint32_t word_of(uint32_t magnitude) { return magnitude >> 16 | ((magnitude & 0xffff) != 0); }
INLINE uint32_t low_halves(uint32_t a, uint32_t b) { return (a & 0xffff) | b << 16; }
INLINE uint32_t high_halves(uint32_t a, uint32_t b) { return a >> 16 | (b & 0xffff0000); }

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
                                      : word_of(row[0]) | word_of(row[1]) << 16;
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
                UNROLL for (int j = 0; j < 2; j++)
                    col[j] = __builtin_elementwise_max(col[j], e->word[i][2 * p + j] & 0x7fffffff);
            }
        }
        amax.two[p] = type == MX_BF16 ? col[0] : word_of(col[0]) | word_of(col[1]) << 16;
    }
    return amax;
}

// Over the 4 lanes of a block, `step` apart: the q-th of them gets the maximum of pair q.
INLINE uint32_t reduce(const struct blocks *amax, uint32_t step) {
    uint32_t lane = lane_id(), half[2];
    UNROLL for (int i = 0; i < 2; i++) {
        bool upper = lane & 2 * step;
        uint32_t keep = upper ? amax->two[i + 2] : amax->two[i], give = upper ? amax->two[i] : amax->two[i + 2];
        half[i] = max_pairs(keep, shuffle_xor(give, 2 * step));
    }
    bool odd = lane & step;
    return max_pairs(odd ? half[1] : half[0], shuffle_xor(odd ? half[0] : half[1], step));
}

// The other way round: pair q from the q-th lane.
INLINE struct blocks spread(uint32_t v, uint32_t step) {
    uint32_t first = lane_id() & ~(3 * step);
    return (struct blocks){
        {shuffle(v, first), shuffle(v, first + step), shuffle(v, first + 2 * step), shuffle(v, first + 3 * step)}};
}

INLINE uint32_t threshold_of(int32_t rounding) {
    uint32_t threshold = 0;
#define THRESHOLD(name, value)                                                                                         \
    if (rounding == MX_ROUND_##name)                                                                                   \
        threshold = value;
    MX_ROUNDING_MODES(THRESHOLD)
#undef THRESHOLD
    return threshold;
}

// 2^(127 - scale) as a bf16; a NaN for NAN_SCALE, which makes any product NaN.
INLINE uint32_t factor_of(uint32_t scale) { return scale == NAN_SCALE ? NAN_FACTOR : (254 - scale) << 7; }

INLINE uint32_t two_codes(float low, float high) {
    uint16_t v;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(v) : "f"(high), "f"(low));
    return v;
}
INLINE double_word eight_codes(const float *v, float factor) {
    double_word w;
    UNROLL for (int i = 0; i < 2; i++) {
        const float *four = v + 4 * i;
        w[i] = two_codes(four[0] * factor, four[1] * factor) | two_codes(four[2] * factor, four[3] * factor) << 16;
    }
    return w;
}
INLINE float value_at(const struct elements *e, int i, int j, int32_t type) {
    if (type == MX_F32)
        return __builtin_bit_cast(float, e->word[i][j]);
    uint32_t w = e->word[i][j / 2];
    return __builtin_bit_cast(float, j % 2 ? w & 0xffff0000 : w << 16);
}
INLINE float factor_at(const struct blocks *blocks, int i) {
    uint32_t w = blocks->two[i / 2];
    return __builtin_bit_cast(float, i % 2 ? w & 0xffff0000 : w << 16);
}
INLINE double_word encode_row(const struct elements *e, const struct blocks *rows, int i, int32_t type) {
    float v[CHUNK];
    UNROLL for (int j = 0; j < CHUNK; j++) v[j] = value_at(e, i, j, type);
    return eight_codes(v, factor_at(rows, i));
}
INLINE double_word encode_col(const struct elements *e, const struct blocks *cols, int j, int32_t type) {
    float v[CHUNK];
    UNROLL for (int i = 0; i < CHUNK; i++) v[i] = value_at(e, i, j, type);
    return eight_codes(v, factor_at(cols, j));
}

enum source { ROWS, COLS, ZEROS };

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

INLINE void store_codes(const struct target *to, enum source source) {
    uint32_t chunk = thread_id() % 8, first = thread_id() / 8;
    GLOBAL uint8_t *at = to->data + first * to->stride + chunk * 16;
    UNROLL for (uint32_t k = 0; k < 4; k++) {
        uint32_t line = first + k * 32;
        u32x4 v = {};
        if (source == ROWS)
            v = *(const SHARED u32x4 *)&row_codes[line][(chunk ^ line / 8 % 2 * 4) * 2];
        if (source == COLS)
            v = *(const SHARED u32x4 *)&col_codes[line][(chunk ^ line / 8 % 8) * 2];
        if ((int32_t)line < to->lines && (int32_t)chunk * 16 < to->width)
            store_quad(at + k * 32 * to->stride, v);
    }
}

INLINE void store_scales(const struct target *to, enum source source) {
    uint32_t line = thread_id() % TILE, v = 0;
    if (source == ROWS)
        v = *(const SHARED uint32_t *)row_scale[line];
    if (source == COLS)
        v = *(const SHARED uint32_t *)col_scale[line];
    if ((int32_t)line >= to->lines)
        return;
    GLOBAL uint8_t *at = to->scale + line * (to->stride / MX_BLOCK);
    if (to->width == TILE && (uintptr_t)at % 4 == 0)
        *(GLOBAL uint32_t *)at = v;
    else
        UNROLL for (int b = 0; b < BLOCKS; b++) {
            if (b * MX_BLOCK < to->width)
                at[b] = (uint8_t)(v >> 8 * b);
        }
}

// Keeps the compiler from holding on to what was computed from the elements, which does not fit the registers.
INLINE void forget(struct elements *e, int32_t type) {
    UNROLL for (int i = 0; i < CHUNK; i++) {
        UNROLL for (int j = 0; j < (type == MX_BF16 ? PAIRS : CHUNK); j++) asm volatile("" : "+r"(e->word[i][j]));
    }
}

INLINE void quantize_tile(const struct mx_quantize_args *args, struct tile tile, int64_t matrix, int64_t token,
                          int64_t col, int32_t type, bool want_rows, bool want_cols) {
    const int64_t size = type == MX_BF16 ? 2 : 4;
    bool first_half = thread_id() < THREADS / 2;
    int32_t cols = clamp_tile(args->cols - col);
    int64_t row = matrix * args->rows + tile.row;
    int64_t col_line = matrix * args->cols + col;
    if (want_cols && !tile.in_group) {
        struct target by_cols = target_at(args->col_data, args->col_scale, col_line, args->col_k, token, cols);
        store_codes(&by_cols, ZEROS);
        if (first_half)
            store_scales(&by_cols, ZEROS);
        want_cols = false;
    }
    if (tile.rows == 0)
        return;

    const GLOBAL char *x = (const GLOBAL char *)args->x + (row * args->cols + col) * size;
    struct elements e = load(x, args->cols * size, tile.rows, cols, type);
    uint32_t threshold = threshold_of(args->rounding), lane = lane_id();
    if (want_rows) {
        struct blocks own = row_amax(&e, type);
        uint32_t amax = reduce(&own, 1);
        uint32_t even = mx_scale_of_amax(amax << 16, threshold), odd = mx_scale_of_amax(amax & 0xffff0000, threshold);
        struct blocks factors = spread(factor_of(even) | factor_of(odd) << 16, 1);
        uint32_t line = lane_row() + lane % 4 * 2;
        row_scale[line][lane_col() / MX_BLOCK] = (uint8_t)even;
        row_scale[line + 1][lane_col() / MX_BLOCK] = (uint8_t)odd;
        UNROLL for (int i = 0; i < CHUNK; i++) {
            double_word codes = encode_row(&e, &factors, i, type);
#if ROWS_DIRECT
    struct target by_rows = target_at(args->row_data, args->row_scale, row, args->row_k, col, tile.rows);
            if ((int32_t)lane_row() + i < by_rows.lines && (int32_t)lane_col() < by_rows.width)
                store_double(by_rows.data + (lane_row() + (uint32_t)i) * by_rows.stride + lane_col(), codes);
#else
            uint32_t r = lane_row() + (uint32_t)i;
            row_codes[r][lane_col() / CHUNK ^ r / 8 % 2 * 8] = codes;
#endif
        }
    }
    if (want_rows && want_cols)
        forget(&e, type);
    if (want_cols) {
        struct blocks own = col_amax(&e, type);
        uint32_t amax = reduce(&own, 8);
        uint32_t even = mx_scale_of_amax(amax << 16, threshold), odd = mx_scale_of_amax(amax & 0xffff0000, threshold);
        struct blocks factors = spread(factor_of(even) | factor_of(odd) << 16, 8);
        uint32_t line = lane_col() + lane / 8 * 2;
        col_scale[line][lane_row() / MX_BLOCK] = (uint8_t)even;
        col_scale[line + 1][lane_row() / MX_BLOCK] = (uint8_t)odd;
        UNROLL for (int j = 0; j < CHUNK; j++) {
            double_word codes = encode_col(&e, &factors, j, type);
#if COLS_DIRECT
    struct target by_cols = target_at(args->col_data, args->col_scale, col_line, args->col_k, token, cols);
            if ((int32_t)lane_col() + j < by_cols.lines && (int32_t)lane_row() < by_cols.width)
                store_double(by_cols.data + (lane_col() + (uint32_t)j) * by_cols.stride + lane_row(), codes);
#else
            uint32_t c = lane_col() + (uint32_t)j;
            col_codes[c][lane_row() / CHUNK ^ c / 8 % 8 * 2] = codes;
#endif
        }
    }
    __syncthreads();

    struct target by_rows = target_at(args->row_data, args->row_scale, row, args->row_k, col, tile.rows);
    struct target by_cols = target_at(args->col_data, args->col_scale, col_line, args->col_k, token, cols);
#if !ROWS_DIRECT
    if (want_rows)
        store_codes(&by_rows, ROWS);
#endif
#if !COLS_DIRECT
    if (want_cols)
        store_codes(&by_cols, COLS);
#endif
    if (want_rows && first_half)
        store_scales(&by_rows, ROWS);
    if (want_cols && !first_half)
        store_scales(&by_cols, COLS);
}

INLINE void quantize(const struct mx_quantize_args *given, int32_t type, bool want_rows, bool want_cols) {
    struct mx_quantize_args args = *given;
    if (!want_cols) {
        args.rows *= args.batch;
        args.batch = 1;
    }
    bool by_group = args.offs && want_cols;
    uint32_t tiles = (uint32_t)((args.rows + TILE - 1) / TILE), matrix = 0;
    if (by_group)
        tiles = (uint32_t)((want_rows ? mx_padded_tokens(args.rows, args.groups + 1) : args.col_k) / TILE);
    uint32_t x = (uint32_t)__nvvm_read_ptx_sreg_ctaid_x();
    uint32_t t = (uint32_t)__nvvm_read_ptx_sreg_ctaid_z() * (uint32_t)__nvvm_read_ptx_sreg_nctaid_y() +
                 (uint32_t)__nvvm_read_ptx_sreg_ctaid_y();
#if RASTER > 1
    uint32_t across = (uint32_t)__nvvm_read_ptx_sreg_nctaid_x(), total = tiles * (uint32_t)args.batch;
    if (t >= total)
        return;
    uint32_t linear = t * across + x, super = linear / (across * RASTER), within = linear - super * (across * RASTER);
    uint32_t high = total - super * RASTER < RASTER ? total - super * RASTER : RASTER;
    x = within / high;
    t = super * RASTER + within % high;
#endif
    if (args.batch > 1) {
        matrix = t / tiles;
        t -= matrix * tiles;
    }
    if (matrix >= args.batch || t >= tiles)
        return;
    int64_t col = (int64_t)x * TILE;
    struct tile tile =
        by_group ? find_tile((const GLOBAL int32_t *)args.offs, args.rows, (int32_t)args.groups, t, want_rows)
                 : plain_tile(args.rows, t);
    quantize_tile(&args, tile, matrix, (int64_t)t * TILE, col, type, want_rows, want_cols);
}

#define QUANTIZE(name, type, want_rows, want_cols)                                                                     \
    KERNEL void mx_quantize_##name##_sm90(struct mx_quantize_args args) {                                              \
        quantize(&args, type, want_rows, want_cols);                                                                   \
    }
QUANTIZE(rows_bf16, MX_BF16, true, false)
QUANTIZE(cols_bf16, MX_BF16, false, true)
QUANTIZE(both_bf16, MX_BF16, true, true)
QUANTIZE(rows_f32, MX_F32, true, false)
QUANTIZE(cols_f32, MX_F32, false, true)
QUANTIZE(both_f32, MX_F32, true, true)

KERNEL void mx_zero_padding_sm90(struct mx_padding_args args) {
    int64_t used = args.groups ? ((const GLOBAL int32_t *)args.offs)[args.groups - 1] : 0;
    used = max64(0, min64(used, args.depth)) / MX_BLOCK * MX_BLOCK;
    int64_t rows_step = (int64_t)__nvvm_read_ptx_sreg_nctaid_x() * (THREADS / WARP);
    int64_t step = (int64_t)__nvvm_read_ptx_sreg_nctaid_y() * WARP;
    int64_t first_row = (int64_t)__nvvm_read_ptx_sreg_ctaid_x() * (THREADS / WARP) + warp_id();
    int64_t first = (int64_t)__nvvm_read_ptx_sreg_ctaid_y() * WARP + lane_id();
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
