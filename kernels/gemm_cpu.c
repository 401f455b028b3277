// CPU grouped GEMMs: mx_cpu_gemm_rows and mx_cpu_gemm_depth (formulas, shapes and layouts: mx_args.h).
//
// Both are sets of independent products c[i][j] = sum over d of a[i][d] * b[j][d], both operands stored d-contiguous. A
// task (group, row chunk, column chunk) computes one part of one product on one thread. In a task of `gemm_rows` the
// rows are tokens and the columns weight rows; in one of `gemm_depth` d runs over the group's token columns.
//
// The sums are float32, and the order in which an element of `out` adds up its terms is a function of the contraction's
// length and of whether the group has more than DOT_ROWS rows: not of chunk sizes, threads or other groups.
//
// A dequantized element is e4m3 * 2^-8 * 2^(scale - 127): exact in float32 for every scale from 0 to 254, and so are the
// products' 2^-16, undone when a sum is complete. E4M3 NaN (0x7f, 0xff) and scale 255 give NaN.
//
// Operands are read without regard to alignment and never outside their rows; `out` is written and never read, except
// when accumulating.
#include <stddef.h>
#include <string.h>

#include "cpu.h"

#if defined(__AVX512F__)
enum { LANES = 16, REGISTERS = 32 };
#elif defined(__AVX2__)
enum { LANES = 8, REGISTERS = 16 };
#elif defined(__aarch64__)
enum { LANES = 4, REGISTERS = 32 };
#else
enum { LANES = 4, REGISTERS = 16 };
#endif

enum {
    PANEL = 2 * LANES,             // columns that the multiply kernel computes at a time
    KERNEL_ROWS = REGISTERS * 3 / 8, // rows of the same: the accumulators take three quarters of the registers
    DEPTH_CHUNK = 256,             // contraction elements that are dequantized at a time
    ROW_CHUNK = 192,               // most rows and columns of a task
    COLUMN_CHUNK = 256,
    MIN_COLUMN_CHUNK = 64,
    TASKS_PER_THREAD = 8, // columns are split further, down to MIN_COLUMN_CHUNK, to have this many tasks
    DOT_ROWS = 8,         // groups of up to so many rows are not worth packing
    DOT_DEPTH = 512,
    DOT_MAX_COLUMNS = 4,
    DOT_AHEAD = 8, // rows of b to prefetch ahead
    A_STRIDE = DEPTH_CHUNK + 16, // the strides keep successive rows out of the same cache sets
    C_STRIDE = COLUMN_CHUNK + 16,
    DOT_STRIDE = DOT_DEPTH + 16,
};

// Columns that the dot kernel of so many rows computes at a time.
#define DOT_COLUMNS(rows) (REGISTERS * 3 / 4 < DOT_MAX_COLUMNS * (rows) ? REGISTERS * 3 / 4 / (rows) : DOT_MAX_COLUMNS)

typedef float vfloat __attribute__((vector_size(LANES * 4)));
typedef uint32_t vword __attribute__((vector_size(LANES * 4)));
typedef uint16_t vhalf __attribute__((vector_size(LANES * 2)));
typedef uint8_t vlanes __attribute__((vector_size(LANES)));
typedef uint8_t vbytes __attribute__((vector_size(LANES * 4)));
typedef uint8_t bytes16 __attribute__((vector_size(16)));

// A thread's scratch memory.
union scratch {
    struct {
        float a[ROW_CHUNK * A_STRIDE];
        float panel[DEPTH_CHUNK * PANEL];
        float c[ROW_CHUNK * C_STRIDE];
    } tile;
    struct {
        float a[DOT_ROWS * DOT_STRIDE];
        vfloat sums[COLUMN_CHUNK + DOT_MAX_COLUMNS][DOT_ROWS];
        float c[DOT_ROWS * C_STRIDE];
    } dot;
};

// One task: out[rows][columns] (+)= a . b^T (+ bias).
struct product {
    const uint8_t *a, *a_scale; // [rows][depth], rows `stride` bytes apart; scale rows stride / MX_BLOCK
    const uint8_t *b, *b_scale; // [columns][depth], likewise
    int64_t stride, depth;      // depth is a multiple of MX_BLOCK
    int rows, columns;          // up to ROW_CHUNK, COLUMN_CHUNK
    const float *bias;          // [columns], or null
    char *out;                  // rows `out_stride` elements apart
    int64_t out_stride;
    enum mx_type type;
    int accumulate;
};

