/* Vector instructions (VOP1, VOP2, VOPC, VOP3, VOP3P): the operand driver and the lane semantics.
 * Source: CDNA4 ISA chapters 6 and 12 (pseudo-code). MODE is the one that
 * all accepted kernels start with (RNE, denormals kept, IEEE, DX10_CLAMP: elf.c refuses others), so omod does nothing.
 * The driver fetches sources into registers of 64 lanes, applies SDWA/DPP/neg/abs, calls the lane function, and writes
 * back under EXEC. A lane function computes all 64 lanes. */
#include <math.h>

#include "exec.h"
#include "formats.h"

static emu_u32v expand(uint64_t mask) {
    emu_u32v m;
    for (unsigned l = 0; l < EMU_LANES; l++)
        m[l] = mask >> l & 1 ? 0xffffffff : 0;
    return m;
}

/* ---- sources ---- */
static emu_u32v splat(uint32_t x) { return (emu_u32v){} + x; }

static emu_u32v sdwa_select(emu_u32v x, unsigned sel, bool sext) {
    if (sel == 6)
        return x;
    unsigned shift = sel < 4 ? 8 * sel : 16 * (sel - 4), up = sel < 4 ? 24 : 16;
    emu_u32v top = (x >> shift) << up;
    return sext ? (emu_u32v)((emu_i32v)top >> up) : top >> up;
}

/* lane that lane l reads under dpp_ctrl; -1 when there is none */
static int dpp_source(unsigned ctrl, int l) {
    int row = l & ~15, n = l & 15, k = (int)(ctrl & 15);
    if (ctrl < 0x100)
        return (l & ~3) | (int)(ctrl >> (2 * (l & 3)) & 3);
    if (ctrl < 0x110)
        return n + k < 16 ? l + k : -1;
    if (ctrl < 0x120)
        return n - k >= 0 ? l - k : -1;
    if (ctrl < 0x130)
        return row | ((n - k) & 15);
    switch (ctrl) {
    case 0x130:
        return l < 63 ? l + 1 : -1;
    case 0x134:
        return (l + 1) & 63;
    case 0x138:
        return l - 1;
    case 0x13c:
        return (l - 1) & 63;
    case 0x140:
        return row | (15 - n);
    case 0x141:
        return (l & ~7) | (7 - (l & 7));
    case 0x142:
        return l >= 16 ? row - 1 : -1;
    case 0x143:
        return l >= 32 ? 31 : -1;
    default:
        return ctrl >= 0x150 && ctrl < 0x160 ? row | k : -1;
    }
}

/* permutes source 0 and narrows EXEC to the lanes that DPP lets write */
static void apply_dpp(struct emu_vctx *c) {
    const struct emu_inst *i = c->i;
    emu_u32v in = *c->s[0], out = {};
    uint64_t write = 0, exec = c->exec;
    for (int l = 0; l < EMU_LANES; l++) {
        int from = dpp_source(i->dpp_ctrl, l);
        bool valid = from >= 0 && exec >> from & 1;
        bool enabled = (i->row_mask >> (l >> 4) & 1) && (i->bank_mask >> (l >> 2 & 3) & 1);
        if (valid)
            out[l] = in[from];
        if (enabled && (valid || i->bound_ctrl))
            write |= 1ull << l;
    }
    c->tmp[0][0] = out;
    c->s[0] = c->tmp[0];
    c->exec &= write;
}

static void apply_modifiers(struct emu_vctx *c, unsigned n) {
    const struct emu_inst *i = c->i;
    const struct emu_operand *o = &i->src[n];
    unsigned top = o->dwords == 2 && o->type == 'f';
    bool half = o->type == 'h' || o->type == 'w';
    emu_u32v x = c->s[n][top];
    if (i->form == FORM_SDWA && n < 2)
        x = sdwa_select(x, i->src_sel[n], i->src_sext[n]);
    if (half && i->form == FORM_E64 && i->opsel >> n & 1)
        x >>= 16;
    uint32_t sign = half ? 0x8000 : 0x80000000;
    if (i->abs >> n & 1)
        x &= ~splat(sign);
    if (i->neg >> n & 1)
        x ^= splat(sign);
    c->tmp[n][0] = c->s[n][0];
    c->tmp[n][top] = x;
    c->s[n] = c->tmp[n];
}

static void fetch(struct emu_vctx *c, unsigned n) {
    const struct emu_operand *o = &c->i->src[n];
    if (o->type == 'm') {
        c->cin = emu_scalar(c->w, o);
        return;
    }
    if (o->file == EMU_VGPR)
        c->s[n] = &c->w->v[o->reg];
    else {
        uint64_t x = emu_scalar(c->w, o);
        c->tmp[n][0] = splat((uint32_t)x);
        /* packed f32 constants feed both halves; other 64-bit sources take their high dword */
        c->tmp[n][1] = o->type == 'q' && o->file == EMU_CONST ? c->tmp[n][0] : splat((uint32_t)(x >> 32));
        c->s[n] = c->tmp[n];
    }
}

/* ---- results ---- */
static emu_u32v blend(uint64_t exec, emu_u32v value, emu_u32v old) {
    if (exec == ~0ull)
        return value;
    emu_u32v m = expand(exec);
    return (value & m) | (old & ~m);
}

static emu_u32v sdwa_place(const struct emu_inst *i, emu_u32v value, emu_u32v old) {
    unsigned sel = i->dst_sel;
    if (sel == 6)
        return value;
    unsigned shift = sel < 4 ? 8 * sel : 16 * (sel - 4), width = sel < 4 ? 8 : 16;
    uint32_t field = (width == 8 ? 0xffu : 0xffffu) << shift;
    emu_u32v placed = (value << shift) & splat(field);
    if (i->dst_unused == 2)
        return placed | (old & ~splat(field));
    if (i->dst_unused == 1 && shift + width < 32) {
        unsigned up = 32 - shift - width;
        return (emu_u32v)((emu_i32v)(placed << up) >> up);
    }
    return placed;
}

static void clamp_f32(emu_u32v *v) {
    float *x = (float *)v;
    for (unsigned l = 0; l < EMU_LANES; l++)
        x[l] = x[l] > 0 ? (x[l] < 1 ? x[l] : 1) : 0;
}

