/* Scalar instructions: SOP1, SOP2, SOPC, SOPK semantics and the program-control SOPP.
 * Source: CDNA4 ISA chapters 5 and 12 (pseudo-code). */
#include "check.h"
#include "exec.h"
#include "flight.h"

bool emu_exec_salu(struct emu_wave *w, const struct emu_inst *i, emu_salu_fn *f) {
    struct emu_salu c = {.w = w, .i = i, .scc = w->scc};
    if (i->nsrc)
        c.a = emu_scalar(w, &i->src[0]);
    c.b = i->nsrc > 1 ? emu_scalar(w, &i->src[1]) : i->op->enc == ENC_SOPK ? i->simm : 0;
    if (i->ndst)
        c.d = emu_scalar(w, &i->dst[0]);
    f(&c);
    w->scc = c.scc;
    if (!i->ndst)
        return true;
    emu_scalar_write(w, &i->dst[0], c.d);
    if (i->dst[0].reg == EMU_VCC || i->dst[0].reg == EMU_VCC + 1)
        w->vccz_stale = i->dst[0].dwords == 1; /* a half written alone leaves vccz as it was */
    if (i->dst[0].reg == EMU_M0)
        w->m0_salu = w->t;
    return true;
}

#define OP(name) void emu_s_##name(struct emu_salu *c)
#define A32 ((uint32_t)c->a)
#define B32 ((uint32_t)c->b)
#define IA ((int32_t)c->a)
#define IB ((int32_t)c->b)

static void logic(struct emu_salu *c, uint64_t value) {
    c->d = value;
    c->scc = value != 0;
}

OP(mov) { c->d = c->a; }
OP(cmov) { c->d = c->scc ? c->a : c->d; }
OP(not32) { logic(c, (uint32_t)~c->a); }
OP(not64) { logic(c, ~c->a); }
OP(brev32) { c->d = __builtin_bitreverse32(A32); }
OP(brev64) { c->d = __builtin_bitreverse64(c->a); }
OP(bcnt0) { logic(c, (uint64_t)(c->i->op->arg - __builtin_popcountll(c->a))); }
OP(bcnt1) { logic(c, (uint64_t)__builtin_popcountll(c->a)); }
OP(ff0) {
    uint64_t zeros = ~c->a & (c->i->op->arg == 32 ? 0xffffffffu : ~0ull);
    c->d = zeros ? (uint32_t)__builtin_ctzll(zeros) : 0xffffffff;
}
OP(ff1) { c->d = c->a ? (uint32_t)__builtin_ctzll(c->a) : 0xffffffff; }
OP(flbit) {
    unsigned width = (unsigned)c->i->op->arg;
    c->d = c->a ? (uint32_t)__builtin_clzll(c->a) - (64 - width) : 0xffffffff;
}
OP(flbit_signed) {
    unsigned width = (unsigned)c->i->op->arg;
    int64_t x = width == 32 ? IA : (int64_t)c->a;
    uint64_t differ = (uint64_t)(x ^ (x >> 63));
    c->d = differ ? (uint32_t)__builtin_clzll(differ) - (64 - width) : 0xffffffff;
}
OP(sext8) { c->d = (uint32_t)(int8_t)c->a; }
OP(sext16) { c->d = (uint32_t)(int16_t)c->a; }
OP(bitset0) { c->d &= ~(1ull << (c->a & (uint64_t)(c->i->op->arg - 1))); }
OP(bitset1) { c->d |= 1ull << (c->a & (uint64_t)(c->i->op->arg - 1)); }
OP(getpc) { c->d = c->w->b->k->entry + c->w->pc + 4; }

