/* What silicon leaves undefined, the emulator stops on: registers in flight, missing wait states, LDS races.
 * Sources: CDNA4 ISA 4.4, 4.5 and the tables of chapter 7; LLVM's GCNHazardRecognizer.cpp. States: 1 instruction = 1,
 * s_nop n = n + 1.
 *
 * Wait states. Each wave has a clock in wait states; each VGPR and SGPR remembers when what kind of instruction touched
 * it. An instruction at clock t after one at clock x has t - x - 1 states between.
 *
 * LDS. Every byte of LDS has a shadow: last writer with the barrier epoch in which the write was known complete, and
 * the waves that read it with the same. An access of another wave is ordered only if it completed in an earlier epoch.
 */
#include <stdio.h>

#include "check.h"

enum { NEVER_DONE = UINT32_MAX }; /* epoch of a write still in flight */

static int mfma_passes(const struct emu_inst *i) {
    bool f8 = i->cbsz < 2 || i->blgp < 2;
    return i->op->arg == 16 ? (f8 ? 8 : 4) : (f8 ? 16 : 8);
}

static bool is_valu(const struct emu_inst *i) { return i->op->enc >= ENC_VOP1 && i->op->enc <= ENC_MFMA; }

static bool is_vmem(const struct emu_inst *i) { return i->op->enc >= ENC_MUBUF; }

static bool half_result(const struct emu_inst *i) {
    return (i->form == FORM_SDWA && i->dst_sel != 6) || i->op->flags & OPF_HALF ||
           (i->form == FORM_E64 && i->opsel & 8 && !emu_is_matrix(i));
}

static const char *reg_name(const struct emu_wave *w, unsigned r, char out[8]) {
    unsigned acc = w->b->k->env.accum_offset;
    snprintf(out, 8, "%c%u", r < acc ? 'v' : 'a', r < acc ? r : r - acc);
    return out;
}

/* states between `when` and now are fewer than need */
static bool too_soon(const struct emu_wave *w, uint32_t when, unsigned need) { return w->t - when <= need; }

static bool missing(struct emu_wave *w, const char *reg, uint32_t when, unsigned need, const char *rule) {
    return emu_stop(w, -1, "%s: %s: needs %u wait states, has %u", reg, rule, need, w->t - when - 1);
}

/* ---- vector registers ---- */
static unsigned mfma_row(unsigned passes) { return passes <= 2 ? 0 : passes <= 4 ? 1 : passes <= 8 ? 2 : 3; }

/* states from an MFMA's write of D until this use of it */
static unsigned mfma_result_need(const struct emu_track *k, const struct emu_inst *i, const struct emu_regs *run,
                                 bool write) {
    static const uint8_t overlap[4] = {4, 6, 10, 18}, other[4] = {5, 8, 12, 20};
    unsigned row = mfma_row(k->mfma_passes);
    if (write && emu_is_matrix(i))
        return 0; /* same pipe, in order */
    if (!write && run->role == ROLE_C && emu_is_matrix(i)) {
        bool exact = k->mfma_dst == run->reg && k->mfma_op == i->op->opcode;
        return exact ? (row == 0 ? 2 : 0) : overlap[row];
    }
    return other[row];
}

static bool check_mfma_use(struct emu_wave *w, const struct emu_inst *i, const struct emu_regs *run, unsigned r,
                           bool write) {
    static const uint8_t war[4] = {1, 3, 7, 15};
    const struct emu_track *k = &w->track[r];
    char name[8];
    if (w->t - k->mfma <= 20) {
        unsigned need = mfma_result_need(k, i, run, write);
        if (too_soon(w, k->mfma, need))
            return missing(w, reg_name(w, r, name), k->mfma, need,
                           write ? "overwritten while an MFMA still writes it" : "MFMA result used too early");
    }
    if (write && !emu_is_matrix(i) && w->t - k->srcc <= 16) { /* ISA: VALU writers; LLVM waits before loads too */
        unsigned need = war[mfma_row(k->srcc_passes)];
        if (too_soon(w, k->srcc, need))
            return missing(w, reg_name(w, r, name), k->srcc, need, "overwritten while an MFMA still reads it as SrcC");
    }
    return true;
}

