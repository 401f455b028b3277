/* The scaled matrix instructions.
 * Source: CDNA4 ISA 7.1.5, 7.3; lane layouts agree with the hardware dumps that Composable Kernel publishes.
 * Accumulation inside one f8f6f4 MFMA is undocumented. Default (EMU_SUM_WIDE): each 32-block's dot product is exact in
 * double, blocks are scaled and added to C in double in k order, one RNE to f32. EMU_SUM_RJ: per block a chain of f32
 * FMAs in k order, then acc += ldexp(block). Operands are decoded once per instruction into [k][row] and [k][column].
 */
#include <math.h>
#include <pthread.h>

#include "exec.h"
#include "formats.h"

/* ---- tables ---- */
static double format_table[5][256];
static double scale_table[256];
static pthread_once_t tables_once = PTHREAD_ONCE_INIT;

static void build_tables(void) {
    for (int f = 0; f < 5; f++)
        for (int code = 0; code < 256; code++)
            format_table[f][code] = emu_fp8_to_f32((uint8_t)code, f);
    for (int s = 0; s < 255; s++)
        scale_table[s] = ldexp(1, s - 127);
    scale_table[255] = __builtin_nan("");
}

/* ---- operands ---- */
enum { BLOCK = 32 };

/* code number n (0..31) that lane holds */
static unsigned element(const uint32_t *lane, unsigned format, unsigned n) {
    size_t width = format < 2 ? 8 : format < 4 ? 6 : 4, bit = n * width;
    uint64_t two = lane[(bit / 32) * EMU_LANES];
    if (bit % 32 + width > 32)
        two |= (uint64_t)lane[(bit / 32 + 1) * EMU_LANES] << 32;
    return (unsigned)(two >> (bit % 32)) & ((1u << width) - 1);
}

/* logical k of code n in lane group g: F8 data of a lane lies in two runs of 16 that are half of K apart */
static unsigned logical_k(unsigned format, unsigned k_total, unsigned g, unsigned n) {
    if (format >= 2)
        return 32 * g + n;
    return n < 16 ? 16 * g + n : k_total / 2 + 16 * g + (n - 16);
}

/* out[k][line]: line = row of A or column of B */
static void decode_operand(const struct emu_wave *w, const struct emu_operand *o, unsigned format, size_t lines,
                           unsigned k_total, double *out) {
    const uint32_t *regs = (const uint32_t *)&w->v[o->reg];
    const double *table = format_table[format];
    for (unsigned n = 0; n < 32; n++)
        for (unsigned g = 0; g < EMU_LANES / lines; g++) {
            double *row = out + logical_k(format, k_total, g, n) * lines;
            const uint32_t *lane = regs + g * lines;
            if (format < 2) /* the common case: bytes */
                for (unsigned l = 0; l < lines; l++)
                    row[l] = table[lane[n / 4 * EMU_LANES + l] >> (8 * (n % 4)) & 0xff];
            else
                for (unsigned l = 0; l < lines; l++)
                    row[l] = table[element(lane + l, format, n)];
        }
}

/* out[line + lines * block] = scale of that row or column and 32-block: the chosen byte of the lane of that number */
static void decode_scales(const struct emu_wave *w, const struct emu_inst *i, unsigned n, double *out) {
    if (i->nsrc < 5) {
        for (unsigned l = 0; l < EMU_LANES; l++)
            out[l] = 1;
        return;
    }
    unsigned byte = (i->opsel >> n & 1u) | (i->opsel_hi >> n & 1u) << 1;
    for (unsigned l = 0; l < EMU_LANES; l++)
        out[l] = scale_table[w->v[i->src[3 + n].reg][l] >> (8 * byte) & 0xff];
}

static float overflow_rule(const struct emu_wave *w, float x) {
    if (w->ovfl && __builtin_isinf(x))
        return __builtin_copysignf(3.4028234663852886e38f, x);
    return x;
}

typedef double vec16 __attribute__((vector_size(128)));
struct tile {
    size_t rows, k;
    double a[128 * 16] __attribute__((aligned(128))),
        b[128 * 16] __attribute__((aligned(128))); /* A[k][row], B[k][column] */
    double sa[EMU_LANES], sb[EMU_LANES] __attribute__((aligned(128)));
    float c[32 * 32];
};

/* Four rows by 16 columns. Products of two elements and sums of 32 of them are exact in double, so FMA changes nothing.
 */
