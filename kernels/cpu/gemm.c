// CPU grouped GEMMs: mx_cpu_gemm_rows and mx_cpu_gemm_depth (formulas, shapes and layouts: mx_args.h).
//
// Both are sets of independent products c[i][j] = sum over d of a[i][d] * b[j][d], both operands stored d-contiguous. A
// task (group, row chunk, column chunk) computes one part of one product on one thread. In a task of `gemm_rows` the
// rows are tokens and the columns weight rows; in one of `gemm_depth` d runs over the group's token columns.
//
// The sums are float32, and the order in which an element of `out` adds up its terms is a function of the contraction's
// length and of whether the group has more than DOT_ROWS rows: not of chunk sizes, threads or other groups.
//
// A dequantized element is e4m3 * 2^-8 * 2^(scale - 127): exact in float32 for every scale from 0 to 254, and so are
// the products' 2^-16, undone when a sum is complete. E4M3 NaN (0x7f, 0xff) and scale 255 give NaN.
//
// Operands are read without regard to alignment and never outside their rows; `out` is written and never read, except
// when accumulating.
#include <stddef.h>
#include <string.h>

#include "cpu.h"

// Floats in a vector, and vectors that the kernels may keep in registers.
#if defined(__AVX512F__)
#define LANES 16
#define REGISTERS 32
#elif defined(__AVX2__)
#define LANES 8
#define REGISTERS 16
#elif defined(__aarch64__)
#define LANES 4
#define REGISTERS 32
#else
#define LANES 4
#define REGISTERS 16
#endif

enum {
    // A task: at most so many rows and columns. Columns are split further while there are too few tasks.
    ROW_CHUNK = 264,
    COLUMN_CHUNK = 128,
    MIN_COLUMN_CHUNK = 64,
    TASKS_PER_THREAD = 8,

    // The multiply kernel: its accumulators take three quarters of the registers.
    PANEL = 2 * LANES,
    KERNEL_ROWS = REGISTERS * 3 / 8,
    DEPTH_CHUNK = 256, // contraction elements that are dequantized at a time

    // The dot kernel, for groups of so few rows that packing b would cost more than multiplying it.
    DOT_ROWS = 8,
    DOT_COLUMNS = 2, // computed at a time, if the registers suffice
    DOT_CHUNK = 512, // contraction elements that are dequantized at a time

    // Strides that keep successive rows out of the same cache sets or banks.
    A_STRIDE = DEPTH_CHUNK + 16,
    C_STRIDE = COLUMN_CHUNK + 16,
    RAW_STRIDE = DEPTH_CHUNK + 64,
    DOT_STRIDE = DOT_CHUNK + LANES,
};
static_assert(ROW_CHUNK % KERNEL_ROWS == 0 && COLUMN_CHUNK % PANEL == 0 && MIN_COLUMN_CHUNK % PANEL == 0);

typedef float vfloat __attribute__((vector_size(LANES * 4)));
typedef uint32_t vword __attribute__((vector_size(LANES * 4)));
typedef uint16_t vshort __attribute__((vector_size(LANES * 2)));
typedef uint8_t vbytes __attribute__((vector_size(LANES * 4)));
typedef uint8_t bytes32 __attribute__((vector_size(32)));

// A thread's scratch memory.
union scratch {
    struct {
        float a[ROW_CHUNK * A_STRIDE];
        float panel[DEPTH_CHUNK * PANEL];
        float c[ROW_CHUNK * C_STRIDE];
    } tile;
    struct {
        float a[DOT_ROWS * DOT_STRIDE];
        vfloat sums[COLUMN_CHUNK + DOT_COLUMNS][DOT_ROWS];
        float c[DOT_ROWS * C_STRIDE];
    } dot;
};

// One task: out[rows][columns] (+)= a . b^T (+ bias).
struct product {
    const uint8_t *a, *a_scale; // [rows][depth], rows `stride` bytes apart; scale rows, stride / MX_BLOCK bytes
    const uint8_t *b, *b_scale; // [columns][depth], likewise
    int64_t stride, depth;      // multiples of MX_BLOCK
    int rows, columns;          // up to ROW_CHUNK, COLUMN_CHUNK
    const float *bias;          // [columns], or null
    char *out;                  // rows `out_stride` elements apart
    int64_t out_stride;
    enum mx_type type;
    int accumulate;
};