static void write_back(struct emu_vctx *c) {
    const struct emu_inst *i = c->i;
    for (unsigned n = 0; n < i->ndst; n++) {
        const struct emu_operand *o = &i->dst[n];
        if (o->type == 'm') {
            emu_scalar_write(c->w, o, c->mask & c->exec);
            if (o->reg == EMU_VCC)
                c->w->vccz_stale = false;
            continue;
        }
        bool half = o->type == 'h' || o->type == 'w';
        if (i->clamp && (o->type == 'f' || o->type == 'q'))
            for (unsigned dw = 0; dw < (o->type == 'q' ? 2 : 1); dw++)
                clamp_f32(&c->d[dw]);
        if (half && i->form == FORM_E64 && i->opsel & 8)
            c->d[0] = (c->d[0] << 16) | (c->w->v[o->reg] & 0xffff);
        else if (half && i->op->enc == ENC_VOP3) /* 16-bit VOP3 keeps the half it does not write */
            c->d[0] = (c->d[0] & 0xffff) | (c->w->v[o->reg] & 0xffff0000);
        else if (half)
            c->d[0] &= 0xffff;
        for (unsigned dw = 0; dw < o->dwords; dw++) {
            emu_u32v *r = &c->w->v[o->reg + dw];
            emu_u32v value = i->form == FORM_SDWA ? sdwa_place(i, c->d[dw], *r) : c->d[dw];
            *r = blend(c->exec, value, *r);
        }
    }
    if (i->op->flags & OPF_CMPX)
        emu_scalar_write(c->w, &(struct emu_operand){.reg = EMU_EXEC, .dwords = 2}, c->mask & c->exec);
}

static bool clamp_known(const struct emu_inst *i) {
    bool is_float = (i->dst[0].type == 'f' && i->dst[0].dwords == 1) || i->dst[0].type == 'q';
    return is_float || i->op->flags & OPF_CLAMP;
}

bool emu_exec_valu(struct emu_wave *w, const struct emu_inst *i, emu_lane_fn *f) {
    struct emu_vctx c = {.w = w, .i = i};
    c.exec = emu_exec(w);
    if (i->clamp && !clamp_known(i))
        return emu_stop(w, -1, "clamp on an instruction whose clamp is not modelled");
    for (unsigned n = 0; n < i->nsrc; n++)
        fetch(&c, n);
    if (i->form == FORM_DPP)
        apply_dpp(&c);
    bool modified = i->neg || i->abs || i->form == FORM_SDWA || (i->form == FORM_E64 && i->opsel);
    if (modified && i->op->enc != ENC_VOP3P)
        for (unsigned n = 0; n < i->nsrc; n++)
            if (i->src[n].type != 'm')
                apply_modifiers(&c, n);
    if (i->op->flags & OPF_READS_D)
        for (unsigned dw = 0; dw < i->dst[0].dwords; dw++)
            c.d[dw] = w->v[i->dst[0].reg + dw];
    f(&c);
    write_back(&c);
    return true;
}

/* ---- GPR indexing ---- */
static bool index_operand(struct emu_wave *w, struct emu_operand *o, struct emu_regs *run) {
    unsigned by = w->s[EMU_M0] & 0xff;
    if (o->file != EMU_VGPR)
        return true;
    if (o->acc || o->index + by + o->dwords > w->b->k->env.accum_offset)
        return emu_stop(w, -1, "indexed register v%u + %u: past the kernel's VGPRs", o->index, by);
    o->reg = (uint16_t)(o->reg + by);
    run->reg = (uint16_t)(run->reg + by);
    return true;
}

bool emu_index_registers(struct emu_wave *w, const struct emu_inst *i, struct emu_inst *out) {
    if (i->op->kind != KIND_V || i->op->enc == ENC_VOP3P || i->op->enc == ENC_MFMA || i->op->flags & OPF_READS_D)
        return emu_stop(w, -1, "this instruction under a GPR index mode is not modelled");
    *out = *i;
    out->nreads = 0;
    for (unsigned n = 0; n < out->nsrc; n++) {
        struct emu_regs run = {out->src[n].reg, out->src[n].dwords, ROLE_VALU, out->src[n].file == EMU_VGPR};
        if (w->gpr_idx >> n & 1 && !index_operand(w, &out->src[n], &run))
            return false;
        if (out->src[n].file == EMU_VGPR || out->src[n].file == EMU_SGPR)
            out->reads[out->nreads++] = run;
    }
    return !(w->gpr_idx & 8) || !out->nwrites || index_operand(w, &out->dst[0], &out->writes[0]);
}

/* ---- lane semantics ---- */
#define U0 ((const uint32_t *)c->s[0])
#define U1 ((const uint32_t *)c->s[1])
#define U2 ((const uint32_t *)c->s[2])
#define I0 ((const int32_t *)c->s[0])
#define I1 ((const int32_t *)c->s[1])
#define I2 ((const int32_t *)c->s[2])
#define F0 ((const float *)c->s[0])
#define F1 ((const float *)c->s[1])
#define F2 ((const float *)c->s[2])
#define D ((uint32_t *)c->d)
#define FD ((float *)c->d)
#define OP(name) void emu_v_##name(struct emu_vctx *c)
#define LANES for (unsigned l = 0; l < EMU_LANES; l++)
#define ARG (c->i->op->arg)

static uint64_t get64(const uint32_t *p, unsigned l) { return p[l] | (uint64_t)p[EMU_LANES + l] << 32; }
static void set64(uint32_t *p, unsigned l, uint64_t x) {
    p[l] = (uint32_t)x;
    p[EMU_LANES + l] = (uint32_t)(x >> 32);
}
static double getd(const uint32_t *p, unsigned l) { return __builtin_bit_cast(double, get64(p, l)); }
static void setd(uint32_t *p, unsigned l, double x) { set64(p, l, __builtin_bit_cast(uint64_t, x)); }