#define UNROLL _Pragma("clang loop unroll(full)")

static inline int min_int(int64_t a, int64_t b) { return (int)(a < b ? a : b); }

static inline vfloat load(const float *from) {
    vfloat v;
    memcpy(&v, from, sizeof v);
    return v;
}

static inline void store(float *to, vfloat v) { memcpy(to, &v, sizeof v); }

// x - 0 is x for every x; 0 + x would cost an addition, because it turns -0 into 0.
static inline vfloat splat(float x) { return x - (vfloat){}; }

static inline bytes16 load_bytes(const uint8_t *from) {
    bytes16 v;
    memcpy(&v, from, sizeof v);
    return v;
}

// ---- dequantize ----

// 2^(scale - 127), NaN for 255.
static inline vfloat scale_value(vword scale) {
    vword special = (vword)(((scale + 1) & 0xff) < 2);
    return (vfloat)(scale << 23 | (special & 0x00400000));
}

// e4m3 * 2^-8; the NaN codes give 1.875.
static inline void e4m3_value(bytes16 code, vfloat value[16 / LANES]) {
    typedef float floats __attribute__((vector_size(64)));
#ifdef __F16C__
    // As float16, whose exponent bias is 8 more, E4M3's bits mean just this, subnormals included.
    typedef int8_t signed_bytes __attribute__((vector_size(16)));
    typedef int16_t words __attribute__((vector_size(32)));
    typedef _Float16 halves __attribute__((vector_size(32)));
    words bits = __builtin_convertvector((signed_bytes)code, words) << 7 & (int16_t)0xbfff;
    floats all = __builtin_convertvector((halves)bits, floats);
#else
    // Exponent 0 is read as 2^-14 * 1.mmm, from which 2^-14 is taken.
    typedef uint32_t words __attribute__((vector_size(64)));
    words bits = __builtin_convertvector(code, words);
    words subnormal = (words)((bits & 0x78) == 0);
    floats magnitude = (floats)(((bits & 0x7f) << 20) + (112u << 23) + (subnormal & 1u << 23));
    magnitude -= (floats)(subnormal & 113u << 23);
    floats all = (floats)((words)magnitude | (bits & 0x80) << 24);
#endif
    memcpy(value, &all, sizeof all);
}

static inline int is_nan_code(uint8_t code) { return (code & 0x7f) == 0x7f; }

// Of `largest`, the elementwise largest (code | 0x80): was a NaN code there?
static inline int saw_nan(bytes16 largest) {
    typedef uint64_t pair __attribute__((vector_size(16)));
    pair hit = (pair)(largest == 0xff);
    return (hit[0] | hit[1]) != 0;
}

[[gnu::cold, gnu::noinline]] static void put_nan(float *to, int64_t to_stride, const uint8_t *codes, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (is_nan_code(codes[i]))
            to[i * to_stride] = __builtin_nanf("");
}

static void dequantize_row(float *to, const uint8_t *data, const uint8_t *scale, int depth) {
    bytes16 largest = {};
    for (int d = 0; d < depth; d += MX_BLOCK) {
        vfloat factor = scale_value((vword){} + scale[d / MX_BLOCK]);
        UNROLL for (int half = 0; half < MX_BLOCK; half += 16) {
            bytes16 code = load_bytes(data + d + half);
            largest = __builtin_elementwise_max(largest, code | 0x80);
            vfloat value[16 / LANES];
            e4m3_value(code, value);
            UNROLL for (int i = 0; i < 16 / LANES; i++) store(to + d + half + i * LANES, value[i] * factor);
        }
    }
    if (__builtin_expect(saw_nan(largest), 0))
        put_nan(to, 1, data, depth);
}

static inline void prefetch_row(const uint8_t *data, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64)
        __builtin_prefetch(data + i, 0, 2);
}