#define UNROLL _Pragma("clang loop unroll(full)")

// The smaller of the two, which fits an int.
static inline int min_int(int64_t a, int64_t b) { return (int)(a < b ? a : b); }

static inline vfloat load(const float *from) {
    vfloat v;
    memcpy(&v, from, sizeof v);
    return v;
}

static inline void store(float *to, vfloat v) { memcpy(to, &v, sizeof v); }

// x - 0 is x for every x; 0 + x would cost an addition, because it turns -0 into 0.
static inline vfloat splat(float x) { return x - (vfloat){}; }

// ---- dequantize ----

// 2^(scale - 127), NaN for 255.
#define SCALE_1(s) ((uint32_t)(s) << 23 | ((s) == 0 || (s) == 255) << 22)
#define SCALE_4(s) SCALE_1(s), SCALE_1((s) + 1), SCALE_1((s) + 2), SCALE_1((s) + 3)
#define SCALE_16(s) SCALE_4(s), SCALE_4((s) + 4), SCALE_4((s) + 8), SCALE_4((s) + 12)
#define SCALE_64(s) SCALE_16(s), SCALE_16((s) + 16), SCALE_16((s) + 32), SCALE_16((s) + 48)
static const uint32_t scale_bits[256] = {SCALE_64(0), SCALE_64(64), SCALE_64(128), SCALE_64(192)};

static inline float scale_value(uint8_t scale) {
    float value;
    memcpy(&value, &scale_bits[scale], sizeof value);
    return value;
}

// e4m3 * 2^-8 of 32 codes; the NaN codes give 1.875.
static inline void e4m3_value(const uint8_t *codes, vfloat value[32 / LANES]) {
    typedef float floats __attribute__((vector_size(128)));
#ifdef __F16C__
    // As float16, whose exponent bias is 8 more, E4M3's bits mean just this, subnormals included.
    typedef int8_t bytes __attribute__((vector_size(32)));
    typedef int16_t words __attribute__((vector_size(64)));
    typedef _Float16 halves __attribute__((vector_size(64)));
    bytes code;
    memcpy(&code, codes, sizeof code);
    words bits = __builtin_convertvector(code, words) << 7 & (int16_t)0xbfff;
    floats all = __builtin_convertvector((halves)bits, floats);
#else
    // Exponent 0 is read as 2^-14 * 1.mmm, from which 2^-14 is taken.
    typedef uint32_t words __attribute__((vector_size(128)));
    bytes32 code;
    memcpy(&code, codes, sizeof code);
    words bits = __builtin_convertvector(code, words);
    words subnormal = (words)((bits & 0x78) == 0);
    floats magnitude = (floats)(((bits & 0x7f) << 20) + (112u << 23) + (subnormal & 1u << 23));
    magnitude -= (floats)(subnormal & 113u << 23);
    floats all = (floats)((words)magnitude | (bits & 0x80) << 24);
#endif
    memcpy(value, &all, sizeof all);
}

static inline int is_nan_code(uint8_t code) { return (code & 0x7f) == 0x7f; }

// NaN codes are looked for apart from the arithmetic: `largest` gathers (code | 0x80), of which only theirs is 0xff.
static inline void search_nan(bytes32 *largest, const uint8_t *codes) {
    bytes32 code;
    memcpy(&code, codes, sizeof code);
    *largest = __builtin_elementwise_max(*largest, code | 0x80);
}

static inline int found_nan(const bytes32 *largest) {
    uint64_t part[4];
    bytes32 hit = (bytes32)(*largest == 0xff);
    memcpy(part, &hit, sizeof part);
    return __builtin_expect((part[0] | part[1] | part[2] | part[3]) != 0, 0);
}

[[gnu::cold, gnu::noinline]] static void put_nan(float *to, int64_t to_stride, const uint8_t *codes, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (is_nan_code(codes[i]))
            to[i * to_stride] = __builtin_nanf("");
}