static void saveexec(struct emu_salu *c, uint64_t exec) {
    c->d = emu_exec(c->w);
    c->w->s[EMU_EXEC] = (uint32_t)exec;
    c->w->s[EMU_EXEC + 1] = (uint32_t)(exec >> 32);
    c->scc = exec != 0;
}
OP(and_saveexec) { saveexec(c, c->a & emu_exec(c->w)); }
OP(or_saveexec) { saveexec(c, c->a | emu_exec(c->w)); }
OP(xor_saveexec) { saveexec(c, c->a ^ emu_exec(c->w)); }
OP(andn2_saveexec) { saveexec(c, c->a & ~emu_exec(c->w)); }
OP(orn2_saveexec) { saveexec(c, c->a | ~emu_exec(c->w)); }
OP(nand_saveexec) { saveexec(c, ~(c->a & emu_exec(c->w))); }
OP(nor_saveexec) { saveexec(c, ~(c->a | emu_exec(c->w))); }
OP(xnor_saveexec) { saveexec(c, ~(c->a ^ emu_exec(c->w))); }
OP(andn1_saveexec) { saveexec(c, ~c->a & emu_exec(c->w)); }
OP(orn1_saveexec) { saveexec(c, ~c->a | emu_exec(c->w)); }
OP(andn1_wrexec) {
    saveexec(c, ~c->a & emu_exec(c->w));
    c->d = emu_exec(c->w);
}
OP(andn2_wrexec) {
    saveexec(c, c->a & ~emu_exec(c->w));
    c->d = emu_exec(c->w);
}
OP(abs) { logic(c, IA < 0 ? (uint32_t)-c->a : A32); }
OP(bitreplicate) {
    c->d = 0;
    for (unsigned b = 0; b < 32; b++)
        c->d |= (uint64_t)(A32 >> b & 1 ? 3 : 0) << (2 * b);
}

OP(add_u) {
    uint64_t sum = (uint64_t)A32 + B32;
    c->d = (uint32_t)sum;
    c->scc = sum >> 32;
}
OP(sub_u) {
    c->scc = B32 > A32;
    c->d = A32 - B32;
}
OP(add_i) {
    int32_t sum;
    c->scc = __builtin_add_overflow(IA, IB, &sum);
    c->d = (uint32_t)sum;
}
OP(sub_i) {
    int32_t difference;
    c->scc = __builtin_sub_overflow(IA, IB, &difference);
    c->d = (uint32_t)difference;
}
OP(addc) {
    uint64_t sum = (uint64_t)A32 + B32 + c->scc;
    c->d = (uint32_t)sum;
    c->scc = sum >> 32;
}
OP(subb) {
    uint64_t take = (uint64_t)B32 + c->scc;
    c->d = (uint32_t)(A32 - take);
    c->scc = take > A32;
}
OP(min_i) {
    c->scc = IA < IB;
    c->d = c->scc ? A32 : B32;
}
OP(min_u) {
    c->scc = A32 < B32;
    c->d = c->scc ? A32 : B32;
}
OP(max_i) {
    c->scc = IA > IB;
    c->d = c->scc ? A32 : B32;
}
OP(max_u) {
    c->scc = A32 > B32;
    c->d = c->scc ? A32 : B32;
}
OP(cselect) { c->d = c->scc ? c->a : c->b; }
OP(and) { logic(c, c->a & c->b); }
OP(or) { logic(c, c->a | c->b); }
OP(xor) { logic(c, c->a ^ c->b); }
OP(andn2) { logic(c, c->a & ~c->b); }
OP(orn2_32) { logic(c, (uint32_t)(c->a | ~c->b)); }
OP(orn2_64) { logic(c, c->a | ~c->b); }
OP(nand32) { logic(c, (uint32_t)~(c->a & c->b)); }
OP(nand64) { logic(c, ~(c->a & c->b)); }
OP(nor32) { logic(c, (uint32_t)~(c->a | c->b)); }
OP(nor64) { logic(c, ~(c->a | c->b)); }
OP(xnor32) { logic(c, (uint32_t)~(c->a ^ c->b)); }
OP(xnor64) { logic(c, ~(c->a ^ c->b)); }
OP(lshl32) { logic(c, A32 << (B32 & 31)); }
OP(lshl64) { logic(c, c->a << (B32 & 63)); }
OP(lshr32) { logic(c, A32 >> (B32 & 31)); }
OP(lshr64) { logic(c, c->a >> (B32 & 63)); }
OP(ashr32) { logic(c, (uint32_t)(IA >> (B32 & 31))); }
OP(ashr64) { logic(c, (uint64_t)((int64_t)c->a >> (B32 & 63))); }
OP(bfm32) { c->d = ((1u << (A32 & 31)) - 1) << (B32 & 31); }
OP(bfm64) { c->d = ((1ull << (A32 & 63)) - 1) << (B32 & 63); }
OP(mul) { c->d = (uint32_t)(A32 * B32); }
OP(mul_hi_u) { c->d = (uint32_t)((uint64_t)A32 * B32 >> 32); }
OP(mul_hi_i) { c->d = (uint32_t)((int64_t)IA * IB >> 32); }