OP(mov) {
    for (int dw = 0; dw < ARG; dw++)
        c->d[dw] = c->s[0][dw];
}
OP(not) { *c->d = ~*c->s[0]; }
OP(and) { *c->d = *c->s[0] & *c->s[1]; }
OP(or) { *c->d = *c->s[0] | *c->s[1]; }
OP(xor) { *c->d = *c->s[0] ^ *c->s[1]; }
OP(xnor) { *c->d = ~(*c->s[0] ^ *c->s[1]); }
OP(lshlrev) { *c->d = *c->s[1] << (*c->s[0] & 31); }
OP(lshrrev) { *c->d = *c->s[1] >> (*c->s[0] & 31); }
OP(ashrrev) { *c->d = (emu_u32v)((emu_i32v)*c->s[1] >> (emu_i32v)(*c->s[0] & 31)); }
OP(bfrev) { LANES D[l] = __builtin_bitreverse32(U0[l]); }
OP(ffbh_u) { LANES D[l] = U0[l] ? (uint32_t)__builtin_clz(U0[l]) : 0xffffffff; }
OP(ffbl) { LANES D[l] = U0[l] ? (uint32_t)__builtin_ctz(U0[l]) : 0xffffffff; }
OP(ffbh_i) {
    LANES {
        uint32_t differ = (uint32_t)(I0[l] ^ (I0[l] >> 31));
        D[l] = differ ? (uint32_t)__builtin_clz(differ) : 0xffffffff;
    }
}
OP(cndmask) { *c->d = blend(c->cin, *c->s[1], *c->s[0]); }

OP(add_u32) {
    *c->d = *c->s[0] + *c->s[1];
    if (c->i->clamp)
        LANES D[l] = D[l] < U0[l] ? 0xffffffff : D[l];
}
OP(sub_u32) {
    emu_u32v a = *c->s[0], b = *c->s[1];
    *c->d = a - b;
    if (c->i->clamp)
        LANES D[l] = b[l] > a[l] ? 0 : D[l];
}
OP(subrev_u32) {
    emu_u32v a = *c->s[1], b = *c->s[0];
    *c->d = a - b;
    if (c->i->clamp)
        LANES D[l] = b[l] > a[l] ? 0 : D[l];
}
static uint32_t saturate32(int64_t x, bool clamp) {
    return (uint32_t)(!clamp ? x : x > INT32_MAX ? INT32_MAX : x < INT32_MIN ? INT32_MIN : x);
}
OP(add_i32) { LANES D[l] = saturate32((int64_t)I0[l] + I1[l], c->i->clamp); }
OP(sub_i32) { LANES D[l] = saturate32((int64_t)I0[l] - I1[l], c->i->clamp); }

static void carry_add(struct emu_vctx *c, const uint32_t *a, const uint32_t *b, uint64_t cin) {
    c->mask = 0;
    LANES {
        uint64_t sum = (uint64_t)a[l] + b[l] + (cin >> l & 1);
        D[l] = (uint32_t)sum;
        c->mask |= (sum >> 32 & 1) << l;
    }
}
static void carry_sub(struct emu_vctx *c, const uint32_t *a, const uint32_t *b, uint64_t cin) {
    c->mask = 0;
    LANES {
        uint64_t take = (uint64_t)b[l] + (cin >> l & 1);
        c->mask |= (uint64_t)(take > a[l]) << l;
        D[l] = (uint32_t)(a[l] - take);
    }
}
OP(add_co) { carry_add(c, U0, U1, 0); }
OP(sub_co) { carry_sub(c, U0, U1, 0); }
OP(subrev_co) { carry_sub(c, U1, U0, 0); }
OP(addc_co) { carry_add(c, U0, U1, c->cin); }
OP(subb_co) { carry_sub(c, U0, U1, c->cin); }
OP(subbrev_co) { carry_sub(c, U1, U0, c->cin); }