static void dequantize_row(float *to, const uint8_t *data, const uint8_t *scale, int depth) {
    bytes32 largest = {};
    for (int d = 0; d < depth; d += MX_BLOCK) {
        vfloat value[MX_BLOCK / LANES], factor = splat(scale_value(scale[d / MX_BLOCK]));
        e4m3_value(data + d, value);
        search_nan(&largest, data + d);
        UNROLL for (int64_t i = 0; i < MX_BLOCK / LANES; i++)
            store(to + d + i * LANES, value[i] * factor);
    }
    if (found_nan(&largest))
        put_nan(to, 1, data, depth);
}

static inline void prefetch_row(const uint8_t *data, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64)
        __builtin_prefetch(data + i);
}

// Dequantizes elements [d, d + depth) of a's rows.
static void dequantize_a(float *to, int64_t to_stride, const struct product *p, int64_t d, int depth) {
    enum { AHEAD = 8 };
    for (int64_t i = 0; i < p->rows; i++) {
        int64_t at = i * p->stride + d;
        if (i + AHEAD < p->rows)
            prefetch_row(p->a + at + AHEAD * p->stride, depth);
        dequantize_row(to + i * to_stride, p->a + at, p->a_scale + at / MX_BLOCK, depth);
    }
}

// ---- pack: a panel's rows of b become columns ----

// The shuffle that interleaves, in each 16-byte lane, the lane's halves that begin at byte `half` of two vectors.
#define LANE_INTERLEAVE(at)                                                                                            \
    (at), (at) + 4 * LANES, (at) + 1, (at) + 1 + 4 * LANES, (at) + 2, (at) + 2 + 4 * LANES, (at) + 3,                  \
        (at) + 3 + 4 * LANES, (at) + 4, (at) + 4 + 4 * LANES, (at) + 5, (at) + 5 + 4 * LANES, (at) + 6,                \
        (at) + 6 + 4 * LANES, (at) + 7, (at) + 7 + 4 * LANES
#if LANES == 16
#define INTERLEAVE(half)                                                                                               \
    LANE_INTERLEAVE(half), LANE_INTERLEAVE((half) + 16), LANE_INTERLEAVE((half) + 32), LANE_INTERLEAVE((half) + 48)
#elif LANES == 8
#define INTERLEAVE(half) LANE_INTERLEAVE(half), LANE_INTERLEAVE((half) + 16)
#else
#define INTERLEAVE(half) LANE_INTERLEAVE(half)
#endif

// Transposes each 16-byte lane: byte j of the i-th vector becomes byte i of the j-th.
static inline void transpose_lanes(vbytes v[16]) {
    UNROLL for (int step = 0; step < 4; step++) {
        vbytes t[16];
        UNROLL for (int64_t i = 0; i < 8; i++) {
            t[2 * i] = __builtin_shufflevector(v[i], v[i + 8], INTERLEAVE(0));
            t[2 * i + 1] = __builtin_shufflevector(v[i], v[i + 8], INTERLEAVE(8));
        }
        UNROLL for (int i = 0; i < 16; i++)
            v[i] = t[i];
    }
}

// Packs one MX block: panel[d][row] = raw[row][d] * factor[row]. The block's 2 * PANEL half rows fill 16 vectors, so
// that after the lane transpose a lane holds 16 neighbours of the panel: vector i, lane l holds half l % 2 + i / PANEL
// of row (i + l / 2 * 16) % PANEL.
static inline void pack_block(float *panel, const uint8_t *raw, const float factor[PANEL]) {
    vbytes v[16];
    UNROLL for (int i = 0; i < 16; i++) {
        UNROLL for (int64_t lane = 0; lane < LANES / 4; lane++) {
            const int64_t row = (i + lane / 2 * 16) % PANEL, half = lane % 2 + i / PANEL;
            memcpy((uint8_t *)&v[i] + 16 * lane, raw + row * RAW_STRIDE + 16 * half, 16);
        }
    }
    transpose_lanes(v);
    uint8_t codes[16 * sizeof(vbytes)];
    memcpy(codes, v, sizeof codes);
    UNROLL for (int at = 0; at < (int)sizeof codes; at += 32) {
        vfloat value[32 / LANES];
        e4m3_value(codes + at, value);
        UNROLL for (int i = 0; i < 32 / LANES; i++) {
            const int byte = at + i * LANES, lane = byte / 16 % (LANES / 4), from = byte % 16;
            const int64_t column = (lane / 2 * 16 + from) % PANEL, half = lane % 2 + from / PANEL;
            store(panel + (16 * half + byte / (4 * LANES)) * PANEL + column, value[i] * load(factor + column));
        }
    }
}

