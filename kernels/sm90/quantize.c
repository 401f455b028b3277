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
//           x is at least as aligned as its elements, data 16 bytes, scale 1 byte. Nothing else is asked for; rows of
//           x that start at multiples of 16 bytes are read 16 bytes at a time, others by elements.
// Grid      x: ceil(cols / 128) column tiles. y * z, split in any way: batch * token tiles or more. Token tiles:
//              without offs             ceil(rows / 128); the rows kernels take batch * rows for rows, 1 for batch
//              with offs, both          mx_padded_tokens(rows, groups + 1) / 128
//              with offs, cols          col_k / 128
//           Nothing to launch when either is 0. No workspace, no dynamic shared memory. Fewer than 2^32 token tiles.
// Tile      128 rows x 128 columns. With offs every group starts a token tile, so token tile t has exactly the columns
//           from 128 t of the transposed copy; each warp finds its tile's group itself (find_tile). The tiles after the
//           last group have the rows past offs[groups - 1], which are in no column, and the columns past the last
//           group's, which are zeros. offs may hold anything: what it gives is clamped to x.
// Lane      lane l of warp w holds rows 32 (w / 2) + 8 (l / 8) .. + 7 of columns 64 (w % 2) + 8 (l % 8) .. + 7: a
//           row-block is 4 lanes side by side, a column-block 4 lanes 8 apart.
// Shared    row_codes [128 rows][128 bytes]: bytes 8 d .. + 7 of row r are double word d ^ (r / 8) % 2 * 8 there.
//           col_codes [128 columns][128 bytes]: of column c, double word d ^ (c / 8) % 8 * 2.
//           So the 16 lanes of an 8-byte write and the 8 lanes of a 16-byte read each meet every bank once.
//           row_scale [128 rows][4 blocks], col_scale [128 columns][4 blocks], bytes.
// Registers both: 64 with bf16, 126 with f32; rows or cols: 48 and 80. No spills.
// Tails     rows and columns that x does not have count as zeros. Stores are cut to rows, cols, row_k, col_k: chunks of
//           16 bytes are in or out whole, as those are multiples of 32.
//
// Source: PTX ISA 8.8 (cvt.rn.satfinite.e4m3x2: NaN gives 0x7f; 16-bit max; shfl.sync).
#include "../mx_scale.h"
#include "device.h"

#define GLOBAL __attribute__((address_space(1)))

enum {
    TILE = MX_GROUP_ALIGN,
    BLOCKS = TILE / MX_BLOCK,
    WARP = 32,
    THREADS = 256,
    WARP_COLS = 64,
    CHUNK = 8,           // rows and columns of a lane
    PAIRS = CHUNK / 2,   // a lane's blocks go by twos, 16 bits each
    GROUPS_PER_LANE = 4, // in find_tile
    NAN_FACTOR = 0x7fff, // bf16
};
enum : uint32_t { ALL_LANES = 0xffffffff };

typedef mx_words pair;
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

// Of each of a lane's 8 blocks in one direction, a bf16: first its amax, then its factor, 2^(127 - scale).
struct blocks {
    uint32_t two[PAIRS]; // blocks (0, 1), (2, 3), ...
};

INLINE uint32_t block_x(void) { return (uint32_t)__nvvm_read_ptx_sreg_ctaid_x(); }
INLINE uint32_t block_y(void) { return (uint32_t)__nvvm_read_ptx_sreg_ctaid_y(); }
INLINE uint32_t block_z(void) { return (uint32_t)__nvvm_read_ptx_sreg_ctaid_z(); }
INLINE uint32_t grid_x(void) { return (uint32_t)__nvvm_read_ptx_sreg_nctaid_x(); }
INLINE uint32_t grid_y(void) { return (uint32_t)__nvvm_read_ptx_sreg_nctaid_y(); }

INLINE uint32_t lane_id(void) { return thread_id() % WARP; }
INLINE uint32_t warp_id(void) { return thread_id() / WARP; }
INLINE uint32_t lane_row(void) { return warp_id() / 2 * MX_BLOCK + lane_id() / CHUNK * CHUNK; }
INLINE uint32_t lane_col(void) { return warp_id() % 2 * WARP_COLS + lane_id() % CHUNK * CHUNK; }
INLINE int32_t clamp_tile(int64_t n) { return (int32_t)max64(0, min64(n, TILE)); }

INLINE uint32_t low_halves(uint32_t a, uint32_t b) { return (a & 0xffff) | b << 16; }
INLINE uint32_t high_halves(uint32_t a, uint32_t b) { return a >> 16 | (b & 0xffff0000); }
INLINE uint32_t max_pairs(uint32_t a, uint32_t b) {
    pair v = __builtin_elementwise_max(__builtin_bit_cast(pair, a), __builtin_bit_cast(pair, b));
    return __builtin_bit_cast(uint32_t, v);
}

INLINE uint32_t from_lane(uint32_t v, uint32_t from) {
    return (uint32_t)__nvvm_shfl_sync_idx_i32(ALL_LANES, (int)v, (int)from, WARP - 1);
}
INLINE uint32_t from_lane_xor(uint32_t v, uint32_t mask) {
    return (uint32_t)__nvvm_shfl_sync_bfly_i32(ALL_LANES, (int)v, (int)mask, WARP - 1);
}

