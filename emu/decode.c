/* Machine words -> struct emu_inst.
 * Encodings: CDNA4 ISA chapter 13. The instruction table (insts.def) is indexed by encoding and opcode once.
 * A decoded instruction carries its operands and the runs of registers that it reads and writes, so that checks and
 * execution never look at words again. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "decode.h"

static const struct emu_op op_table[] = {
#define OP(k, e, o, n, p, f, a) {#n, KIND_##k, ENC_##e, o, p, f, a},
#define S(e, o, n, p, h, a) OP(S, e, o, n, p, 0, a)
#define V(e, o, n, p, h, f, a) OP(V, e, o, n, p, f, a)
#define R(e, o, n, p, h, f, a) OP(R, e, o, n, p, f, a)
#include "insts.def"
#undef OP
#undef S
#undef V
#undef R
};

enum { OPCODES = 1024 };
static const struct emu_op *op_index[ENC_COUNT][OPCODES];
static pthread_once_t op_index_once = PTHREAD_ONCE_INIT;

static void build_index(void) {
    for (size_t n = 0; n < sizeof op_table / sizeof *op_table; n++)
        op_index[op_table[n].enc][op_table[n].opcode] = &op_table[n];
}

size_t emu_op_table(const struct emu_op **table) {
    *table = op_table;
    return sizeof op_table / sizeof *op_table;
}

struct shape { /* of an instruction's operands, by insts.def */
    struct {
        char type;
        uint8_t dwords;
    } dst[2], src[5];
    unsigned ndst, nsrc;
};

struct decoder {
    const uint32_t *w;
    size_t left;
    const struct emu_decode_env *env;
    struct emu_inst *i;
    unsigned used; /* words consumed */
    struct shape shape;
    bool bad;
};

static void reject(struct decoder *d, const char *why) {
    if (!d->bad)
        snprintf(d->i->fault, sizeof d->i->fault, "%s", why);
    d->bad = true;
}

static uint32_t bits(uint32_t word, unsigned hi, unsigned lo) {
    return word >> lo & (uint32_t)((2ull << (hi - lo)) - 1);
}

static int32_t sext(uint32_t value, unsigned width) { return (int32_t)(value << (32 - width)) >> (32 - width); }

static uint32_t take_word(struct decoder *d) {
    if (d->used >= d->left || d->used >= 4) {
        reject(d, "instruction cut off by the end of the code");
        return 0;
    }
    uint32_t word = d->w[d->used];
    return d->i->words[d->used++] = word;
}

/* ---- operand shapes ---- */
static struct shape parse_shape(const char *text) {
    struct shape s = {};
    bool dst = true;
    while (*text) {
        if (*text == ':' || *text == ',') {
            dst = dst && *text != ':';
            text++;
            continue;
        }
        char type = *text++;
        unsigned n = 0;
        while (*text >= '0' && *text <= '9')
            n = n * 10 + (unsigned)(*text++ - '0');
        if (dst) {
            s.dst[s.ndst].type = type;
            s.dst[s.ndst++].dwords = (uint8_t)n;
        } else {
            s.src[s.nsrc].type = type;
            s.src[s.nsrc++].dwords = (uint8_t)n;
        }
    }
    return s;
}

static bool find_op(struct decoder *d, enum emu_enc enc, unsigned opcode) {
    pthread_once(&op_index_once, build_index);
    d->i->op = op_index[enc][opcode];
    if (d->i->op)
        d->shape = parse_shape(d->i->op->operands);
    return d->i->op;
}

/* ---- operands ---- */
static const uint32_t inline_f32[9] = {0x3f000000, 0xbf000000, 0x3f800000, 0xbf800000, 0x40000000,
                                       0xc0000000, 0x40800000, 0xc0800000, 0x3e22f983};