// panel[depth][PANEL] from elements [d, d + depth) of `columns` rows of b, from row `column` on. A panel that is not
// full repeats the last row. The rows are copied first, because rows that lie a power of two apart share a few sets of
// the first-level cache and would push each other out while pack_block reads them.
static void pack_panel(float *panel, const struct product *p, int64_t column, int columns, int64_t d, int depth) {
    uint8_t raw[PANEL * RAW_STRIDE];
    float factor[DEPTH_CHUNK / MX_BLOCK][PANEL];
    bytes32 largest = {};
    for (int64_t i = 0; i < PANEL; i++) {
        int64_t at = (column + min_int(i, columns - 1)) * p->stride + d;
        _Pragma("clang loop vectorize(disable)") for (int64_t block = 0; block < depth / MX_BLOCK; block++) {
            const uint8_t *codes = p->b + at + block * MX_BLOCK;
            factor[block][i] = scale_value(p->b_scale[at / MX_BLOCK + block]);
            search_nan(&largest, codes);
            memcpy(raw + i * RAW_STRIDE + block * MX_BLOCK, codes, MX_BLOCK);
        }
    }
    for (int64_t block = 0; block < depth / MX_BLOCK; block++)
        pack_block(panel + block * MX_BLOCK * PANEL, raw + block * MX_BLOCK, factor[block]);
    if (found_nan(&largest))
        for (int64_t i = 0; i < PANEL; i++)
            put_nan(panel + i, PANEL, raw + i * RAW_STRIDE, depth);
}

// ---- multiply ----

// c[rows][PANEL] = a[rows][depth] . panel (+ c unless `first`)
[[gnu::always_inline]] static inline void multiply_rows(const int rows, int64_t depth, const float *a,
                                                        const float *panel, float *c, int first) {
    vfloat sum[KERNEL_ROWS][2];
    UNROLL for (int i = 0; i < rows; i++)
        sum[i][0] = sum[i][1] = (vfloat){};
    _Pragma("clang loop unroll_count(2)") for (int64_t d = 0; d < depth; d++) {
        vfloat b0 = load(panel + d * PANEL), b1 = load(panel + d * PANEL + LANES);
        UNROLL for (int64_t i = 0; i < rows; i++) {
            vfloat x = splat(a[i * A_STRIDE + d]);
            sum[i][0] += x * b0;
            sum[i][1] += x * b1;
        }
    }
    UNROLL for (int64_t i = 0; i < rows; i++) {
        UNROLL for (int64_t j = 0; j < 2; j++) {
            float *to = c + i * C_STRIDE + j * LANES;
            store(to, first ? sum[i][j] : load(to) + sum[i][j]);
        }
    }
}

#define ROW_COUNTS_6(X) X(1) X(2) X(3) X(4) X(5) X(6)
#define ROW_COUNTS_8(X) ROW_COUNTS_6(X) X(7) X(8)
#define ROW_COUNTS_12(X) ROW_COUNTS_8(X) X(9) X(10) X(11) X(12)
#if REGISTERS == 32
#define KERNEL_ROW_COUNTS ROW_COUNTS_12
#else
#define KERNEL_ROW_COUNTS ROW_COUNTS_6
#endif

#define DEFINE_MULTIPLY(rows)                                                                                          \
    static void multiply_##rows(int64_t depth, const float *a, const float *panel, float *c, int first) {              \
        multiply_rows(rows, depth, a, panel, c, first);                                                                \
    }
#define LIST_MULTIPLY(rows) multiply_##rows,
KERNEL_ROW_COUNTS(DEFINE_MULTIPLY)
static void (*const multiply[])(int64_t, const float *, const float *, float *,
                                int) = {KERNEL_ROW_COUNTS(LIST_MULTIPLY)};
static_assert(sizeof multiply / sizeof *multiply == KERNEL_ROWS);

// ---- finish: complete sums to out ----