static int32_t i24(int32_t x) { return (int32_t)((uint32_t)x << 8) >> 8; }
static uint32_t u24(uint32_t x) { return x & 0xffffff; }
OP(mul_i24) { LANES D[l] = (uint32_t)((int64_t)i24(I0[l]) * i24(I1[l])); }
OP(mul_hi_i24) { LANES D[l] = (uint32_t)((int64_t)i24(I0[l]) * i24(I1[l]) >> 32); }
OP(mul_u24) { LANES D[l] = (uint32_t)((uint64_t)u24(U0[l]) * u24(U1[l])); }
OP(mul_hi_u24) { LANES D[l] = (uint32_t)((uint64_t)u24(U0[l]) * u24(U1[l]) >> 32); }
OP(mad_i24) { LANES D[l] = (uint32_t)((int64_t)i24(I0[l]) * i24(I1[l])) + U2[l]; }
OP(mad_u24) { LANES D[l] = (uint32_t)((uint64_t)u24(U0[l]) * u24(U1[l])) + U2[l]; }
OP(mad_u32_u16) { LANES D[l] = (U0[l] & 0xffff) * (U1[l] & 0xffff) + U2[l]; }
OP(mad_i32_i16) { LANES D[l] = (uint32_t)((int16_t)U0[l] * (int16_t)U1[l]) + U2[l]; }
OP(mul_lo) { *c->d = *c->s[0] * *c->s[1]; }
OP(mul_hi_u) { LANES D[l] = (uint32_t)((uint64_t)U0[l] * U1[l] >> 32); }
OP(mul_hi_i) { LANES D[l] = (uint32_t)((int64_t)I0[l] * I1[l] >> 32); }
OP(mad_u64) {
    c->mask = 0;
    LANES {
        uint64_t sum;
        c->mask |= (uint64_t)__builtin_add_overflow((uint64_t)U0[l] * U1[l], get64(U2, l), &sum) << l;
        set64(D, l, sum);
    }
}
OP(mad_i64) {
    c->mask = 0;
    LANES {
        int64_t sum;
        c->mask |= (uint64_t)__builtin_add_overflow((int64_t)I0[l] * I1[l], (int64_t)get64(U2, l), &sum) << l;
        set64(D, l, (uint64_t)sum);
    }
}
OP(min_i32) { LANES D[l] = (uint32_t)(I0[l] < I1[l] ? I0[l] : I1[l]); }
OP(max_i32) { LANES D[l] = (uint32_t)(I0[l] > I1[l] ? I0[l] : I1[l]); }
OP(min_u32) { LANES D[l] = U0[l] < U1[l] ? U0[l] : U1[l]; }
OP(max_u32) { LANES D[l] = U0[l] > U1[l] ? U0[l] : U1[l]; }
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
OP(min3_i32) { LANES D[l] = (uint32_t)MIN(MIN(I0[l], I1[l]), I2[l]); }
OP(min3_u32) { LANES D[l] = MIN(MIN(U0[l], U1[l]), U2[l]); }
OP(max3_i32) { LANES D[l] = (uint32_t)MAX(MAX(I0[l], I1[l]), I2[l]); }
OP(max3_u32) { LANES D[l] = MAX(MAX(U0[l], U1[l]), U2[l]); }
OP(med3_i32) { LANES D[l] = (uint32_t)MAX(MIN(MAX(I0[l], I1[l]), I2[l]), MIN(I0[l], I1[l])); }
OP(med3_u32) { LANES D[l] = MAX(MIN(MAX(U0[l], U1[l]), U2[l]), MIN(U0[l], U1[l])); }
OP(bfe_u) {
    LANES {
        uint32_t offset = U1[l] & 31, width = U2[l] & 31;
        D[l] = (U0[l] >> offset) & ((1u << width) - 1);
    }
}
OP(bfe_i) {
    LANES {
        uint32_t offset = U1[l] & 31, width = U2[l] & 31, x = (U0[l] >> offset) & ((1u << width) - 1);
        bool whole = offset + width >= 32;
        D[l] = !width  ? 0
               : whole ? (uint32_t)(I0[l] >> offset)
                       : (uint32_t)((int32_t)(x << (32 - width)) >> (32 - width));
    }
}
OP(bfi) { *c->d = (*c->s[0] & *c->s[1]) | (~*c->s[0] & *c->s[2]); }
OP(bfm) { LANES D[l] = ((1u << (U0[l] & 31)) - 1) << (U1[l] & 31); }
OP(alignbit) { LANES D[l] = (uint32_t)((U1[l] | (uint64_t)U0[l] << 32) >> (U2[l] & 31)); }
OP(alignbyte) { LANES D[l] = (uint32_t)((U1[l] | (uint64_t)U0[l] << 32) >> (8 * (U2[l] & 3))); }
OP(xad) { *c->d = (*c->s[0] ^ *c->s[1]) + *c->s[2]; }
OP(lshl_add) { *c->d = (*c->s[0] << (*c->s[1] & 31)) + *c->s[2]; }
OP(add_lshl) { *c->d = (*c->s[0] + *c->s[1]) << (*c->s[2] & 31); }
OP(add3) { *c->d = *c->s[0] + *c->s[1] + *c->s[2]; }
OP(lshl_or) { *c->d = (*c->s[0] << (*c->s[1] & 31)) | *c->s[2]; }
OP(and_or) { *c->d = (*c->s[0] & *c->s[1]) | *c->s[2]; }
OP(or3) { *c->d = *c->s[0] | *c->s[1] | *c->s[2]; }
OP(lshl_add_u64) { LANES set64(D, l, (get64(U0, l) << (U1[l] & 7)) + get64(U2, l)); }
OP(lshlrev64) { LANES set64(D, l, get64(U1, l) << (U0[l] & 63)); }
OP(lshrrev64) { LANES set64(D, l, get64(U1, l) >> (U0[l] & 63)); }
OP(ashrrev64) { LANES set64(D, l, (uint64_t)((int64_t)get64(U1, l) >> (U0[l] & 63))); }
OP(bcnt) { LANES D[l] = (uint32_t)__builtin_popcount(U0[l]) + U1[l]; }
OP(mbcnt_lo) { LANES D[l] = (uint32_t)__builtin_popcount(U0[l] & (l < 32 ? (1u << l) - 1 : ~0u)) + U1[l]; }
OP(mbcnt_hi) { LANES D[l] = (uint32_t)__builtin_popcount(U0[l] & (l < 32 ? 0 : (1u << (l - 32)) - 1)) + U1[l]; }

OP(bitop3) {
    emu_u32v r = {};
    for (unsigned row = 0; row < 8; row++)
        if (c->i->bitop3 >> row & 1)
            r |= (row & 4 ? *c->s[0] : ~*c->s[0]) & (row & 2 ? *c->s[1] : ~*c->s[1]) & (row & 1 ? *c->s[2] : ~*c->s[2]);
    *c->d = r;
}

static uint32_t perm_byte(uint64_t pair, unsigned sel) {
    if (sel < 8)
        return (uint32_t)(pair >> (8 * sel) & 0xff);
    if (sel < 12) /* sign of bytes 1, 3, 5, 7 */
        return pair >> (16 * (sel - 8) + 15) & 1 ? 0xff : 0;
    return sel == 12 ? 0 : 0xff;
}
OP(perm) {
    LANES {
        uint64_t pair = U1[l] | (uint64_t)U0[l] << 32;
        D[l] = perm_byte(pair, U2[l] & 0xff) | perm_byte(pair, U2[l] >> 8 & 0xff) << 8 |
               perm_byte(pair, U2[l] >> 16 & 0xff) << 16 | perm_byte(pair, U2[l] >> 24) << 24;
    }
}