static uint64_t field(uint64_t value, unsigned offset, unsigned width, unsigned size, bool is_signed) {
    if (!width)
        return 0;
    uint64_t x = value >> offset;
    if (width < 64)
        x &= (1ull << width) - 1;
    unsigned top = width < size - offset ? width : size - offset;
    if (is_signed && x >> (top - 1) & 1 && top < 64)
        x |= ~0ull << top;
    return size == 32 ? (uint32_t)x : x;
}
OP(bfe_u32) { logic(c, field(A32, B32 & 31, B32 >> 16 & 127, 32, false)); }
OP(bfe_i32) { logic(c, field(A32, B32 & 31, B32 >> 16 & 127, 32, true)); }
OP(bfe_u64) { logic(c, field(c->a, B32 & 63, B32 >> 16 & 127, 64, false)); }
OP(bfe_i64) { logic(c, field(c->a, B32 & 63, B32 >> 16 & 127, 64, true)); }
OP(absdiff) {
    int64_t x = (int32_t)(A32 - B32);
    logic(c, (uint32_t)(x < 0 ? -x : x));
}
OP(lshl_add) {
    uint64_t sum = ((uint64_t)A32 << c->i->op->arg) + B32;
    c->d = (uint32_t)sum;
    c->scc = sum >> 32 != 0;
}
OP(pack_ll) { c->d = (A32 & 0xffff) | B32 << 16; }
OP(pack_lh) { c->d = (A32 & 0xffff) | (B32 & 0xffff0000); }
OP(pack_hh) { c->d = A32 >> 16 | (B32 & 0xffff0000); }

static bool compare_u(int condition, uint64_t a, uint64_t b) {
    const bool result[6] = {a == b, a != b, a > b, a >= b, a < b, a <= b};
    return result[condition];
}
static bool compare_i(int condition, int32_t a, int32_t b) {
    const bool result[6] = {a == b, a != b, a > b, a >= b, a < b, a <= b};
    return result[condition];
}
OP(cmp_u) { c->scc = compare_u(c->i->op->arg, c->a, c->b); }
OP(cmp_i) { c->scc = compare_i(c->i->op->arg, IA, IB); }
OP(bitcmp0) { c->scc = !(c->a >> (B32 & (uint32_t)c->i->op->arg) & 1); }
OP(bitcmp1) { c->scc = c->a >> (B32 & (uint32_t)c->i->op->arg) & 1; }
OP(movk) { c->d = (uint32_t)(int16_t)c->b; }
OP(cmovk) { c->d = c->scc ? (uint32_t)(int16_t)c->b : c->d; }
OP(cmpk_i) { c->scc = compare_i(c->i->op->arg, IA, (int16_t)c->b); }
OP(cmpk_u) { c->scc = compare_u(c->i->op->arg, A32, (uint16_t)c->b); }
OP(addk) {
    int32_t sum;
    c->scc = __builtin_add_overflow((int32_t)c->d, (int32_t)(int16_t)c->b, &sum);
    c->d = (uint32_t)sum;
}
OP(mulk) { c->d = (uint32_t)((uint32_t)c->d * (uint32_t)(int16_t)c->b); }