static inline vshort bf16_bits(vfloat x) {
    vword bits = (vword)x, ordered = (vword)(x == x);
    vword rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return __builtin_convertvector((rounded & ordered) | (0x7fc0 & ~ordered), vshort);
}

// Finishes `count` elements, at most LANES: *sum belongs at (row, column) of p->out.
[[gnu::always_inline]] static inline void finish_vector(const struct product *p, const float *sum, int64_t row,
                                                        int64_t column, const int count) {
    vfloat x = load(sum) * 0x1p16f;
    size_t bytes = sizeof(float) * (size_t)count;
    if (p->bias) {
        vfloat bias = {};
        memcpy(&bias, p->bias + column, bytes);
        x += bias;
    }
    int64_t at = row * p->out_stride + column;
    if (p->type == MX_BF16) {
        vshort y = bf16_bits(x);
        memcpy(p->out + at * 2, &y, bytes / 2);
        return;
    }
    if (p->accumulate) {
        vfloat before = {};
        memcpy(&before, p->out + at * 4, bytes);
        x += before;
    }
    memcpy(p->out + at * 4, &x, bytes);
}

// c, which has the product's shape, to out: rows [row, row + rows) of columns [column, column + columns).
static void finish(const struct product *p, const float *c, int row, int rows, int column, int columns) {
    int end = column + columns;
    for (int64_t i = row; i < row + rows; i++) {
        int64_t j = column;
        for (; j + LANES <= end; j += LANES)
            finish_vector(p, c + i * C_STRIDE + j, i, j, LANES);
        if (j < end)
            finish_vector(p, c + i * C_STRIDE + j, i, j, (int)(end - j));
    }
}

static void compute_zero(const struct product *p, union scratch *s) {
    memset(s->tile.c, 0, sizeof(float) * C_STRIDE * (size_t)p->rows);
    finish(p, s->tile.c, 0, p->rows, 0, p->columns);
}

// ---- tile: a task by the multiply kernel ----

// Rows that the kernel takes when `left` are left: what is no multiple of KERNEL_ROWS is split evenly at the end,
// because a kernel of few rows waits for its own sums.
static int kernel_rows(int left) {
    if (left == KERNEL_ROWS || left >= 2 * KERNEL_ROWS)
        return KERNEL_ROWS;
    return left < KERNEL_ROWS ? left : (left + 1) / 2;
}

// One panel of the product for one chunk of the contraction.
static void multiply_panel(const struct product *p, union scratch *s, int column, int columns, int depth, int first,
                           int last) {
    for (int i = 0, rows; i < p->rows; i += rows) {
        rows = kernel_rows(p->rows - i);
        multiply[rows - 1](depth, s->tile.a + (int64_t)i * A_STRIDE, s->tile.panel,
                           s->tile.c + (int64_t)i * C_STRIDE + column, first);
        if (last)
            finish(p, s->tile.c, i, rows, column, columns);
    }
}

static void compute_tile(const struct product *p, union scratch *s) {
    for (int64_t d = 0; d < p->depth; d += DEPTH_CHUNK) {
        int depth = min_int(DEPTH_CHUNK, p->depth - d);
        dequantize_a(s->tile.a, A_STRIDE, p, d, depth);
        for (int j = 0; j < p->columns; j += PANEL) {
            int columns = min_int(PANEL, p->columns - j);
            pack_panel(s->tile.panel, p, j, columns, d, depth);
            for (int64_t i = j + PANEL; i < min_int(j + 2 * PANEL, p->columns); i++)
                prefetch_row(p->b + i * p->stride + d, depth);
            multiply_panel(p, s, j, columns, depth, d == 0, d + depth == p->depth);
        }
    }
}

// ---- dot: a task of few rows ----

// Columns that the kernel of so many rows computes at a time.
static inline int dot_columns(int rows) { return rows <= REGISTERS / 4 ? DOT_COLUMNS : 1; }