// Dequantizes columns [d, d + depth) of `a`.
static void dequantize_rows(float *to, int64_t to_stride, const struct product *p, int64_t d, int depth) {
    enum { AHEAD = 8 };
    for (int i = 0; i < p->rows; i++) {
        if (i + AHEAD < p->rows)
            prefetch_row(p->a + (i + AHEAD) * p->stride + d, depth);
        dequantize_row(to + i * to_stride, p->a + i * p->stride + d, p->a_scale + (i * p->stride + d) / MX_BLOCK, depth);
    }
}

// ---- pack: a panel's rows of b become columns ----

// In each 16-byte lane, interleaves the first (or second) halves of two vectors.
#define LANE_INTERLEAVE(at, size)                                                                                      \
    at, at + size, at + 1, at + 1 + size, at + 2, at + 2 + size, at + 3, at + 3 + size, at + 4, at + 4 + size, at + 5, \
        at + 5 + size, at + 6, at + 6 + size, at + 7, at + 7 + size
#if defined(__AVX512F__)
#define EACH_LANE(half)                                                                                                \
    LANE_INTERLEAVE(half, 64), LANE_INTERLEAVE(16 + half, 64), LANE_INTERLEAVE(32 + half, 64),                         \
        LANE_INTERLEAVE(48 + half, 64)
#elif defined(__AVX2__)
#define EACH_LANE(half) LANE_INTERLEAVE(half, 32), LANE_INTERLEAVE(16 + half, 32)
#else
#define EACH_LANE(half) LANE_INTERLEAVE(half, 16)
#endif

// Transposes each 16-byte lane: byte j of the i-th vector becomes byte i of the j-th.
static inline void transpose_lanes(vbytes v[16]) {
    UNROLL for (int step = 0; step < 4; step++) {
        vbytes t[16];
        UNROLL for (int i = 0; i < 8; i++) {
            t[2 * i] = __builtin_shufflevector(v[i], v[i + 8], EACH_LANE(0));
            t[2 * i + 1] = __builtin_shufflevector(v[i], v[i + 8], EACH_LANE(8));
        }
        UNROLL for (int i = 0; i < 16; i++) v[i] = t[i];
    }
}

// Packs one MX block of PANEL rows: panel[d][row] = row[d] * factor[row]. The block's 2 * PANEL half rows fill 16
// vectors, so that after the lane transpose a lane holds 16 neighbours of the panel: vector i, lane l holds half
// l % 2 + i / PANEL of row (i + l / 2 * 16) % PANEL.
static inline bytes16 pack_block(float *panel, const uint8_t *const row[PANEL], const vfloat factor[2], int64_t d) {
    vbytes v[16];
    bytes16 largest = {};
    UNROLL for (int i = 0; i < 16; i++) {
        UNROLL for (int lane = 0; lane < LANES / 4; lane++) {
            bytes16 code = load_bytes(row[(i + lane / 2 * 16) % PANEL] + d + 16 * (lane % 2 + i / PANEL));
            largest = __builtin_elementwise_max(largest, code | 0x80);
            memcpy((uint8_t *)&v[i] + 16 * lane, &code, 16);
        }
    }
    transpose_lanes(v);
    uint8_t codes[16][LANES * 4];
    memcpy(codes, v, sizeof codes);
    UNROLL for (int j = 0; j < 16; j++) {
        UNROLL for (int lane = 0; lane < LANES / 4; lane++) {
            vfloat value[16 / LANES];
            e4m3_value(load_bytes(codes[j] + 16 * lane), value);
            UNROLL for (int i = 0; i < 16 / LANES; i++) {
                int column = (lane / 2 * 16 + i * LANES) % PANEL, half = lane % 2 + i * LANES / PANEL;
                store(panel + (16 * half + j) * PANEL + column, value[i] * factor[column / LANES]);
            }
        }
    }
    return largest;
}