static bool check_vector_read(struct emu_wave *w, const struct emu_inst *i, const struct emu_regs *run, unsigned r) {
    const struct emu_track *k = &w->track[r];
    char name[8];
    if (w->vpend[r] || w->dpend[r])
        return emu_stop(w, -1, "reads %s while %s into it is in flight", reg_name(w, r, name),
                        w->vpend[r] ? "a memory load" : "an LDS read");
    if (!check_mfma_use(w, i, run, r, false))
        return false;
    if (!is_valu(i))
        return true;
    unsigned need = emu_is_matrix(i) || i->op->flags & OPF_SWAP ? 2 : i->op->flags & OPF_LANESEL ? 1 : 0;
    if (i->form == FORM_DPP && i->src[0].file == EMU_VGPR && r == i->src[0].reg)
        need = 2;
    if (need && too_soon(w, k->valu, need))
        return missing(w, reg_name(w, r, name), k->valu, need,
                       emu_is_matrix(i) ? "VALU result used by an MFMA" : "VALU result read across lanes");
    if (!(i->op->flags & OPF_TRANS) && too_soon(w, k->trans, 1))
        return missing(w, reg_name(w, r, name), k->trans, 1, "transcendental result used by a VALU instruction");
    if (too_soon(w, k->half, 1))
        return missing(w, reg_name(w, r, name), k->half, 1, "partly written register used by a VALU instruction");
    return true;
}

static bool check_vector_write(struct emu_wave *w, const struct emu_inst *i, const struct emu_regs *run, unsigned r) {
    const struct emu_track *k = &w->track[r];
    char name[8];
    /* vector-memory loads return in order (VmemWriteVgprInOrder), so one may follow another into a register */
    if (w->dpend[r] || (w->vpend[r] && !is_vmem(i)))
        return emu_stop(w, -1, "overwrites %s while %s into it is in flight", reg_name(w, r, name),
                        w->vpend[r] ? "a memory load" : "an LDS read");
    if (!check_mfma_use(w, i, run, r, true))
        return false;
    /* The ISA asks for one state before other writers too; a load cannot return that soon and LLVM does not wait. */
    if (is_valu(i) && too_soon(w, k->store, k->store_need))
        return missing(w, reg_name(w, r, name), k->store, k->store_need, "data of a wide store overwritten");
    if (is_valu(i) && !(i->op->flags & OPF_TRANS) && too_soon(w, k->trans, 1))
        return missing(w, reg_name(w, r, name), k->trans, 1, "transcendental result overwritten by a VALU instruction");
    if (i->op->flags & OPF_SWAP && too_soon(w, k->valu, 2))
        return missing(w, reg_name(w, r, name), k->valu, 2, "VALU result swapped across lanes");
    return true;
}

/* ---- scalar registers ---- */
static bool check_scalar_read(struct emu_wave *w, const struct emu_inst *i, const struct emu_regs *run, unsigned r) {
    char name[8];
    snprintf(name, sizeof name, "s%u", r);
    if (w->spend[r])
        return emu_stop(w, -1, "reads %s while a scalar load into it is in flight", name);
    unsigned need = 0;
    if (is_vmem(i))
        need = 5;
    else if (is_valu(i))
        need = run->role == ROLE_LANESEL || i->op->flags & OPF_DIVFMAS ? 4 : 2;
    if (need && too_soon(w, w->sgpr_valu[r], need))
        return missing(w, name, w->sgpr_valu[r], need,
                       is_vmem(i) ? "VALU result used by a memory instruction"
                                  : "VALU result used as a scalar operand");
    if (is_valu(i) && (r == EMU_EXEC || r == EMU_EXEC + 1) && too_soon(w, w->exec_valu, 2))
        return missing(w, "exec", w->exec_valu, 2, "v_cmpx result read as a constant");
    return true;
}

static bool check_scalar_write(struct emu_wave *w, unsigned r) {
    if (w->spend[r])
        return emu_stop(w, -1, "overwrites s%u while a scalar load into it is in flight", r);
    return true;
}