// sums[column][row] = the lanes' parts of dot products of a's rows and b's (+ sums unless `first`). b is dequantized in
// registers.
[[gnu::always_inline]] static inline void dot_rows(const int rows, int64_t depth, const float *a,
                                                   const uint8_t *const b[], const uint8_t *const b_scale[],
                                                   vfloat sums[][DOT_ROWS], int first) {
    const int columns = dot_columns(rows);
    vfloat sum[DOT_COLUMNS][DOT_ROWS];
    bytes32 largest = {};
    UNROLL for (int j = 0; j < columns; j++) {
        UNROLL for (int i = 0; i < rows; i++)
            sum[j][i] = first ? (vfloat){} : sums[j][i];
    }
    for (int64_t d = 0; d < depth; d += MX_BLOCK) {
        vfloat value[DOT_COLUMNS][MX_BLOCK / LANES];
        UNROLL for (int j = 0; j < columns; j++) {
            vfloat factor = splat(scale_value(b_scale[j][d / MX_BLOCK]));
            e4m3_value(b[j] + d, value[j]);
            search_nan(&largest, b[j] + d);
            UNROLL for (int l = 0; l < MX_BLOCK / LANES; l++)
                value[j][l] *= factor;
        }
        UNROLL for (int64_t l = 0; l < MX_BLOCK / LANES; l++) {
            UNROLL for (int64_t i = 0; i < rows; i++) {
                vfloat x = load(a + i * DOT_STRIDE + d + l * LANES);
                UNROLL for (int j = 0; j < columns; j++)
                    sum[j][i] += x * value[j][l];
            }
        }
    }
    if (found_nan(&largest))
        for (int j = 0; j < columns; j++)
            for (int64_t d = 0; d < depth; d++)
                if (is_nan_code(b[j][d]))
                    for (int i = 0; i < rows; i++)
                        sum[j][i] += __builtin_nanf("");
    UNROLL for (int j = 0; j < columns; j++) {
        UNROLL for (int i = 0; i < rows; i++)
            sums[j][i] = sum[j][i];
    }
}

#define DEFINE_DOT(rows)                                                                                               \
    static void dot_##rows(int64_t depth, const float *a, const uint8_t *const b[], const uint8_t *const b_scale[],    \
                           vfloat sums[][DOT_ROWS], int first) {                                                       \
        dot_rows(rows, depth, a, b, b_scale, sums, first);                                                             \
    }
#define LIST_DOT(rows) dot_##rows,
ROW_COUNTS_8(DEFINE_DOT)
static void (*const dot[])(int64_t, const float *, const uint8_t *const[], const uint8_t *const[], vfloat[][DOT_ROWS],
                           int) = {ROW_COUNTS_8(LIST_DOT)};
static_assert(sizeof dot / sizeof *dot == DOT_ROWS);

static inline float sum_lanes(vfloat v) {
    float lane[LANES];
    store(lane, v);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++)
            lane[i] += lane[i + width];
    return lane[0];
}

// In the last step, columns past the product's repeat the last one.
static void compute_dot(const struct product *p, union scratch *s) {
    enum { AHEAD = 4 };
    const int step = dot_columns(p->rows);
    for (int64_t d = 0; d < p->depth; d += DOT_CHUNK) {
        int depth = min_int(DOT_CHUNK, p->depth - d);
        dequantize_a(s->dot.a, DOT_STRIDE, p, d, depth);
        for (int j = 0; j < p->columns; j += step) {
            const uint8_t *b[DOT_COLUMNS], *b_scale[DOT_COLUMNS];
            for (int i = 0; i < step; i++) {
                int64_t at = min_int(j + i, p->columns - 1) * p->stride + d;
                b[i] = p->b + at;
                b_scale[i] = p->b_scale + at / MX_BLOCK;
                if (j + i + AHEAD < p->columns)
                    prefetch_row(p->b + at + AHEAD * p->stride, depth);
            }
            dot[p->rows - 1](depth, s->dot.a, b, b_scale, s->dot.sums + j, d == 0);
        }
    }
    for (int64_t j = 0; j < p->columns; j++)
        for (int64_t i = 0; i < p->rows; i++)
            s->dot.c[i * C_STRIDE + j] = sum_lanes(s->dot.sums[j][i]);
    finish(p, s->dot.c, 0, p->rows, 0, p->columns);
}

// ---- tasks ----

// How the `count` rows or columns of a product are cut: `chunks` pieces of `size`, the last one shorter.
struct cut {
    int64_t count, size, chunks;
};

