/* struct emu_inst -> text as llvm-objdump 22 writes it (without the trailing comment). The test that decodes every
 * shipped code object compares these lines with llvm-objdump's: a wrong field shows as a different line. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "decode.h"

struct text {
    char *at;
    size_t left;
};

static void put(struct text *t, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void put(struct text *t, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(t->at, t->left, fmt, args);
    va_end(args);
    size_t step = n < 0 ? 0 : (size_t)n < t->left ? (size_t)n : t->left - 1;
    t->at += step;
    t->left -= step;
}

static void put_run(struct text *t, char file, unsigned first, unsigned n) {
    if (n == 1)
        put(t, "%c%u", file, first);
    else
        put(t, "%c[%u:%u]", file, first, first + n - 1);
}

static void put_sgpr(struct text *t, unsigned code, unsigned n) {
    if (code == EMU_VCC)
        put(t, n == 2 ? "vcc" : "vcc_lo");
    else if (code == EMU_VCC + 1)
        put(t, "vcc_hi");
    else if (code == EMU_EXEC)
        put(t, n == 2 ? "exec" : "exec_lo");
    else if (code == EMU_EXEC + 1)
        put(t, "exec_hi");
    else if (code == EMU_M0)
        put(t, "m0");
    else
        put_run(t, 's', code, n);
}

static void put_const(struct text *t, const struct emu_operand *o) {
    static const char *const floats[8] = {"0.5", "-0.5", "1.0", "-1.0", "2.0", "-2.0", "4.0", "-4.0"};
    if (o->code == 255)
        put(t, "0x%x", (unsigned)(o->type == 'f' && o->dwords == 2 ? o->value >> 32 : o->value));
    else if (o->code >= 240 && o->type == 'w')
        put(t, "0x%x", (unsigned)o->value);
    else if (o->code >= 240 && o->code < 248)
        put(t, "%s", floats[o->code - 240]);
    else if (o->code == 248)
        put(t, "%s", o->dwords == 2 && o->type != 'q' ? "0.15915494309189532" : "0.15915494");
    else
        put(t, "%d", o->code <= 192 ? o->code - 128 : 192 - o->code);
}

static void put_operand(struct text *t, const struct emu_operand *o) {
    if (o->file == EMU_VGPR)
        put_run(t, o->acc ? 'a' : 'v', o->index, o->dwords);
    else if (o->file == EMU_SGPR)
        put_sgpr(t, o->index, o->dwords);
    else
        put_const(t, o);
}

static void comma(struct text *t, bool *first) {
    put(t, "%s", *first ? " " : ", ");
    *first = false;
}

static void put_operands(struct text *t, const struct emu_operand *o, unsigned n, bool *first) {
    for (const struct emu_operand *end = o + n; o < end; o++) {
        comma(t, first);
        put_operand(t, o);
    }
}

static void put_modified(struct text *t, const struct emu_inst *i, unsigned n) {
    const struct emu_operand *o = &i->src[n];
    bool neg = i->neg >> n & 1, abs = i->abs >> n & 1;
    bool call = neg && !abs && o->file == EMU_CONST;
    if (i->form == FORM_SDWA && i->src_sext[n])
        put(t, "sext(");
    put(t, "%s%s", neg ? (call ? "neg(" : "-") : "", abs ? "|" : "");
    put_operand(t, o);
    put(t, "%s%s", abs ? "|" : "", call ? ")" : "");
    if (i->form == FORM_SDWA && i->src_sext[n])
        put(t, ")");
}

static void put_bits(struct text *t, const char *name, unsigned value, unsigned n) {
    put(t, " %s:[", name);
    for (unsigned b = 0; b < n; b++)
        put(t, "%s%u", b ? "," : "", value >> b & 1);
    put(t, "]");
}

static void put_dpp(struct text *t, const struct emu_inst *i) {
    unsigned c = i->dpp_ctrl;
    if (c < 0x100)
        put(t, " quad_perm:[%u,%u,%u,%u]", c & 3, c >> 2 & 3, c >> 4 & 3, c >> 6 & 3);
    else if (c > 0x100 && c < 0x110)
        put(t, " row_shl:%u", c & 15);
    else if (c > 0x110 && c < 0x120)
        put(t, " row_shr:%u", c & 15);
    else if (c > 0x120 && c < 0x130)
        put(t, " row_ror:%u", c & 15);
    else if (c >= 0x150 && c < 0x160)
        put(t, " row_newbcast:%u", c & 15);
    else {
        const char *name = c == 0x130   ? "wave_shl:1"
                           : c == 0x134 ? "wave_rol:1"
                           : c == 0x138 ? "wave_shr:1"
                           : c == 0x13c ? "wave_ror:1"
                           : c == 0x140 ? "row_mirror"
                           : c == 0x141 ? "row_half_mirror"
                           : c == 0x142 ? "row_bcast:15"
                           : c == 0x143 ? "row_bcast:31"
                                        : "/* invalid dpp_ctrl */";
        put(t, " %s", name);
    }
    put(t, " row_mask:0x%x bank_mask:0x%x%s", i->row_mask, i->bank_mask, i->bound_ctrl ? " bound_ctrl:1" : "");
}

