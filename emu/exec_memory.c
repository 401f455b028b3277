/* Memory instructions: SMEM, DS, MUBUF (with LDS copies), GLOBAL, SCRATCH.
 * Sources: CDNA4 ISA chapters 4 (counters, order), 8 (SMEM), 9 (buffer resources, LDS copies), 10 (FLAT), 11 (LDS).
 * Here an access is issued: addresses are computed and checked, store data is captured. flight.c does the rest. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "exec.h"
#include "flight.h"
#include "memory.h"

#define RUN(name) bool emu_r_##name(struct emu_wave *w, const struct emu_inst *i)

static void count(struct emu_wave *w, enum emu_counter c, uint64_t n) { w->b->counters[c] += n; }

/* ---- checks on addresses ---- */
static bool check_memory(struct emu_wave *w, int lane, uint64_t addr, uint64_t bytes, bool write) {
    if (addr < w->cache_lo || addr + bytes > w->cache_hi || (write && !w->cache_w)) {
        uint64_t lo, hi;
        bool writable;
        if (!emu_mem_find(addr, &lo, &hi, &writable))
            return emu_stop_memory(w, lane, "%s of %u bytes at 0x%llx: outside every live allocation",
                                   write ? "store" : "load", (unsigned)bytes, (unsigned long long)addr);
        if (addr + bytes > hi)
            return emu_stop_memory(w, lane, "%s of %u bytes at 0x%llx: runs %llu bytes past its allocation",
                                   write ? "store" : "load", (unsigned)bytes, (unsigned long long)addr,
                                   (unsigned long long)(addr + bytes - hi));
        if (write && !writable)
            return emu_stop_memory(w, lane, "store at 0x%llx into read-only memory", (unsigned long long)addr);
        w->cache_lo = lo;
        w->cache_hi = hi;
        w->cache_w = writable;
    }
    return true;
}

static bool issue_lds(struct emu_wave *w, enum emu_lds_kind kind, unsigned lane, uint64_t addr, unsigned bytes) {
    static const char *const names[3] = {"ds read", "ds write", "LDS copy"};
    struct emu_block *b = w->b;
    int l = (int)lane;
    if (addr + bytes > b->lds_bytes)
        return emu_stop(w, l, "%s of %u bytes at LDS address 0x%llx: past the workgroup's %u bytes", names[kind], bytes,
                        (unsigned long long)addr, b->lds_bytes);
    if (!b->lds_started) /* as junk, when a block first touches it: most blocks of a padded grid never do */
        emu_junk(b->lds, b->lds_bytes, b->lds_seed);
    b->lds_started = true;
    if (!emu_strict(w))
        return true;
    unsigned align = bytes < 4 ? bytes : 4;
    if (addr % align)
        return emu_stop(w, l, "%s of %u bytes at LDS address 0x%llx: not aligned to %u", names[kind], bytes,
                        (unsigned long long)addr, align);
    return emu_lds_issue(w, kind, (uint32_t)addr, bytes, l);
}

/* ---- SMEM ---- */
RUN(smem) {
    unsigned dwords = i->dst[0].dwords;
    uint64_t offset = i->soffset.file ? emu_scalar(w, &i->soffset) & ~3ull : 0;
    uint64_t addr = (emu_scalar(w, &i->saddr) & ~3ull) + offset + (uint64_t)(int64_t)(i->offset & ~3);
    count(w, CNT_SMEM_BYTES, 4ull * dwords);
    if (!check_memory(w, -1, addr, 4ull * dwords, false) || !emu_race_scalar(w, addr, 4ull * dwords))
        return false;
    struct emu_pend *p = emu_push(w, &w->sm, i, P_SMEM);
    p->addr[0] = addr;
    return emu_commit(w, &w->sm);
}

/* the clock is the wave's own count of wait states: monotonic, and the same for the same seed */
RUN(memtime) {
    struct emu_pend *p = emu_push(w, &w->sm, i, P_CLOCK);
    p->addr[0] = w->t;
    return emu_commit(w, &w->sm);
}