static bool check_exec(struct emu_wave *w, const struct emu_inst *i) {
    unsigned need = emu_is_matrix(i) || i->op->flags & (OPF_LANESEL | OPF_SWAP) ? 4 : i->form == FORM_DPP ? 5 : 0;
    if (need && too_soon(w, w->exec_valu, need))
        return missing(w, "exec", w->exec_valu, need, "v_cmpx result used by a cross-lane or matrix instruction");
    if (i->lds && too_soon(w, w->m0_salu, 1))
        return missing(w, "m0", w->m0_salu, 1, "scalar write used by an LDS copy");
    return true;
}

/* saveexec and branches read registers that are not operands */
static bool check_implicit(struct emu_wave *w, const struct emu_inst *i) {
    bool vcc = i->op->enc == ENC_SOPP && (i->op->opcode == 6 || i->op->opcode == 7);
    if (vcc && (w->spend[EMU_VCC] || w->spend[EMU_VCC + 1]))
        return emu_stop(w, -1, "branches on VCC while a scalar load into it is in flight");
    return true;
}

bool emu_check(struct emu_wave *w, const struct emu_inst *i) {
    for (unsigned n = 0; n < i->nreads; n++)
        for (unsigned r = i->reads[n].reg; r < i->reads[n].reg + (unsigned)i->reads[n].n; r++)
            if (!(i->reads[n].vector ? check_vector_read(w, i, &i->reads[n], r)
                                     : check_scalar_read(w, i, &i->reads[n], r)))
                return false;
    for (unsigned n = 0; n < i->nwrites; n++)
        for (unsigned r = i->writes[n].reg; r < i->writes[n].reg + (unsigned)i->writes[n].n; r++)
            if (!(i->writes[n].vector ? check_vector_write(w, i, &i->writes[n], r) : check_scalar_write(w, r)))
                return false;
    return check_exec(w, i) && check_implicit(w, i);
}

static void track_mfma(struct emu_wave *w, const struct emu_inst *i) {
    const struct emu_operand *d = &i->dst[0], *c = &i->src[2];
    uint8_t passes = (uint8_t)mfma_passes(i);
    for (unsigned r = d->reg; r < d->reg + (unsigned)d->dwords; r++) {
        struct emu_track *k = &w->track[r];
        k->mfma = w->t;
        k->mfma_passes = passes;
        k->mfma_dst = d->reg;
        k->mfma_op = i->op->opcode;
    }
    if (c->file == EMU_VGPR)
        for (unsigned r = c->reg; r < c->reg + (unsigned)c->dwords; r++) {
            w->track[r].srcc = w->t;
            w->track[r].srcc_passes = passes;
        }
}

static void track_store(struct emu_wave *w, const struct emu_inst *i) {
    const struct emu_operand *data = &i->src[i->nsrc - 1];
    bool sgpr = i->op->enc == ENC_MUBUF && i->soffset.file == EMU_SGPR;
    for (unsigned r = data->reg; r < data->reg + (unsigned)data->dwords; r++) {
        w->track[r].store = w->t;
        w->track[r].store_need = sgpr ? 1 : 2;
    }
}

void emu_track_writes(struct emu_wave *w, const struct emu_inst *i) {
    if (emu_is_matrix(i))
        track_mfma(w, i);
    else if (is_valu(i)) {
        for (unsigned n = 0; n < i->nwrites; n++)
            for (unsigned r = i->writes[n].reg; r < i->writes[n].reg + (unsigned)i->writes[n].n; r++) {
                if (!i->writes[n].vector) {
                    w->sgpr_valu[r] = w->t;
                    continue;
                }
                w->track[r].valu = w->t;
                if (i->op->flags & OPF_TRANS)
                    w->track[r].trans = w->t;
                if (half_result(i))
                    w->track[r].half = w->t;
            }
        if (i->op->flags & OPF_CMPX)
            w->exec_valu = w->t;
    } else if (is_vmem(i) && i->op->flags & OPF_STORE && i->op->arg > 8)
        track_store(w, i);
}