// Sum over this lane and those below it.
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

// Token tile `wanted`: each lane takes some groups, so 128 groups are one step.
INLINE struct tile find_tile(const struct mx_quantize_args *args, uint32_t wanted, bool want_rows) {
    const GLOBAL int32_t *offs = (const GLOBAL int32_t *)args->offs;
    int32_t rows = (int32_t)min64(args->rows, INT32_MAX), groups = (int32_t)args->groups, last = 0;
    uint32_t first = 0, lane = lane_id(); // first: of the tiles of this step's groups
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
            uint32_t index = wanted - before; // holds for anything in offs: it is below tiles[i], so row is below end
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
            row = (int32_t)from_lane((uint32_t)row, source);
            stop = (int32_t)from_lane((uint32_t)stop, source);
            return (struct tile){.row = row, .rows = clamp_tile(stop - row), .in_group = true};
        }
        first = from_lane(through, WARP - 1);
        last = (int32_t)from_lane((uint32_t)end[GROUPS_PER_LANE], WARP - 1);
    }
    int64_t row = last + (int64_t)(wanted > first ? wanted - first : 0) * TILE;
    return (struct tile){.row = row, .rows = want_rows ? clamp_tile(args->rows - row) : 0, .in_group = false};
}

// ------------------------------------------------------------------------------------------------------------- loading