// panel[depth][PANEL] from `columns` rows of b; columns past them repeat the last one.
static void pack_panel(float *panel, const uint8_t *data, const uint8_t *scale, int64_t stride, int columns, int depth) {
    const uint8_t *row[PANEL];
    uint8_t scales[DEPTH_CHUNK / MX_BLOCK][PANEL];
    for (int i = 0; i < PANEL; i++) {
        int64_t at = min_int(i, columns - 1) * stride;
        row[i] = data + at;
        for (int block = 0; block < depth / MX_BLOCK; block++)
            scales[block][i] = scale[at / MX_BLOCK + block];
    }
    bytes16 largest = {};
    for (int d = 0; d < depth; d += MX_BLOCK) {
        vfloat factor[2];
        for (int i = 0; i < 2; i++) {
            vlanes codes;
            memcpy(&codes, scales[d / MX_BLOCK] + i * LANES, sizeof codes);
            factor[i] = scale_value(__builtin_convertvector(codes, vword));
        }
        largest = __builtin_elementwise_max(largest, pack_block(panel + d * PANEL, row, factor, d));
    }
    if (__builtin_expect(saw_nan(largest), 0))
        for (int i = 0; i < PANEL; i++)
            put_nan(panel + i, PANEL, row[i], depth);
}

// ---- multiply ----

// c[rows][PANEL] = a[rows][depth] . panel (+ c unless `first`)
[[gnu::always_inline]] static inline void multiply_rows(const int rows, int depth, const float *a, const float *panel,
                                                        float *c, int first) {
    vfloat sum[KERNEL_ROWS][2];
    UNROLL for (int i = 0; i < rows; i++) sum[i][0] = sum[i][1] = (vfloat){};
    _Pragma("clang loop unroll_count(2)") for (int d = 0; d < depth; d++) {
        vfloat b0 = load(panel + d * PANEL), b1 = load(panel + d * PANEL + LANES);
        UNROLL for (int i = 0; i < rows; i++) {
            vfloat x = splat(a[i * A_STRIDE + d]);
            sum[i][0] += x * b0;
            sum[i][1] += x * b1;
        }
    }
    UNROLL for (int i = 0; i < rows; i++) {
        UNROLL for (int j = 0; j < 2; j++) {
            float *to = c + i * C_STRIDE + j * LANES;
            store(to, first ? sum[i][j] : load(to) + sum[i][j]);
        }
    }
}

#define ROW_COUNTS_6(X) X(1) X(2) X(3) X(4) X(5) X(6)
#define ROW_COUNTS_8(X) ROW_COUNTS_6(X) X(7) X(8)
#define ROW_COUNTS_12(X) ROW_COUNTS_8(X) X(9) X(10) X(11) X(12)

#define DEFINE_MULTIPLY(rows)                                                                                          \
    static void multiply_##rows(int depth, const float *a, const float *panel, float *c, int first) {                  \
        multiply_rows(rows, depth, a, panel, c, first);                                                                \
    }
#define LIST_MULTIPLY(rows) multiply_##rows,
#if defined(__AVX512F__) || defined(__aarch64__)
#define ROW_COUNTS ROW_COUNTS_12
#else
#define ROW_COUNTS ROW_COUNTS_6
#endif
ROW_COUNTS(DEFINE_MULTIPLY)
static void (*const multiply[])(int, const float *, const float *, float *, int) = {ROW_COUNTS(LIST_MULTIPLY)};

// ---- finish: complete sums to out ----