/* ---- program control ---- */
#define RUN(name) bool emu_r_##name(struct emu_wave *w, const struct emu_inst *i)

RUN(nothing) {
    (void)w;
    (void)i;
    return true;
}

RUN(endpgm) {
    (void)i;
    if (emu_strict(w))
        for (unsigned n = 0; n < w->vm.count; n++)
            if (w->vm.slot[(w->vm.head + n) % w->vm.size].kind == P_DMA)
                return emu_stop(w, -1, "LDS copy still in flight at s_endpgm");
    emu_retire_vm(w, 0);
    emu_retire_lgkm(w, 0);
    w->state = WAVE_END;
    w->b->live--;
    return true;
}

RUN(branch) {
    uint64_t vcc = w->s[EMU_VCC] | (uint64_t)w->s[EMU_VCC + 1] << 32;
    int condition = i->op->arg;
    if ((condition == 3 || condition == 4) && w->vccz_stale && emu_strict(w))
        return emu_stop(w, -1, "branch on vccz after half of VCC was written alone (vccz is not updated)");
    const bool taken[7] = {true, !w->scc, w->scc, !vcc, vcc != 0, !emu_exec(w), emu_exec(w) != 0};
    if (taken[condition])
        w->next = w->pc + 4 + (uint32_t)((int32_t)(int16_t)i->simm * 4);
    return true;
}

RUN(barrier) {
    (void)i;
    if (emu_strict(w))
        emu_lds_remark(w);
    w->state = WAVE_BARRIER;
    return true;
}

RUN(waitcnt) {
    unsigned vm = (i->simm & 15u) | (i->simm >> 14 & 3u) << 4, lgkm = i->simm >> 8 & 15u;
    unsigned vm_before = w->vm.count, lgkm_before = w->ds.count + w->sm.count;
    struct emu_stat *stat = &w->b->stats[i - w->b->k->insts];
    if (vm < EMU_VMCNT_MAX)
        emu_retire_vm(w, vm);
    if (lgkm < EMU_LGKMCNT_MAX)
        emu_retire_lgkm(w, lgkm);
    stat->vm += vm_before - w->vm.count;
    stat->lgkm += lgkm_before - w->ds.count - w->sm.count;
    return true;
}

/* Only MODE.FP16_OVFL (bit 23) may change: every other MODE bit would change rules that this emulator fixes at launch.
 */
RUN(setreg) {
    unsigned id = i->simm & 63, offset = i->simm >> 6 & 31, size = (i->simm >> 11) + 1u;
    uint32_t value = (uint32_t)emu_scalar(w, &i->src[0]);
    if (emu_strict(w) && w->t - w->setreg <= 2)
        return emu_stop(w, -1, "s_setreg: needs 2 wait states after another, has %u", w->t - w->setreg - 1);
    w->setreg = w->t;
    if (id != 1 || offset != 23 || size != 1)
        return emu_stop(w, -1, "s_setreg of hardware register %u bits %u+%u: only MODE.FP16_OVFL is modelled", id,
                        offset, size);
    w->ovfl = value & 1;
    return true;
}

/* GPR indexing: while a mode is on, VALU instructions add M0[7:0] to the VGPR numbers that the mode names */
RUN(gpr_idx_on) {
    w->s[EMU_M0] =
        (w->s[EMU_M0] & 0xffff0f00) | (uint32_t)(emu_scalar(w, &i->src[0]) & 0xff) | (i->simm >> 8 & 15u) << 12;
    w->gpr_idx = i->simm >> 8 & 15;
    return true;
}

RUN(gpr_idx_idx) {
    w->s[EMU_M0] = (w->s[EMU_M0] & 0xffffff00) | (uint32_t)(emu_scalar(w, &i->src[0]) & 0xff);
    return true;
}

RUN(gpr_idx_mode) {
    w->gpr_idx = i->op->arg ? i->simm & 15 : 0;
    return true;
}