static const uint16_t inline_f16[9] = {0x3800, 0xb800, 0x3c00, 0xbc00, 0x4000, 0xc000, 0x4400, 0xc400, 0x3118};
static const uint64_t inline_f64[9] = {0x3fe0000000000000, 0xbfe0000000000000, 0x3ff0000000000000,
                                       0xbff0000000000000, 0x4000000000000000, 0xc000000000000000,
                                       0x4010000000000000, 0xc010000000000000, 0x3fc45f306dc9c882};

static uint64_t inline_float(unsigned n, char type, unsigned dwords) {
    if (type == 'h' || type == 'w')
        return inline_f16[n];
    if (dwords == 2 && type != 'q')
        return inline_f64[n];
    return inline_f32[n];
}

static void scalar_register(struct decoder *d, struct emu_operand *o, unsigned code) {
    o->file = EMU_SGPR;
    o->reg = o->index = (uint16_t)code;
    if (code < 102 && code + o->dwords > d->env->sgprs)
        reject(d, "SGPR past the kernel's allocation");
    if (code >= 102 && code != EMU_VCC && code != EMU_VCC + 1 && code != EMU_M0 && code != EMU_EXEC &&
        code != EMU_EXEC + 1)
        reject(d, "special SGPR (flat_scratch, xnack_mask, ttmp) that the emulator does not model");
}

static void vector_register(struct decoder *d, struct emu_operand *o, unsigned n, bool acc) {
    unsigned physical = acc ? d->env->accum_offset + n : n;
    unsigned limit = acc ? d->env->vgprs : d->env->accum_offset;
    o->file = EMU_VGPR;
    o->acc = acc;
    o->index = (uint16_t)n;
    o->reg = (uint16_t)physical;
    if (physical + o->dwords > limit)
        reject(d, acc ? "AGPR past the kernel's allocation" : "VGPR past the kernel's allocation");
}

/* a 9-bit source field */
static void source(struct decoder *d, struct emu_operand *o, unsigned code) {
    o->code = (uint16_t)code;
    if (code >= 256)
        vector_register(d, o, code - 256, o->type == 'a');
    else if (code < 128)
        scalar_register(d, o, code);
    else {
        o->file = EMU_CONST;
        if (code <= 192)
            o->value = code - 128;
        else if (code <= 208)
            o->value = (uint64_t)(192 - (int64_t)code);
        else if (code >= 240 && code <= 248)
            o->value = inline_float(code - 240, o->type, o->dwords);
        else if (code == 255) {
            uint32_t literal = d->used == 2 && d->i->nwords == 2 ? d->w[1] : take_word(d);
            d->i->nwords = 2;
            /* f64 takes the literal as its high half; integers of 64 bits extend (u64 zero, i64 sign: ISA 5.x) */
            o->value = o->dwords != 2   ? literal
                       : o->type == 'f' ? (uint64_t)literal << 32
                                        : (uint64_t)(int64_t)(int32_t)literal;
        } else {
            o->file = EMU_SPECIAL;
            reject(d, "source operand code that the emulator does not model");
        }
        if (o->dwords == 1)
            o->value &= o->type == 'h' || o->type == 'w' ? 0xffff : 0xffffffff;
    }
}

static void add_src(struct decoder *d, unsigned code) {
    unsigned n = d->i->nsrc++;
    d->i->src[n].type = d->shape.src[n].type;
    d->i->src[n].dwords = d->shape.src[n].dwords;
    source(d, &d->i->src[n], code);
}

static void add_mask_src(struct decoder *d, unsigned code) {
    add_src(d, code);
    if (d->i->src[d->i->nsrc - 1].file == EMU_VGPR)
        reject(d, "lane mask in a VGPR");
}

static struct emu_operand *new_dst(struct decoder *d, unsigned code) {
    unsigned n = d->i->ndst++;
    d->i->dst[n].type = d->shape.dst[n].type;
    d->i->dst[n].dwords = d->shape.dst[n].dwords;
    d->i->dst[n].code = (uint16_t)code;
    return &d->i->dst[n];
}