static const char *sel_name(unsigned sel) {
    static const char *const names[8] = {"BYTE_0", "BYTE_1", "BYTE_2", "BYTE_3", "WORD_0", "WORD_1", "DWORD", "?"};
    return names[sel];
}

static void put_vop_tail(struct text *t, const struct emu_inst *i) {
    static const char *const unused[4] = {"UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE", "?"};
    static const char *const omod[4] = {"", " mul:2", " mul:4", " div:2"};
    unsigned nsrc = i->nsrc;
    if (i->op->enc == ENC_VOP3 && (i->op->opcode == 0x233 || i->op->opcode == 0x234) && i->bitop3)
        put(t, i->bitop3 <= 10 ? " bitop3:%u" : " bitop3:0x%x", i->bitop3);
    if (i->form == FORM_E64 && i->op->enc == ENC_VOP3P) {
        unsigned all = (1u << nsrc) - 1;
        if (i->opsel & all)
            put_bits(t, "op_sel", i->opsel, nsrc);
        if ((i->opsel_hi & all) != all)
            put_bits(t, "op_sel_hi", i->opsel_hi, nsrc);
        if (i->neg & all)
            put_bits(t, "neg_lo", i->neg, nsrc);
        if (i->neg_hi & all)
            put_bits(t, "neg_hi", i->neg_hi, nsrc);
    } else if (i->form == FORM_E64 && i->opsel && i->op->enc != ENC_MFMA)
        put_bits(t, "op_sel", (i->opsel & ((1u << nsrc) - 1)) | (unsigned)(i->opsel >> 3 & 1) << nsrc, nsrc + 1);
    put(t, "%s%s", i->clamp ? " clamp" : "", omod[i->omod]);
    if (i->form == FORM_DPP)
        put_dpp(t, i);
    if (i->form == FORM_SDWA) {
        if (i->op->enc != ENC_VOPC && !(i->op->flags & OPF_NODSTSEL))
            put(t, " dst_sel:%s dst_unused:%s", sel_name(i->dst_sel), unused[i->dst_unused]);
        put(t, " src0_sel:%s", sel_name(i->src_sel[0]));
        if (nsrc > 1)
            put(t, " src1_sel:%s", sel_name(i->src_sel[1]));
    }
}

static void put_vop(struct text *t, const struct emu_inst *i) {
    static const char *const suffix[4] = {"_e32", "_e64", "_sdwa", "_dpp"};
    bool base = i->op->enc == ENC_VOP1 || i->op->enc == ENC_VOP2 || i->op->enc == ENC_VOPC;
    bool e64_only_name = i->op->flags & OPF_NOSUFFIX;
    put(t, "%s%s", i->op->name, base && (!e64_only_name || i->form > FORM_E64) ? suffix[i->form] : "");
    bool first = true;
    put_operands(t, i->dst, i->ndst, &first);
    for (unsigned n = 0; n < i->nsrc; n++) {
        comma(t, &first);
        if (i->op->enc == ENC_VOP3P)
            put_operand(t, &i->src[n]);
        else
            put_modified(t, i, n);
    }
    put_vop_tail(t, i);
}

static void put_mfma(struct text *t, const struct emu_inst *i) {
    bool scaled = i->nsrc == 5, first = true;
    put(t, "v_mfma_%s%s", scaled ? "scale_" : "", i->op->name + strlen("v_mfma_"));
    put_operands(t, i->dst, 1, &first);
    put_operands(t, i->src, i->nsrc, &first);
    if (scaled && i->opsel)
        put_bits(t, "op_sel", i->opsel, 3);
    if (scaled)
        put_bits(t, "op_sel_hi", i->opsel_hi, 3);
    if (i->cbsz)
        put(t, " cbsz:%u", i->cbsz);
    if (i->blgp)
        put(t, " blgp:%u", i->blgp);
}

