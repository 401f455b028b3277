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
//           x is at least as aligned as its elements, data 16 bytes, scale 1 byte. Nothing else is asked for.
// Grid      x: ceil(cols / 128) column tiles. y * z, split in any way: batch * token tiles or more. Token tiles:
//              without offs             ceil(rows / 128); the rows kernels take batch * rows for rows, 1 for batch
//              with offs, both          mx_padded_tokens(rows, groups + 1) / 128
//              with offs, cols          col_k / 128
//           Nothing to launch when either is 0. No workspace, LDS is static. Fewer than 2^32 token tiles.
// Tile      128 rows x 128 columns. With offs every group starts a token tile, so token tile t has exactly the columns
//           from 128 t of the transposed copy; each wave finds its tile's group itself (find_tile). The tiles after the
//           last group have the rows past offs[groups - 1], which are in no column, and the columns past the last
//           group's, which are zeros. offs may hold anything: what it gives is clamped to x.
// Lane      lane l of wave w holds rows 32w + 8(l / 16) .. + 7 of columns 8(l % 16) .. + 7: a row-block is 4 lanes side
//           by side, a column-block 4 lanes 16 apart.
// LDS       row_codes [128 rows][128 bytes]: what a wave wrote it also reads.
//           col_codes [128 columns][128 bytes]: chunk p of 16 bytes of column c is at row c ^ (c / 64) and there at
//           chunk p ^ (c / 8) % 8, so that neither 8-byte writes by 16 lanes, 8 columns apart, nor 16-byte reads along
//           columns meet in a bank.
//           row_scale [128 rows][4 blocks], col_scale [128 columns][4 blocks], bytes.
// Tails     rows and columns that x does not have count as zeros. Stores are cut to rows, cols, row_k, col_k: chunks of
//           16 bytes are in or out whole, as those are multiples of 32.
//
// Sources: CDNA4 ISA, section 6 (conversions; of the scale operand the exponent byte alone counts), 11 (LDS: 64 banks).
#include "../mx_scale.h"
#include "device.h"

enum {
    TILE = MX_GROUP_ALIGN,
    BLOCKS = TILE / MX_BLOCK,
    WAVE = 64,
    THREADS = MX_GFX950_THREADS,
    CHUNK = 8,           // rows and columns of a lane
    PAIRS = CHUNK / 2,   // a lane's blocks go by twos, 16 bits each
    GROUPS_PER_LANE = 4, // in find_tile
    NAN_CODES = 0x7f7f7f7f,
    // Below, bf16's subnormals count, and scale 0 is 2^-127, itself subnormal: what the scaled conversion makes of
    // either is not documented well enough to rely on.
    FAST_SCALE = 11,
};

typedef mx_words pair;
typedef uint32_t double_word __attribute__((ext_vector_type(2)));
typedef u32x4 loose_quad __attribute__((aligned(2)));
typedef uint32_t loose_word __attribute__((aligned(1)));
typedef float float_pair __attribute__((ext_vector_type(2)));
typedef __bf16 bf16_pair __attribute__((ext_vector_type(2)));
typedef int16_t code_pair __attribute__((ext_vector_type(2)));

static LDS uint8_t row_codes[TILE][TILE] __attribute__((loader_uninitialized, aligned(1024)));
static LDS uint8_t col_codes[TILE][TILE] __attribute__((loader_uninitialized, aligned(1024)));
static LDS uint8_t row_scale[TILE][BLOCKS] __attribute__((loader_uninitialized, aligned(16)));
static LDS uint8_t col_scale[TILE][BLOCKS] __attribute__((loader_uninitialized, aligned(16)));

struct tile {
    int64_t row;   // of x, where it starts
    int32_t rows;  // 0..TILE, from there
    bool in_group; // its rows are in the transposed copy
};

// A lane's elements: words [row][column], or with bf16 [row][pair of columns].
struct elements {
    uint32_t word[CHUNK][CHUNK];
};

// Of each of a lane's 8 blocks in one direction, 16 bits: first its amax as a bf16, then its scale.
struct blocks {
    uint32_t two[PAIRS]; // blocks (0, 1), (2, 3), ...
};

INLINE uint32_t lane_id(void) { return thread_id() % WAVE; }
INLINE uint32_t wave_id(void) { return uniform(thread_id() / WAVE); }
INLINE int32_t clamp_tile(int64_t n) { return (int32_t)max64(0, min64(n, TILE)); }