// The lane's elements of the tile at x, which has rows x cols of them. Those it does not have are zeros.
INLINE struct elements load(const GLOBAL char *x, int64_t stride, int32_t rows, int32_t cols, int32_t type) {
    const int32_t size = type == MX_BF16 ? 2 : 4, in_quad = 16 / size, quads = CHUNK / in_quad;
    int32_t row = (int32_t)lane_row(), col = (int32_t)lane_col();
    const GLOBAL char *from = x + row * stride + col * size;
    struct elements e;
    if (((uintptr_t)x | (uint64_t)stride) % 16 == 0) { // then cols cuts no quad
        UNROLL for (int i = 0; i < CHUNK; i++) {
            UNROLL for (int q = 0; q < quads; q++) {
                u32x4 v = {};
                if (row + i < rows && col + q * in_quad < cols)
                    v = *(const GLOBAL u32x4 *)(from + i * stride + q * 16);
                UNROLL for (int k = 0; k < 4; k++) e.word[i][4 * q + k] = v[k];
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
        UNROLL for (int j = 0; j < (type == MX_BF16 ? PAIRS : CHUNK); j++) asm volatile("" : "+r"(e->word[i][j]));
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
        UNROLL for (int j = 0; j < CHUNK; j++) v[j] = value_at(e, i, j, type);
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
        UNROLL for (int i = 0; i < CHUNK; i++) v[i] = value_at(e, i, j, type);
        uint32_t col = lane_col() + (uint32_t)j;
        col_codes[col][lane_row() / CHUNK ^ col / 8 % 8 * 2] = eight_codes(v, bf16_at(factors.two, j));
    }
}

// ------------------------------------------------------------------------------------------------------------- storing

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

// 128 lines of 128 bytes: 4 times 4 of them by each warp.
INLINE void store_codes(const struct target *to, enum source source) {
    uint32_t chunk = thread_id() % 8, first = thread_id() / 8;
    GLOBAL uint8_t *at = to->data + first * to->stride + chunk * 16;
    UNROLL for (uint32_t k = 0; k < TILE; k += THREADS / 8) {
        uint32_t line = first + k;
        u32x4 v = {};
        if (source == ROWS)
            v = *(const SHARED u32x4 *)&row_codes[line][chunk * 2 ^ line / 8 % 2 * 8];
        if (source == COLS)
            v = *(const SHARED u32x4 *)&col_codes[line][chunk * 2 ^ line / 8 % 8 * 2];
        if ((int32_t)line < to->lines && (int32_t)chunk * 16 < to->width)
            *(GLOBAL u32x4 *)(at + k * to->stride) = v;
    }
}

// By half of the threads, one line each.
INLINE void store_scales(const struct target *to, enum source source) {
    uint32_t line = thread_id() % TILE, v = 0;
    if (source == ROWS)
        v = *(const SHARED uint32_t *)row_scale[line];
    if (source == COLS)
        v = *(const SHARED uint32_t *)col_scale[line];
    if ((int32_t)line >= to->lines)
        return;
    GLOBAL uint8_t *at = to->scale + line * (to->stride / MX_BLOCK);
    if (to->width == TILE && (uintptr_t)at % 4 == 0) {
        *(GLOBAL uint32_t *)at = v;
        return;
    }
    UNROLL for (int b = 0; b < BLOCKS; b++) {
        if (b * MX_BLOCK < to->width)
            at[b] = (uint8_t)(v >> 8 * b);
    }
}

// ------------------------------------------------------------------------------------------------------------- kernels

INLINE void quantize_tile(const struct mx_quantize_args *args, struct tile tile, int64_t matrix, int64_t token,
                          int64_t col, int32_t type, bool want_rows, bool want_cols) {
    const int64_t size = type == MX_BF16 ? 2 : 4;
    bool first_half = thread_id() < THREADS / 2;
    int32_t cols = clamp_tile(args->cols - col);
    int64_t row = matrix * args->rows + tile.row, line = matrix * args->cols + col;
    if (want_cols && !tile.in_group) {
        struct target by_cols = target_at(args->col_data, args->col_scale, line, args->col_k, token, cols);
        store_codes(&by_cols, ZEROS);
        if (first_half)
            store_scales(&by_cols, ZEROS);
        want_cols = false;
    }
    if (tile.rows == 0)
        return;

    const GLOBAL char *x = (const GLOBAL char *)args->x + (row * args->cols + col) * size;
    struct elements e = load(x, args->cols * size, tile.rows, cols, type);
    uint32_t threshold = mx_rounding_threshold(args->rounding);
    if (want_rows)
        encode_rows(&e, type, threshold);
    if (want_rows && want_cols)
        forget(&e, type);
    if (want_cols)
        encode_cols(&e, type, threshold);
    sync_block();

    struct target by_rows = target_at(args->row_data, args->row_scale, row, args->row_k, col, tile.rows);
    struct target by_cols = target_at(args->col_data, args->col_scale, line, args->col_k, token, cols);
    if (want_rows)
        store_codes(&by_rows, ROWS);
    if (want_cols)
        store_codes(&by_cols, COLS);
    if (want_rows && first_half)
        store_scales(&by_rows, ROWS);
    if (want_cols && !first_half)
        store_scales(&by_cols, COLS);
}

INLINE void quantize(struct mx_quantize_args args, int32_t type, bool want_rows, bool want_cols) {
    if (!want_cols) {
        args.rows *= args.batch;
        args.batch = 1;
    }
    bool by_group = args.offs && want_cols;
    uint32_t tiles = (uint32_t)((args.rows + TILE - 1) / TILE);
    if (by_group)
        tiles = (uint32_t)((want_rows ? mx_padded_tokens(args.rows, args.groups + 1) : args.col_k) / TILE);
    uint32_t t = block_z() * grid_y() + block_y(), matrix = 0;
    if (args.batch > 1) {
        matrix = t / tiles;
        t -= matrix * tiles;
    }
    if (matrix >= args.batch || t >= tiles)
        return;
    struct tile tile = by_group ? find_tile(&args, t, want_rows) : plain_tile(args.rows, t);
    quantize_tile(&args, tile, matrix, (int64_t)t * TILE, (int64_t)block_x() * TILE, type, want_rows, want_cols);
}

#define QUANTIZE(name, type, want_rows, want_cols, blocks)                                                             \
    KERNEL(mx_quantize_##name##_sm90, 256, blocks)(struct mx_quantize_args args) {                                     \
        quantize(args, type, want_rows, want_cols);                                                                    \
    }
QUANTIZE(rows_bf16, MX_BF16, true, false, 5)
QUANTIZE(cols_bf16, MX_BF16, false, true, 5)
QUANTIZE(both_bf16, MX_BF16, true, true, 4)
QUANTIZE(rows_f32, MX_F32, true, false, 3)
QUANTIZE(cols_f32, MX_F32, false, true, 3)
QUANTIZE(both_f32, MX_F32, true, true, 2)

// Thread `first` of `step` does its share, by 16 bytes where that is possible.
INLINE void clear(GLOBAL uint8_t *at, int64_t bytes, int64_t first, int64_t step) {
    if (((uintptr_t)at | (uint64_t)bytes) % 16 == 0) {
        GLOBAL u32x4 *quads = (GLOBAL u32x4 *)at;
        ROLLED for (int64_t i = first; i < bytes / 16; i += step) quads[i] = (u32x4)0;
    } else {
        ROLLED for (int64_t i = first; i < bytes; i += step) at[i] = 0;
    }
}

// Clears the columns of a plain-layout operand from offs[groups - 1] on: struct mx_padding_args, of any alignment, one
// warp a row. Grid x: ceil(rows / 8) blocks, y: blocks along the columns, 512 bytes of them a step; blocks stride over
// what is left.
KERNEL(mx_zero_padding_sm90, 256, 8)(struct mx_padding_args args) {
    int64_t used = args.groups ? ((const GLOBAL int32_t *)args.offs)[args.groups - 1] : 0;
    used = max64(0, min64(used, args.depth)) / MX_BLOCK * MX_BLOCK;
    int64_t bytes = args.depth - used, first = (int64_t)block_y() * WARP + lane_id(), step = (int64_t)grid_y() * WARP;
    int64_t first_row = (int64_t)block_x() * (THREADS / WARP) + warp_id();
    ROLLED for (int64_t row = first_row; row < args.rows; row += (int64_t)grid_x() * (THREADS / WARP)) {
        int64_t start = row * args.depth + used;
        clear((GLOBAL uint8_t *)args.data + start, bytes, first, step);
        clear((GLOBAL uint8_t *)args.scale + start / MX_BLOCK, bytes / MX_BLOCK, first, step);
    }
}