static void sum_strip(const struct emu_wave *w, struct tile *t, unsigned row, unsigned col) {
    enum { STRIP = 4 };
    size_t n = t->rows;
    vec16 total[STRIP];
    for (unsigned r = 0; r < STRIP; r++)
        for (unsigned j = 0; j < 16; j++)
            total[r][j] = t->c[(row + r) * n + col + j];
    for (size_t block = 0; block < t->k / BLOCK; block++) {
        vec16 sum[STRIP] = {}, scale = *(const vec16 *)(t->sb + n * block + col);
        for (size_t k = block * BLOCK; k < (block + 1) * BLOCK; k++) {
            vec16 b = *(const vec16 *)(t->b + k * n + col);
            for (unsigned r = 0; r < STRIP; r++)
                sum[r] = __builtin_elementwise_fma((vec16){} + t->a[k * n + row + r], b, sum[r]);
        }
        for (unsigned r = 0; r < STRIP; r++)
            total[r] += sum[r] * (scale * t->sa[n * block + row + r]);
    }
    for (unsigned r = 0; r < STRIP; r++)
        for (unsigned j = 0; j < 16; j++)
            t->c[(row + r) * n + col + j] = overflow_rule(w, (float)total[r][j]);
}

static void sum_wide(const struct emu_wave *w, struct tile *t) {
    for (unsigned row = 0; row < t->rows; row += 4)
        for (unsigned col = 0; col < t->rows; col += 16)
            sum_strip(w, t, row, col);
}

static void sum_rj(const struct emu_wave *w, struct tile *t) {
    unsigned n = t->rows;
    for (unsigned row = 0; row < n; row++)
        for (unsigned col = 0; col < n; col++) {
            float acc = t->c[row * n + col];
            for (unsigned block = 0; block < t->k / BLOCK; block++) {
                float sum = 0;
                for (unsigned k = block * BLOCK; k < (block + 1) * BLOCK; k++)
                    sum = __builtin_fmaf((float)t->a[k * n + row], (float)t->b[k * n + col], sum);
                acc += (float)(sum * (t->sa[row + n * block] * t->sb[col + n * block]));
            }
            t->c[row * n + col] = overflow_rule(w, acc);
        }
}

/* D and C: register r of lane l holds row, column (section 5) */
static unsigned d_row(unsigned n, unsigned r, unsigned l) {
    return n == 16 ? l / 16 * 4 + r : 8 * (r / 4) + 4 * (l / 32) + r % 4;
}

static void load_c(const struct emu_wave *w, const struct emu_operand *o, struct tile *t) {
    for (unsigned r = 0; r < o->dwords; r++)
        for (unsigned l = 0; l < EMU_LANES; l++) {
            uint32_t x = o->file == EMU_VGPR ? w->v[o->reg + r][l] : (uint32_t)o->value;
            t->c[d_row(t->rows, r, l) * t->rows + l % t->rows] = __builtin_bit_cast(float, x);
        }
}

static void store_d(struct emu_wave *w, const struct emu_operand *o, const struct tile *t) {
    for (unsigned r = 0; r < o->dwords; r++)
        for (unsigned l = 0; l < EMU_LANES; l++) {
            float x = t->c[d_row(t->rows, r, l) * t->rows + l % t->rows];
            w->v[o->reg + r][l] = x != x ? 0x7fc00000 : __builtin_bit_cast(uint32_t, x);
        }
}

/* EXEC does not matter: all lanes compute and write */
bool emu_r_mfma(struct emu_wave *w, const struct emu_inst *i) {
    pthread_once(&tables_once, build_tables);
    struct tile t __attribute__((aligned(128)));
    t.rows = (unsigned)i->op->arg;
    t.k = t.rows == 16 ? 128 : 64;
    decode_operand(w, &i->src[0], i->cbsz, t.rows, t.k, t.a);
    decode_operand(w, &i->src[1], i->blgp, t.rows, t.k, t.b);
    decode_scales(w, i, 0, t.sa);
    decode_scales(w, i, 1, t.sb);
    load_c(w, &i->src[2], &t);
    if (w->b->l->opt.sum == EMU_SUM_WIDE)
        sum_wide(w, &t);
    else
        sum_rj(w, &t);
    store_d(w, &i->dst[0], &t);
    return true;
}