// Blocks of the grid along axis 0..2: the first hidden arguments.
INLINE uint32_t grid_size(int axis) { return ((const CONSTANT uint32_t *)__builtin_amdgcn_implicitarg_ptr())[axis]; }

// Orders LDS alone: a block's global loads and stores stay in flight.
INLINE void sync_lds(void) {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");
}

INLINE pair as_pair(uint32_t v) { return __builtin_bit_cast(pair, v); }
INLINE uint32_t of_pair(pair v) { return __builtin_bit_cast(uint32_t, v); }
INLINE uint32_t max_pairs(uint32_t a, uint32_t b) { return of_pair(__builtin_elementwise_max(as_pair(a), as_pair(b))); }
INLINE uint32_t low_halves(uint32_t a, uint32_t b) { return __builtin_amdgcn_perm(b, a, 0x05040100); }
INLINE uint32_t high_halves(uint32_t a, uint32_t b) { return __builtin_amdgcn_perm(b, a, 0x07060302); }

#define DPP_ALL(v, control) (uint32_t)__builtin_amdgcn_update_dpp(0, (int)(v), control, 0xf, 0xf, true)
#define DPP_ROWS(v, control, rows) (uint32_t)__builtin_amdgcn_update_dpp(0, (int)(v), control, rows, 0xf, false)
#define QUAD_PERM(a, b, c, d) ((a) | (b) << 2 | (c) << 4 | (d) << 6)

// Sum over this lane and those below it.
INLINE uint32_t prefix_sum(uint32_t v) {
    v += DPP_ALL(v, 0x111); // row_shr 1, 2, 4, 8
    v += DPP_ALL(v, 0x112);
    v += DPP_ALL(v, 0x114);
    v += DPP_ALL(v, 0x118);
    v += DPP_ROWS(v, 0x142, 0xa); // row_bcast 15 and 31, to the rows after
    v += DPP_ROWS(v, 0x143, 0xc);
    return v;
}

INLINE struct tile plain_tile(int64_t rows, int64_t t) {
    return (struct tile){.row = t * TILE, .rows = clamp_tile(rows - t * TILE), .in_group = true};
}

// Token tile t: each lane takes some groups, so 256 groups are one step.
INLINE struct tile find_tile(const struct mx_quantize_args *args, uint32_t wanted, bool want_rows) {
    const GLOBAL int32_t *offs = (const GLOBAL int32_t *)args->offs;
    int32_t rows = (int32_t)min64(args->rows, INT32_MAX), last = 0;
    int32_t groups = (int32_t)args->groups;
    uint32_t first = 0, lane = lane_id(); // first: of the tiles of this step's groups
    ROLLED for (int32_t base = 0; base < groups; base += WAVE * GROUPS_PER_LANE) {
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
        uint64_t where = __builtin_amdgcn_ballot_w64(found);
        if (where) {
            int source = __builtin_ctzll(where);
            row = __builtin_amdgcn_readlane(row, source);
            stop = __builtin_amdgcn_readlane(stop, source);
            return (struct tile){.row = row, .rows = clamp_tile(stop - row), .in_group = true};
        }
        first = (uint32_t)__builtin_amdgcn_readlane((int)through, WAVE - 1);
        last = __builtin_amdgcn_readlane(end[GROUPS_PER_LANE], WAVE - 1);
    }
    int64_t row = last + (int64_t)(wanted > first ? wanted - first : 0) * TILE;
    return (struct tile){.row = row, .rows = want_rows ? clamp_tile(args->rows - row) : 0, .in_group = false};
}

// ------------------------------------------------------------------------------------------------------------- loading

// All ones when i < n: by arithmetic, as dozens of conditions at once do not fit the scalar registers.
INLINE uint32_t mask_below(int32_t i, int32_t n) { return (uint32_t)((i - n) >> 31); }

// Columns of a row to `word`: whole words of what x holds.
INLINE void load_chunk(uint32_t *word, const GLOBAL char *x, int32_t type) {
    UNROLL for (int q = 0; q < (type == MX_BF16 ? 1 : 2); q++) {
        u32x4 v = ((const GLOBAL loose_quad *)x)[q];
        UNROLL for (int k = 0; k < 4; k++) word[4 * q + k] = v[k];
    }
}