/* ---- 16-bit integers ---- */
#define W0 ((uint16_t)U0[l])
#define W1 ((uint16_t)U1[l])
#define W2 ((uint16_t)U2[l])
OP(add_u16) { LANES D[l] = (uint16_t)(W0 + W1); }
OP(sub_u16) { LANES D[l] = (uint16_t)(W0 - W1); }
OP(subrev_u16) { LANES D[l] = (uint16_t)(W1 - W0); }
OP(mul_lo_u16) { LANES D[l] = (uint16_t)((uint32_t)W0 * W1); }
OP(lshlrev_b16) { LANES D[l] = (uint16_t)(W1 << (W0 & 15)); }
OP(lshrrev_b16) { LANES D[l] = (uint16_t)(W1 >> (W0 & 15)); }
OP(ashrrev_i16) { LANES D[l] = (uint16_t)((int16_t)W1 >> (W0 & 15)); }
OP(max_u16) { LANES D[l] = MAX(W0, W1); }
OP(min_u16) { LANES D[l] = MIN(W0, W1); }
OP(max_i16) { LANES D[l] = (uint16_t)MAX((int16_t)W0, (int16_t)W1); }
OP(min3_i16) { LANES D[l] = (uint16_t)MIN(MIN((int16_t)W0, (int16_t)W1), (int16_t)W2); }
OP(min3_u16) { LANES D[l] = MIN(MIN(W0, W1), W2); }
OP(max3_i16) { LANES D[l] = (uint16_t)MAX(MAX((int16_t)W0, (int16_t)W1), (int16_t)W2); }
OP(max3_u16) { LANES D[l] = MAX(MAX(W0, W1), W2); }
OP(med3_i16) {
    LANES {
        int16_t a = (int16_t)W0, b = (int16_t)W1, x = (int16_t)W2;
        D[l] = (uint16_t)MAX(MIN(MAX(a, b), x), MIN(a, b));
    }
}
OP(med3_u16) { LANES D[l] = MAX(MIN(MAX(W0, W1), W2), MIN(W0, W1)); }
OP(min_i16) { LANES D[l] = (uint16_t)MIN((int16_t)W0, (int16_t)W1); }

/* packed: op_sel picks each source's half for the low result, op_sel_hi for the high one */
static uint16_t half_of(const struct emu_vctx *c, unsigned n, unsigned l, bool high) {
    unsigned from = (high ? c->i->opsel_hi : c->i->opsel) >> n & 1;
    return (uint16_t)(((const uint32_t *)c->s[n])[l] >> (16 * from));
}
#define PACKED(name, expr)                                                                                             \
    OP(name) {                                                                                                         \
        LANES {                                                                                                        \
            uint32_t r[2];                                                                                             \
            for (unsigned h = 0; h < 2; h++) {                                                                         \
                uint16_t a = half_of(c, 0, l, h), b = half_of(c, 1, l, h);                                             \
                r[h] = (uint16_t)(expr);                                                                               \
            }                                                                                                          \
            D[l] = r[0] | r[1] << 16;                                                                                  \
        }                                                                                                              \
    }
static uint32_t sat_i16(int32_t x) { return (uint16_t)(x > 32767 ? 32767 : x < -32768 ? -32768 : x); }
PACKED(pk_add_u16, c->i->clamp ? MIN(a + b, 0xffff) : a + b)
PACKED(pk_sub_u16, c->i->clamp ? MAX(a - b, 0) : a - b)
PACKED(pk_add_i16, c->i->clamp ? sat_i16((int16_t)a + (int16_t)b) : (uint32_t)(a + b))
PACKED(pk_sub_i16, c->i->clamp ? sat_i16((int16_t)a - (int16_t)b) : (uint32_t)(a - b))
PACKED(pk_mul_lo_u16, (uint32_t)a *b)
PACKED(pk_lshlrev_b16, b << (a & 15))
PACKED(pk_lshrrev_b16, b >> (a & 15))
PACKED(pk_ashrrev_i16, (int16_t)b >> (a & 15))
PACKED(pk_max_i16, MAX((int16_t)a, (int16_t)b))
PACKED(pk_min_i16, MIN((int16_t)a, (int16_t)b))
PACKED(pk_max_u16, MAX(a, b))
PACKED(pk_min_u16, MIN(a, b))
OP(cvt_pk_u16_u32) { LANES D[l] = MIN(U0[l], 0xffffu) | MIN(U1[l], 0xffffu) << 16; }
OP(cvt_pk_i16_i32) { LANES D[l] = sat_i16(I0[l]) | sat_i16(I1[l]) << 16; }
OP(pack_b32_f16) { LANES D[l] = W0 | (uint32_t)W1 << 16; }

/* ---- f32 ---- */
#define VF(n) (*(const emu_f32v *)c->s[n])
#define VD (*(emu_f32v *)c->d)
OP(add_f32) { VD = VF(0) + VF(1); }
OP(sub_f32) { VD = VF(0) - VF(1); }
OP(subrev_f32) { VD = VF(1) - VF(0); }
OP(mul_f32) { VD = VF(0) * VF(1); }
OP(fma_f32) { VD = __builtin_elementwise_fma(VF(0), VF(1), VF(2)); }
OP(fmac_f32) { VD = __builtin_elementwise_fma(VF(0), VF(1), VD); }

static bool is_snan(uint32_t x) { return (x & 0x7fffffff) > 0x7f800000 && !(x & 0x400000); }
static uint32_t f2u(float x) { return __builtin_bit_cast(uint32_t, x); }
static float u2f(uint32_t x) { return __builtin_bit_cast(float, x); }