static inline vhalf bf16_bits(vfloat x) {
    vword bits = (vword)x, ordered = (vword)(x == x);
    vword rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return __builtin_convertvector((rounded & ordered) | (0x7fc0 & ~ordered), vhalf);
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
        vhalf y = bf16_bits(x);
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

static void finish(const struct product *p, const float *c, int row, int rows, int column, int columns) {
    for (int i = row; i < row + rows; i++) {
        int j = column;
        for (; j + LANES <= column + columns; j += LANES)
            finish_vector(p, c + i * C_STRIDE + j, i, j, LANES);
        if (j < column + columns)
            finish_vector(p, c + i * C_STRIDE + j, i, j, column + columns - j);
    }
}

// ---- the two ways to compute a task ----

// All of a column panel for one chunk of the contraction. Rows go to the kernel KERNEL_ROWS at a time; what remains is
// split evenly, because a kernel of few rows waits for its own sums.
static void multiply_panel(const struct product *p, union scratch *s, int column, int depth, int first, int last) {
    int columns = min_int(PANEL, p->columns - column);
    for (int i = 0, rows; i < p->rows; i += rows) {
        int left = p->rows - i;
        rows = left >= 2 * KERNEL_ROWS || left == KERNEL_ROWS ? KERNEL_ROWS
               : left > KERNEL_ROWS                           ? (left + 1) / 2
                                                              : left;
        multiply[rows - 1](depth, s->tile.a + i * A_STRIDE, s->tile.panel, s->tile.c + i * C_STRIDE + column, first);
        if (last)
            finish(p, s->tile.c, i, rows, column, columns);
    }
}

static void compute_tile(const struct product *p, union scratch *s) {
    for (int64_t d = 0; d < p->depth; d += DEPTH_CHUNK) {
        int depth = min_int(DEPTH_CHUNK, p->depth - d);
        dequantize_rows(s->tile.a, A_STRIDE, p, d, depth);
        for (int j = 0; j < p->columns; j += PANEL) {
            int64_t at = j * p->stride + d;
            pack_panel(s->tile.panel, p->b + at, p->b_scale + at / MX_BLOCK, p->stride, min_int(PANEL, p->columns - j),
                       depth);
            for (int i = j + PANEL; i < min_int(j + 2 * PANEL, p->columns); i++)
                prefetch_row(p->b + i * p->stride + d, depth);
            multiply_panel(p, s, j, depth, d == 0, d + depth == p->depth);
        }
    }
}

static void compute_zero(const struct product *p, union scratch *s) {
    memset(s->tile.c, 0, sizeof(float) * C_STRIDE * (size_t)p->rows);
    finish(p, s->tile.c, 0, p->rows, 0, p->columns);
}

// sums[column][row] = the lanes' parts of dot products of a's rows and b's (+ sums unless `first`).
[[gnu::always_inline]] static inline void dot_rows(const int rows, int depth, const float *a, const uint8_t *const b[],
                                                   const uint8_t *const b_scale[], vfloat sums[][DOT_ROWS], int first) {
    const int columns = DOT_COLUMNS(rows);
    vfloat sum[DOT_MAX_COLUMNS][DOT_ROWS];
    bytes16 largest = {};
    UNROLL for (int j = 0; j < columns; j++) {
        UNROLL for (int i = 0; i < rows; i++) sum[j][i] = first ? (vfloat){} : sums[j][i];
    }
    for (int d = 0; d < depth; d += MX_BLOCK) {
        UNROLL for (int half = 0; half < MX_BLOCK; half += 16) {
            vfloat value[DOT_MAX_COLUMNS][16 / LANES];
            UNROLL for (int j = 0; j < columns; j++) {
                bytes16 code = load_bytes(b[j] + d + half);
                largest = __builtin_elementwise_max(largest, code | 0x80);
                e4m3_value(code, value[j]);
                vfloat factor = scale_value((vword){} + b_scale[j][d / MX_BLOCK]);
                UNROLL for (int l = 0; l < 16 / LANES; l++) value[j][l] *= factor;
            }
            UNROLL for (int l = 0; l < 16 / LANES; l++) {
                UNROLL for (int i = 0; i < rows; i++) {
                    vfloat x = load(a + i * DOT_STRIDE + d + half + l * LANES);
                    UNROLL for (int j = 0; j < columns; j++) sum[j][i] += x * value[j][l];
                }
            }
        }
    }
    if (__builtin_expect(saw_nan(largest), 0))
        for (int j = 0; j < columns; j++)
            for (int d = 0; d < depth; d++)
                if (is_nan_code(b[j][d]))
                    for (int i = 0; i < rows; i++)
                        sum[j][i] += __builtin_nanf("");
    UNROLL for (int j = 0; j < columns; j++) {
        UNROLL for (int i = 0; i < rows; i++) sums[j][i] = sum[j][i];
    }
}

#define DEFINE_DOT(rows)                                                                                               \
    static void dot_##rows(int depth, const float *a, const uint8_t *const b[], const uint8_t *const b_scale[],        \
                           vfloat sums[][DOT_ROWS], int first) {                                                       \
        dot_rows(rows, depth, a, b, b_scale, sums, first);                                                             \
    }
#define LIST_DOT(rows) dot_##rows,
ROW_COUNTS_8(DEFINE_DOT)
static void (*const dot[])(int, const float *, const uint8_t *const[], const uint8_t *const[], vfloat[][DOT_ROWS],
                           int) = {ROW_COUNTS_8(LIST_DOT)};

static inline float sum_lanes(vfloat v) {
    float lane[LANES];
    store(lane, v);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++)
            lane[i] += lane[i + width];
    return lane[0];
}