static void put_waitcnt(struct text *t, unsigned imm) {
    unsigned vm = (imm & 15) | (imm >> 14 & 3) << 4, exp = imm >> 4 & 7, lgkm = imm >> 8 & 15;
    bool all = vm == 63 && exp == 7 && lgkm == 15;
    if (vm != 63 || all)
        put(t, " vmcnt(%u)", vm);
    if (exp != 7 || all)
        put(t, " expcnt(%u)", exp);
    if (lgkm != 15 || all)
        put(t, " lgkmcnt(%u)", lgkm);
}

static void put_sopk_imm(struct text *t, const struct emu_inst *i) {
    if (i->op->opcode == 18 || i->op->opcode == 20)
        put(t, "hwreg(HW_REG_%s, %u, %u)", (i->simm & 63) == 1 ? "MODE" : "?", i->simm >> 6 & 31, (i->simm >> 11) + 1);
    else
        put(t, "0x%x", i->simm);
}

static void put_gpr_idx(struct text *t, unsigned mode) {
    static const char *const names[4] = {"SRC0", "SRC1", "SRC2", "DST"};
    bool first = true;
    put(t, "gpr_idx(");
    for (unsigned n = 0; n < 4; n++)
        if (mode >> n & 1) {
            put(t, "%s%s", first ? "" : ",", names[n]);
            first = false;
        }
    put(t, ")");
}

static void put_scalar(struct text *t, const struct emu_inst *i) {
    bool first = true;
    put(t, "%s", i->op->name);
    if (i->op->enc == ENC_SOPP) {
        unsigned op = i->op->opcode;
        if (op == 12)
            put_waitcnt(t, i->simm);
        else if (op == 29) {
            put(t, " ");
            put_gpr_idx(t, i->simm & 15);
        } else if (op != 10 && op != 19 && op != 28 && (op != 1 || i->simm))
            put(t, op == 14 && i->simm > 64 ? " 0x%x" : " %u", i->simm);
        return;
    }
    bool setreg = i->op->enc == ENC_SOPK && (i->op->opcode == 18 || i->op->opcode == 20);
    if (setreg) {
        put(t, " ");
        put_sopk_imm(t, i);
        first = false;
    }
    put_operands(t, i->dst, i->ndst, &first);
    put_operands(t, i->src, i->nsrc, &first);
    if (i->op->enc == ENC_SOPC && i->op->opcode == 17) {
        put(t, ", ");
        put_gpr_idx(t, i->simm >> 8 & 15);
    }
    if (i->op->enc == ENC_SOPK && !setreg) {
        comma(t, &first);
        put_sopk_imm(t, i);
    }
}

static void put_smem(struct text *t, const struct emu_inst *i) {
    put(t, "%s", i->op->name);
    if (!i->ndst)
        return;
    put(t, " ");
    put_operand(t, &i->dst[0]);
    if (!i->saddr.file)
        return;
    put(t, ", ");
    put_operand(t, &i->saddr);
    put(t, ", ");
    if (i->soffset.file)
        put_operand(t, &i->soffset);
    if (i->imm_en) {
        put(t, "%s", i->soffset.file ? " offset:" : "");
        put(t, "%s0x%x", i->offset < 0 ? "-" : "", (unsigned)(i->offset < 0 ? -i->offset : i->offset));
    }
    put(t, "%s", i->sc0 ? " glc" : "");
}