/* IEEE=1: a signalling NaN comes out quiet; one quiet NaN gives the other operand; -0 < +0 */
static float minmax(float a, float b, bool want_max) {
    if (is_snan(f2u(a)))
        return u2f(f2u(a) | 0x400000);
    if (is_snan(f2u(b)))
        return u2f(f2u(b) | 0x400000);
    if (a != a)
        return b;
    if (b != b)
        return a;
    if (a == b)
        return want_max ? u2f(f2u(a) & f2u(b)) : u2f(f2u(a) | f2u(b));
    return (a > b) == want_max ? a : b;
}
OP(min_f32) { LANES FD[l] = minmax(F0[l], F1[l], false); }
OP(max_f32) { LANES FD[l] = minmax(F0[l], F1[l], true); }
OP(min3_f32) { LANES FD[l] = minmax(minmax(F0[l], F1[l], false), F2[l], false); }
OP(max3_f32) { LANES FD[l] = minmax(minmax(F0[l], F1[l], true), F2[l], true); }
OP(med3_f32) {
    LANES {
        float a = F0[l], b = F1[l], x = F2[l];
        if (a != a || b != b || x != x) {
            FD[l] = minmax(minmax(a, b, false), x, false);
            continue;
        }
        float top = minmax(minmax(a, b, true), x, true);
        FD[l] = top == a ? minmax(b, x, true) : top == b ? minmax(a, x, true) : minmax(a, b, true);
    }
}
/* v_minimum3/v_maximum3: IEEE 754-2019, any NaN gives NaN */
static float propagate(float a, float b, bool want_max) {
    if (a != a || b != b)
        return u2f(f2u(a != a ? a : b) | 0x400000);
    return minmax(a, b, want_max);
}
OP(minimum3_f32) { LANES FD[l] = propagate(propagate(F0[l], F1[l], false), F2[l], false); }
OP(maximum3_f32) { LANES FD[l] = propagate(propagate(F0[l], F1[l], true), F2[l], true); }
OP(trunc_f32) { LANES FD[l] = __builtin_truncf(F0[l]); }
OP(ceil_f32) { LANES FD[l] = __builtin_ceilf(F0[l]); }
OP(floor_f32) { LANES FD[l] = __builtin_floorf(F0[l]); }
OP(rndne_f32) { LANES FD[l] = __builtin_roundevenf(F0[l]); }
OP(fract_f32) {
    LANES {
        float x = F0[l] - __builtin_floorf(F0[l]);
        FD[l] = x < 1 ? x : x >= 1 ? 0x1.fffffep-1f : x;
    }
}
/* transcendental unit: 1 ULP, denormals in and out flushed (ISA pseudo-code notes) */
static float flush(float x) { return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0, x) : x; }
OP(exp_f32) { LANES FD[l] = flush((float)exp2(flush(F0[l]))); }
OP(log_f32) { LANES FD[l] = flush((float)log2(flush(F0[l]))); }
OP(rcp_f32) { LANES FD[l] = flush(1.0f / flush(F0[l])); }
OP(rsq_f32) { LANES FD[l] = flush((float)(1.0 / sqrt(flush(F0[l])))); }
OP(sqrt_f32) { LANES FD[l] = __builtin_sqrtf(flush(F0[l])); }
OP(ldexp_f32) { LANES FD[l] = ldexpf(F0[l], I1[l]); }
OP(frexp_exp) {
    LANES {
        int e = 0;
        if (__builtin_isfinite(F0[l]))
            frexpf(F0[l], &e);
        D[l] = (uint32_t)e;
    }
}
OP(frexp_mant) {
    LANES {
        int e;
        FD[l] = __builtin_isfinite(F0[l]) ? frexpf(F0[l], &e) : F0[l];
    }
}

static uint64_t w_vcc(const struct emu_wave *w) { return w->s[EMU_VCC] | (uint64_t)w->s[EMU_VCC + 1] << 32; }

/* Division helpers. V_DIV_SCALE's printed pseudo-code does not divide correctly; the rule by encoded exponents, n of
 * the numerator and d of the denominator, is the one checked on RDNA hardware (rocm-systems PR 11613), taken to hold
 * here:
 * - n - d >= 96: the denominator grows, post-scale
 * - d subnormal, or n <= 24 and nothing else applies: both grow
 * - d >= 253: both shrink; but with n - d <= -96 only the denominator, post-scale
 * - n - d <= -96: the numerator grows, post-scale
 * "Grow" and "shrink" are by 2^64. */
static float div_scale(float value, float denominator, float numerator, bool *post) {
    int d = (int)(f2u(denominator) >> 23 & 255), n = (int)(f2u(numerator) >> 23 & 255);
    bool is_denominator = f2u(value) == f2u(denominator), far_over = n - d >= 96, far_under = n - d <= -96;
    int of_denominator = 0, of_numerator = 0;
    if (far_over)
        of_denominator = 64;
    else if (d >= 253) {
        of_denominator = -64;
        of_numerator = far_under ? 0 : -64;
    } else if (d != 0 && far_under)
        of_numerator = 64;
    else if (d == 0 || n <= 24)
        of_denominator = of_numerator = 64;
    *post = far_over || (d != 0 && far_under);
    if (numerator == 0 || denominator == 0)
        return u2f(0xffc00000);
    return ldexpf(value, is_denominator ? of_denominator : of_numerator);
}
OP(div_scale_f32) {
    c->mask = 0;
    LANES {
        bool vcc;
        FD[l] = div_scale(F0[l], F1[l], F2[l], &vcc);
        c->mask |= (uint64_t)vcc << l;
    }
}
/* FMA, then a power of two by the addend's exponent; a subnormal result is rounded once (rocm-systems PR 11613) */
static float div_fmas(float a, float b, float c, bool scale) {
    float r = __builtin_fmaf(a, b, c);
    if (!scale)
        return r;
    int power = (f2u(c) >> 23 & 255) > 127 ? 64 : -64;
    float scaled = ldexpf(r, power);
    return __builtin_fabsf(scaled) < 0x1p-126f ? (float)ldexp(fma(a, b, c), power) : scaled;
}
OP(div_fmas_f32) {
    uint64_t vcc = w_vcc(c->w);
    LANES FD[l] = div_fmas(F0[l], F1[l], F2[l], vcc >> l & 1);
}
static float div_fixup(float q, float d, float n) {
    bool negative = (f2u(d) ^ f2u(n)) >> 31;
    float zero = negative ? -0.0f : 0.0f, inf = negative ? -__builtin_inff() : __builtin_inff();
    if (n != n)
        return u2f(f2u(n) | 0x400000);
    if (d != d)
        return u2f(f2u(d) | 0x400000);
    if ((d == 0 && n == 0) || (__builtin_isinf(d) && __builtin_isinf(n)))
        return u2f(0xffc00000);
    if (d == 0 || __builtin_isinf(n))
        return inf;
    if (__builtin_isinf(d) || n == 0)
        return zero;
    int en = (int)(f2u(n) >> 23 & 255), ed = (int)(f2u(d) >> 23 & 255);
    if (en - ed < -150)
        return zero;
    if (!__builtin_isfinite(q)) /* the refinement ran over: the printed pseudo-code misses NaN here */
        return inf;
    return negative ? -__builtin_fabsf(q) : __builtin_fabsf(q);
}
OP(div_fixup_f32) { LANES FD[l] = div_fixup(F0[l], F1[l], F2[l]); }