/* ---- DS ---- */
/* LDS phases: which lanes are served together (section 7; b32 and narrower: all 64 lanes, an assumption) */
static unsigned phase_of(unsigned bytes, bool write, unsigned l) {
    static const uint8_t read128[32] = {0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0,
                                        1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1};
    static const uint8_t read96[32] = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3,
                                       1, 1, 1, 1, 0, 0, 0, 0, 3, 3, 3, 3, 2, 2, 2, 2};
    if (bytes <= 4)
        return 0;
    if (write)
        return bytes == 8 ? l / 16 : l / 8;
    if (bytes == 8)
        return l / 32;
    return bytes == 12 ? read96[l % 32] + l / 32 * 4u : read128[l % 32] + l / 32 * 2u;
}

/* extra cycles = over phases, (most distinct rows that one bank must serve) - 1 */
static void count_conflicts(struct emu_wave *w, const struct emu_pend *p, bool write, const uint64_t *addr) {
    enum { BANKS = 64, PHASES = 8, ROWS = EMU_LANES };
    uint32_t row[BANKS][ROWS];
    for (unsigned phase = 0; phase < PHASES; phase++) {
        uint8_t rows[BANKS] = {};
        unsigned worst = 0, lanes = 0;
        for (unsigned l = 0; l < EMU_LANES; l++) {
            if (!(p->exec >> l & 1) || phase_of(p->bytes, write, l) != phase)
                continue;
            lanes++;
            for (uint32_t a = (uint32_t)addr[l] / 4; a <= (uint32_t)(addr[l] + p->bytes - 1) / 4; a++) {
                unsigned bank = a % BANKS, n = 0;
                while (n < rows[bank] && row[bank][n] != a)
                    n++;
                if (n == rows[bank])
                    row[bank][rows[bank]++] = a;
                worst = rows[bank] > worst ? rows[bank] : worst;
            }
        }
        count(w, CNT_LDS_PHASES, lanes != 0);
        count(w, CNT_LDS_CONFLICTS, worst > 1 ? worst - 1 : 0);
    }
}

static bool ds_addresses(struct emu_wave *w, struct emu_pend *p, bool write) {
    const struct emu_inst *i = p->i;
    enum emu_lds_kind kind = write ? LDS_WRITE : LDS_READ;
    unsigned scale = p->bytes * (strstr(i->op->name, "st64") ? 64u : 1u);
    p->elems = strstr(i->op->name, "read2") || strstr(i->op->name, "write2") ? 2 : 1;
    for (unsigned l = 0; l < EMU_LANES; l++) {
        if (!(p->exec >> l & 1))
            continue;
        uint64_t base = w->v[i->src[0].reg][l];
        p->addr[l] = base + (p->elems == 2 ? (uint64_t)i->offset0 * scale : (unsigned)i->offset);
        p->addr1[l] = base + (uint64_t)i->offset1 * scale;
        if (!issue_lds(w, kind, l, p->addr[l], p->bytes) ||
            (p->elems == 2 && !issue_lds(w, kind, l, p->addr1[l], p->bytes)))
            return false;
    }
    unsigned lanes = (unsigned)__builtin_popcountll(p->exec);
    count(w, write ? CNT_LDS_WRITE_BYTES : CNT_LDS_READ_BYTES, (uint64_t)lanes * p->bytes * p->elems);
    count(w, CNT_LANE_ADDRS, (uint64_t)lanes * p->elems);
    if (emu_strict(w)) {
        count_conflicts(w, p, write, p->addr);
        if (p->elems == 2)
            count_conflicts(w, p, write, p->addr1);
    }
    return true;
}

RUN(ds_read) {
    struct emu_pend *p = emu_push(w, &w->ds, i, P_DSREAD);
    p->bytes = (uint8_t)abs(i->op->arg);
    if ((i->op->opcode == 226 || i->op->opcode == 227) && p->exec != ~0ull)
        return emu_stop(w, -1, "transposing LDS read under a partial EXEC");
    return ds_addresses(w, p, false) && emu_commit(w, &w->ds);
}

RUN(ds_write) {
    struct emu_pend *p = emu_push(w, &w->ds, i, P_DSWRITE);
    p->bytes = (uint8_t)i->op->arg;
    bool high = strstr(i->op->name, "_d16_hi");
    for (unsigned l = 0; l < EMU_LANES; l++)
        for (unsigned n = 1, dw = 0; n < i->nsrc; n++)
            for (unsigned r = 0; r < i->src[n].dwords; r++)
                p->data[l][dw++] = w->v[i->src[n].reg + r][l] >> (high ? 16 : 0);
    return ds_addresses(w, p, true) && emu_commit(w, &w->ds);
}