/* ---- LDS shadow ---- */
static bool race(struct emu_wave *w, int lane, uint32_t at, const char *mine, unsigned other, const char *theirs,
                 bool flying) {
    if (other == w->id)
        return emu_stop(w, lane, "LDS byte 0x%x: %s while this wave's own %s is in flight", at, mine, theirs);
    return emu_stop(w, lane, "LDS race at byte 0x%x: %s, and wave %u's %s %s", at, mine, other, theirs,
                    flying ? "is still in flight" : "has no barrier between");
}

static const char *const kind_name[3] = {"read", "write", "LDS copy"};

static bool issue_byte(struct emu_wave *w, enum emu_lds_kind kind, uint32_t at, int lane) {
    struct emu_shadow *s = &w->b->shadow[at];
    uint32_t epoch = w->b->epoch;
    uint16_t me = (uint16_t)(1u << w->id);
    const char *writer = s->w_dma ? "LDS copy" : "write";
    if (s->w_epoch >= epoch && s->w_wave != w->id)
        return race(w, lane, at, kind_name[kind], s->w_wave, writer, s->w_epoch == NEVER_DONE);
    if (s->w_epoch == NEVER_DONE && (s->w_dma || kind == LDS_DMA))
        return race(w, lane, at, kind_name[kind], w->id, writer, true);
    if (kind == LDS_READ) {
        s->r_pend |= me;
        return true;
    }
    uint16_t readers = s->r_pend | (s->r_epoch >= epoch ? s->r_mask : 0), others = readers & (uint16_t)~me;
    if (others)
        return race(w, lane, at, kind_name[kind], (unsigned)__builtin_ctz(others), "read", others & s->r_pend);
    if (kind == LDS_DMA && s->r_pend & me)
        return race(w, lane, at, kind_name[kind], w->id, "read", true);
    s->w_epoch = NEVER_DONE;
    s->w_wave = w->id;
    s->w_dma = kind == LDS_DMA;
    return true;
}

bool emu_lds_issue(struct emu_wave *w, enum emu_lds_kind kind, uint32_t addr, unsigned bytes, int lane) {
    for (uint32_t at = addr; at < addr + bytes; at++)
        if (!issue_byte(w, kind, at, lane))
            return false;
    return true;
}

void emu_lds_retire(struct emu_wave *w, enum emu_lds_kind kind, uint32_t addr, unsigned bytes) {
    uint32_t epoch = w->b->epoch;
    uint16_t me = (uint16_t)(1u << w->id);
    for (struct emu_shadow *s = w->b->shadow + addr; s < w->b->shadow + addr + bytes; s++) {
        if (kind != LDS_READ) {
            if (s->w_wave == w->id && s->w_epoch == NEVER_DONE)
                s->w_epoch = epoch;
            continue;
        }
        s->r_pend &= (uint16_t)~me;
        if (s->r_epoch != epoch) {
            s->r_epoch = epoch;
            s->r_mask = 0;
        }
        s->r_mask |= me;
    }
}

/* An older access of this wave to the same byte may have retired and hidden that a younger one is still in flight. */
static void remark(struct emu_wave *w, const struct emu_pend *p, uint32_t addr) {
    for (struct emu_shadow *s = w->b->shadow + addr; s < w->b->shadow + addr + p->bytes; s++)
        if (p->kind == P_DSREAD)
            s->r_pend |= (uint16_t)(1u << w->id);
        else {
            s->w_epoch = NEVER_DONE;
            s->w_wave = w->id;
            s->w_dma = false;
        }
}

void emu_lds_remark(struct emu_wave *w) {
    for (unsigned n = 0; n < w->ds.count; n++) {
        const struct emu_pend *p = &w->ds.slot[(w->ds.head + n) % w->ds.size];
        if (p->kind != P_DSREAD && p->kind != P_DSWRITE)
            continue;
        for (unsigned l = 0; l < EMU_LANES; l++) {
            if (!(p->exec >> l & 1))
                continue;
            remark(w, p, (uint32_t)p->addr[l]);
            if (p->elems == 2)
                remark(w, p, (uint32_t)p->addr1[l]);
        }
    }
}