/* destination of type s (SGPR), m (mask), or vector */
static void add_dst(struct decoder *d, unsigned code, bool acc) {
    struct emu_operand *o = new_dst(d, code);
    if (o->type == 's' || o->type == 'm')
        scalar_register(d, o, code);
    else
        vector_register(d, o, code, acc || o->type == 'a');
}

static void add_scalar_dst(struct decoder *d, unsigned code) {
    struct emu_operand *o = new_dst(d, code);
    if (code >= 128)
        reject(d, "scalar destination past 127");
    else
        scalar_register(d, o, code);
}

/* ---- scalar encodings ---- */
static void decode_sop(struct decoder *d, enum emu_enc enc) {
    uint32_t w = d->i->words[0];
    unsigned op = enc == ENC_SOP1   ? bits(w, 15, 8)
                  : enc == ENC_SOP2 ? bits(w, 29, 23)
                  : enc == ENC_SOPK ? bits(w, 27, 23)
                                    : bits(w, 22, 16);
    if (!find_op(d, enc, op))
        return;
    d->i->simm = (uint16_t)w;
    if (d->shape.ndst && (enc == ENC_SOP1 || enc == ENC_SOP2 || enc == ENC_SOPK))
        add_scalar_dst(d, bits(w, 22, 16));
    if (enc == ENC_SOPK && d->shape.nsrc)
        add_src(d, bits(w, 22, 16));
    if (enc == ENC_SOP1 || enc == ENC_SOP2 || enc == ENC_SOPC) {
        if (d->shape.nsrc)
            add_src(d, bits(w, 7, 0));
        if (d->shape.nsrc > 1)
            add_src(d, bits(w, 15, 8));
    }
    if (enc == ENC_SOPK && d->i->op->opcode == 20) {
        uint32_t literal = take_word(d);
        d->i->src[0] = (struct emu_operand){.file = EMU_CONST, .dwords = 1, .type = 'b', .code = 255, .value = literal};
        d->i->nsrc = 1;
    }
}

static void decode_smem(struct decoder *d) {
    uint32_t w = d->i->words[0], hi = take_word(d);
    if (!find_op(d, ENC_SMEM, bits(w, 25, 18)))
        return;
    d->i->imm_en = bits(w, 17, 17);
    d->i->soffset_en = bits(w, 14, 14);
    d->i->sc0 = bits(w, 16, 16);
    if (!d->shape.ndst)
        return;
    add_scalar_dst(d, bits(w, 12, 6));
    if (!d->i->op->arg) /* s_memtime: no address */
        return;
    d->i->saddr = (struct emu_operand){.dwords = 2, .type = 'b'};
    scalar_register(d, &d->i->saddr, bits(w, 5, 0) * 2);
    d->i->soffset = (struct emu_operand){.dwords = 1, .type = 'b'};
    if (d->i->imm_en)
        d->i->offset = sext(bits(hi, 20, 0), 21);
    if (d->i->soffset_en)
        source(d, &d->i->soffset, bits(hi, 31, 25));
    else if (!d->i->imm_en)
        source(d, &d->i->soffset, bits(hi, 6, 0));
}

/* ---- vector encodings ---- */
static void decode_sdwa(struct decoder *d, bool vopc) {
    struct emu_inst *i = d->i;
    uint32_t x = take_word(d);
    i->form = FORM_SDWA;
    i->src_sel[0] = (uint8_t)bits(x, 18, 16);
    i->src_sel[1] = (uint8_t)bits(x, 26, 24);
    i->src_sext[0] = bits(x, 19, 19);
    i->src_sext[1] = bits(x, 27, 27);
    i->neg = (uint8_t)(bits(x, 20, 20) | bits(x, 28, 28) << 1);
    i->abs = (uint8_t)(bits(x, 21, 21) | bits(x, 29, 29) << 1);
    i->dst_sel = 6;
    if (!vopc) {
        i->dst_sel = (uint8_t)bits(x, 10, 8);
        i->dst_unused = (uint8_t)bits(x, 12, 11);
        i->clamp = bits(x, 13, 13);
        i->omod = (uint8_t)bits(x, 15, 14);
    }
}