// The lane's elements of the tile at x, which has rows x cols of them, none 0. What it does not have is read elsewhere
// in the tile, so that no load leaves x, and then cleared.
INLINE struct elements load(const GLOBAL char *x, int64_t stride, int32_t rows, int32_t cols, bool whole_chunks,
                            int32_t type) {
    const int32_t size = type == MX_BF16 ? 2 : 4, words = type == MX_BF16 ? PAIRS : CHUNK;
    uint32_t lane = lane_id();
    int32_t lane_row = (int32_t)(wave_id() * MX_BLOCK + lane / 16 * CHUNK), lane_col = (int32_t)(lane % 16 * CHUNK);
    struct elements e;
    if (rows == TILE && cols == TILE) {
        const GLOBAL char *from = x + lane_row * stride + lane_col * size;
        UNROLL for (int i = 0; i < CHUNK; i++) load_chunk(e.word[i], from + i * stride, type);
        return e;
    }
    if (whole_chunks) {
        int32_t col = lane_col < cols ? lane_col : 0;
        UNROLL for (int i = 0; i < CHUNK; i++) {
            int32_t row = lane_row + i < rows ? lane_row + i : rows - 1;
            load_chunk(e.word[i], x + row * stride + col * size, type);
        }
        uint32_t col_mask = mask_below(lane_col, cols);
        UNROLL for (int i = 0; i < CHUNK; i++) {
            uint32_t mask = mask_below(lane_row + i, rows) & col_mask;
            UNROLL for (int j = 0; j < words; j++) e.word[i][j] &= mask;
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
INLINE pair fast_scale(pair scale) {
    return __builtin_elementwise_min(__builtin_elementwise_max(scale, (pair)FAST_SCALE), (pair)(MX_SCALE_NAN - 1));
}

// Nonzero where that changes what comes out.
INLINE pair is_special(pair scale, pair amax) { return __builtin_elementwise_min(fast_scale(scale) ^ scale, amax); }

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

// 128 lines of 128 bytes: 4 times 8 of them by each wave.
INLINE void store_codes(const struct target *to, enum source source) {
    uint32_t lane = lane_id(), wave = wave_id(), chunk = lane % 8, first = wave * 32 + lane / 8;
    GLOBAL uint8_t *at = to->data + first * to->stride + chunk * 16;
    UNROLL for (uint32_t k = 0; k < 4; k++) {
        uint32_t line = first + k * 8;
        u32x4 v = {};
        if (source == ROWS)
            v = *(const LDS u32x4 *)&row_codes[line][chunk * 16];
        if (source == COLS)
            v = *(const LDS u32x4 *)&col_codes[line ^ wave / 2][(chunk ^ (wave * 4 + k) % 8) * 16];
        if ((int32_t)line < to->lines && (int32_t)chunk * 16 < to->width)
            *(GLOBAL u32x4 *)(at + k * 8 * to->stride) = v;
    }
}

// By two waves, one line a lane.
INLINE void store_scales(const struct target *to, enum source source) {
    uint32_t line = thread_id() % TILE, v = 0;
    if (source == ROWS)
        v = *(const LDS uint32_t *)row_scale[line];
    if (source == COLS)
        v = *(const LDS uint32_t *)col_scale[line];
    if ((int32_t)line >= to->lines)
        return;
    GLOBAL uint8_t *at = to->scale + line * (to->stride / MX_BLOCK);
    if (to->width == TILE)
        *(GLOBAL loose_word *)at = v;
    else
        UNROLL for (int b = 0; b < BLOCKS; b++) {
            if (b * MX_BLOCK < to->width)
                at[b] = (uint8_t)(v >> 8 * b);
        }
}

// ------------------------------------------------------------------------------------------------------------- kernels

INLINE void quantize_tile(const struct mx_quantize_args *args, struct tile tile, int64_t matrix, int64_t token,
                          int64_t col, int32_t type, bool want_rows, bool want_cols) {
    const int64_t size = type == MX_BF16 ? 2 : 4;
    uint32_t lane = lane_id(), wave = wave_id(), chunk = lane % 16, group = lane / 16;
    bool first_half = wave < 2;
    int32_t cols = clamp_tile(args->cols - col);
    int64_t row = matrix * args->rows + tile.row;
    struct target by_rows = target_at(args->row_data, args->row_scale, row, args->row_k, col, tile.rows);
    struct target by_cols =
        target_at(args->col_data, args->col_scale, matrix * args->cols + col, args->col_k, token, cols);
    if (want_cols && !tile.in_group) {
        store_codes(&by_cols, ZEROS);
        if (first_half)
            store_scales(&by_cols, ZEROS);
        want_cols = false;
    }
    if (tile.rows == 0)
        return;

    const GLOBAL char *x = (const GLOBAL char *)args->x + (row * args->cols + col) * size;
    struct elements e = load(x, args->cols * size, tile.rows, cols, cols % CHUNK == 0, type);

    struct blocks row_amax, col_amax;
    lane_amax(&e, type, &row_amax, &col_amax);
    uint16_t bump = mx_rounding_bump(args->rounding);
    pair rows_pair = {}, cols_pair = {}, special = {};
    if (want_rows) {
        pair amax = as_pair(reduce_rows(&row_amax));
        rows_pair = mx_scales_of_words(amax, bump);
        special |= is_special(rows_pair, amax);
        uint32_t line = wave * MX_BLOCK + group * CHUNK + lane % 4 * 2;
        row_scale[line][chunk / 4] = (uint8_t)rows_pair.x;
        row_scale[line + 1][chunk / 4] = (uint8_t)rows_pair.y;
    }
    if (want_cols) {
        pair amax = as_pair(reduce_cols(&col_amax));
        cols_pair = mx_scales_of_words(amax, bump);
        special |= is_special(cols_pair, amax);
        uint32_t line = chunk * CHUNK + group * 2;
        col_scale[line][wave] = (uint8_t)cols_pair.x;
        col_scale[line + 1][wave] = (uint8_t)cols_pair.y;
    }

    // Only these modes never saturate.
    bool fits = args->rounding == MX_ROUND_rceil || args->rounding == MX_ROUND_ceil;
    bool fast = type == MX_BF16 && fits && !__builtin_amdgcn_ballot_w64(of_pair(special));
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
    sync_lds();

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
    uint32_t t = __builtin_amdgcn_workgroup_id_z() * grid_size(1) + __builtin_amdgcn_workgroup_id_y(), matrix = 0;
    if (args.batch > 1) {
        matrix = t / tiles;
        t -= matrix * tiles;
    }
    if (matrix >= args.batch || t >= tiles)
        return;
    int64_t col = (int64_t)__builtin_amdgcn_workgroup_id_x() * TILE;
    struct tile tile = by_group ? find_tile(&args, t, want_rows) : plain_tile(args.rows, t);
    quantize_tile(&args, tile, matrix, (int64_t)t * TILE, col, type, want_rows, want_cols);
}

// `waves` is what the registers must leave room for on each SIMD: LDS allows no more than 4 of both.
#define QUANTIZE(name, type, want_rows, want_cols, waves)                                                              \
    KERNEL __attribute__((amdgpu_waves_per_eu(waves))) void mx_quantize_##name##_gfx950(                               \
        struct mx_quantize_args args) {                                                                                \
        quantize(args, type, want_rows, want_cols);                                                                    \
    }
QUANTIZE(rows_bf16, MX_BF16, true, false, 4)
QUANTIZE(cols_bf16, MX_BF16, false, true, 4)
QUANTIZE(both_bf16, MX_BF16, true, true, 4)
QUANTIZE(rows_f32, MX_F32, true, false, 4)
QUANTIZE(cols_f32, MX_F32, false, true, 4)
QUANTIZE(both_f32, MX_F32, true, true, 3)

// Clears the columns of a plain-layout operand from offs[groups - 1] on: struct mx_padding_args, one wave a row.
// Grid x: ceil(rows / 4) blocks, y: blocks along the columns, 1 KB of them a step; blocks stride over what is left.
KERNEL void mx_zero_padding_gfx950(struct mx_padding_args args) {
    int64_t used = args.groups ? ((const GLOBAL int32_t *)args.offs)[args.groups - 1] : 0;
    used = max64(0, min64(used, args.depth)) / MX_BLOCK * MX_BLOCK;
    int64_t rows_step = (int64_t)grid_size(0) * (THREADS / WAVE), step = (int64_t)grid_size(1) * WAVE;
    int64_t first_row = (int64_t)__builtin_amdgcn_workgroup_id_x() * (THREADS / WAVE) + wave_id();
    int64_t first = (int64_t)__builtin_amdgcn_workgroup_id_y() * WAVE + lane_id();
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