static void put_swizzle(struct text *t, unsigned offset) {
    if (!offset)
        return;
    if (offset & 0x8000) {
        if ((offset & 0xff00) == 0x8000)
            put(t, " offset:swizzle(QUAD_PERM,%u,%u,%u,%u)", offset & 3, offset >> 2 & 3, offset >> 4 & 3,
                offset >> 6 & 3);
        else
            put(t, " offset:%u", offset);
        return;
    }
    unsigned and = offset & 31, or = offset >> 5 & 31, xor = offset >> 10 & 31;
    if (and == 31 && !or && xor && !(xor & (xor - 1)))
        put(t, " offset:swizzle(SWAP,%u)", xor);
    else if (and == 31 && !or && xor && !(xor & (xor + 1)))
        put(t, " offset:swizzle(REVERSE,%u)", xor + 1);
    else if (!xor && ((32 - and) & (31 - and)) == 0 && and < 31 && or < 32 - and)
        put(t, " offset:swizzle(BROADCAST,%u,%u)", 32 - and, or);
    else {
        put(t, " offset:swizzle(BITMASK_PERM,\"");
        for (int b = 4; b >= 0; b--) {
            unsigned a = and >> b & 1, o = or >> b & 1, x = xor >> b & 1;
            put(t, "%c", a && !o ? (x ? 'i' : 'p') : ((o ^ x) ? '1' : '0'));
        }
        put(t, "\")");
    }
}

static void put_ds(struct text *t, const struct emu_inst *i) {
    bool first = true;
    put(t, "%s", i->op->name);
    put_operands(t, i->dst, i->ndst, &first);
    put_operands(t, i->src, i->nsrc, &first);
    if (i->op->opcode == 61)
        put_swizzle(t, (unsigned)i->offset);
    else if (strstr(i->op->name, "read2") || strstr(i->op->name, "write2")) {
        if (i->offset0)
            put(t, " offset0:%u", i->offset0);
        if (i->offset1)
            put(t, " offset1:%u", i->offset1);
    } else if (i->offset)
        put(t, " offset:%u", (unsigned)i->offset);
}

static void put_cache(struct text *t, const struct emu_inst *i) {
    put(t, "%s%s%s%s", i->sc0 ? " sc0" : "", i->nt ? " nt" : "", i->sc1 ? " sc1" : "",
        i->lds && i->op->enc == ENC_MUBUF ? " lds" : "");
}

static void put_mubuf(struct text *t, const struct emu_inst *i) {
    bool store = i->op->flags & OPF_STORE, address = i->offen || i->idxen;
    put(t, "%s ", i->op->name);
    if (store)
        put_operand(t, &i->src[address]);
    else if (i->ndst)
        put_operand(t, &i->dst[0]);
    put(t, "%s", store || i->ndst ? ", " : "");
    if (address)
        put_operand(t, &i->src[0]);
    else
        put(t, "off");
    put(t, ", ");
    put_operand(t, &i->saddr);
    put(t, ", ");
    put_operand(t, &i->soffset);
    put(t, "%s%s", i->idxen ? " idxen" : "", i->offen ? " offen" : "");
    if (i->offset)
        put(t, " offset:%d", i->offset);
    put_cache(t, i);
}

static void put_flat(struct text *t, const struct emu_inst *i) {
    bool first = true;
    put(t, "%s", i->op->name);
    put_operands(t, i->dst, i->ndst, &first);
    comma(t, &first);
    if (i->offen)
        put_operand(t, &i->src[0]);
    else
        put(t, "off");
    if (i->op->flags & OPF_STORE) {
        put(t, ", ");
        put_operand(t, &i->src[i->offen]);
    }
    if (i->op->enc != ENC_FLAT)
        put(t, ", ");
    if (i->saddr.file)
        put_operand(t, &i->saddr);
    else if (i->op->enc != ENC_FLAT)
        put(t, "off");
    if (i->offset)
        put(t, " offset:%d", i->offset);
    put_cache(t, i);
}

void emu_disasm(const struct emu_inst *i, char *text, size_t size) {
    struct text t = {text, size};
    text[0] = 0;
    if (!i->op) {
        put(&t, "<unknown>");
        return;
    }
    switch (i->op->enc) {
    case ENC_VOP1:
    case ENC_VOP2:
    case ENC_VOPC:
    case ENC_VOP3:
    case ENC_VOP3P:
        put_vop(&t, i);
        break;
    case ENC_MFMA:
        if (emu_is_matrix(i))
            put_mfma(&t, i);
        else
            put_vop(&t, i);
        break;
    case ENC_SMEM:
        put_smem(&t, i);
        break;
    case ENC_DS:
        put_ds(&t, i);
        break;
    case ENC_MUBUF:
        put_mubuf(&t, i);
        break;
    case ENC_FLAT:
    case ENC_GLOBAL:
    case ENC_SCRATCH:
        put_flat(&t, i);
        break;
    default:
        put_scalar(&t, i);
        break;
    }
}