static void decode_dpp(struct decoder *d) {
    struct emu_inst *i = d->i;
    uint32_t x = take_word(d);
    i->form = FORM_DPP;
    i->dpp_ctrl = (uint16_t)bits(x, 16, 8);
    i->bound_ctrl = bits(x, 19, 19);
    i->neg = (uint8_t)(bits(x, 20, 20) | bits(x, 22, 22) << 1);
    i->abs = (uint8_t)(bits(x, 21, 21) | bits(x, 23, 23) << 1);
    i->bank_mask = (uint8_t)bits(x, 27, 24);
    i->row_mask = (uint8_t)bits(x, 31, 28);
}

static void decode_vop12c(struct decoder *d, enum emu_enc enc) {
    struct emu_inst *i = d->i;
    uint32_t w = i->words[0];
    unsigned op = enc == ENC_VOP1 ? bits(w, 16, 9) : enc == ENC_VOPC ? bits(w, 24, 17) : bits(w, 30, 25);
    if (!find_op(d, enc, op))
        return;
    unsigned src0 = bits(w, 8, 0), sdst = EMU_VCC;
    i->dst_sel = 6;
    i->src_sel[0] = i->src_sel[1] = 6;
    if (src0 == 249) {
        decode_sdwa(d, enc == ENC_VOPC);
        uint32_t x = i->words[1];
        src0 = bits(x, 7, 0) + (bits(x, 23, 23) ? 0 : 256);
        if (enc == ENC_VOPC && bits(x, 15, 15))
            sdst = bits(x, 14, 8);
    } else if (src0 == 250) {
        decode_dpp(d);
        src0 = bits(i->words[1], 7, 0) + 256;
    }
    if (d->shape.ndst)
        add_dst(d, enc == ENC_VOPC ? sdst : bits(w, 24, 17), false);
    if (d->shape.ndst > 1)
        add_dst(d, EMU_VCC, false);
    if (!d->shape.nsrc)
        return;
    bool wide = d->shape.dst[0].dwords == 2 || d->shape.src[0].dwords == 2;
    if (i->form == FORM_DPP && wide && (i->dpp_ctrl < 0x150 || i->dpp_ctrl > 0x15f))
        reject(d, "64-bit DPP other than row_newbcast");
    if (i->op->flags & OPF_LANESEL && src0 < 256)
        reject(d, "v_readfirstlane of something that is not a VGPR");
    add_src(d, src0);
    if (d->shape.nsrc == 1)
        return;
    unsigned src1 = bits(w, 16, 9) + 256;
    if (i->form == FORM_SDWA && bits(i->words[1], 31, 31))
        src1 -= 256;
    if (d->shape.src[1].type == 'k') /* v_fmamk: the literal stands between the two registers */
        add_src(d, 255);
    else
        add_src(d, src1);
    if (d->shape.nsrc == 3) {
        if (d->shape.src[2].type == 'm')
            add_mask_src(d, EMU_VCC);
        else
            add_src(d, d->shape.src[2].type == 'k' ? 255 : src1);
    }
}

static bool takes_op_sel(const struct emu_op *op, const struct shape *s) {
    bool half = op->flags & (OPF_HALF | OPF_OPSEL);
    for (unsigned n = 0; n < s->nsrc; n++)
        half = half || s->src[n].type == 'h' || s->src[n].type == 'w';
    return half || (s->ndst && (s->dst[0].type == 'h' || s->dst[0].type == 'w'));
}