static struct emu_pend *lane_result(struct emu_wave *w, const struct emu_inst *i) {
    struct emu_pend *p = emu_push(w, &w->ds, i, P_DSLANE);
    for (unsigned l = 0; l < EMU_LANES; l++)
        p->data[l][0] = 0;
    return p;
}

static uint32_t lane_value(const struct emu_wave *w, uint64_t exec, unsigned reg, unsigned lane) {
    return exec >> lane & 1 ? w->v[reg][lane] : 0; /* an inactive source lane reads as 0 */
}

RUN(ds_bpermute) {
    struct emu_pend *p = lane_result(w, i);
    for (unsigned l = 0; l < EMU_LANES; l++)
        p->data[l][0] = lane_value(w, p->exec, i->src[1].reg, (w->v[i->src[0].reg][l] + (uint32_t)i->offset) / 4 % 64);
    return emu_commit(w, &w->ds);
}

RUN(ds_permute) {
    struct emu_pend *p = lane_result(w, i);
    for (unsigned l = 0; l < EMU_LANES; l++)
        if (p->exec >> l & 1)
            p->data[(w->v[i->src[0].reg][l] + (uint32_t)i->offset) / 4 % 64][0] = w->v[i->src[1].reg][l];
    return emu_commit(w, &w->ds);
}

RUN(ds_swizzle) {
    unsigned o = (unsigned)i->offset;
    if (o & 0x8000 && (o & 0xff00) != 0x8000)
        return emu_stop(w, -1, "ds_swizzle mode 0x%x is not modelled", o);
    struct emu_pend *p = lane_result(w, i);
    for (unsigned l = 0; l < EMU_LANES; l++) {
        unsigned from = o & 0x8000 ? (l & ~3u) | (o >> (2 * (l & 3)) & 3)
                                   : (l & 32) | ((((l & 31) & (o & 31)) | (o >> 5 & 31)) ^ (o >> 10 & 31));
        p->data[l][0] = lane_value(w, p->exec, i->src[0].reg, from);
    }
    return emu_commit(w, &w->ds);
}

/* ---- vector memory ---- */
struct resource { /* buffer descriptor V# */
    uint64_t base;
    uint32_t stride, records, format;
    bool swizzle, add_tid;
};

static struct resource read_resource(const struct emu_wave *w, unsigned s) {
    const uint32_t *v = &w->s[s];
    return (struct resource){.base = v[0] | (uint64_t)(v[1] & 0xffff) << 32,
                             .stride = v[1] >> 16 & 0x3fff,
                             .records = v[2],
                             .format = v[3] >> 15 & 15,
                             .swizzle = v[1] >> 31,
                             .add_tid = v[3] >> 23 & 1};
}

/* dwords (or the one narrower element) at byte offset `at` that lie below `records` */
static uint8_t range_mask(uint64_t at, unsigned bytes, uint64_t records) {
    uint64_t part = bytes < 4 ? bytes : 4;
    uint8_t mask = 0;
    for (uint64_t dw = 0; dw * part < bytes; dw++)
        if (at + (dw + 1) * part <= records)
            mask |= (uint8_t)(1u << dw);
    return mask;
}

/* One lane's range verdict. Sources conflict on raw buffers: rocjitsu (checked on gfx950) tests voffset+imm plus
 * soffset, the ISA text and LLVM leave soffset out. Both are computed; the option picks one. */