static float pk_src(const struct emu_vctx *c, unsigned n, unsigned l, bool high) {
    unsigned from = (high ? c->i->opsel_hi : c->i->opsel) >> n & 1, neg = (high ? c->i->neg_hi : c->i->neg) >> n & 1;
    float x = ((const float *)c->s[n])[from * EMU_LANES + l];
    return neg ? -x : x;
}
#define PACKED_F32(name, expr)                                                                                         \
    OP(name) {                                                                                                         \
        LANES for (unsigned h = 0; h < 2; h++) {                                                                       \
            float a = pk_src(c, 0, l, h), b = pk_src(c, 1, l, h);                                                      \
            FD[h * EMU_LANES + l] = (expr);                                                                            \
        }                                                                                                              \
    }
PACKED_F32(pk_add_f32, a + b)
PACKED_F32(pk_mul_f32, a *b)
PACKED_F32(pk_fma_f32, __builtin_fmaf(a, b, pk_src(c, 2, l, h)))
OP(pk_mov_b32) /* low result from source 0, high from source 1, each by its op_sel */
{
    LANES {
        D[l] = U0[(c->i->opsel & 1) * EMU_LANES + l];
        D[EMU_LANES + l] = U1[(c->i->opsel >> 1 & 1) * EMU_LANES + l];
    }
}

/* ---- f64 ---- */
OP(add_f64) { LANES setd(D, l, getd(U0, l) + getd(U1, l)); }
OP(mul_f64) { LANES setd(D, l, getd(U0, l) * getd(U1, l)); }
OP(min_f64) { LANES setd(D, l, fmin(getd(U0, l), getd(U1, l))); }
OP(max_f64) { LANES setd(D, l, fmax(getd(U0, l), getd(U1, l))); }
OP(fma_f64) { LANES setd(D, l, fma(getd(U0, l), getd(U1, l), getd(U2, l))); }
OP(fmac_f64) { LANES setd(D, l, fma(getd(U0, l), getd(U1, l), getd(D, l))); }
OP(ldexp_f64) { LANES setd(D, l, ldexp(getd(U0, l), I1[l])); }
OP(trunc_f64) { LANES setd(D, l, trunc(getd(U0, l))); }
OP(ceil_f64) { LANES setd(D, l, ceil(getd(U0, l))); }
OP(floor_f64) { LANES setd(D, l, floor(getd(U0, l))); }
OP(rndne_f64) { LANES setd(D, l, __builtin_roundeven(getd(U0, l))); }

/* ---- conversions ---- */
static uint32_t to_u32(double x) { return !(x > 0) ? 0 : x >= 4294967295.0 ? 0xffffffff : (uint32_t)x; }
static uint32_t to_i32(double x) {
    return x != x ? 0 : x >= 2147483647.0 ? 0x7fffffff : x <= -2147483648.0 ? 0x80000000 : (uint32_t)(int32_t)x;
}
OP(cvt_f32_i32) { LANES FD[l] = (float)I0[l]; }
OP(cvt_f32_u32) { LANES FD[l] = (float)U0[l]; }
OP(cvt_u32_f32) { LANES D[l] = to_u32(F0[l]); }
OP(cvt_i32_f32) { LANES D[l] = to_i32(F0[l]); }
OP(cvt_i32_f64) { LANES D[l] = to_i32(getd(U0, l)); }
OP(cvt_u32_f64) { LANES D[l] = to_u32(getd(U0, l)); }
OP(cvt_f64_i32) { LANES setd(D, l, I0[l]); }
OP(cvt_f64_u32) { LANES setd(D, l, U0[l]); }
OP(cvt_f32_f64) { LANES FD[l] = (float)getd(U0, l); }
OP(cvt_f64_f32) {
    emu_u32v a = *c->s[0];
    LANES setd(D, l, u2f(a[l]));
}
OP(cvt_f32_ubyte) { LANES FD[l] = (float)(U0[l] >> ARG & 0xff); }
OP(cvt_f16_f32) { LANES D[l] = __builtin_bit_cast(uint16_t, (_Float16)F0[l]); }
OP(cvt_f32_f16) { LANES FD[l] = (float)__builtin_bit_cast(_Float16, (uint16_t)U0[l]); }
OP(cvt_f32_bf16) { LANES D[l] = U0[l] << 16; }
OP(cvt_pk_bf16_f32) { LANES D[l] = emu_f32_to_bf16(F0[l]) | (uint32_t)emu_f32_to_bf16(F1[l]) << 16; }
OP(cvt_f32_fp8) { LANES FD[l] = emu_fp8_to_f32((uint8_t)U0[l], ARG); }
OP(cvt_pk_f32_fp8) {
    emu_u32v a = *c->s[0];
    unsigned shift = c->i->form == FORM_E64 && c->i->opsel & 1 ? 16 : 0;
    LANES for (unsigned h = 0; h < 2; h++) FD[h * EMU_LANES + l] =
        emu_fp8_to_f32((uint8_t)(a[l] >> (shift + 8 * h)), ARG);
}

/* 448 < |x| < 464 rounds to 448, but no source says whether overflow is decided before rounding (section 10 item 3) */
static uint32_t fp8_code(struct emu_vctx *c, unsigned l, double x) {
    bool edge = false;
    uint8_t code = emu_f32_to_fp8((float)x, ARG, c->w->ovfl, &edge);
    if (!edge || c->w->ovfl || !(c->exec >> l & 1))
        return code;
    emu_conflict(c->w, (int)l, "fp8 conversion of a value between the largest finite one and the rounding limit");
    return c->w->b->l->opt.edge == EMU_EDGE_ROUND ? code : (code & 0x80) | (ARG ? 0x7cu : 0x7fu);
}
static void put_fp8_pair(struct emu_vctx *c, unsigned l, double x0, double x1) {
    uint32_t pair = fp8_code(c, l, x0) | fp8_code(c, l, x1) << 8;
    bool high = c->i->opsel & 8;
    D[l] = high ? (D[l] & 0xffff) | pair << 16 : (D[l] & 0xffff0000) | pair;
}
OP(cvt_pk_fp8_f32) { LANES put_fp8_pair(c, l, F0[l], F1[l]); }
/* result = RNE(value / 2^(scale-127)); the exponent byte of the scale source alone counts */
static void scaled_pair(struct emu_vctx *c, unsigned l, float x0, float x1, uint32_t scale) {
    int e = (int)(scale >> 23 & 255) - 127;
    if (e == 128 && c->exec >> l & 1) {
        emu_conflict(c->w, (int)l, "scale exponent 0xff in v_cvt_scalef32");
        if (c->w->b->l->opt.scale255 == EMU_SCALE255_KEEP)
            return;
    }
    put_fp8_pair(c, l, ldexp(x0, -e), ldexp(x1, -e));
}
OP(cvt_scale_pk_fp8_f32) { LANES scaled_pair(c, l, F0[l], F1[l], U2[l]); }
OP(cvt_scale_pk_fp8_bf16) { LANES scaled_pair(c, l, u2f(U0[l] << 16), u2f(U0[l] & 0xffff0000), U1[l]); }
OP(cvt_scale_pk_fp8_f16) {
    LANES scaled_pair(c, l, (float)__builtin_bit_cast(_Float16, (uint16_t)U0[l]),
                      (float)__builtin_bit_cast(_Float16, (uint16_t)(U0[l] >> 16)), U1[l]);
}