static void decode_vop3(struct decoder *d) {
    struct emu_inst *i = d->i;
    uint32_t w = i->words[0], hi = take_word(d);
    unsigned op = bits(w, 25, 16);
    i->form = FORM_E64;
    i->dst_sel = 6;
    i->src_sel[0] = i->src_sel[1] = 6;
    bool known = op < 0x100   ? find_op(d, ENC_VOPC, op)
                 : op < 0x140 ? find_op(d, ENC_VOP2, op - 0x100)
                 : op < 0x1c0 ? find_op(d, ENC_VOP1, op - 0x140)
                              : find_op(d, ENC_VOP3, op);
    if (!known)
        return;
    i->clamp = bits(w, 15, 15);
    i->neg = (uint8_t)bits(hi, 31, 29);
    i->omod = (uint8_t)bits(hi, 28, 27);
    if (!(i->op->flags & OPF_VOP3B)) {
        i->opsel = (uint8_t)bits(w, 14, 11);
        i->abs = (uint8_t)bits(w, 10, 8);
    }
    if (i->opsel && !takes_op_sel(i->op, &d->shape))
        reject(d, "op_sel on an instruction that has none");
    if (op == 0x233 || op == 0x234) { /* v_bitop3: its truth table sits in the modifier fields */
        i->bitop3 = (uint8_t)(i->neg | i->abs << 3 | i->omod << 6);
        i->neg = i->abs = i->omod = 0;
    }
    if (d->shape.ndst)
        add_dst(d, bits(w, 7, 0), false);
    if (d->shape.ndst > 1)
        add_dst(d, bits(w, 14, 8), false);
    const unsigned field[3] = {bits(hi, 8, 0), bits(hi, 17, 9), bits(hi, 26, 18)};
    for (unsigned n = 0; n < d->shape.nsrc; n++) {
        if (field[n] == 255)
            reject(d, "literal in VOP3");
        else if (d->shape.src[n].type == 'm')
            add_mask_src(d, field[n]);
        else
            add_src(d, field[n]);
    }
}

static void decode_vop3p(struct decoder *d) {
    struct emu_inst *i = d->i;
    uint32_t w = i->words[0], hi = take_word(d);
    if (!find_op(d, ENC_VOP3P, bits(w, 22, 16)))
        return;
    i->form = FORM_E64;
    i->dst_sel = 6;
    i->clamp = bits(w, 15, 15);
    i->opsel = (uint8_t)bits(w, 13, 11);
    i->neg_hi = (uint8_t)bits(w, 10, 8);
    i->neg = (uint8_t)bits(hi, 31, 29);
    i->opsel_hi = (uint8_t)(bits(hi, 28, 27) | bits(w, 14, 14) << 2);
    add_dst(d, bits(w, 7, 0), false);
    const unsigned field[3] = {bits(hi, 8, 0), bits(hi, 17, 9), bits(hi, 26, 18)};
    for (unsigned n = 0; n < d->shape.nsrc; n++)
        add_src(d, field[n]);
}

static void mfma_source(struct decoder *d, unsigned code, unsigned dwords, bool acc) {
    struct emu_operand *o = &d->i->src[d->i->nsrc++];
    o->type = acc ? 'a' : 'b';
    o->dwords = (uint8_t)dwords;
    source(d, o, code);
}

static unsigned format_dwords(unsigned format) { return format < 2 ? 8 : format < 4 ? 6 : 4; }