static bool buffer_range(struct emu_wave *w, struct emu_pend *p, unsigned l, const struct resource *r, uint64_t offset,
                         uint32_t soffset, uint32_t index, bool indexed) {
    const struct emu_options *opt = &w->b->l->opt;
    uint8_t all = range_mask(0, p->bytes, 16), rj, isa;
    if (!r->format)
        rj = isa = 0;
    else if (indexed && r->stride)
        rj = isa = index < r->records ? all : 0;
    else {
        rj = range_mask(offset + soffset, p->bytes, r->records);
        isa = range_mask(offset, p->bytes, r->records);
    }
    p->in_range[l] = opt->range == EMU_RANGE_RJ ? rj : isa;
    if (rj != isa) {
        char what[128];
        snprintf(what, sizeof what, "is offset %llu + soffset %u, %u bytes, inside num_records %u",
                 (unsigned long long)offset, soffset, p->bytes, r->records);
        if (emu_conflict(w, (int)l, what))
            return false;
    }
    if (p->in_range[l] != all && opt->strict && opt->oob == EMU_OOB_STOP)
        return emu_stop(w, (int)l, "buffer access at offset %llu + soffset %u, %u bytes: past num_records %u",
                        (unsigned long long)offset, soffset, p->bytes, r->records);
    return true;
}

static bool buffer_lane(struct emu_wave *w, struct emu_pend *p, unsigned l, const struct resource *r,
                        uint32_t soffset) {
    const struct emu_inst *i = p->i;
    uint32_t index = i->idxen ? w->v[i->src[0].reg][l] : 0;
    uint32_t voffset = i->offen ? w->v[i->src[0].reg + i->idxen][l] : 0;
    uint32_t offset = voffset + (uint32_t)i->offset;
    if (!buffer_range(w, p, l, r, offset, soffset, index, i->idxen))
        return false;
    p->addr[l] = r->base + soffset + offset + (uint64_t)index * r->stride;
    if (p->bytes >= 4 && p->addr[l] & 3) {
        if (emu_strict(w))
            return emu_stop(w, (int)l, "buffer access at 0x%llx: the low two address bits are ignored",
                            (unsigned long long)p->addr[l]);
        p->addr[l] &= ~3ull;
    }
    return true;
}

static bool buffer_addresses(struct emu_wave *w, struct emu_pend *p) {
    struct resource r = read_resource(w, p->i->saddr.reg);
    uint32_t soffset = (uint32_t)emu_scalar(w, &p->i->soffset);
    if (r.swizzle || r.add_tid || w->s[p->i->saddr.reg + 3] >> 30)
        return emu_stop(w, -1, "buffer resource with swizzle, add_tid or a type other than 0");
    for (unsigned l = 0; l < EMU_LANES; l++)
        if (p->exec >> l & 1 && !buffer_lane(w, p, l, &r, soffset))
            return false;
    return true;
}

static bool global_addresses(struct emu_wave *w, struct emu_pend *p) {
    const struct emu_inst *i = p->i;
    uint64_t base = i->saddr.file ? emu_scalar(w, &i->saddr) : 0;
    unsigned reg = i->src[0].reg;
    for (unsigned l = 0; l < EMU_LANES; l++) {
        if (!(p->exec >> l & 1))
            continue;
        uint64_t v = w->v[reg][l];
        if (!i->saddr.file)
            v |= (uint64_t)w->v[reg + 1][l] << 32;
        else if (v >> 31) {
            if (emu_conflict(w, (int)l, "sign of a 32-bit offset past 2^31 from an SGPR base"))
                return false;
            if (w->b->l->opt.saddr == EMU_SADDR_SEXT)
                v |= 0xffffffff00000000;
        }
        p->addr[l] = base + v + (uint64_t)(int64_t)i->offset;
        p->in_range[l] = 15;
        if (p->kind == P_ATOMIC && p->addr[l] % p->bytes)
            return emu_stop(w, (int)l, "atomic of %u bytes at 0x%llx: not aligned", p->bytes,
                            (unsigned long long)p->addr[l]);
    }
    return true;
}

static bool scratch_addresses(struct emu_wave *w, struct emu_pend *p) {
    const struct emu_inst *i = p->i;
    uint32_t base = (i->saddr.file ? (uint32_t)emu_scalar(w, &i->saddr) : 0) + (uint32_t)i->offset;
    uint32_t size = w->b->k->private_segment;
    for (unsigned l = 0; l < EMU_LANES; l++) {
        if (!(p->exec >> l & 1))
            continue;
        uint32_t at = base + (i->offen ? w->v[i->src[0].reg][l] : 0);
        if ((uint64_t)at + p->bytes > size)
            return emu_stop_memory(w, (int)l, "scratch access of %u bytes at %u: past the %u bytes a lane has",
                                   p->bytes, at, size);
        p->addr[l] = (uint64_t)(w->scratch + (size_t)l * size + at);
        p->in_range[l] = 15;
    }
    return true;
}