static struct cut make_cut(int64_t count, int64_t largest, int64_t multiple) {
    if (count == 0)
        return (struct cut){};
    int64_t chunks = div_up(count, largest);
    int64_t size = mx_round_up(div_up(count, chunks), multiple);
    return (struct cut){count, size, div_up(count, size)};
}

static struct cut cut_rows(int64_t rows) { return make_cut(rows, ROW_CHUNK, KERNEL_ROWS); }

static struct cut cut_columns(int64_t columns, int64_t row_chunks, int threads) {
    int64_t largest = COLUMN_CHUNK;
    int64_t wanted = (int64_t)TASKS_PER_THREAD * threads;
    while (largest > MIN_COLUMN_CHUNK && row_chunks * div_up(columns, largest) < wanted)
        largest /= 2;
    return make_cut(columns, largest, PANEL);
}

static int chunk_size(const struct cut *cut, int64_t chunk) {
    return min_int(cut->size, cut->count - chunk * cut->size);
}

// The workspace: a table of numbers, then each thread's scratch.
static int64_t table_bytes(int64_t numbers) { return mx_round_up(numbers * (int64_t)sizeof(int64_t), 64); }

static int64_t workspace_bytes(int64_t numbers, int threads) {
    return table_bytes(numbers) + threads * (int64_t)sizeof(union scratch);
}

static union scratch *workspace_scratch(const struct mx_exec *exec, int64_t numbers) {
    return (union scratch *)((char *)exec->workspace + table_bytes(numbers));
}

// ---- gemm_rows ----

struct rows_job {
    const struct mx_rows_args *args;
    // First row chunk of each group, counted over all. A last "group" is the rows past the real ones, which are zeroed.
    const int64_t *first_chunk; // [groups + 2]
    struct cut columns;
    union scratch *scratch;
};

static int64_t group_begin(const struct mx_rows_args *args, int64_t group) { return group ? args->offs[group - 1] : 0; }

static int64_t group_end(const struct mx_rows_args *args, int64_t group) {
    return group < args->groups ? args->offs[group] : args->m;
}

// The group whose row chunks include `chunk`.
static int64_t find_group(const int64_t *first_chunk, int64_t groups, int64_t chunk) {
    int64_t low = 0, high = groups;
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (first_chunk[middle] <= chunk)
            low = middle;
        else
            high = middle;
    }
    return low;
}

// Tasks in order: row chunks, in each its column chunks.
static void rows_task(int64_t index, int thread, void *context) {
    const struct rows_job *job = context;
    const struct mx_rows_args *args = job->args;
    int64_t chunk = index / job->columns.chunks, column_chunk = index % job->columns.chunks;
    int64_t group = find_group(job->first_chunk, args->groups + 1, chunk);
    int64_t begin = group_begin(args, group);
    struct cut rows = cut_rows(group_end(args, group) - begin);
    int64_t row_chunk = chunk - job->first_chunk[group];
    int64_t row = begin + row_chunk * rows.size, column = column_chunk * job->columns.size;
    int64_t b_row = group * args->n + column;
    int padding = group == args->groups;
    union scratch *scratch = job->scratch + thread;
    struct product p = {
        .stride = args->k,
        .depth = args->k,
        .rows = chunk_size(&rows, row_chunk),
        .columns = chunk_size(&job->columns, column_chunk),
        .bias = args->bias && !padding ? args->bias + b_row : NULL,
        .out = (char *)args->out + (row * args->n + column) * mx_type_bytes(args->out_type),
        .out_stride = args->n,
        .type = args->out_type,
    };
    if (padding || p.depth == 0) {
        compute_zero(&p, scratch);
        return;
    }
    p.a = args->a + row * p.stride;
    p.a_scale = args->a_scale + row * p.stride / MX_BLOCK;
    p.b = args->b + b_row * p.stride;
    p.b_scale = args->b_scale + b_row * p.stride / MX_BLOCK;
    (rows.count <= DOT_ROWS ? compute_dot : compute_tile)(&p, scratch);
}

int64_t mx_cpu_gemm_rows_workspace(const struct mx_rows_args *args, const struct mx_exec *exec) {
    return workspace_bytes(args->groups + 2, exec->threads);
}