/* a = first word of the VOP3P-MAI part, already taken; scale = the two words of the prefix, or null */
static void decode_mai(struct decoder *d, uint32_t w, const uint32_t *scale) {
    struct emu_inst *i = d->i;
    uint32_t hi = take_word(d);
    if (!find_op(d, ENC_MFMA, bits(w, 22, 16)))
        return;
    i->form = FORM_E64;
    i->dst_sel = 6;
    bool acc_cd = bits(w, 15, 15);
    if (!emu_is_matrix(i)) { /* v_accvgpr_read/write */
        add_dst(d, bits(w, 7, 0), d->shape.dst[0].type == 'a');
        add_src(d, bits(hi, 8, 0));
        return;
    }
    i->cbsz = (uint8_t)bits(w, 10, 8);
    i->blgp = (uint8_t)bits(hi, 31, 29);
    if (i->cbsz > 4 || i->blgp > 4)
        reject(d, "matrix format past 4 (E2M1)");
    if (bits(w, 14, 11) != (scale ? 1u : 0u))
        reject(d, "abid does not fit the scale prefix");
    add_dst(d, bits(w, 7, 0), acc_cd);
    mfma_source(d, bits(hi, 8, 0), format_dwords(i->cbsz), bits(hi, 27, 27));
    mfma_source(d, bits(hi, 17, 9), format_dwords(i->blgp), bits(hi, 28, 28));
    mfma_source(d, bits(hi, 26, 18), i->dst[0].dwords, acc_cd);
    for (unsigned n = 0; n < 2; n++)
        if (i->src[n].file != EMU_VGPR)
            reject(d, "matrix operand that is not a VGPR");
    if (i->src[2].file != EMU_VGPR && i->src[2].file != EMU_CONST)
        reject(d, "SrcC in an SGPR");
    if (!scale)
        return;
    i->opsel = (uint8_t)bits(scale[0], 12, 11);
    i->opsel_hi = (uint8_t)bits(scale[1], 28, 27);
    for (unsigned n = 0; n < 2; n++) {
        mfma_source(d, bits(scale[1], 9 * n + 8, 9 * n), 1, false);
        if (i->src[3 + n].file != EMU_VGPR)
            reject(d, "scale operand that is not a VGPR");
    }
}

static void decode_vop3p_or_mai(struct decoder *d) {
    uint32_t w = d->i->words[0];
    unsigned op = bits(w, 22, 16);
    if (op == 0x2c) {
        const uint32_t scale[2] = {w, take_word(d)};
        uint32_t mai = take_word(d);
        if (bits(mai, 31, 23) != 0x1a7 || (bits(mai, 22, 16) != 0x2d && bits(mai, 22, 16) != 0x2e))
            reject(d, "scale prefix without its MFMA");
        decode_mai(d, mai, scale);
    } else if (op == 0x2d || op == 0x2e || op >= 0x40)
        decode_mai(d, w, nullptr);
    else
        decode_vop3p(d);
}

/* ---- memory encodings ---- */
static void vector_field(struct decoder *d, unsigned code, char type, unsigned dwords, bool acc) {
    struct emu_operand *o = &d->i->src[d->i->nsrc++];
    o->type = type;
    o->dwords = (uint8_t)dwords;
    o->code = (uint16_t)(256 + code);
    vector_register(d, o, code, acc);
}

static void decode_ds(struct decoder *d) {
    struct emu_inst *i = d->i;
    uint32_t w = i->words[0], hi = take_word(d);
    if (!find_op(d, ENC_DS, bits(w, 24, 17)))
        return;
    bool acc = bits(w, 25, 25);
    i->gds = bits(w, 16, 16);
    if (i->gds)
        reject(d, "GDS access");
    i->offset0 = (uint8_t)bits(w, 7, 0);
    i->offset1 = (uint8_t)bits(w, 15, 8);
    i->offset = (int32_t)bits(w, 15, 0);
    if (d->shape.ndst)
        add_dst(d, bits(hi, 31, 24), acc);
    vector_field(d, bits(hi, 7, 0), 'b', 1, false);
    for (unsigned n = 0; n < d->shape.nsrc; n++)
        vector_field(d, n ? bits(hi, 23, 16) : bits(hi, 15, 8), 'b', d->shape.src[n].dwords, acc);
}