/* every byte that will move lies in a live allocation; counts bytes, addresses and 128-byte lines */
static bool check_lanes(struct emu_wave *w, const struct emu_pend *p, bool write) {
    uint64_t lines[EMU_LANES * 2];
    unsigned nlines = 0;
    size_t part = p->bytes < 4 ? p->bytes : 4;
    for (unsigned l = 0; l < EMU_LANES; l++) {
        if (!(p->exec >> l & 1))
            continue;
        for (size_t dw = 0; dw * part < p->bytes; dw++)
            if (p->in_range[l] >> dw & 1 && !check_memory(w, (int)l, p->addr[l] + dw * part, part, write))
                return false;
        for (uint64_t line = p->addr[l] >> 7; line <= (p->addr[l] + p->bytes - 1) >> 7; line++) {
            unsigned n = 0;
            while (n < nlines && lines[n] != line)
                n++;
            if (n == nlines)
                lines[nlines++] = line;
        }
    }
    count(w, CNT_LINES, nlines);
    return true;
}

static bool dma_target(struct emu_wave *w, struct emu_pend *p) {
    uint32_t m0 = w->s[EMU_M0];
    bool strict = emu_strict(w);
    if (m0 >> 18 && strict)
        return emu_stop(w, -1, "LDS copy with M0 = 0x%x: bits above 17 are not defined", m0);
    p->dma = (m0 & 0x3ffff) + (uint32_t)p->i->offset;
    unsigned step = emu_dma_step(p);
    if (strict && p->dma % step)
        return emu_stop(w, -1, "LDS copy to LDS address 0x%x: not aligned to %u", p->dma, step);
    for (unsigned l = 0; l < EMU_LANES; l++)
        if (p->exec >> l & 1 && !issue_lds(w, LDS_DMA, l, p->dma + l * step, p->bytes))
            return false;
    return true;
}

static bool vmem(struct emu_wave *w, struct emu_pend *p, bool write) {
    const struct emu_inst *i = p->i;
    bool ok = i->op->enc == ENC_MUBUF     ? buffer_addresses(w, p)
              : i->op->enc == ENC_SCRATCH ? scratch_addresses(w, p)
                                          : global_addresses(w, p);
    if (!ok || (i->op->enc != ENC_SCRATCH && (!check_lanes(w, p, write) || !emu_race_lanes(w, p))))
        return false;
    if (p->kind == P_DMA && !dma_target(w, p))
        return false;
    uint64_t lanes = (uint64_t)__builtin_popcountll(p->exec);
    count(w, p->kind == P_DMA ? CNT_DMA_BYTES : write ? CNT_STORE_BYTES : CNT_LOAD_BYTES, lanes * p->bytes);
    count(w, CNT_LDS_DMA, p->kind == P_DMA);
    count(w, CNT_LANE_ADDRS, lanes);
    emu_commit(w, &w->vm);
    if (i->op->enc == ENC_FLAT) { /* counts in both counters, and its register is in flight until both are waited for */
        emu_push(w, &w->sm, i, P_FLAT);
        emu_commit(w, &w->sm);
    }
    return true;
}

RUN(vmem_load) {
    struct emu_pend *p = emu_push(w, &w->vm, i, i->lds ? P_DMA : P_LOAD);
    p->bytes = (uint8_t)abs(i->op->arg);
    return vmem(w, p, false);
}

RUN(vmem_store) {
    struct emu_pend *p = emu_push(w, &w->vm, i, i->op->flags & OPF_ATOMIC ? P_ATOMIC : P_STORE);
    p->bytes = (uint8_t)i->op->arg;
    const struct emu_operand *data = &i->src[i->nsrc - 1];
    bool high = strstr(i->op->name, "_d16_hi");
    for (unsigned l = 0; l < EMU_LANES; l++)
        for (unsigned dw = 0; dw < data->dwords; dw++)
            p->data[l][dw] = w->v[data->reg + dw][l] >> (high ? 16 : 0);
    return vmem(w, p, true);
}