int mx_cpu_gemm_rows(const struct mx_rows_args *args, const struct mx_exec *exec, struct mx_error *error) {
    int failed = mx_cpu_check_offs(args->offs, args->groups, args->m, 1, error);
    if (failed)
        return failed;
    int64_t *first_chunk = exec->workspace, chunks = 0;
    for (int64_t group = 0; group <= args->groups; group++) {
        first_chunk[group] = chunks;
        chunks += cut_rows(group_end(args, group) - group_begin(args, group)).chunks;
    }
    first_chunk[args->groups + 1] = chunks;
    struct rows_job job = {
        .args = args,
        .first_chunk = first_chunk,
        .columns = cut_columns(args->n, chunks, exec->threads),
        .scratch = workspace_scratch(exec, args->groups + 2),
    };
    return mx_cpu_run(chunks * job.columns.chunks, rows_task, &job, exec, error);
}

// ---- gemm_depth ----

struct depth_job {
    const struct mx_depth_args *args;
    const int64_t *begin; // [groups]: first token column of each group
    struct cut rows, columns;
    union scratch *scratch;
};

// Tasks in order: groups, in each its row chunks, in each its column chunks.
static void depth_task(int64_t index, int thread, void *context) {
    const struct depth_job *job = context;
    const struct mx_depth_args *args = job->args;
    int64_t column_chunk = index % job->columns.chunks, chunk = index / job->columns.chunks;
    int64_t row_chunk = chunk % job->rows.chunks, group = chunk / job->rows.chunks;
    int64_t row = row_chunk * job->rows.size, column = column_chunk * job->columns.size;
    int64_t tokens = args->offs[group] - (group ? args->offs[group - 1] : 0);
    union scratch *scratch = job->scratch + thread;
    struct product p = {
        .stride = args->depth,
        .depth = mx_round_up(tokens, MX_BLOCK),
        .rows = chunk_size(&job->rows, row_chunk),
        .columns = chunk_size(&job->columns, column_chunk),
        .out = (char *)args->out + ((group * args->n + row) * args->k + column) * mx_type_bytes(args->out_type),
        .out_stride = args->k,
        .type = args->out_type,
        .accumulate = args->accumulate,
    };
    if (p.depth == 0) {
        if (!p.accumulate)
            compute_zero(&p, scratch);
        return;
    }
    int64_t a_at = row * p.stride + job->begin[group], b_at = column * p.stride + job->begin[group];
    p.a = args->a + a_at;
    p.a_scale = args->a_scale + a_at / MX_BLOCK;
    p.b = args->b + b_at;
    p.b_scale = args->b_scale + b_at / MX_BLOCK;
    compute_tile(&p, scratch);
}

int64_t mx_cpu_gemm_depth_workspace(const struct mx_depth_args *args, const struct mx_exec *exec) {
    return workspace_bytes(args->groups, exec->threads);
}

int mx_cpu_gemm_depth(const struct mx_depth_args *args, const struct mx_exec *exec, struct mx_error *error) {
    int failed = mx_cpu_check_offs(args->offs, args->groups, args->depth, args->plain ? MX_BLOCK : 1, error);
    if (failed)
        return failed;
    int64_t *begin = exec->workspace, next = 0;
    for (int64_t group = 0; group < args->groups; group++) {
        int64_t before = group ? args->offs[group - 1] : 0, tokens = args->offs[group] - before;
        begin[group] = args->plain ? before : next;
        if (begin[group] + mx_round_up(tokens, MX_BLOCK) > args->depth)
            return mx_fail(error,
                           "offs: with every group started at a multiple of %d, group %lld (%lld tokens) ends past the "
                           "%lld token columns of the operands",
                           MX_GROUP_ALIGN, (long long)group, (long long)tokens, (long long)args->depth);
        next += mx_round_up(tokens, MX_GROUP_ALIGN);
    }
    struct cut rows = cut_rows(args->n);
    struct depth_job job = {
        .args = args,
        .begin = begin,
        .rows = rows,
        .columns = cut_columns(args->k, args->groups * rows.chunks, exec->threads),
        .scratch = workspace_scratch(exec, args->groups),
    };
    return mx_cpu_run(args->groups * rows.chunks * job.columns.chunks, depth_task, &job, exec, error);
}