static void decode_mubuf(struct decoder *d) {
    struct emu_inst *i = d->i;
    uint32_t w = i->words[0], hi = take_word(d);
    if (!find_op(d, ENC_MUBUF, bits(w, 24, 18)))
        return;
    i->offset = (int32_t)bits(w, 11, 0);
    i->offen = bits(w, 12, 12);
    i->idxen = bits(w, 13, 13);
    i->sc0 = bits(w, 14, 14);
    i->sc1 = bits(w, 15, 15);
    i->lds = bits(w, 16, 16);
    i->nt = bits(w, 17, 17);
    bool acc = bits(hi, 23, 23);
    i->saddr = (struct emu_operand){.dwords = 4, .type = 'b'};
    scalar_register(d, &i->saddr, bits(hi, 20, 16) * 4);
    i->soffset = (struct emu_operand){.dwords = 1, .type = 'b'};
    source(d, &i->soffset, bits(hi, 31, 24));
    bool store = i->op->flags & OPF_STORE;
    if (!store && !i->lds)
        add_dst(d, bits(hi, 15, 8), acc);
    if (i->offen || i->idxen)
        vector_field(d, bits(hi, 7, 0), 'b', i->offen && i->idxen ? 2 : 1, false);
    if (store)
        vector_field(d, bits(hi, 15, 8), 'b', d->shape.src[0].dwords, acc);
    if (i->lds && (store || (i->op->arg != 4 && i->op->arg != 12 && i->op->arg != 16)))
        reject(d, "LDS copy of this width");
}

static void decode_flat(struct decoder *d) {
    struct emu_inst *i = d->i;
    uint32_t w = i->words[0], hi = take_word(d);
    unsigned seg = bits(w, 15, 14);
    enum emu_enc enc = seg == 2 ? ENC_GLOBAL : seg == 1 ? ENC_SCRATCH : ENC_FLAT;
    if (!find_op(d, enc, bits(w, 24, 18)))
        return;
    i->offset = enc == ENC_FLAT ? (int32_t)bits(w, 11, 0) : sext(bits(w, 12, 0), 13);
    i->sc0 = bits(w, 16, 16);
    i->nt = bits(w, 17, 17);
    i->sc1 = bits(w, 25, 25);
    bool sve = bits(w, 13, 13), acc = bits(hi, 23, 23), store = i->op->flags & OPF_STORE;
    unsigned saddr = bits(hi, 22, 16);
    bool wide = enc != ENC_SCRATCH;
    if (wide && sve)
        reject(d, "GLOBAL or FLAT with bit 13 set");
    if (enc == ENC_FLAT)
        saddr = 0x7f; /* not a field of FLAT */
    i->lds = enc == ENC_GLOBAL && !store && !d->shape.ndst;
    if (saddr != 0x7f) {
        i->saddr = (struct emu_operand){.dwords = wide ? 2 : 1, .type = 'b'};
        scalar_register(d, &i->saddr, saddr);
    }
    if (d->shape.ndst && (!(i->op->flags & OPF_ATOMIC) || i->sc0))
        add_dst(d, bits(hi, 31, 24), acc);
    if (wide)
        vector_field(d, bits(hi, 7, 0), 'b', saddr == 0x7f ? 2 : 1, false);
    else if (sve)
        vector_field(d, bits(hi, 7, 0), 'b', 1, false);
    i->offen = wide || sve;
    if (store)
        vector_field(d, bits(hi, 15, 8), 'b', d->shape.src[0].dwords, acc);
}