/* ---- compares ---- */
static bool float_condition(int n, double a, double b) {
    switch (n) {
    case 0:
        return false;
    case 1:
        return a < b;
    case 2:
        return a == b;
    case 3:
        return a <= b;
    case 4:
        return a > b;
    case 5:
        return a < b || a > b;
    case 6:
        return a >= b;
    case 7:
        return a == a && b == b;
    case 8:
        return a != a || b != b;
    case 9:
        return !(a >= b);
    case 10:
        return !(a < b || a > b);
    case 11:
        return !(a > b);
    case 12:
        return !(a <= b);
    case 13:
        return a != b;
    case 14:
        return !(a < b);
    default:
        return true;
    }
}
static bool int_condition(int n, int64_t a, int64_t b) {
    const bool result[8] = {false, a<b, a == b, a <= b, a> b, a != b, a >= b, true};
    return result[n];
}
#define COMPARE(name, test)                                                                                            \
    OP(name) {                                                                                                         \
        c->mask = 0;                                                                                                   \
        LANES c->mask |= (uint64_t)(test) << l;                                                                        \
    }
COMPARE(cmp_f32, float_condition(ARG, F0[l], F1[l]))
COMPARE(cmp_f64, float_condition(ARG, getd(U0, l), getd(U1, l)))
COMPARE(cmp_i16, int_condition(ARG, (int16_t)U0[l], (int16_t)U1[l]))
COMPARE(cmp_u16, int_condition(ARG, (uint16_t)U0[l], (uint16_t)U1[l]))
COMPARE(cmp_i32, int_condition(ARG, I0[l], I1[l]))
COMPARE(cmp_u32, int_condition(ARG, U0[l], U1[l]))
COMPARE(cmp_i64, int_condition(ARG, (int64_t)get64(U0, l), (int64_t)get64(U1, l)))
#define FLIP(x) ((int64_t)((x) ^ 0x8000000000000000u))
COMPARE(cmp_u64, int_condition(ARG, FLIP(get64(U0, l)), FLIP(get64(U1, l))))

static unsigned float_class(uint32_t x) {
    unsigned e = x >> 23 & 255, m = x & 0x7fffff;
    bool neg = x >> 31;
    if (e == 255 && m)
        return m & 0x400000 ? 1 : 0;
    if (e == 255)
        return neg ? 2 : 9;
    if (e)
        return neg ? 3 : 8;
    return m ? (neg ? 4 : 7) : (neg ? 5 : 6);
}
COMPARE(cmp_class, U1[l] >> float_class(U0[l]) & 1)

/* ---- lanes as scalars ---- */
#define RUN(name) bool emu_r_##name(struct emu_wave *w, const struct emu_inst *i)

RUN(readfirstlane) {
    uint64_t exec = emu_exec(w);
    unsigned lane = exec ? (unsigned)__builtin_ctzll(exec) : 0; /* EXEC = 0 reads lane 0 */
    uint32_t x = i->src[0].file == EMU_VGPR ? w->v[i->src[0].reg][lane] : (uint32_t)emu_scalar(w, &i->src[0]);
    emu_scalar_write(w, &i->dst[0], x);
    return true;
}

RUN(readlane) {
    unsigned lane = (unsigned)emu_scalar(w, &i->src[1]) & 63;
    if (i->src[0].file != EMU_VGPR)
        return emu_stop(w, -1, "v_readlane_b32 of something that is not a VGPR");
    emu_scalar_write(w, &i->dst[0], w->v[i->src[0].reg][lane]);
    return true;
}

RUN(writelane) {
    unsigned lane = (unsigned)emu_scalar(w, &i->src[1]) & 63;
    if (i->src[0].file == EMU_VGPR)
        return emu_stop(w, -1, "v_writelane_b32 from a VGPR");
    w->v[i->dst[0].reg][lane] = (uint32_t)emu_scalar(w, &i->src[0]);
    return true;
}

/* swaps lanes n..2n of each 2n of VDST with lanes 0..n of SRC0 */
RUN(permlane_swap) {
    unsigned n = (unsigned)i->op->arg;
    uint64_t exec = emu_exec(w);
    if (i->src[0].file != EMU_VGPR)
        return emu_stop(w, -1, "v_permlane swap with something that is not a VGPR");
    if (exec != ~0ull && emu_conflict(w, -1, "v_permlane swap under a partial EXEC"))
        return false;
    if (w->b->l->opt.permlane == EMU_PERMLANE_ALL) /* as the pseudo-code, which does not name EXEC */
        exec = ~0ull;
    emu_u32v *d = &w->v[i->dst[0].reg], *s = &w->v[i->src[0].reg];
    for (unsigned l = 0; l < EMU_LANES; l++) {
        if (l & n)
            continue;
        uint32_t low = (*s)[l], high = (*d)[l + n];
        if (exec >> l & 1)
            (*s)[l] = high;
        if (exec >> (l + n) & 1)
            (*d)[l + n] = low;
    }
    return true;
}