// Dot products of up to DOT_ROWS rows of `a` with rows of b, which are dequantized in registers. In the last step,
// columns past the product's repeat the last one.
static void compute_dot(const struct product *p, union scratch *s) {
    const int step = DOT_COLUMNS(p->rows);
    for (int64_t d = 0; d < p->depth; d += DOT_DEPTH) {
        int depth = min_int(DOT_DEPTH, p->depth - d);
        dequantize_rows(s->dot.a, DOT_STRIDE, p, d, depth);
        for (int j = 0; j < p->columns; j += step) {
            const uint8_t *b[DOT_MAX_COLUMNS], *b_scale[DOT_MAX_COLUMNS];
            for (int i = 0; i < step; i++) {
                int64_t at = min_int(j + i, p->columns - 1) * p->stride + d;
                b[i] = p->b + at;
                b_scale[i] = p->b_scale + at / MX_BLOCK;
                if (j + i + DOT_AHEAD < p->columns)
                    prefetch_row(p->b + (j + i + DOT_AHEAD) * p->stride + d, depth);
            }
            dot[p->rows - 1](depth, s->dot.a, b, b_scale, s->dot.sums + j, d == 0);
        }
    }
    for (int j = 0; j < p->columns; j++)
        for (int i = 0; i < p->rows; i++)
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
    int64_t chunks = (count + largest - 1) / largest;
    int64_t size = mx_round_up((count + chunks - 1) / chunks, multiple);
    return (struct cut){count, size, (count + size - 1) / size};
}

static struct cut cut_rows(int64_t rows) { return make_cut(rows, ROW_CHUNK, KERNEL_ROWS); }

static struct cut cut_columns(int64_t columns, int64_t row_chunks, int threads) {
    int64_t largest = COLUMN_CHUNK;
    while (largest > MIN_COLUMN_CHUNK && row_chunks * ((columns + largest - 1) / largest) < TASKS_PER_THREAD * threads)
        largest /= 2;
    return make_cut(columns, largest, PANEL);
}

static int chunk_size(const struct cut *cut, int64_t chunk) { return min_int(cut->size, cut->count - chunk * cut->size); }

// The workspace: `per_group` numbers, then each thread's scratch.
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
    int padding = group == args->groups;
    int64_t b_row = padding ? 0 : group * args->n + column;
    struct product p = {
        .a = args->a + row * args->k,
        .a_scale = args->a_scale + row * args->k / MX_BLOCK,
        .b = args->b + b_row * args->k,
        .b_scale = args->b_scale + b_row * args->k / MX_BLOCK,
        .stride = args->k,
        .depth = padding ? 0 : args->k,
        .rows = chunk_size(&rows, row_chunk),
        .columns = chunk_size(&job->columns, column_chunk),
        .bias = args->bias && !padding ? args->bias + b_row : NULL,
        .out = (char *)args->out + (row * args->n + column) * (args->out_type == MX_BF16 ? 2 : 4),
        .out_stride = args->n,
        .type = args->out_type,
    };
    union scratch *s = job->scratch + thread;
    if (p.depth == 0)
        compute_zero(&p, s);
    else if (rows.count <= DOT_ROWS)
        compute_dot(&p, s);
    else
        compute_tile(&p, s);
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
    int64_t a_at = row * args->depth + job->begin[group], b_at = column * args->depth + job->begin[group];
    struct product p = {
        .a = args->a + a_at,
        .a_scale = args->a_scale + a_at / MX_BLOCK,
        .b = args->b + b_at,
        .b_scale = args->b_scale + b_at / MX_BLOCK,
        .stride = args->depth,
        .depth = mx_round_up(tokens, MX_BLOCK),
        .rows = chunk_size(&job->rows, row_chunk),
        .columns = chunk_size(&job->columns, column_chunk),
        .out = (char *)args->out + ((group * args->n + row) * args->k + column) * (args->out_type == MX_BF16 ? 2 : 4),
        .out_stride = args->k,
        .type = args->out_type,
        .accumulate = args->accumulate,
    };
    if (p.depth > 0)
        compute_tile(&p, job->scratch + thread);
    else if (!p.accumulate)
        compute_zero(&p, job->scratch + thread);
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