/* ---- which encoding ---- */
static void decode_words(struct decoder *d) {
    uint32_t w = take_word(d);
    if (d->bad)
        return;
    d->i->nwords = 1;
    if (!bits(w, 31, 31)) {
        unsigned top = bits(w, 31, 25);
        decode_vop12c(d, top == 0x3f ? ENC_VOP1 : top == 0x3e ? ENC_VOPC : ENC_VOP2);
    } else if (bits(w, 31, 30) == 2) {
        unsigned top = bits(w, 31, 23);
        if (top == 0x17d)
            decode_sop(d, ENC_SOP1);
        else if (top == 0x17e)
            decode_sop(d, ENC_SOPC);
        else if (top == 0x17f)
            decode_sop(d, ENC_SOPP);
        else
            decode_sop(d, bits(w, 31, 28) == 0xb ? ENC_SOPK : ENC_SOP2);
    } else
        switch (bits(w, 31, 26)) {
        case 0x30:
            decode_smem(d);
            break;
        case 0x34:
            if (bits(w, 31, 23) == 0x1a7)
                decode_vop3p_or_mai(d);
            else
                decode_vop3(d);
            break;
        case 0x36:
            decode_ds(d);
            break;
        case 0x37:
            decode_flat(d);
            break;
        case 0x38:
            decode_mubuf(d);
            break;
        default:
            break;
        }
    d->i->nwords = (uint8_t)d->used;
}

/* ---- register runs for the checks ---- */
static void note(struct emu_regs *list, uint8_t *count, const struct emu_operand *o, enum emu_role role) {
    if (o->file != EMU_VGPR && o->file != EMU_SGPR)
        return;
    list[(*count)++] = (struct emu_regs){o->reg, o->dwords, role, o->file == EMU_VGPR};
}

static enum emu_role source_role(const struct emu_inst *i, unsigned n) {
    static const enum emu_role mfma[5] = {ROLE_A, ROLE_B, ROLE_C, ROLE_SCALE, ROLE_SCALE};
    if (emu_is_matrix(i))
        return mfma[n];
    if (i->op->enc >= ENC_DS)
        return ROLE_MEM;
    return i->src[n].type == 'm' ? ROLE_MASK : i->src[n].type == 'l' ? ROLE_LANESEL : ROLE_VALU;
}

static void note_registers(struct emu_inst *i) {
    for (unsigned n = 0; n < i->nsrc; n++)
        note(i->reads, &i->nreads, &i->src[n], source_role(i, n));
    note(i->reads, &i->nreads, &i->saddr, ROLE_MEM);
    note(i->reads, &i->nreads, &i->soffset, ROLE_MEM);
    for (unsigned n = 0; n < i->ndst; n++)
        note(i->writes, &i->nwrites, &i->dst[n], i->op->enc >= ENC_DS ? ROLE_MEM : ROLE_VALU);
    bool preserves = i->form == FORM_SDWA && i->dst_sel != 6 && i->dst_unused == 2;
    if (i->op->flags & (OPF_READS_D | OPF_HALF | OPF_D16) || preserves)
        note(i->reads, &i->nreads, &i->dst[0], ROLE_VALU);
    if (i->op->flags & OPF_SWAP)
        note(i->writes, &i->nwrites, &i->src[0], ROLE_VALU);
    if (i->op->flags & OPF_DIVFMAS)
        i->reads[i->nreads++] = (struct emu_regs){EMU_VCC, 2, ROLE_MASK, false};
    if (i->lds)
        i->reads[i->nreads++] = (struct emu_regs){EMU_M0, 1, ROLE_MEM, false};
}

/* v_cndmask takes neg and abs on operands that are bits */
static bool sign_on_integer(const struct emu_inst *i) {
    bool any = false;
    for (unsigned n = 0; n < i->nsrc; n++)
        any = any || ((i->neg | i->abs) >> n & 1 && i->src[n].type == 'b' && strcmp(i->op->name, "v_cndmask_b32") != 0);
    return any && i->op->enc >= ENC_VOP1 && i->op->enc <= ENC_VOP3;
}

bool emu_decode(const uint32_t *words, size_t left, const struct emu_decode_env *env, struct emu_inst *out) {
    *out = (struct emu_inst){};
    struct decoder d = {.w = words, .left = left, .env = env, .i = out};
    decode_words(&d);
    if (!out->op)
        reject(&d, "unknown instruction");
    else if (sign_on_integer(out))
        reject(&d, "neg or abs on an integer operand");
    if (d.bad)
        return false;
    note_registers(out);
    return true;
}
